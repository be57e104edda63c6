"""What a run writes to disk: one record a line, JSON, raw scores only. No torch.

A causal trace as it is written down: three runs, and every cell's restored probability.

A case as evaluation writes it down: raw scores of its prompts before and after an edit.

An edit as it is written down: what was changed where, and the prompts before and after.

TrainingRecord: how far a learned editor is, seen on examples that it is not trained on.

Files of records: one a line.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from factscope.errors import BadFact, BadRecord
from factscope.facts import Fact
from factscope.io import write_atomic

__all__ = [
    "KINDS",
    "CaseRecord",
    "CaseScores",
    "CellTable",
    "ChangedWeight",
    "EditRecord",
    "Generation",
    "Phase",
    "PromptScore",
    "PromptScores",
    "Protocol",
    "TargetScores",
    "TraceRecord",
    "TrainingRecord",
    "as_cell_table",
    "read_case_records",
    "read_edit_records",
    "read_records",
    "read_training_records",
    "write_records",
]

KINDS = ("states", "mlp", "attn")
"""What a trace restores: single states, or windows of MLP or of attention outputs."""

CellTable = tuple[tuple[float | None, ...], ...]
"""A table token × layer; None where the cell was not measured."""


@dataclass(frozen=True, kw_only=True)
class TraceRecord:
    """One fact's causal trace (paper §2.1): three runs, and every cell's restored probability."""

    fact: Fact
    model: str
    tokens: tuple[str, ...]
    """The prompt's tokens as text, special tokens included."""
    subject: tuple[int, int]
    """The subject's tokens, as [start, stop)."""
    answer: str
    """The token that the clean run predicts, as text; its probability is what is traced."""
    answer_id: int
    known: bool
    """Whether the answer is what the fact's target says; True where no target was given."""
    clean: float
    """P[o], the answer's probability in the clean run."""
    corrupted: float
    """P*[o], its mean probability over the corrupted runs."""
    corrupted_samples: tuple[float, ...]
    """The same for each sample of the noise."""
    restored: Mapping[str, CellTable] = field(default_factory=dict)
    """For each kind of `KINDS`: token × layer of P*[o] with that cell restored."""
    severed: Mapping[str, CellTable] = field(default_factory=dict)
    """For "mlp" or "attn": restored *states* in the graph where that module is severed at the
    restored token (the paper's Figure 3)."""
    gradients: Mapping[str, CellTable] = field(default_factory=dict)
    """For each kind: the norm of the integrated gradient at each state (App. B)."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was traced: corruption, window, samples, seed, preset."""

    @property
    def total_effect(self) -> float:
        """TE = P[o] - P*[o]."""
        return self.clean - self.corrupted

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "TraceRecord":
        """The record of one line of JSON."""
        try:
            fields = json.loads(line)
            fields["fact"] = Fact(**fields["fact"])
            for name in ("restored", "severed", "gradients"):
                fields[name] = {kind: as_cell_table(rows) for kind, rows in fields[name].items()}
            for name in ("tokens", "subject", "corrupted_samples"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRecord(f"not a trace record ({error}): {line[:80]!r}") from error


def as_cell_table(rows: Iterable[Sequence[float | None]]) -> CellTable:
    """A table of plain numbers; what is not a number becomes None."""
    return tuple(
        tuple(None if x is None or math.isnan(x) else float(x) for x in row) for row in rows
    )


Protocol = Literal["single", "sequential", "batch"]
"""Each edit on a fresh model; one after another on the same; or many facts in one edit."""
Phase = Literal["edit", "end"]
"""When a case was scored: right after its own edit, or after the last one of a sequence."""


@dataclass(frozen=True, kw_only=True)
class PromptScore:
    """What a model thinks of both objects after one prompt."""

    new: float
    """Mean negative log-likelihood of the new object's tokens; exp(-new) is the paper's P."""
    true: float
    """The same of the true object."""
    new_right: bool
    """Whether every token of the new object is the likeliest where it stands."""
    true_right: bool


@dataclass(frozen=True, kw_only=True)
class CaseScores:
    """Everything that was asked of one model, edited or not, about one case."""

    prompts: Mapping[str, tuple[PromptScore, ...]] = field(default_factory=dict)
    """CounterFact: by kind, "prompt", "paraphrase", "neighbour" and "attribute", each text's."""
    tokens: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    """zsRE: by kind, "prompt", "paraphrase" and "neighbour", of each token of the right answer
    whether it is the likeliest."""
    texts: tuple[str, ...] = ()
    """What the model wrote, each text with the opening that it was given."""
    reference: float | None = None
    """How like those texts are to the reference texts: the cosine of their TF-IDF vectors."""


@dataclass(frozen=True, kw_only=True)
class CaseRecord:
    """One case of an evaluation."""

    fact: Fact
    """The fact as it shall be: its target is the new object."""
    true: str | None
    data: str
    """The set that the case is from: "counterfact" or "zsre"."""
    model: str
    method: str
    """Of the edit; "none" for the model as it is."""
    protocol: Protocol = "single"
    phase: Phase = "edit"
    step: int | None = None
    """Which edit of a sequence or which batch it was, from 0."""
    before: CaseScores | None = None
    """The unedited model's scores."""
    after: CaseScores | None = None
    """The edited model's; None where the edit failed."""
    error: str | None = None
    """Why there is no edit."""
    checks: Mapping[str, Any] = field(default_factory=dict)
    """The guard rails of the edit, as in an `EditRecord`."""

    @property
    def failed(self) -> bool:
        """Whether there is no edit."""
        return self.error is not None

    def to_json(self) -> str:
        """The record as one line of JSON."""
        fields = {"kind": "case", **dataclasses.asdict(self)}
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "CaseRecord":
        """The record of one line of JSON."""
        try:
            fields = json.loads(line)
            if fields.pop("kind", None) != "case":
                raise ValueError("it does not say that it is one")
            fields["fact"] = Fact(**fields["fact"])
            for name in ("before", "after"):
                fields[name] = scores_from(fields[name])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, BadFact) as error:
            raise BadRecord(f"not a case's record ({error}): {line[:80]!r}") from error


