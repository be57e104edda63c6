"""What a run writes to disk: one record a line, JSON, raw scores only. No torch."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from factscope.errors import BadFact, BadRecord
from factscope.facts import Fact
from factscope.files import write_whole

__all__ = [
    "KINDS",
    "EditRecord",
    "Generation",
    "Grid",
    "Place",
    "PromptScores",
    "Scores",
    "TraceRecord",
    "read_edit_records",
    "read_records",
    "write_records",
]

T = TypeVar("T")

KINDS = ("states", "mlp", "attn")
"""What a trace restores: single states, or windows of MLP or of attention outputs."""

Grid = tuple[tuple[float | None, ...], ...]
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
    restored: Mapping[str, Grid] = field(default_factory=dict)
    """For each kind of `KINDS`: token × layer of P*[o] with that cell restored."""
    severed: Mapping[str, Grid] = field(default_factory=dict)
    """For "mlp" or "attn": restored *states* in the graph where that module is severed at the
    restored token (the paper's Figure 3)."""
    gradients: Mapping[str, Grid] = field(default_factory=dict)
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
                fields[name] = {kind: as_grid(rows) for kind, rows in fields[name].items()}
            for name in ("tokens", "subject", "corrupted_samples"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRecord(f"not a trace record ({error}): {line[:80]!r}") from error


def as_grid(rows: Iterable[Sequence[float | None]]) -> Grid:
    """A table of plain numbers; what is not a number becomes None."""
    return tuple(
        tuple(None if x is None or math.isnan(x) else float(x) for x in row) for row in rows
    )


# ---- edits


@dataclass(frozen=True, kw_only=True)
class Place:
    """A weight that an edit changes."""

    name: str
    shape: tuple[int, ...]
    """Of its change, in the paper's orientation."""
    rank: int
    norm: float
    """The Frobenius norm of the change."""


@dataclass(frozen=True, kw_only=True)
class Scores:
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
    before: Scores
    after: Scores


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
    places: tuple[Place, ...]
    prompts: tuple[PromptScores, ...]
    """The fact's own prompt first, then paraphrases, then neighbours."""
    generations: tuple[Generation, ...] = ()
    health: Mapping[str, Any] = field(default_factory=dict)
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
                    "places": tuple(
                        Place(**{**place, "shape": tuple(place["shape"])})
                        for place in fields["places"]
                    ),
                    "prompts": tuple(map(_prompt_scores, fields["prompts"])),
                    "generations": tuple(Generation(**g) for g in fields["generations"]),
                }
            )
        except (ValueError, KeyError, TypeError, AttributeError, BadFact) as error:
            raise BadRecord(f"not an edit's record ({error}): {line[:80]!r}") from error


def _prompt_scores(fields: dict[str, Any]) -> PromptScores:
    both = {name: Scores(**fields[name]) for name in ("before", "after")}
    return PromptScores(**{**fields, **both})


# ---- files


def write_records(path: Path, records: Iterable[TraceRecord | EditRecord]) -> None:
    """Write the records, one a line; the file appears whole or not at all."""
    write_whole(path, "".join(r.to_json() + "\n" for r in records))


def read_records(path: Path) -> Iterator[TraceRecord]:
    """The traces of a file, in order."""
    return _read(path, TraceRecord.from_json, "factscope trace --out")


def read_edit_records(path: Path) -> Iterator[EditRecord]:
    """The edits of a file, in order."""
    return _read(path, EditRecord.from_json, "factscope edit --json")


def _read(path: Path, from_json: Callable[[str], T], maker: str) -> Iterator[T]:
    if not path.is_file():
        raise BadRecord(f"no records at {path}; `{maker}` writes them")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield from_json(line)
            except BadRecord as error:
                raise BadRecord(f"{path}, line {number}: {error}") from error
