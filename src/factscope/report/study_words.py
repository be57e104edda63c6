"""Preferences in words and as tables."""

import math
from collections.abc import Sequence

from factscope.analysis.metrics import UNEDITED
from factscope.analysis.preferences import Interval, Preference
from factscope.report.evaluation_words import editor_name
from factscope.report.tables import Cell, Table

__all__ = ["ASKED", "every_vote", "preference_table", "ratio_text", "sentence"]

ASKED = {"consistent": "consistency with the fact", "fluent": "fluency"}
MORE = {"consistent": "more consistent", "fluent": "more fluent"}
NOTE = (
    "The ratio is the votes for A by those for B, without those that saw no difference. Its 95 % "
    "interval is about other people and other cases: votes of one person, or on one case, count "
    "for less than as many independent ones."
)


def sentence(found: Preference) -> str:
    """A preference as the paper states it."""
    first, second = map(_who, found.pair)
    more, ties = MORE[found.question], f"{found.ties} without a difference"
    if not found.votes:
        return f"Nobody called either of {first} and {second} {more}: {ties}."
    wins, ratio, interval = found.wins, found.ratio, found.ratio_interval
    if ratio < 1:
        first, second, wins, ratio = second, first, wins[::-1], _inverse(ratio)
        interval = Interval(_inverse(interval.high), _inverse(interval.low))
    often = "always" if math.isinf(ratio) else f"{number(ratio)} times as often as {second}"
    said = (
        f"{first} was called {more} {often} (95 % interval {span(interval)}): "
        f"{wins[0]} votes against {wins[1]}, {ties}."
    )
    return said[0].upper() + said[1:]


def _who(method: str) -> str:
    return "the unedited model" if method == UNEDITED else editor_name(method)


def _inverse(ratio: float) -> float:
    return math.inf if ratio == 0 else 1 / ratio


def ratio_text(found: Preference) -> str:
    """The ratio with its interval: "1.8 (1.2 to 2.7)"."""
    if not found.votes:
        return "–"
    return f"{number(found.ratio)} ({span(found.ratio_interval)})"


def span(interval: Interval) -> str:
    """An interval of ratios."""
    return f"{number(interval.low)} to {number(interval.high)}"


def number(ratio: float) -> str:
    """A ratio, two digits at least."""
    if math.isinf(ratio):
        return "∞"
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def preference_table(found: Sequence[Preference]) -> Table:
    """A row for each question and pair of methods."""
    columns = ("asked", "A", "B", "for A", "for B", "no difference", "ratio (95 %)", "raters",
               "cases", "agreement")  # fmt: skip
    rows = tuple(
        (
            ASKED[one.question], *map(editor_name, one.pair), *one.wins, one.ties, ratio_text(one),
            one.raters, one.cases, _percent(one.agreement),
        )
        for one in found
    )  # fmt: skip
    return Table("Preferences", columns, rows, NOTE)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def every_vote(found: Sequence[Preference]) -> Table:
    """The same with every number, unrounded; an infinite ratio is left empty."""
    columns = ("asked", "A", "B", "for A", "for B", "no difference", "share of A", "low", "high",
               "ratio", "ratio low", "ratio high", "independent low", "independent high",
               "effective votes", "on the left", "raters", "cases", "agreement")  # fmt: skip
    return Table("Preferences", columns, tuple(map(_numbers, found)))


def _numbers(one: Preference) -> tuple[Cell, ...]:
    ratios = (one.ratio, one.ratio_interval.low, one.ratio_interval.high)
    return (
        one.question, *one.pair, *one.wins, one.ties,
        one.share, one.interval.low, one.interval.high,
        *(None if math.isinf(ratio) else ratio for ratio in ratios),
        one.independent.low, one.independent.high, one.effective,
        one.left, one.raters, one.cases, one.agreement,
    )  # fmt: skip
