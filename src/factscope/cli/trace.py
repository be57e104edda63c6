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
from factscope.errors import BadSetting
from factscope.io import check_output_file, check_output_folder, write_atomic
from factscope.records import TraceRecord
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
    edit: Annotated[tuple[Path, ...], Flag(short="e")] = ()
    """Edit file: trace the edited model. Repeatable."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    out: Annotated[Path | None, Flag(short="o")] = None
    """Figure (.png .svg .pdf .html), or with --facts the run folder. An interrupted run resumes."""
    max_memory: str | None = None
    """Memory limit in addition to the model, e.g. 4GiB."""
    preset: Literal["default", "paper"] = "default"
    """paper computes what the paper's code computes."""
    model: EditedModel = field(default_factory=EditedModel)
    tracing: Tracing = field(default_factory=Tracing)

    chosen_by = ("preset",)

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> "TraceOptions":
        """The settings of the preset."""
        return cls(tracing=PRESETS.get(given.get("preset", "default"), PRESETS["default"]))

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
        if options.answer is not None:
            raise BadSetting("--answer is for one prompt; leave it out with --facts")
        if source.prompt is not None or out is None:
            raise BadSetting("--facts FILE goes with --out FOLDER and without a prompt")
        _trace_file(options, source.facts, out)
    elif source.prompt is None or source.subject is None:
        raise BadSetting('give a prompt and its --subject "…", or --facts FILE --out FOLDER')
    else:
        _trace_prompt(options)


def _trace_prompt(options: TraceOptions) -> None:
    from factscope.lm.tokens import chat_fact
    from factscope.tracing.trace import trace

    fact, out, memory = options.source.fact(options.target), options.out, options.max_bytes
    check_suffix(out, "out", ".png", ".svg", ".pdf", ".html")
    text = fact.text
    if out is None and not options.json:
        name = re.sub(r"\W+", "-", text.casefold()).strip("-")[:60]
        out = Path("traces") / f"{name or 'trace'}.png"
    if out is not None:
        check_output_file(out, "--out")
    with options.edited_model() as lm:
        if options.chat.chat:
            fact = chat_fact(lm, fact)
        with working(f"tracing {text!r}") as done:
            record = trace(
                lm, fact, options.tracing, answer=options.answer, memory=memory, progress=done
            )
    drawn = [] if out is None else draw_trace(record, out)
    if options.json:
        print_json(record.to_json())
        return
    print_trace(record)
    say(f"Figure: {', '.join(map(str, drawn))}")


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
    """The answer, the probabilities, a small heat map and the strongest cells."""
    from factscope.report.terminal import strongest_cells, trace_heatmap

    say(f"{record.fact.text} →{record.answer}", style="bold")
    if not record.known:
        expected = f"Not known: {record.fact.target!r} was expected"
        say(f"{expected}; averages leave such a fact out.", style="yellow")
    cells = [x for table in record.restored.values() for row in table for x in row if x is not None]
    best = max(cells, default=record.corrupted)
    say(f"P clean {record.clean:.3f}   corrupted {record.corrupted:.3f}   best restored {best:.3f}")
    for kind in record.restored:
        results.print(trace_heatmap(record, kind))
    for kind in record.restored:
        results.print(strongest_cells(record, kind, count=3))


def draw_trace(record: TraceRecord, out: Path) -> list[Path]:
    """Write the figure, and a second one for severed modules; or the page."""
    from factscope.report import figures
    from factscope.report.traces import trace_page

    out.parent.mkdir(parents=True, exist_ok=True)
    if out.suffix == ".html":
        write_atomic(out, trace_page(record))
        return [out]
    draw = figures.gradients_figure if record.gradients else figures.traces_figure
    drawn = {out: draw(record)}
    if record.severed and "states" in record.restored:
        drawn[out.with_stem(f"{out.stem}-severed")] = figures.severed_detail(record)
    for path, figure in drawn.items():
        figures.save_figure(figure, path)
    return list(drawn)
