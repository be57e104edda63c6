"""factscope edit and generate: write facts, work with edit files, generate with edits applied."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import compress
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge
from rich.text import Text

from factscope.cli.flags import ChatOptions, Command, FactSource, ModelOptions, Options
from factscope.cli.output import check_suffix, doing, note, print_json, say, skipped, working
from factscope.cli.stats import with_statistics
from factscope.editing.settings import EDITORS, Rome, editor
from factscope.errors import BadFact, BadSetting, EditDidNotTake, PromptTooLong
from factscope.facts import Case, Fact, strip_end
from factscope.io import check_output_file, check_output_folder
from factscope.records import EditRecord, Generation
from factscope.settings import Flag, Seed, settings_of

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.editing.editor import Editor
    from factscope.lm.model import LM

    Method = str
else:
    Method = Literal[tuple(EDITORS)]

SUFFIX = ".edit"


# ---- the method, for edit, evaluate and sweep


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Options):
    method: Method = "rome"
    """Edit method. With --help, its settings are listed: --method memit --help."""
    preset: Literal["default", "paper"] = "default"
    """paper computes what the authors' code computes."""
    model: ModelOptions = field(default_factory=ModelOptions)
    editor: Any = field(default_factory=Rome)

    chosen_by = ("method", "preset")

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> "MethodOptions":
        """The settings of the method and preset."""
        return cls(editor=editor(given.get("method", "rome"), given.get("preset", "default")))

    @classmethod
    def explain(cls, flags: Sequence[str], base: "MethodOptions") -> str | None:
        """A message with the methods that have a flag, and the flags of the chosen method."""
        known = {name: settings_of(presets["default"]) for name, presets in EDITORS.items()}
        methods = {flag: [name for name in known if flag in known[name]] for flag in flags}
        foreign = [f"--{flag} (see {', '.join(names)})" for flag, names in methods.items() if names]
        if not foreign:
            return None
        settings = ", ".join(f"--{name}" for name in settings_of(base.editor))
        return f"{base.editor.method} has no {', '.join(foreign)}; its settings are {settings}"

    def checked_editor(self) -> "Editor":
        """The editor; an error if its weights are missing or its name does not fit."""
        given, default = self.editor, EDITORS[self.method][self.preset]
        getattr(given, "trained", None)  # raises if there are none, before the model loads
        if getattr(given, "prefixes", None) and given.prefix_lengths != default.prefix_lengths:
            raise BadSetting("give --prefixes FILE or --prefix-lengths, not both")
        if given.method != self.method:
            advice = f"give --method {given.method} instead of {self.method}"
            raise BadSetting(f"--max-change makes this {given.method}; {advice}")
        return given


