"""factscope edit and generate: write facts, work with edit files, generate with edits applied."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge

from factscope.cli.flags import Command, ModelOptions, Options
from factscope.cli.output import (
    check_suffix,
    doing,
    note,
    print_json,
    results,
    say,
    skipped,
    working,
)
from factscope.cli.stats import with_statistics
from factscope.cli.trace import fact_from
from factscope.editing.settings import EDITORS, Rome, editor
from factscope.errors import BadFact, BadSetting, PromptTooLong
from factscope.settings import Flag, settings_of

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.editing.editor import Editor
    from factscope.facts import Case
    from factscope.lm.model import LM
    from factscope.records import EditRecord

SUFFIX = ".edit"


# ---- the method, for edit, evaluate and sweep


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Options):
    """Options."""

    method: Literal["rome", "r-rome", "memit", "ft", "ft-l", "attn", "kn", "mend", "ke"] = "rome"
    """Edit method. With --help, its settings are listed: --method memit --help."""
    preset: Literal["default", "paper"] = "default"
    """paper computes what the authors' code computes."""
    model: ModelOptions = field(default_factory=ModelOptions)
    editor: Any = field(default_factory=Rome)

    def checked_editor(self) -> "Editor":
        """The editor; an error if its weights are missing or its name does not fit."""
        getattr(self.editor, "trained", None)  # raises if there are none, before the model loads
        given, default = self.editor, EDITORS[self.method][self.preset]
        if getattr(given, "prefixes", None) and given.prefix_lengths != default.prefix_lengths:
            raise BadSetting("give --prefixes FILE or --prefix-lengths, not both")
        if self.editor.method != self.method:
            raise BadSetting(
                f"--max-change makes this {self.editor.method}; give --method "
                f"{self.editor.method} instead of {self.method}"
            )
        return self.editor


def method_base(kind: Callable[..., Any]) -> Callable[[Mapping[str, Any]], Any]:
    """Default options of a command with a --method."""

    def base(given: Mapping[str, Any]) -> Any:
        return kind(editor=editor(given.get("method", "rome"), given.get("preset", "default")))

    return base


def explain_method(flags: Sequence[str], base: MethodOptions) -> str | None:
    """A message with the methods that have a flag, and the flags of the chosen method."""
    methods_with = {
        flag: [name for name in EDITORS if flag in settings_of(EDITORS[name]["default"])]
        for flag in flags
    }
    foreign = [flag for flag in flags if methods_with[flag]]
    if not foreign:
        return None
    method = base.editor.method
    listed = ", ".join(f"--{flag} (see {', '.join(methods_with[flag])})" for flag in foreign)
    settings = ", ".join(f"--{name}" for name in settings_of(base.editor))
    return f"{method} has no {listed}; its settings are {settings}"


# ---- write


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Before and after."""

    true: str | None = None
    """The old object; the model's prediction if not given."""
    paraphrase: tuple[str, ...] = ()
    """Another prompt for the same fact, which should change too. Repeatable."""
    neighbour: tuple[str, ...] = ()
    """A prompt about another subject, which should not change. Repeatable."""
    max_new_tokens: Annotated[int, Ge(0)] = 40
    """Tokens to generate before and after; 0 for none."""


