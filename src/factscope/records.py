"""Records: what runs write to disk, one JSON object per line, raw scores only. No torch.

TraceRecord       the causal trace of one fact                    factscope trace
EditRecord        one edited fact, its prompts before and after   factscope edit
CaseRecord        one case of an evaluation                       factscope evaluate
TrainingRecord    held-out metrics at one step of training        factscope train

Each line says its `kind` and the `version` of the format. Lines without a version are of
version 1; their old field names are translated when they are read.
"""

import dataclasses
import html
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from factscope.errors import BadFact, BadRecord
from factscope.facts import Fact
from factscope.io import check_json, parse_json, write_atomic

log = logging.getLogger(__name__)

VERSION = 2  # of the record format

# Field names of version 1 → today's, by the class that has them.
RENAMED: dict[str, dict[str, str]] = {
    "EditRecord": {"health": "checks", "places": "changed_weights"},
    "CaseRecord": {"health": "checks", "moment": "phase"},
    "TrainingRecord": {
        "trained": "train_loss", "before": "unedited_loss", "edit": "edit_loss",
        "rephrased": "rephrase_loss", "local": "locality_loss", "said": "edit_accuracy",
        "said_rephrased": "rephrase_accuracy", "kept": "locality_accuracy",
    },
    "CaseScores": {"tokens": "token_correct", "reference": "reference_similarity"},
    "PromptScore": {"new_right": "new_correct", "true_right": "true_correct"},
}  # fmt: skip

KINDS = ("states", "mlp", "attn")
"""What a trace restores: single states, or windows of MLP or attention outputs."""

CellTable = tuple[tuple[float | None, ...], ...]
"""A table token × layer; None where the cell was not measured."""

R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """A result of a run: one line of JSON."""

    KIND: ClassVar[str]
    NAN_AS_NULL: ClassVar[bool] = False
    """Whether a number that is not finite is valid, and written as null."""

    def to_json(self) -> str:
        """The record as one line of JSON; NaN and infinity are refused."""
        values = dataclasses.asdict(self)
        if self.NAN_AS_NULL:
            values = {
                name: None if isinstance(x, float) and not math.isfinite(x) else x
                for name, x in values.items()
            }
        try:
            check_json(values)
        except ValueError as error:
            raise BadRecord(
                f"a record of kind {self.KIND!r} cannot be written: {error}; load the model with "
                "--dtype float32, or use less extreme settings"
            ) from error
        fields = {"kind": self.KIND, "version": VERSION, **values}
        return json.dumps(fields, ensure_ascii=False)

    @classmethod
    def from_json(cls: "type[R]", line: str | bytes) -> "R":
        """Parse one line of JSON; NaN and infinity are refused."""
        try:
            fields = parse_json(line, allow_nan=cls.NAN_AS_NULL)
            version = fields.pop("version", 1)
            if version not in range(1, VERSION + 1):
                raise BadRecord(
                    f"the record has format version {version!r}; this factscope reads versions 1 "
                    f"to {VERSION}, so update factscope"
                )
            kind = fields.pop("kind", None)
            # Version 1 did not write the kind of traces and of training records.
            implied = version == 1 and kind is None and cls.KIND in ("trace", "training")
            if kind != cls.KIND and not implied:
                raise ValueError(f"its kind is {kind!r}")
            if cls.NAN_AS_NULL:
                nan = {f.name for f in dataclasses.fields(cls) if f.type is float}
                fields = {n: math.nan if x is None and n in nan else x for n, x in fields.items()}
            return decode(fields, cls)
        except (ValueError, KeyError, TypeError, AttributeError, BadFact) as error:
            start = line[:80] if isinstance(line, str) else line[:80].decode(errors="replace")
            raise BadRecord(f"not a record of kind {cls.KIND!r} ({error}): {start!r}") from error


T = TypeVar("T")


def decode(value: Any, kind: type[T]) -> T:
    """A value of JSON as an annotated type, such as a dataclass; ValueError if it does not fit."""
    return _decode(value, kind, kind.__name__)


