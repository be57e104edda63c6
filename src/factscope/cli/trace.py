"""factscope trace: one prompt, or a file of facts into a run folder."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from factscope.cli.edit import EditedModel, load_edits
from factscope.cli.flags import ChatOptions, Command, FactSource, Options
from factscope.cli.output import check_suffix, print_json, results, say, skipped, working
from factscope.errors import BadFact, BadSetting
from factscope.facts import Fact
from factscope.io import check_output_file, check_output_folder, write_atomic
from factscope.records import EditTraces, TraceRecord
from factscope.settings import Flag
from factscope.tracing.settings import PRESETS, Tracing

if TYPE_CHECKING:
    from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """Options."""

    source: FactSource = field(default_factory=FactSource)
    target: str | None = None
    """The expected answer."""
    answer: str | None = None
    """Trace this answer instead of the most likely next token. P of several tokens is their
    product."""
    replace_with: str | None = None
    """Corrupt by token replacement with this subject, which must have as many tokens. Without it,
    --distribution tokens chooses the subject of a fact of the same relation."""
    foil: str | None = None
    """Token that the metric logit-difference compares the answer with, instead of the corrupted
    run's most likely one."""
    edit: Annotated[tuple[Path, ...], Flag(short="e")] = ()
    """Edit file: trace the edited model. Repeatable."""
    compare: bool = False
    """With --edit: trace the fact before and after the edit, and show where the effect moved."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    out: Annotated[Path | None, Flag(short="o")] = None
    """Figure (.png .svg .pdf .html), or with --facts the run folder. An interrupted run resumes."""
    max_memory: str | None = None
    """Memory limit in addition to the model, e.g. 4GiB."""
    normalised: bool = False
    """Show all values on a scale from 0, the corrupted run, to 1, the clean run. --json prints raw
    values."""
    preset: Literal["default", "paper"] = "default"
    """paper computes what the paper's code computes."""
    model: EditedModel = field(default_factory=EditedModel)
    tracing: Tracing = field(default_factory=Tracing)

    chosen_by = ("preset", "replace-with")

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> "TraceOptions":
        """The settings of the preset; token replacement if another subject is given."""
        tracing = PRESETS.get(given.get("preset", "default"), PRESETS["default"])
        if "replace-with" in given:
            tracing = replace(
                tracing, corruption=replace(tracing.corruption, distribution="tokens")
            )
        return cls(tracing=tracing)

    @property
    def max_bytes(self) -> int | None:
        """--max-memory in bytes."""
        from factscope.lm.memory import parse_bytes

        return None if self.max_memory is None else parse_bytes(self.max_memory)

    @contextmanager
    def edited_model(self) -> "Iterator[LM]":
        """The model with the edits applied; its name names them."""
        edits = load_edits(self.edit)
        lm = self.model.load_for(edits)
        if not edits:
            yield lm
            return
        name = " + ".join([lm.name, *(file.name for file in self.edit)])
        # As in `generate`, the checks are not repeated: a broken model can be traced too.
        with reduce(add, edits).applied(replace(lm, name=name), force=True) as lm:
            yield lm


@Command
def trace(options: TraceOptions) -> None:
    """Trace a fact: which states restore the answer after the subject was corrupted?"""
    source, out = options.source, options.out
    if source.facts is not None:
        for name in ("answer", "foil", "compare"):
            if getattr(options, name):
                raise BadSetting(f"--{name} is for one prompt; leave it out with --facts")
        if options.normalised:
            raise BadSetting("--normalised is for one prompt; give it to `factscope report` later")
        if options.replace_with is not None:
            raise BadSetting(
                "--replace-with is for one prompt; with --facts give --distribution tokens, and in "
                "the file a field `replacement` where you want to choose it"
            )
        if source.prompt is not None or out is None:
            raise BadSetting("--facts FILE goes with --out FOLDER and without a prompt")
        _trace_file(options, source.facts, out)
    elif source.prompt is None or source.subject is None:
        raise BadSetting('give a prompt and its --subject "…", or --facts FILE --out FOLDER')
    else:
        _trace_prompt(options)