@dataclass(frozen=True, kw_only=True)
class WriteOptions(MethodOptions):
    """Options."""

    prompt: Annotated[str | None, Flag(positional=True)] = None
    """Text up to the object."""
    subject: str | None = None
    """The words of the prompt that name the subject."""
    to: str | None = None
    """The new object."""
    occurrence: int | None = None
    """Which occurrence of the subject in the prompt, from 1; the last if not given."""
    facts: str | None = None
    """Write all facts of a file or data set in one edit."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use only the first N facts."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Save the edit in this file."""
    page: Path | None = None
    """Write a page about the edit (.html)."""
    figure: Path | None = None
    """Draw before and after (.png .svg .pdf)."""
    force: bool = False
    """Write the edit even if it fails the checks, or if the model predicts the object already."""
    judging: Judging = field(default_factory=Judging)

    def check(self) -> None:
        """Check the paths and combinations of flags before the model is loaded."""
        if self.out is not None and self.out.is_dir():
            raise BadSetting(f"--out is {str(self.out)!r}, a folder; give a file, e.g. rome.edit")
        check_suffix(self.page, "page", ".html")
        check_suffix(self.figure, "figure", ".png", ".svg", ".pdf")
        if self.facts is None:
            return
        if self.page or self.figure:
            raise BadSetting("--page and --figure show one fact; leave them out with --facts")
        judging = self.judging
        of_one_fact = (self.prompt, self.subject, self.to, self.occurrence, judging.true)
        if any((*of_one_fact, judging.paraphrase, judging.neighbour)):
            raise BadSetting("--facts FILE has prompts, subjects and objects; leave those out")

    def cases(self) -> "list[Case]":
        """The facts to write."""
        from factscope.data.readers import read_cases
        from factscope.data.registry import find_data
        from factscope.facts import Case

        if self.facts is not None:
            file = read_cases(find_data(self.facts))
            skipped(file.problems)
            return list(file.cases[: self.limit])
        if self.prompt is None or self.subject is None or self.to is None:
            raise BadSetting('give a prompt, --subject "…" and the new object --to "…", or --facts')
        if not self.to.strip():
            raise BadFact(f"--to is {self.to!r}; give the new object")
        judging = self.judging
        if any(not text.strip() for text in (*judging.paraphrase, *judging.neighbour)):
            raise BadFact("a --paraphrase or --neighbour is empty; leave it out")
        fact = fact_from(self.prompt, self.subject, self.occurrence, self.to.strip())
        true = (judging.true or "").strip() or None
        paraphrases, neighbours = judging.paraphrase, judging.neighbour
        return [Case(fact=fact, true=true, paraphrases=paraphrases, neighbours=neighbours)]


def write(options: WriteOptions) -> None:
    """Write a fact, or a file of facts, and show predictions before and after.

    The word "write" can be left out.
    """
    options.check()
    cases, editor = options.cases(), options.checked_editor()
    lm = options.model.load()
    cases, known = (cases, []) if options.force else _unpredicted(lm, cases)
    edit = make_edit(lm, editor, cases, force=options.force)
    if options.facts is None:
        _show_one(lm, edit, cases[0], options)
    else:
        _show_many(lm, edit, cases, options, known)


def _unpredicted(lm: "LM", cases: "list[Case]") -> "tuple[list[Case], list[str]]":
    """The cases whose new object the model does not predict yet, and messages about the others."""
    from factscope.evaluation.before_after import already_predicted

    with doing("predicting before the edit"):
        predicted = already_predicted(lm, [case.fact for case in cases])
    pairs = list(zip(cases, predicted, strict=True))
    known = [
        f"{lm.name} already predicts {case.fact.target!r} after {case.fact.text!r}"
        for case, is_predicted in pairs
        if is_predicted
    ]
    if len(known) == len(cases):
        more = f" (and so on for all {len(cases)} facts)" if len(cases) > 1 else ""
        raise BadFact(f"{known[0]}{more}; nothing to change (--force writes it anyway)")
    skipped(known)
    return [case for case, is_predicted in pairs if not is_predicted], known


def make_edit(
    lm: "LM", editor: "Editor", cases: "Sequence[Case]", *, force: bool = False
) -> "Edit":
    """The edit that writes all the cases; refused if it fails the checks, unless forced."""
    from factscope.editing.checks import with_checks

    facts = [case.request for case in cases]
    editor = with_statistics(lm, editor, facts)
    what = repr(facts[0].text) if len(facts) == 1 else f"{len(facts)} facts"
    with working(f"editing {what}") as done:
        edit = editor(lm, facts, progress=done)
    if edit.checks is None:
        [edit] = with_checks(lm, [edit])
    assert edit.checks is not None
    if not force:
        edit.checks.raise_if_unsafe()
    _complain(edit.checks.complaints())
    return edit


def _complain(complaints: Sequence[str]) -> None:
    for complaint in complaints:
        note(f"check failed: {complaint}", style="bold red")


