"""An edit as it is written down: what was changed where, and the prompts before and after."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from factscope.errors import BadFact, BadRecord
from factscope.facts import Fact

__all__ = ["EditRecord", "Generation", "Place", "PromptScores", "Scores"]


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