# ---- write


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
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
    source: FactSource = field(default_factory=FactSource)
    to: str | None = None
    """The new object."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Save the edit in this file."""
    page: Path | None = None
    """Write a page about the edit (.html)."""
    figure: Path | None = None
    """Draw before and after (.png .svg .pdf)."""
    force: bool = False
    """Write the edit even if it fails the checks, if the model predicts the object already, or over
    a file that is not an edit."""
    require: bool = False
    """Exit with code 3, and write no file, unless the new object (of every fact) is the most likely
    one after the edit."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    comparison: ComparisonOptions = field(default_factory=ComparisonOptions)

    def check(self) -> None:
        """Check the paths and combinations of flags before the model is loaded."""
        check_suffix(self.page, "page", ".html")
        check_suffix(self.figure, "figure", ".png", ".svg", ".pdf")
        for flag in ("out", "page", "figure"):
            if getattr(self, flag) is not None:
                check_output_file(getattr(self, flag), f"--{flag}")
        if self.out is not None and self.out.exists() and not self.force:
            from factscope.editing.edit import check_replaceable

            check_replaceable(self.out)
        source, comparison = self.source, self.comparison
        if source.facts is None:
            return
        if self.page or self.figure:
            raise BadSetting("--page and --figure show one fact; leave them out with --facts")
        of_one_fact = (source.prompt, source.subject, source.occurrence, self.to, comparison.true)
        if any((*of_one_fact, comparison.paraphrase, comparison.neighbour)):
            raise BadSetting("--facts FILE has prompts, subjects and objects; leave those out")

    def cases(self) -> list[Case]:
        """The facts to write."""
        from factscope.data.readers import read_cases
        from factscope.data.registry import find_data

        source, comparison = self.source, self.comparison
        if source.facts is not None:
            file = read_cases(find_data(source.facts))
            skipped(file.problems)
            return list(file.cases[: source.limit])
        if source.prompt is None or source.subject is None or self.to is None:
            raise BadSetting('give a prompt, --subject "…" and the new object --to "…", or --facts')
        if not self.to.strip():
            raise BadFact(f"--to is {self.to!r}; give the new object")
        paraphrases, neighbours = comparison.paraphrase, comparison.neighbour
        if any(not text.strip() for text in (*paraphrases, *neighbours)):
            raise BadFact("a --paraphrase or --neighbour is empty; leave it out")
        fact, true = source.fact(self.to.strip()), (comparison.true or "").strip() or None
        return [Case(fact=fact, true=true, paraphrases=paraphrases, neighbours=neighbours)]


@Command
def write(options: WriteOptions) -> None:
    """Write a fact, or a file of facts, and show predictions before and after.

    The word "write" can be left out.
    """
    from factscope.evaluation.before_after import before_after_each

    options.check()
    cases, editor = options.cases(), options.checked_editor()
    lm = options.model.load()
    if options.chat.chat:
        cases = [_chat_case(lm, case) for case in cases]
    cases, known = (cases, []) if options.force else _unpredicted(lm, cases)
    edit = make_edit(lm, editor, cases, force=options.force)
    one = options.source.facts is None
    with doing("predicting before and after"):
        tokens = options.comparison.max_new_tokens if one else 0
        records = before_after_each(lm, edit, cases, generation_tokens=tokens)
        missed = _not_predicted(lm, edit, cases) if options.require else []
    if missed:
        options = replace(options, out=None, page=None, figure=None)
    if options.out is not None:
        edit.save(options.out, force=options.force)
    page, figure = options.page, options.figure
    drawn = draw_edit(records[0], page, figure) if page or figure else []
    warn(records)
    _print_written(options, edit, records, known, drawn)
    if missed:
        fact, more = missed[0], f" (and {len(missed) - 1} more)" if missed[1:] else ""
        raise EditDidNotTake(
            f"--require: {fact.target!r} is not the most likely object after {fact.text!r}{more}; "
            f"nothing was saved. Try {advice(edit.method)}"
        )


def _not_predicted(lm: "LM", edit: "Edit", cases: Sequence[Case]) -> list[Fact]:
    """The facts whose new object is not the most likely one, token by token, after the edit."""
    from factscope.evaluation.score import Query, score_queries

    facts = [case.fact for case in cases]
    scores = score_queries(lm, [Query(fact.text, fact.target or "", 0) for fact in facts], [edit])
    return [fact for fact, score in zip(facts, scores, strict=True) if not all(score.correct)]


def _print_written(
    options: WriteOptions,
    edit: "Edit",
    records: Sequence[EditRecord],
    known: Sequence[str],
    drawn: Sequence[Path],
) -> None:
    from factscope.report.terminal import facts_table

    one, out = options.source.facts is None, options.out
    if options.json and one:
        print_json(records[0].to_json())
        return
    if options.json:
        values = [asdict(record) for record in records]
        shared = ("model", "method", "changed_weights", "checks", "settings")
        own = [{name: x[name] for name in ("fact", "true", "prompts")} for x in values]
        print_json({"kind": "edits", **{name: values[0][name] for name in shared}, "file": out,
                    "left_out": known, "facts": own})  # fmt: skip
        return
    if one:
        print_edit(records[0])
    else:
        say(f"{edit.method} on {edit.model}: {len(records)} facts\n", style="bold")
        say(facts_table(records))
        _print_changes(records[0])
    if out is None:
        say("Not saved; -o FILE.edit saves it.")
    else:
        say(f"Saved: {out}, {_size(out)}")
        say(f'Next: factscope generate "{edit.facts[0].text}" --edit {out}')
    if drawn:
        say("Drawn: " + ", ".join(map(str, drawn)))


def _chat_case(lm: "LM", case: Case) -> Case:
    """The case with all its prompts in the model's chat template."""
    from factscope.lm.tokens import chat_fact, chat_text

    names = ("paraphrases", "neighbours", "attributes", "generations")
    texts = {name: tuple(chat_text(lm, x) for x in getattr(case, name)) for name in names}
    return replace(case, fact=chat_fact(lm, case.fact), **texts)