def _decode(value: Any, kind: Any, name: str) -> Any:
    """`name` is that of the field, for the message."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        kind = args[0]  # of T | None, the only union in records
        return None if value is None else _decode(value, kind, name)
    hints = _hints(kind)
    if hints is not None and isinstance(value, dict):
        names = RENAMED.get(kind.__name__, {})
        fields = {str(names.get(f, f)): x for f, x in value.items()}
        return kind(**{f: _decode(x, hints.get(f, Any), f) for f, x in fields.items()})
    if origin is Mapping and isinstance(value, dict):
        return {key: _decode(x, args[1], name) for key, x in value.items()}
    if origin is tuple and isinstance(value, list):
        if len(value) > 0 and set(map(type, value)) <= PLAIN.get(args[0], set()):
            return tuple(value)  # a short cut for rows of numbers, most of a record
        kinds = args[:1] * len(value) if args[1:] == (...,) else args
        return tuple(_decode(x, kind, name) for x, kind in zip(value, kinds, strict=True))
    if kind is float and type(value) in (float, int):
        return float(value)
    if kind is Any or type(value) is kind or (origin is Literal and value in args):
        return value
    raise ValueError(f"{name} is {value!r}")


PLAIN: dict[Any, set[type]] = {float: {float}, float | None: {float, NoneType}}


@cache
def _hints(kind: Any) -> dict[str, Any] | None:
    """The annotations of a dataclass; None for other types."""
    return get_type_hints(kind) if dataclasses.is_dataclass(kind) else None


@dataclass(frozen=True, kw_only=True)
class Lens:
    """The logit lens on one run: every state decoded by the final norm and the head."""

    answer: CellTable
    """Probability of the answer's first token."""
    top: tuple[tuple[tuple[tuple[str, float], ...], ...], ...]
    """Token × layer: the most likely tokens, each with its probability."""


@dataclass(frozen=True, kw_only=True)
class TraceRecord(Record):
    """The causal trace of one fact (paper §2.1): three runs, and the metric of each cell.

    Clean run, corrupted run (noise on the subject's embeddings, or another subject), and corrupted
    runs in which one cell is restored to its clean value. With direction "corrupt", clean runs in
    which one cell has its corrupted value.
    """

    KIND = "trace"

    fact: Fact
    model: str
    tokens: tuple[str, ...]
    """The prompt's tokens as text, special tokens included."""
    subject: tuple[int, int]
    """The subject's tokens, as [start, stop)."""
    answer: str
    """The token that the clean run predicts, or the given answer, as text; its probability is
    traced. P of several tokens is their product."""
    answer_id: int
    """The id of its first token."""
    known: bool
    """Whether the answer matches the fact's target; True if the fact has no target."""
    clean: float
    """P[o], the answer's probability in the clean run."""
    corrupted: float
    """P*[o], its mean probability over the corrupted runs."""
    corrupted_samples: tuple[float, ...]
    """P*[o] for each noise sample."""
    metric: str = "probability"
    """The metric of all tables: a choice of `Tracing.metric`."""
    clean_metric: float | None = None
    """The metric in the clean run; None for "probability", where it is `clean`."""
    corrupted_metric: float | None = None
    """Its mean over the corrupted runs; None for "probability", where it is `corrupted`."""
    foil: str | None = None
    """The token that "logit-difference" compares the answer with."""
    restored: Mapping[str, CellTable] = field(default_factory=dict)
    """For each kind in `KINDS`: token × layer of the metric with that cell restored."""
    severed: Mapping[str, CellTable] = field(default_factory=dict)
    """For "mlp" or "attn": the metric with restored *states* while that module is severed at the
    restored token (Figure 3)."""
    heads: tuple[CellTable, ...] = ()
    """For each attention head: token × layer of the metric with its output restored."""
    gradients: Mapping[str, CellTable] = field(default_factory=dict)
    """For each kind: the norm of the integrated gradient at each state (App. B)."""
    lens: Mapping[str, Lens] = field(default_factory=dict)
    """The logit lens on the "clean" and the "corrupted" run."""
    knockout: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """For each group of source tokens ("subject", "relation", "last"): the metric in the clean run
    with attention from the last token to the group blocked in a window around each layer."""
    attribution: Mapping[str, CellTable] = field(default_factory=dict)
    """For each kind: the cells of `restored` estimated by gradients, in the same units."""
    head_attribution: tuple[CellTable, ...] = ()
    """The same for `heads`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was traced: corruption, window, samples, seed, preset."""

    @property
    def clean_value(self) -> float:
        """The metric in the clean run."""
        return self.clean if self.clean_metric is None else self.clean_metric

    @property
    def corrupted_value(self) -> float:
        """The metric in the corrupted run, the mean over its samples."""
        return self.corrupted if self.corrupted_metric is None else self.corrupted_metric

    @property
    def direction(self) -> str:
        """restore: clean cells in corrupted runs; or corrupt: corrupted cells in clean runs."""
        return str(self.settings.get("direction", "restore"))

    @property
    def base_value(self) -> float:
        """The metric in the run that cells are put into: the value of a cell without effect."""
        return self.clean_value if self.direction == "corrupt" else self.corrupted_value

    @property
    def total_effect(self) -> float:
        """TE = P[o] - P*[o], or the same difference of another metric."""
        return self.clean_value - self.corrupted_value

    def __repr__(self) -> str:
        tables = ", ".join(self.restored) or "not traced"
        return (
            f"TraceRecord({self.fact.text!r} → {self.answer!r}, {self.model}: P clean "
            f"{self.clean:.3f}, corrupted {self.corrupted:.3f}; restored: {tables})"
        )

    def _repr_html_(self) -> str:
        """The tables as heat maps, for notebooks; the darker, the higher the probability."""
        cells = (x or 0.0 for table in self.restored.values() for row in table for x in row)
        top = max([self.clean, *cells]) or 1.0
        parts = [f"<p>{html.escape(repr(self))}</p>"]
        for kind, table in self.restored.items():
            rows = ""
            for token, row in zip(self.tokens, table, strict=True):
                cells = "".join(
                    f'<td title="layer {layer}: {x or 0:.3f}" style="padding:0;width:1em;'
                    f'background:rgba(84,39,143,{(x or 0) / top:.2f})"></td>'
                    for layer, x in enumerate(row)
                )
                rows += f"<tr><th>{html.escape(token)}</th>{cells}</tr>"
            parts.append(f"<table><caption>{kind}, by layer</caption>{rows}</table>")
        return "".join(parts)


