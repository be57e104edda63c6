"""An edit's numbers in words, as the terminal, the page and the figure all say them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from factscope.records import Place, PromptScores
from factscope.report.look import shown

__all__ = ["HEADINGS", "Rail", "change_of", "old_name", "percent", "place_words", "rails"]

HEADINGS = {
    "prompt": "the prompt",
    "paraphrase": "paraphrases should change",
    "neighbour": "neighbours should stay",
}
"""Kinds of prompts, in their order."""


def percent(probability: float) -> str:
    """A probability with one digit; one that is not quite nothing, or not quite all, says so."""
    if 0 < probability < 0.0005:
        return "<0.1%"
    return f"{probability:.1%}"


def old_name(prompts: Sequence[PromptScores]) -> str:
    """The old object, where all the prompts share one."""
    names = {scores.old for scores in prompts}
    only = names.pop() if len(names) == 1 else None
    return "old" if only is None else shown(only)


def change_of(prompts: Sequence[PromptScores], which: str) -> tuple[float, float] | None:
    """The mean probability of the "new" or "old" object, before and after."""
    pairs = [(getattr(s.before, which), getattr(s.after, which)) for s in prompts]
    known = [(before, after) for before, after in pairs if before is not None]
    if not known:
        return None
    before, after = zip(*known, strict=True)
    return fmean(before), fmean(after)


@dataclass(frozen=True)
class Rail:
    """A guard rail: its figure, its limit, and whether it is kept."""

    name: str
    value: str
    limit: str
    kept: bool


def rails(health: Mapping[str, Any]) -> Iterator[Rail]:
    """The guard rails of an edit's record."""
    limits = health["limits"]
    if (factor := health["division_factor"]) is not None:
        least = limits["division_factor"]
        yield Rail("division factor", f"{factor:.3g}", f"at least {least:g}", factor >= least)
    norm, most = health["update_norm"], limits["update_norm"]
    kept = norm is not None and norm <= most
    yield Rail("update norm", f"{_figure(norm)} of the weight's", f"at most {most:g}", kept)
    before, after = health["perplexity_before"], health["perplexity_after"]
    growth, most = health["perplexity_growth"], limits["perplexity"]
    kept = growth is not None and growth <= most
    both = f"{_figure(before)} → {_figure(after)}, × {_figure(growth)}"
    yield Rail("perplexity of a plain text", both, f"at most × {most:g}", kept)


def _figure(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def place_words(place: Place) -> str:
    """A weight that is changed, and how."""
    shape = " × ".join(map(str, place.shape))
    return f"{place.name}: rank {place.rank} of {shape}, ‖ΔW‖ {place.norm:.3g}"