def _show_one(lm: "LM", edit: "Edit", case: "Case", options: WriteOptions) -> None:
    """One fact before and after; files are written first."""
    from factscope.evaluation.before_after import before_after

    tokens = options.judging.max_new_tokens
    with doing("predicting before and after"):
        record = before_after(lm, edit, case, generation_tokens=tokens)
    if options.out is not None:
        edit.save(options.out)
    page, figure = options.page, options.figure
    drawn = draw_edit(record, page, figure) if page or figure else []
    warn([record])
    if options.json:
        print_json(record.to_json())
        return
    print_edit(record)
    _print_file(edit, options.out)
    if drawn:
        say("Drawn: " + ", ".join(map(str, drawn)))


def _show_many(
    lm: "LM", edit: "Edit", cases: "Sequence[Case]", options: WriteOptions, known: list[str]
) -> None:
    """Many facts before and after, one line each."""
    from factscope.evaluation.before_after import before_after_each
    from factscope.report import terminal

    with doing("predicting before and after"):
        records = before_after_each(lm, edit, cases, generation_tokens=0)
    if options.out is not None:
        edit.save(options.out)
    warn(records)
    first = records[0]
    if options.json:
        names = ("model", "method", "changed_weights", "checks", "settings")
        shared = {name: value for name, value in asdict(first).items() if name in names}
        own = ("fact", "true", "prompts")
        facts = [{name: asdict(record)[name] for name in own} for record in records]
        file = None if options.out is None else str(options.out)
        print_json({"kind": "edits", **shared, "file": file, "left_out": known, "facts": facts})
        return
    say(f"{edit.method} on {edit.model}: {len(records)} facts\n", style="bold")
    results.print(terminal.facts_table(records))
    results.print()
    results.print(terminal.checks_table(first.checks))
    results.print(terminal.changed_weights_text(first.changed_weights), soft_wrap=True)
    _print_file(edit, options.out)


def draw_edit(record: "EditRecord", page: Path | None, figure: Path | None) -> list[Path]:
    """Write the page and the figure; the neurons of KN get a figure of their own."""
    from factscope.io import write_atomic
    from factscope.report.edits import edit_page
    from factscope.report.figures import before_after_figure, neurons_figure, save_figure
    from factscope.report.figures.edits import has_neurons

    neurons = None
    try:
        if page is not None:
            write_atomic(page, edit_page(record))
        if figure is not None:
            save_figure(before_after_figure(record), figure)
        if figure is not None and has_neurons(record):
            neurons = figure.with_stem(f"{figure.stem}-neurons")
            save_figure(neurons_figure(record), neurons)
    except OSError as error:
        raise BadSetting(f"cannot write the page or figure ({error}); give another path") from error
    return [path for path in (page, figure, neurons) if path is not None]


def print_edit(record: "EditRecord") -> None:
    """Before and after, generated text side by side, the checks and the changed weights."""
    from factscope.report import terminal

    results.print(terminal.fact_text(record), soft_wrap=True)
    say(f"{record.method} on {record.model}\n", style="dim")
    results.print(terminal.scores_table(record))
    if record.generations:
        results.print()
        results.print(terminal.generations_table(record))
    results.print()
    results.print(terminal.checks_table(record.checks))
    results.print(terminal.changed_weights_text(record.changed_weights), soft_wrap=True)


ADVICE = {
    "kn": "a higher --new-weight, more --max-neurons, a lower --context-fraction",
    "memit": "other --layers, more --steps",
    "mend": "a higher --scale, --weights that were trained longer",
    "ke": "a higher --scale, --weights that were trained longer",
}
"""Method → settings to try if an edit fails; other methods have a layer and steps."""


def warn(records: "Sequence[EditRecord]") -> None:
    """Print a note for each fact whose old object is still more likely."""
    for record in records:
        own, advice = record.own, ADVICE.get(record.method, "another --layer, more --steps")
        if own.after.old is not None and own.after.new <= own.after.old and own.new != own.old:
            note(
                f"{record.fact.text!r}: {own.old!r} is still more likely than {own.new!r}; "
                f"try {advice} or another --method",
                style="yellow",
            )