def _trace_prompt(options: TraceOptions) -> None:
    from factscope.analysis.effects import normalised
    from factscope.lm.tokens import chat_fact
    from factscope.tracing.trace import trace

    fact, out, memory = options.source.fact(options.target), options.out, options.max_bytes
    fact = replace(fact, replacement=options.replace_with)
    if options.replace_with is not None and not options.tracing.corruption.replaces_tokens:
        distribution = options.tracing.corruption.distribution
        raise BadSetting(f"--replace-with goes with --distribution tokens, not {distribution}")
    if options.foil is not None and options.tracing.metric != "logit-difference":
        raise BadSetting(
            f"--foil goes with --metric logit-difference, not {options.tracing.metric}"
        )
    for flag, given in (("answer", options.answer), ("foil", options.foil)):
        if given is not None and not given.strip():
            raise BadSetting(f"--{flag} is {given!r}; give a text, or leave it out")
    check_suffix(out, "out", ".png", ".svg", ".pdf", ".html")
    text = fact.text
    if out is None and not options.json:
        name = re.sub(r"\W+", "-", text.casefold()).strip("-")[:60]
        out = Path("traces") / f"{name or 'trace'}.png"
    if out is not None:
        check_output_file(out, "--out")
    if options.compare:
        _compare(options, fact, out)
        return
    with options.edited_model() as lm:
        if options.chat.chat:
            fact = chat_fact(lm, fact)
        with working(f"tracing {text!r}") as done:
            record = trace(
                lm, fact, options.tracing, answer=options.answer, foil=options.foil, memory=memory,
                progress=done,
            )  # fmt: skip
    shown = normalised(record) if options.normalised else record
    drawn = [] if out is None else draw_trace(shown, out)
    if options.json:
        print_json(record.to_json())
        return
    print_trace(shown)
    if options.normalised and shown is record:
        say("Not normalised: the clean and the corrupted run have the same value.", style="yellow")
    say(f"Figure: {', '.join(map(str, drawn))}")


def _compare(options: TraceOptions, fact: Fact, out: Path | None) -> None:
    """Trace a fact before and after the edits."""
    from factscope.evaluation.before_after import trace_edit
    from factscope.lm.tokens import chat_fact

    edits = load_edits(options.edit)
    if not edits:
        raise BadSetting("--compare goes with --edit FILE, the edit to compare with")
    if options.answer is not None or options.foil is not None:
        raise BadSetting("--compare traces the old and the new object; leave out --answer, --foil")
    if options.normalised:
        raise BadSetting("--compare shows three traces on one scale; leave out --normalised")
    lm = options.model.load_for(edits)
    if options.chat.chat:
        fact = chat_fact(lm, fact)
    name = " + ".join([lm.name, *(file.name for file in options.edit)])
    with working(f"tracing {fact.text!r} before and after the edit") as done:
        traces = trace_edit(
            lm, reduce(add, edits), fact, options.tracing, name=name, memory=options.max_bytes,
            progress=done,
        )  # fmt: skip
    if out is not None:
        draw_edit_traces(traces, out)
    if options.json:
        print_json(traces.to_json())
        return
    print_edit_traces(traces)
    say(f"Figure: {out}")


def _trace_file(options: TraceOptions, facts: str, out: Path) -> None:
    from factscope.data.registry import find_data
    from factscope.runs.trace import TraceRun

    memory, model = options.max_bytes, options.model
    name = model.name_for(load_edits(options.edit))
    run = TraceRun(
        model=name, dtype=model.dtype, facts=find_data(facts), limit=options.source.limit,
        chat=options.chat.chat, edits=options.edit, settings=options.tracing,
    )  # fmt: skip
    file = run.read()
    check_output_folder(out, "--out")
    with options.edited_model() as lm:
        readable = run.readable_facts(lm, file.facts)
        problems = [*file.problems, *readable.problems]
        skipped(problems)
        if not readable.facts:
            raise BadFact(f"no fact of {facts} can be traced ({problems[-1]}); give other facts")
        folder = run.create_or_open(lm, out)
        with working("tracing", len(readable.facts)) as done:
            run.run(lm, folder, readable.facts, memory=memory, progress=done)
    records = folder.trace_records()
    known = sum(record.known for record in records)
    options.print_result(
        {"run": out, "facts": len(records), "known": known, "left_out": problems},
        f"{len(records)} facts, {known} known to {name}: {folder.records_path}",
        f"Next: factscope report {out}",
    )


