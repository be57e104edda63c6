"""A case as evaluation writes it down: raw scores of its prompts before and after an edit."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from factscope.errors import BadFact, BadRecord
from factscope.facts import Fact

__all__ = ["Asked", "CaseRecord", "CaseScores", "Moment", "Protocol"]

Protocol = Literal["single", "sequential", "batch"]
"""Each edit on a fresh model; one after another on the same; or many facts in one edit."""
Moment = Literal["edit", "end"]
"""When a case was scored: right after its own edit, or after the last one of a sequence."""


@dataclass(frozen=True, kw_only=True)
class Asked:
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

    prompts: Mapping[str, tuple[Asked, ...]] = field(default_factory=dict)
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
    moment: Moment = "edit"
    step: int | None = None
    """Which edit of a sequence or which batch it was, from 0."""
    before: CaseScores | None = None
    """The unedited model's scores."""
    after: CaseScores | None = None
    """The edited model's; None where the edit failed."""
    error: str | None = None
    """Why there is no edit."""
    health: Mapping[str, Any] = field(default_factory=dict)
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
        prompts={k: tuple(Asked(**x) for x in asked) for k, asked in fields["prompts"].items()},
        tokens={k: tuple(right) for k, right in fields["tokens"].items()},
        texts=tuple(fields["texts"]),
        reference=fields["reference"],
    )