def _unpredicted(lm: "LM", cases: list[Case]) -> tuple[list[Case], list[str]]:
    """The cases whose new object the model does not predict yet, and messages about the others."""
    from factscope.evaluation.before_after import already_predicted

    with doing("predicting before the edit"):
        predicted = already_predicted(lm, [case.fact for case in cases])
    known = [
        f"{lm.name} already predicts {case.fact.target!r} after {case.fact.text!r}"
        for case in compress(cases, predicted)
    ]
    if len(known) == len(cases):
        more = f" (and so on for all {len(cases)} facts)" if len(cases) > 1 else ""
        raise BadFact(f"{known[0]}{more}; nothing to change (--force writes it anyway)")
    skipped(known)
    return [case for case, is_known in zip(cases, predicted, strict=True) if not is_known], known


def make_edit(lm: "LM", editor: "Editor", cases: Sequence[Case], *, force: bool = False) -> "Edit":
    """The edit that writes all the cases; refused if it fails the checks, unless forced."""
    facts = [case.request for case in cases]
    note_defaults(lm, editor, len(facts))
    editor = with_statistics(lm, editor, facts)
    what = repr(facts[0].text) if len(facts) == 1 else f"{len(facts)} facts"
    with working(f"editing {what}") as done:
        edit = editor(lm, facts, progress=done)
    edit = _checked(lm, edit, force=force)
    assert edit.checks is not None
    _complain(edit.checks.complaints())
    return edit


def note_defaults(lm: "LM", editor: Any, facts: int) -> None:
    """Say so if the editor uses defaults that were not measured on this model, or if its
    calibration found another method better for that many facts in an edit."""
    from factscope.editing.calibration import CALIBRATED
    from factscope.editing.defaults import has_own_defaults, rome_defaults

    _note_better_method(lm, editor.method, facts)
    values = {**vars(editor), **vars(getattr(editor, "search", editor))}
    names = CALIBRATED.get(editor.method, ())
    if all(values[name] not in (None, "default") for name in names[:2]) or has_own_defaults(lm):
        return
    row = rome_defaults(lm)
    used = f" (layer {row.layer}, clamp {row.clamp:g})" if editor.method == "rome" else ""
    note(
        f"{lm.name} has no published settings: cautious defaults are used{used}. Measure better "
        f"ones once: factscope calibrate --model {lm.name}",
        style="yellow",
    )


def _note_better_method(lm: "LM", method: str, facts: int) -> None:
    from factscope.editing.calibration import find_calibration

    calibration = find_calibration(lm)
    found = None if calibration is None else calibration.best_method(facts)
    if found is None:
        return
    best, trials = found
    S = {name: 100 * x["S"]["mean"] for name, trial in trials.items() if (x := trial["metrics"])}
    if best == method or not {best, method} <= set(S):
        return
    together = "one fact at a time" if facts == 1 else "several facts at once"
    note(
        f"The calibration of {lm.name} found {best} best for {together}: S {S[best]:.1f}, "
        f"{method} {S[method]:.1f}. Try --method {best}."
    )


def _checked(lm: "LM", edit: "Edit", *, force: bool) -> "Edit":
    """The edit with its checks, which a sum does not have yet; refused if it fails them."""
    from factscope.editing.checks import with_checks

    if edit.checks is None:
        with doing("checking the edit"):
            [edit] = with_checks(lm, [edit])
    if not force and edit.checks is not None:
        edit.checks.raise_if_unsafe()
    return edit


def _complain(complaints: Sequence[str]) -> None:
    for complaint in complaints:
        note(f"check failed: {complaint}", style="bold red")


def draw_edit(record: EditRecord, page: Path | None, figure: Path | None) -> list[Path]:
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


def print_edit(record: EditRecord) -> None:
    """Before and after, generated text side by side, the checks and the changed weights."""
    from factscope.report import terminal

    say(terminal.fact_text(record))
    say(f"{record.method} on {record.model}\n", style="dim")
    say(terminal.scores_table(record))
    if record.generations:
        say("")
        say(terminal.generations_table(record))
    _print_changes(record)


def _print_changes(record: EditRecord) -> None:
    from factscope.report import terminal

    say("")
    say(terminal.checks_table(record.checks))
    say(terminal.changed_weights_text(record.changed_weights))