def print_trace(record: TraceRecord) -> None:
    """The answer, the probabilities, a small heat map of each kind and the strongest cells."""
    from factscope.analysis.attribution import has_attribution
    from factscope.report.labels import metric_label, metric_text
    from factscope.report.terminal import (
        attribution_lines,
        knockout_lines,
        lens_lines,
        strongest_cells,
        strongest_heads,
        trace_heatmap,
    )

    say(f"{record.fact.text} →{record.answer}", style="bold")
    if not record.known:
        expected = f"Not known: {record.fact.target!r} was expected"
        say(f"{expected}; averages leave such a fact out.", style="yellow")
    if record.settings["corruption"]["distribution"] == "tokens":
        say(f"Corrupted run: {record.fact.replacement} in place of {record.fact.subject}")
    say(f"P clean {record.clean:.3f}   corrupted {record.corrupted:.3f}")
    if record.metric != "probability":
        clean, corrupted = (
            metric_text(record.metric, x) for x in (record.clean_value, record.corrupted_value)
        )
        say(f"{metric_label(record)}: clean {clean}   corrupted {corrupted}")
    for kind in record.restored:
        results.print(trace_heatmap(record, kind))
    for kind in record.restored:
        results.print(strongest_cells(record, kind, count=3))
    if record.heads:
        results.print(strongest_heads(record, count=5))
    for lines in (
        record.knockout and knockout_lines(record),
        record.lens and lens_lines(record),
        has_attribution(record) and attribution_lines(record),
    ):
        if lines:
            results.print(lines)


def print_edit_traces(traces: EditTraces) -> None:
    """Each trace in short: probabilities, heat maps, and the strongest cell of each kind."""
    from factscope.report.terminal import strongest_cells, trace_heatmap

    headings = {
        "Before the edit": traces.before,
        "After the edit, the new object": traces.after,
        "After the edit, the old object": traces.old_after,
    }
    for heading, record in headings.items():
        say(f"{heading}: {record.fact.text} →{record.answer}", style="bold")
        say(f"P clean {record.clean:.3f}   corrupted {record.corrupted:.3f}")
        for kind in record.restored:
            results.print(trace_heatmap(record, kind))
            results.print(strongest_cells(record, kind, count=1))


def draw_edit_traces(traces: EditTraces, out: Path) -> None:
    """Write the figure or the page of the traces before and after an edit."""
    from factscope.report import figures
    from factscope.report.comparisons import edit_traces_page

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        write_atomic(out, edit_traces_page(traces))
    else:
        figures.save_figure(figures.edit_traces_figure(traces), out)


def draw_trace(record: TraceRecord, out: Path) -> list[Path]:
    """Write the figure, and further ones for severed modules, heads, knockout, lens and
    attribution; or one page."""
    from factscope.report import figures
    from factscope.report.traces import trace_page

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        write_atomic(out, trace_page(record))
        return [out]
    drawn = {}
    if record.gradients:
        drawn[""] = figures.gradients_figure(record)
    elif record.restored:
        drawn[""] = figures.traces_figure(record)
    if record.severed and "states" in record.restored:
        drawn["-severed"] = figures.severed_detail(record)
    if record.heads:
        drawn["-heads"] = figures.heads_figure(record)
    if record.knockout:
        drawn["-knockout"] = figures.knockout_figure(record)
    if record.lens:
        drawn["-lens"] = figures.lens_figure(record)
    if any(kind in record.restored for kind in record.attribution):
        drawn["-attribution"] = figures.attribution_heatmaps(record)
    # The first figure has the name that was asked for.
    paths = [out.with_stem(out.stem + (name if i else "")) for i, name in enumerate(drawn)]
    for path, figure in zip(paths, drawn.values(), strict=True):
        figures.save_figure(figure, path)
    return paths