def _print_file(edit: "Edit", out: Path | None) -> None:
    if out is None:
        say("Not saved; -o FILE.edit saves it.")
        return
    say(f"Saved: {out}, {_size(out)}")
    say(f'Next: factscope generate "{edit.facts[0].text}" --edit {out}')


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


# ---- show, apply, export, merge


@dataclass(frozen=True, kw_only=True)
class EditedModel(ModelOptions):
    """Model."""

    model: Annotated[str | None, Flag(short="m")] = None  # pyright: ignore
    """Short name, hub id, folder or GGUF file; the one that the edit names if not given."""


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    """Options."""

    files: Annotated[tuple[Path, ...], Flag(positional=True)]
    """Edit files, written by `factscope edit -o`."""

    def load(self) -> "list[Edit]":
        """The edits; an error if a file is given twice."""
        return _load_edits(self.files)


def _load_edits(files: Sequence[Path]) -> "list[Edit]":
    from factscope.editing.edit import Edit

    paths = [file.resolve() for file in files]
    for i, file in enumerate(files):
        if paths[i] in paths[:i]:
            raise BadSetting(f"{file} is given twice; give each edit once")
    return [Edit.load(file) for file in files]


def _load_model(options: ModelOptions, edits: "Sequence[Edit]") -> "LM":
    """The model of the edits."""
    from dataclasses import replace

    from factscope.lm.sources import DEFAULT_MODEL

    name = options.model or (edits[0].model if edits else DEFAULT_MODEL)
    lm = replace(options, model=name).load()
    for edit in edits:
        edit.check_model(lm)
    return lm


def _checked(lm: "LM", edit: "Edit", *, force: bool) -> "Edit":
    """The edit with its checks, which a sum does not have yet; refused if it fails them."""
    from factscope.editing.checks import with_checks

    if edit.checks is None:
        with doing("checking the edit"):
            [edit] = with_checks(lm, [edit])
    if not force and edit.checks is not None:
        edit.checks.raise_if_unsafe()
    return edit


def show(options: ShowOptions) -> None:
    """Show what edits change: facts, weights, method and settings. Needs no model."""
    from factscope.evaluation.before_after import changed_weights, describe_checks
    from factscope.report.terminal import changed_weights_text, checks_table, settings_table

    pairs = list(zip(options.files, options.load(), strict=True))
    if options.json:
        print_json([
            {
                "file": str(file), "bytes": file.stat().st_size, "method": edit.method,
                "model": edit.model, "fingerprint": edit.fingerprint,
                "facts": [asdict(fact) for fact in edit.facts],
                "changed_weights": [asdict(weight) for weight in changed_weights(edit)],
                "checks": describe_checks(edit.checks), "settings": dict(edit.settings),
            }
            for file, edit in pairs
        ])  # fmt: skip
        return
    for file, edit in pairs:
        say(f"{file}, {_size(file)}", style="bold")
        say(f"{edit.method}, for {edit.model} ({edit.fingerprint[:12]})")
        for fact in edit.facts:
            say(f"  {fact.text} → {fact.target}")
        results.print(changed_weights_text(changed_weights(edit)), soft_wrap=True)
        results.print(checks_table(describe_checks(edit.checks)))
        results.print(settings_table(edit.settings))


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(ShowOptions):
    """Options."""

    prompt: Annotated[tuple[str, ...], Flag(short="p")] = ()
    """Text to continue with the edits. Repeatable."""
    max_new_tokens: Annotated[int, Ge(1)] = 40
    """Tokens to generate."""
    model: EditedModel = field(default_factory=EditedModel)