def scores_from(fields: dict[str, Any] | None) -> CaseScores | None:
    """The scores as JSON gave them back."""
    if fields is None:
        return None
    return CaseScores(
        prompts={
            k: tuple(PromptScore(**x) for x in asked) for k, asked in fields["prompts"].items()
        },
        tokens={k: tuple(right) for k, right in fields["tokens"].items()},
        texts=tuple(fields["texts"]),
        reference=fields["reference"],
    )


@dataclass(frozen=True, kw_only=True)
class ChangedWeight:
    """A weight that an edit changes."""

    name: str
    shape: tuple[int, ...]
    """Of its change, in the paper's orientation."""
    rank: int
    norm: float
    """The Frobenius norm of the change."""


@dataclass(frozen=True, kw_only=True)
class TargetScores:
    """What a model thinks of a prompt. P of several tokens is their geometric mean."""

    new: float
    """P of the new object."""
    old: float | None
    """P of the old object, where one is known."""
    top: str
    """The likeliest next token."""
    top_probability: float


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """A prompt before and after an edit."""

    kind: str
    """The fact's own "prompt", a "paraphrase" or a "neighbour" of it."""
    text: str
    new: str
    old: str | None
    before: TargetScores
    after: TargetScores


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How the model goes on with a text, before and after an edit."""

    text: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class EditRecord:
    """One fact's rewriting: what was written where, and what the model says before and after."""

    fact: Fact
    """The fact as it shall be: its target is the new object."""
    true: str | None
    """The old object: the true one where it was given, else what the model said before."""
    model: str
    method: str
    changed_weights: tuple[ChangedWeight, ...]
    prompts: tuple[PromptScores, ...]
    """The fact's own prompt first, then paraphrases, then neighbours."""
    generations: tuple[Generation, ...] = ()
    checks: Mapping[str, Any] = field(default_factory=dict)
    """The guard rails: figures, their limits and the complaints; empty where not measured. A
    figure that is not finite is None."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How the edit was made, every default spelled out."""

    @property
    def own(self) -> PromptScores:
        """The fact's own prompt."""
        return self.prompts[0]

    def of_kind(self, kind: str) -> list[PromptScores]:
        """The prompts of one kind."""
        return [scores for scores in self.prompts if scores.kind == kind]

    def to_json(self) -> str:
        """The record as one line of JSON."""
        fields = {"kind": "edit", **dataclasses.asdict(self)}
        return json.dumps(fields, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "EditRecord":
        """The record of one line of JSON."""
        try:
            fields = json.loads(line)
            if fields.pop("kind", None) != "edit":
                raise ValueError("it does not say that it is one")
            return cls(
                **{
                    **fields,
                    "fact": Fact(**fields["fact"]),
                    "changed_weights": tuple(
                        ChangedWeight(**{**place, "shape": tuple(place["shape"])})
                        for place in fields["changed_weights"]
                    ),
                    "prompts": tuple(map(_prompt_scores, fields["prompts"])),
                    "generations": tuple(Generation(**g) for g in fields["generations"]),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError, BadFact) as error:
            raise BadRecord(f"not an edit's record ({error}): {line[:80]!r}") from error


def _prompt_scores(fields: dict[str, Any]) -> PromptScores:
    both = {name: TargetScores(**fields[name]) for name in ("before", "after")}
    return PromptScores(**{**fields, **both})


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Means over the held-out examples at one step."""

    step: int
    seconds: float
    """Of training so far, interruptions not counted."""
    trained: float | None
    """The mean loss of training since the record before; None in the first."""
    loss: float
    """What training makes small."""
    before: float
    """The new object's loss before the edits."""
    edit: float
    """And after them."""
    rephrased: float
    """The same in other words."""
    local: float
    """KL(unedited ‖ edited) where nothing should change."""
    said: float
    """The share of edits after which the new object is the likeliest."""
    said_rephrased: float
    kept: float
    """The share of likeliest tokens that stayed where nothing should change."""

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "TrainingRecord":
        """The record of a line."""
        try:
            said: dict[str, Any] = json.loads(line)
            return cls(**said)
        except (ValueError, TypeError) as error:
            raise BadRecord(f"not a record of training ({error}): {line!r:.80}") from error


T = TypeVar("T")


def write_records(
    path: Path, records: Iterable[TraceRecord | EditRecord | CaseRecord | TrainingRecord]
) -> None:
    """Write the records, one a line; the file appears whole or not at all."""
    write_atomic(path, "".join(r.to_json() + "\n" for r in records))


def read_records(path: Path) -> Iterator[TraceRecord]:
    """The traces of a file, in order."""
    return _read(path, TraceRecord.from_json, "factscope trace --out")


def read_edit_records(path: Path) -> Iterator[EditRecord]:
    """The edits of a file, in order."""
    return _read(path, EditRecord.from_json, "factscope edit --json")


def read_case_records(path: Path) -> Iterator[CaseRecord]:
    """The evaluated cases of a file, in order."""
    return _read(path, CaseRecord.from_json, "factscope evaluate --out")


def read_training_records(path: Path) -> Iterator[TrainingRecord]:
    """How a training went, in order."""
    return _read(path, TrainingRecord.from_json, "factscope train --out")


def _read(path: Path, from_json: Callable[[str], T], maker: str) -> Iterator[T]:
    if not path.is_file():
        raise BadRecord(f"no records at {path}; `{maker}` writes them")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_json(line)
            except BadRecord as error:
                raise BadRecord(f"{path}, line {number}: {error}") from error