ADVICE = {
    "kn": "a higher --new-weight, more --max-neurons, a lower --context-fraction",
    "memit": "other --layers, more --steps",
    "mend": "a higher --scale, --weights that were trained longer",
    "ke": "a higher --scale, --weights that were trained longer",
}
"""Method → settings to try if an edit fails; other methods have a layer and steps."""


def warn(records: Sequence[EditRecord]) -> None:
    """Print a note for each fact whose old object is still more likely."""
    for record in records:
        prompt, after = record.fact_prompt, record.fact_prompt.after
        if after.old is not None and after.new <= after.old and prompt.new != prompt.old:
            note(
                f"{record.fact.text!r}: {prompt.old!r} is still more likely than {prompt.new!r}; "
                f"try {advice(record.method)}",
                style="yellow",
            )


def advice(method: str) -> str:
    """Settings to try if an edit fails."""
    return ADVICE.get(method, "another --layer, more --steps") + " or another --method"


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


# ---- show, apply, export, merge


@dataclass(frozen=True, kw_only=True)
class EditedModel(ModelOptions):
    """Model."""

    model: Annotated[str | None, Flag(short="m")] = None  # pyright: ignore
    """Short name, hub id, folder or GGUF file; if not given, the model that the edit names, or
    smollm2-135m."""

    def name_for(self, edits: "Sequence[Edit]") -> str:
        """The given name, or that of the edits' model."""
        from factscope.lm.sources import DEFAULT_MODEL

        if self.model is not None:
            return self.model
        return edits[0].model if edits else DEFAULT_MODEL

    def load_for(self, edits: "Sequence[Edit]") -> "LM":
        """The model of the edits."""
        lm = replace(self, model=self.name_for(edits)).load()
        for edit in edits:
            edit.check_model(lm)
        return lm


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    files: Annotated[tuple[Path, ...], Flag(positional=True)]
    """Edit files, written by `factscope edit -o`."""


def load_edits(files: Sequence[Path]) -> "list[Edit]":
    """The edits in the files, each given once."""
    from factscope.editing.edit import Edit

    paths = [file.resolve() for file in files]
    for i, file in enumerate(files):
        if paths[i] in paths[:i]:
            raise BadSetting(f"{file} is given twice; give each edit once")
    return [Edit.load(file) for file in files]