def apply(options: ApplyOptions) -> None:
    """Apply edits together: each fact without edits, with its own edit, and with all edits."""
    from factscope.editing.checks import with_checks
    from factscope.evaluation.before_after import describe_checks, generate_before_after
    from factscope.report.terminal import applied_table, checks_table, generation_table

    edits = options.load()
    total = reduce(add, edits)
    lm = _load_model(options.model, edits)
    with doing("predicting"):
        rows = _scores(lm, options.files, edits, total)
        [total] = with_checks(lm, [total])
        texts = generate_before_after(lm, total, options.prompt, options.max_new_tokens)
    checks = describe_checks(total.checks)
    if options.json:
        generated = [asdict(text) for text in texts]
        print_json({"model": lm.name, "facts": rows, "checks": checks, "texts": generated})
        return
    results.print(applied_table(rows))
    for text in texts:
        results.print(generation_table(text, [fact.target or "" for fact in total.facts]))
    say("all together:", style="dim")
    results.print(checks_table(checks))
    _complain(checks["complaints"])


def _scores(
    lm: "LM", files: Sequence[Path], edits: "Sequence[Edit]", total: "Edit"
) -> list[dict[str, Any]]:
    """The new object's probability for each fact: before, alone, together."""
    import math

    from factscope.evaluation.score import Query, score_queries

    facts = [(number, fact) for number, edit in enumerate(edits) for fact in edit.facts]
    queries = [
        Query(fact.text, fact.target or "", which)
        for number, fact in facts
        for which in (None, number, len(edits))
    ]
    scores = iter(score_queries(lm, queries, [*edits, total]))
    return [
        {
            "file": str(files[number]), "text": fact.text, "target": fact.target,
            **{name: math.exp(-next(scores).nll) for name in ("before", "alone", "together")},
        }
        for number, fact in facts
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ShowOptions):
    """Options."""

    peft: Path | None = None
    """Folder for a LoRA adapter."""
    checkpoint: Path | None = None
    """Folder for the complete edited model."""
    max_rank: Annotated[int | None, Ge(1)] = None
    """With --peft: keep only the N largest singular directions."""
    force: bool = False
    """Export even if the edit fails the checks."""
    model: EditedModel = field(default_factory=lambda: EditedModel(dtype="auto"))


def export(options: ExportOptions) -> None:
    """Write edits for other tools: a LoRA adapter that peft loads, or an edited model."""
    from factscope.editing.export import export_checkpoint, export_peft

    peft, checkpoint, force = options.peft, options.checkpoint, options.force
    if (peft is None) == (checkpoint is None):
        raise BadSetting("give either --peft FOLDER or --checkpoint FOLDER")
    if options.max_rank is not None and peft is None:
        raise BadSetting("--max-rank goes with --peft; a checkpoint has the edits in full")
    edits = options.load()
    lm = _load_model(options.model, edits)
    total = _checked(lm, reduce(add, edits), force=force)
    if peft is not None:
        with doing("writing the adapter"):
            export_peft(total, lm, peft, rank=options.max_rank, force=force)
        _written(peft, "peft", len(edits), options.json)
    if checkpoint is not None:
        with doing("writing the model"):
            export_checkpoint(edits, lm, checkpoint, force=force)
        _written(checkpoint, "checkpoint", len(edits), options.json)


@dataclass(frozen=True, kw_only=True)
class MergeOptions(ShowOptions):
    """Options."""

    out: Annotated[Path, Flag(short="o")]
    """One edit (a file name in .edit), or an edited model (a folder)."""
    force: bool = False
    """Write the model even if the edit fails the checks."""
    model: EditedModel = field(default_factory=lambda: EditedModel(dtype="auto"))


def merge(options: MergeOptions) -> None:
    """Merge edits into one edit, or into a model."""
    from factscope.editing.export import export_checkpoint

    edits = options.load()
    total = reduce(add, edits)
    if options.out.suffix == SUFFIX:
        total.save(options.out)
        _written(options.out, "edit", len(edits), options.json)
        return
    lm = _load_model(options.model, edits)
    _checked(lm, total, force=options.force)
    with doing("writing the model"):
        export_checkpoint(edits, lm, options.out, force=options.force)
    _written(options.out, "checkpoint", len(edits), options.json)


def _written(path: Path, kind: str, edits: int, json: bool) -> None:
    if json:
        print_json({"kind": kind, "path": str(path), "edits": edits})
        return
    messages = {
        "edit": f"{edits} edits in one: {path}\nNext: factscope edit apply {path}",
        "peft": f"{path}\nNext, in Python: peft.PeftModel.from_pretrained(model, {str(path)!r})",
        "checkpoint": f'{path}\nNext: factscope generate "…" --model {path}',
    }
    say(messages[kind])