@dataclass(frozen=True, kw_only=True)
class EditTraces:
    """Traces of one fact before and after an edit."""

    before: TraceRecord
    """The unedited model and its answer, the old object."""
    after: TraceRecord
    """The edited model and the new object."""
    old_after: TraceRecord
    """The edited model and the old object."""

    def to_json(self) -> str:
        """The three records as one line of JSON."""
        names = (field.name for field in dataclasses.fields(self))
        return "{" + ", ".join(f'"{n}": {getattr(self, n).to_json()}' for n in names) + "}"


def as_cell_table(rows: Iterable[Sequence[float | None]]) -> CellTable:
    """The rows as a table of floats; NaN becomes None."""
    return tuple(
        tuple(None if x is None or math.isnan(x) else float(x) for x in row) for row in rows
    )


@dataclass(frozen=True, kw_only=True)
class ChangedWeight:
    """A weight matrix that an edit changes."""

    name: str
    shape: tuple[int, ...]  # of the change ΔW in the paper's orientation (value × key)
    rank: int
    norm: float  # Frobenius norm of ΔW


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model predicts after a prompt. P of several tokens is their geometric mean."""

    new: float  # P(new object)
    old: float | None  # P(old object), where the old object is known
    top: str  # the most likely next token
    top_probability: float


@dataclass(frozen=True, kw_only=True)
class PromptChange:
    """A prompt and the model's predictions before and after an edit."""

    kind: str  # "prompt" (the fact's own), "paraphrase" or "neighbour"
    text: str
    new: str
    old: str | None
    before: Prediction
    after: Prediction

    @property
    def top_changed(self) -> bool:
        """Whether the edit changes the most likely next token."""
        return self.before.top != self.after.top


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The continuation of a text before and after an edit."""

    text: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class EditRecord(Record):
    """One edited fact: the changed weights, and the model's predictions before and after."""

    KIND = "edit"

    fact: Fact
    """The fact after the edit: its target is the new object."""
    true: str | None
    """The old object: the true one if it was given, else the unedited model's prediction."""
    model: str
    method: str
    changed_weights: tuple[ChangedWeight, ...]
    prompts: tuple[PromptChange, ...]
    """The fact's own prompt first, then paraphrases, then neighbours."""
    generations: tuple[Generation, ...] = ()
    checks: Mapping[str, Any] = field(default_factory=dict)
    """Edit checks: measurements (None if not finite), `limits`, `complaints` and the `verdict`;
    empty if the edit was not checked."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The editor's settings, defaults included."""

    @property
    def fact_prompt(self) -> PromptChange:
        """The fact's own prompt."""
        return self.prompts[0]

    def of_kind(self, kind: str) -> list[PromptChange]:
        """The prompts of one kind."""
        return [prompt for prompt in self.prompts if prompt.kind == kind]


Protocol = Literal["single", "sequential", "batch"]
"""Each edit on a fresh model; one edit after another on the same model; or one edit of many
facts."""
Phase = Literal["edit", "end"]
"""When a case was scored: right after its own edit, or after the last edit of a sequence."""