@Command
def show(options: ShowOptions) -> None:
    """Show what edits change: facts, weights, method and settings. Needs no model."""
    from factscope.evaluation.before_after import changed_weights, describe_checks
    from factscope.report.terminal import changed_weights_text, checks_table, settings_table

    pairs = list(zip(options.files, load_edits(options.files), strict=True))
    if options.json:
        print_json([
            {
                "file": file, "bytes": file.stat().st_size, "method": edit.method,
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
        say(changed_weights_text(changed_weights(edit)))
        say(checks_table(describe_checks(edit.checks)))
        say(settings_table(edit.settings))


@dataclass(frozen=True, kw_only=True)
class ApplyOptions(ShowOptions):
    prompt: Annotated[tuple[str, ...], Flag(short="p")] = ()
    """Text to continue with the edits. Repeatable."""
    max_new_tokens: Annotated[int, Ge(1)] = 40
    """Tokens to generate."""
    model: EditedModel = field(default_factory=EditedModel)


@Command
def apply(options: ApplyOptions) -> None:
    """Apply edits together: each fact without edits, with its own edit, and with all edits."""
    from factscope.editing.checks import with_checks
    from factscope.evaluation.before_after import describe_checks, generate_before_after
    from factscope.report.terminal import applied_table, checks_table, generation_table

    edits = load_edits(options.files)
    total = reduce(add, edits)
    lm = options.model.load_for(edits)
    with doing("predicting"):
        rows = _applied_rows(lm, options.files, edits, total)
        [total] = with_checks(lm, [total])
        prompts = _without_end_spaces(options.prompt)
        texts = generate_before_after(lm, total, prompts, options.max_new_tokens)
    checks = describe_checks(total.checks)
    if options.json:
        generated = [asdict(text) for text in texts]
        print_json({"model": lm.name, "facts": rows, "checks": checks, "texts": generated})
        return
    say(applied_table(rows))
    for text in texts:
        say(generation_table(text, [fact.target or "" for fact in total.facts]))
    say("all together:", style="dim")
    say(checks_table(checks))
    _complain(checks["complaints"])


def _probabilities(
    lm: "LM", queries: Sequence[tuple[Fact, int | None]], edits: "Sequence[Edit]"
) -> Iterator[float]:
    """The probability of each fact's new object, with the edit of that number or with none."""
    from factscope.evaluation.score import Query, score_queries

    queried = [Query(fact.text, fact.target or "", which) for fact, which in queries]
    return (math.exp(-score.nll) for score in score_queries(lm, queried, edits))


def _applied_rows(
    lm: "LM", files: Sequence[Path], edits: "Sequence[Edit]", total: "Edit"
) -> list[dict[str, Any]]:
    """The new object's probability for each fact: before, alone, together."""
    facts = [(number, fact) for number, edit in enumerate(edits) for fact in edit.facts]
    queries = [(fact, which) for i, fact in facts for which in (None, i, len(edits))]
    p = _probabilities(lm, queries, [*edits, total])
    return [
        {
            "file": files[number], "text": fact.text, "target": fact.target,
            "before": next(p), "alone": next(p), "together": next(p),
        }
        for number, fact in facts
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ShowOptions):
    peft: Path | None = None
    """Folder for a LoRA adapter."""
    checkpoint: Path | None = None
    """Folder for the complete edited model."""
    max_rank: Annotated[int | None, Ge(1)] = None
    """With --peft: keep only the N largest singular directions, and print what that loses."""
    force: bool = False
    """Export even if the edit fails the checks."""
    model: EditedModel = field(default_factory=lambda: EditedModel(dtype="auto"))


@Command
def export(options: ExportOptions) -> None:
    """Write edits for other tools: a LoRA adapter that peft loads, or an edited model."""
    from factscope.editing.export import export_peft

    peft, checkpoint, force = options.peft, options.checkpoint, options.force
    if (peft is None) == (checkpoint is None):
        raise BadSetting("give either --peft FOLDER or --checkpoint FOLDER")
    if checkpoint is not None:
        if options.max_rank is not None:
            raise BadSetting("--max-rank goes with --peft; a checkpoint has the edits in full")
        _write_checkpoint(options, checkpoint, "--checkpoint")
        return
    assert peft is not None
    _check_new_folder(peft, "--peft")
    edits = load_edits(options.files)
    lm = options.model.load_for(edits)
    total = _checked(lm, reduce(add, edits), force=force)
    with doing("writing the adapter"):
        exported = export_peft(total, lm, peft, rank=options.max_rank, force=force)
    lost: dict[str, Any] = {}
    if options.max_rank is not None:
        with doing("predicting with the full and the truncated edit"):
            lost = _truncation(lm, total, exported)
    options.print_result(
        {"kind": "peft", "path": peft, "edits": len(edits), **lost},
        *_truncation_lines(lost),
        f"{peft}\nNext, in Python: peft.PeftModel.from_pretrained(model, {str(peft)!r})",
    )


def _truncation(lm: "LM", full: "Edit", exported: "Edit") -> dict[str, Any]:
    """What truncation to a rank loses: energy by weight, and each new object's probability."""
    from factscope.editing.export import energy_kept

    overall, weights = energy_kept(full, exported)
    p = _probabilities(lm, [(f, which) for f in full.facts for which in (0, 1)], [full, exported])
    facts = [
        {"text": fact.text, "target": fact.target, "full": next(p), "exported": next(p)}
        for fact in full.facts
    ]
    return {"energy_kept": overall, "weights": weights, "facts": facts}


def _truncation_lines(lost: dict[str, Any], max_facts: int = 10) -> list[str]:
    """The same as text; of many facts those that lose most."""
    if not lost:
        return []
    facts = sorted(lost["facts"], key=lambda x: x["exported"] - x["full"])
    omitted = len(facts) - max_facts
    return [
        f"Energy (squared Frobenius norm) kept: {100 * lost['energy_kept']:.1f} %",
        *(f"  {name}: {100 * kept:.1f} %" for name, kept in lost["weights"].items()),
        "Probability of the new object, full edit → exported:",
        *(
            f"  {x['text']} → {x['target']}: {100 * x['full']:.1f} % → {100 * x['exported']:.1f} %"
            for x in facts[:max_facts]
        ),
        *([f"  and {omitted} facts that lose less"] if omitted > 0 else []),
    ]


@dataclass(frozen=True, kw_only=True)
class MergeOptions(ShowOptions):
    out: Annotated[Path, Flag(short="o")]
    """One edit (a file name in .edit), or an edited model (a folder)."""
    force: bool = False
    """Write the model even if the edit fails the checks; replace a file that is not an edit."""
    model: EditedModel = field(default_factory=lambda: EditedModel(dtype="auto"))


@Command
def merge(options: MergeOptions) -> None:
    """Merge edits into one edit, or into a model."""
    out = options.out
    if out.suffix != SUFFIX:
        _write_checkpoint(options, out, "--out")
        return
    check_output_file(out, "--out")
    edits = load_edits(options.files)
    reduce(add, edits).save(out, force=options.force)
    options.print_result(
        {"kind": "edit", "path": out, "edits": len(edits)},
        f"{len(edits)} edits in one: {out}\nNext: factscope edit apply {out}",
    )


def _check_new_folder(folder: Path, flag: str) -> None:
    """Refuse a folder that is not empty or cannot be written: before the work, not after it."""
    check_output_folder(folder, flag)
    if folder.is_dir() and any(folder.iterdir()):
        raise BadSetting(
            f"{flag} is {str(folder)!r}, which already exists; give a new or empty folder"
        )


def _write_checkpoint(options: ExportOptions | MergeOptions, folder: Path, flag: str) -> None:
    from factscope.editing.export import export_checkpoint

    _check_new_folder(folder, flag)
    edits = load_edits(options.files)
    lm = options.model.load_for(edits)
    _checked(lm, reduce(add, edits), force=options.force)
    with doing("writing the model"):
        export_checkpoint(edits, lm, folder, force=options.force)
    options.print_result(
        {"kind": "checkpoint", "path": folder, "edits": len(edits)},
        f'{folder}\nNext: factscope generate "…" --model {folder}',
    )


# ---- generate


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(Options):
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
    seed: Seed = 0
    """Seed of the samples."""
    compare: bool = False
    """Also generate without the edits, side by side."""
    chat: ChatOptions = field(default_factory=ChatOptions)
    model: EditedModel = field(default_factory=EditedModel)


@Command
def generate(options: GenerateOptions) -> None:
    """Continue texts, with or without edits. No weights are written."""
    from factscope.report.terminal import generation_table

    if options.greedy and options.top_k is not None:
        raise BadSetting("give --greedy or --top-k N, not both")
    if options.compare and not options.edit:
        raise BadSetting("--compare needs an --edit FILE to compare with")
    options = replace(options, prompts=_without_end_spaces(options.prompts))
    edits = load_edits(options.edit)
    total = reduce(add, edits) if edits else None
    lm = options.model.load_for(edits)
    with doing("generating"):
        after = _continuations(lm, total, options)
        rows = [{"text": t, "continuation": x} for t, x in zip(options.prompts, after, strict=True)]
        if options.compare:
            before = _continuations(lm, None, options)
            rows = [{**row, "unedited": x} for row, x in zip(rows, before, strict=True)]
    if options.json:
        print_json({"model": lm.name, "edits": options.edit, "texts": rows})
        return
    objects = [fact.target or "" for fact in total.facts] if total else []
    for row in rows:
        if options.compare:
            text = Generation(text=row["text"], before=row["unedited"], after=row["continuation"])
            say(generation_table(text, objects))
        else:
            say(Text.assemble((row["text"], "bold"), row["continuation"]))


def _without_end_spaces(prompts: tuple[str, ...]) -> tuple[str, ...]:
    """The prompts without spaces at their ends, with a note if there were any."""
    stripped = tuple(map(strip_end, prompts))
    if stripped != prompts:
        note("The spaces at the end of prompts are removed.")
    return stripped


def _continuations(lm: "LM", edit: "Edit | None", options: GenerateOptions) -> list[str]:
    from factscope.editing.per_row import edited
    from factscope.lm.generate import argmax_choice, generate, top_k_choice
    from factscope.lm.tokens import chat_text, encode

    prompts, tokens = options.prompts, options.max_new_tokens
    if options.chat.chat:
        prompts = [chat_text(lm, text) for text in prompts]
    longest = max(len(encode(lm, text)) for text in prompts)
    if lm.context is not None and longest + tokens > lm.context:
        raise PromptTooLong(
            f"a prompt of {longest} tokens and {tokens} new ones exceed the context of {lm.name}, "
            f"{lm.context} tokens; give a smaller --max-new-tokens"
        )
    choose = argmax_choice if options.greedy else top_k_choice(options.top_k or 5, options.seed)
    with edited(lm, [edit]):
        return generate(lm, prompts, tokens, choose)