COMMANDS = {
    "write": Command(
        run=write, base=method_base(WriteOptions), chosen_by=("method", "preset"),
        explain=explain_method,
    ),
    "show": Command(run=show, base=lambda given: ShowOptions),
    "apply": Command(run=apply, base=lambda given: ApplyOptions),
    "export": Command(run=export, base=lambda given: ExportOptions),
    "merge": Command(run=merge, base=lambda given: MergeOptions),
}  # fmt: skip


# ---- generate


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
    """Options."""

    prompts: Annotated[tuple[str, ...], Flag(positional=True)]
    """Texts to continue."""
    edit: Annotated[tuple[Path, ...], Flag(short="e")] = ()
    """Edit file to apply. Repeatable."""
    max_new_tokens: Annotated[int, Ge(1), Flag(short="n")] = 50
    """Tokens to generate."""
    greedy: bool = False
    """Take the most likely token at each step instead of sampling."""
    top_k: Annotated[int | None, Ge(1)] = None
    """Sample from the k most likely tokens; 5 if not given, as in the paper."""
    seed: int = 0
    """Seed of the samples."""
    compare: bool = False
    """Also generate without the edits, side by side."""
    model: EditedModel = field(default_factory=EditedModel)


def generate(options: GenerateOptions) -> None:
    """Continue texts, with or without edits. No weights are written."""
    if options.greedy and options.top_k is not None:
        raise BadSetting("give --greedy or --top-k N, not both")
    if options.compare and not options.edit:
        raise BadSetting("--compare needs an --edit FILE to compare with")
    edits = _load_edits(options.edit)
    total = reduce(add, edits) if edits else None
    lm = _load_model(options.model, edits)
    _check_length(lm, options)
    with doing("generating"):
        before = _continuations(lm, None, options) if options.compare else None
        after = _continuations(lm, total, options)
    if options.json:
        rows = [{"text": t, "says": a} for t, a in zip(options.prompts, after, strict=True)]
        if before is not None:
            rows = [{**row, "unedited": b} for row, b in zip(rows, before, strict=True)]
        files = [str(file) for file in options.edit]
        print_json({"model": lm.name, "edits": files, "texts": rows})
        return
    _print_texts(options.prompts, before, after, total)


GENERATE = Command(run=generate, base=lambda given: GenerateOptions)


def _check_length(lm: "LM", options: GenerateOptions) -> None:
    from factscope.lm.tokens import encode

    longest = max(len(encode(lm, text)) for text in options.prompts)
    if lm.context is not None and longest + options.max_new_tokens > lm.context:
        raise PromptTooLong(
            f"a prompt of {longest} tokens and {options.max_new_tokens} new ones exceed the "
            f"context of {lm.name}, {lm.context} tokens; give a smaller --max-new-tokens"
        )


def _continuations(lm: "LM", edit: "Edit | None", options: GenerateOptions) -> list[str]:
    from factscope.editing.per_row import edited
    from factscope.lm.generate import argmax_choice, top_k_choice
    from factscope.lm.generate import generate as generate_texts

    choose = argmax_choice if options.greedy else top_k_choice(options.top_k or 5, options.seed)
    with edited(lm, [edit]):
        return generate_texts(lm, options.prompts, options.max_new_tokens, choose)


def _print_texts(
    prompts: Sequence[str], before: Sequence[str] | None, after: Sequence[str], edit: "Edit | None"
) -> None:
    from rich.text import Text

    from factscope.records import Generation
    from factscope.report.terminal import generation_table

    objects = [fact.target or "" for fact in edit.facts] if edit else []
    for i, (text, continuation) in enumerate(zip(prompts, after, strict=True)):
        if before is None:
            results.print(Text.assemble((text, "bold"), continuation), soft_wrap=True)
        else:
            generation = Generation(text=text, before=before[i], after=continuation)
            results.print(generation_table(generation, objects))