@dataclass(frozen=True, kw_only=True)
class PromptScore:
    """How likely the new and the true object are after one prompt."""

    new: float  # mean negative log-likelihood of its tokens; exp(-new) is the paper's P
    true: float
    new_correct: bool  # whether every token is the most likely one at its position
    true_correct: bool


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """All raw scores of one model, edited or not, on one case."""

    prompts: Mapping[str, tuple[PromptScore, ...]] = field(default_factory=dict)
    """CounterFact: for each kind ("prompt", "paraphrase", "neighbour", "attribute") the scores of
    its prompts."""
    token_correct: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    """zsRE: for each kind ("prompt", "paraphrase", "neighbour") and each token of the correct
    answer, whether it is the most likely one."""
    texts: tuple[str, ...] = ()
    """Generated texts, each with its generation prompt."""
    reference_similarity: float | None = None
    """Cosine of the TF-IDF vectors of the generated texts and the reference texts (RS)."""


@dataclass(frozen=True, kw_only=True)
class CaseRecord(Record):
    """One case of an evaluation."""

    KIND = "case"

    fact: Fact
    """The fact after the edit: its target is the new object."""
    true: str | None
    data: str
    """The data set, such as "counterfact" or "zsre"."""
    model: str
    method: str
    """The editing method; "none" for the unedited model."""
    protocol: Protocol = "single"
    phase: Phase = "edit"
    step: int | None = None
    """Index of the edit in its sequence, or of the batch, from 0."""
    before: CaseScores | None = None
    """Scores of the unedited model."""
    after: CaseScores | None = None
    """Scores of the edited model; None if the edit failed."""
    error: str | None = None
    """Why the edit failed."""
    broken: str | None = None
    """Why the edited model is broken: it no longer predicts unrelated text, or the objects after
    any of the case's prompts. Its scores count in the means."""
    checks: Mapping[str, Any] = field(default_factory=dict)
    """Edit checks, as in an `EditRecord`."""

    @property
    def failed(self) -> bool:
        """Whether the edit failed."""
        return self.error is not None


@dataclass(frozen=True, kw_only=True)
class TrainingRecord(Record):
    """One evaluation of a hypernetwork in training: means over the validation examples."""

    KIND = "training"
    NAN_AS_NULL = True  # a diverged loss is NaN

    step: int
    seconds: float  # training time so far, without interruptions
    train_loss: float | None  # mean since the last evaluation; None in the first
    loss: float  # the weighted loss that training minimises
    unedited_loss: float  # -log P of the new object before the edit
    edit_loss: float  # -log P of the new object after the edit
    rephrase_loss: float  # the same for a paraphrase of the prompt
    locality_loss: float  # KL(unedited ‖ edited) on a prompt that the edit must not change
    edit_accuracy: float  # how often every token of the new object is the most likely one
    rephrase_accuracy: float  # the same for a paraphrase of the prompt
    locality_accuracy: float  # fraction of most likely tokens unchanged on the locality prompt


def write_records(path: str | Path, records: Iterable[Record]) -> None:
    """Write the records, one per line; the file appears complete or not at all."""
    write_atomic(Path(path), "".join(r.to_json() + "\n" for r in records))


def read_trace_records(path: str | Path) -> Iterator[TraceRecord]:
    """The traces in a file, in order."""
    return _read(path, TraceRecord, "factscope trace --out")


def read_edit_records(path: str | Path) -> Iterator[EditRecord]:
    """The edits in a file, in order."""
    return _read(path, EditRecord, "factscope edit --json")


def read_case_records(path: str | Path) -> Iterator[CaseRecord]:
    """The evaluated cases in a file, in order."""
    return _read(path, CaseRecord, "factscope evaluate --out")


def read_training_records(path: str | Path) -> Iterator[TrainingRecord]:
    """The evaluations of a training run in a file, in order."""
    return _read(path, TrainingRecord, "factscope train --out")


def _read(path: str | Path, kind: type[R], command: str) -> Iterator[R]:
    path = Path(path)
    if not path.is_file():
        raise BadRecord(f"no records at {path}; `{command}` writes them")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield kind.from_json(line)
            except BadRecord as error:
                if not line.endswith(b"\n"):  # a process is writing it, or was killed meanwhile
                    log.warning("%s: the last line is incomplete and left out", path)
                    return
                raise BadRecord(f"{path}, line {number}: {error}") from error
