"""An edit's numbers in words, as the terminal, the page and the figure all say them.

Methods, data sets and moments of an evaluation as they are called in tables and figures.

The axes of a sweep and their values, as they are called in tables and figures.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from factscope.analysis.metrics import UNEDITED, Summary
from factscope.analysis.preferences import Interval, Preference
from factscope.analysis.sweep import NO_BOUND, Setting, Sweep
from factscope.analysis.training import TrainingCurve
from factscope.records import ChangedWeight, PromptScores
from factscope.report.style import display_token

__all__ = [
    "ASKED",
    "DATA",
    "HEADINGS",
    "CheckRow",
    "axis_name",
    "change_of",
    "check_rows",
    "editor_name",
    "line_name",
    "number",
    "old_name",
    "percent",
    "published_method",
    "ratio_text",
    "row_name",
    "setting_name",
    "span",
    "sweep_title",
    "training_title",
    "weight_label",
]

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
    return "old" if only is None else display_token(only)


def change_of(prompts: Sequence[PromptScores], which: str) -> tuple[float, float] | None:
    """The mean probability of the "new" or "old" object, before and after."""
    pairs = [(getattr(s.before, which), getattr(s.after, which)) for s in prompts]
    known = [(before, after) for before, after in pairs if before is not None]
    if not known:
        return None
    before, after = zip(*known, strict=True)
    return fmean(before), fmean(after)


@dataclass(frozen=True)
class CheckRow:
    """A guard rail: its figure, its limit, and whether it is kept."""

    name: str
    value: str
    limit: str
    kept: bool


def check_rows(checks: Mapping[str, Any]) -> Iterator[CheckRow]:
    """The guard rails of an edit's record."""
    limits = checks["limits"]
    if (factor := checks["division_factor"]) is not None:
        least = limits["division_factor"]
        yield CheckRow("division factor", f"{factor:.3g}", f"at least {least:g}", factor >= least)
    norm, most = checks["update_norm"], limits["update_norm"]
    kept = norm is not None and norm <= most
    yield CheckRow("update norm", f"{_figure(norm)} of the weight's", f"at most {most:g}", kept)
    before, after = checks["perplexity_before"], checks["perplexity_after"]
    growth, most = checks["perplexity_growth"], limits["perplexity"]
    kept = growth is not None and growth <= most
    both = f"{_figure(before)} → {_figure(after)}, × {_figure(growth)}"
    yield CheckRow("perplexity of a plain text", both, f"at most × {most:g}", kept)


def _figure(x: float | None) -> str:
    return "not finite" if x is None else f"{x:.3g}" if x < 1000 else f"{x:,.0f}"


def weight_label(place: ChangedWeight) -> str:
    """A weight that is changed, and how."""
    shape = " × ".join(map(str, place.shape))
    return f"{place.name}: rank {place.rank} of {shape}, ‖ΔW‖ {place.norm:.3g}"


METHODS = {
    UNEDITED: "unedited",
    "rome": "ROME",
    "r-rome": "r-ROME",
    "memit": "MEMIT",
    "ft": "FT",
    "ft-l": "FT+L",
    "attn": "AttnEdit",
    "kn": "KN",
    "ke": "KE",
    "ke-cf": "KE-CF",
    "ke-zsre": "KE-zsRE",
    "mend": "MEND",
    "mend-cf": "MEND-CF",
    "mend-zsre": "MEND-zsRE",
}
"""As the paper writes them."""
DATA = {"counterfact": "CounterFact", "zsre": "zsRE"}
WHEN = {"edit": "at edit", "end": "at end"}


def editor_name(method: str) -> str:
    """A method in the paper's writing; what follows its name, such as settings, stays."""
    name = published_method(method)
    return METHODS.get(name, name) + method[len(name) :]


def published_method(method: str) -> str:
    """The method without what follows its name."""
    return re.split(r"[ ,(]", method, maxsplit=1)[0]


def row_name(summary: Summary) -> str:
    """What a table calls the row."""
    parts = [editor_name(summary.method)]
    if summary.protocol != "single":
        parts.append(summary.protocol)
    if summary.protocol == "sequential":
        parts.append(WHEN[summary.phase])
    if summary.published:
        parts.append("published")
    return ", ".join(parts)


AXIS = {"layer": "layer", "token": "token", "max_change": "bound ε", "prefix_lengths": "prefixes"}
TOKENS = {
    "subject-first": "first subject token",
    "subject-last": "last subject token",
    "after-subject": "first token after the subject",
    "last": "last token",
}


def axis_name(axis: str) -> str:
    """What an axis is called."""
    return AXIS.get(axis, axis)


def setting_name(axis: str, value: Setting) -> str:
    """A value of an axis in words."""
    if axis == "token":
        return TOKENS.get(str(value), str(value))
    if axis == "max_change":
        return "no bound" if value == NO_BOUND else f"{value:g}"
    if axis == "prefix_lengths":
        return "none" if value == "none" else str(value).replace(",", ", ").replace("x", " × ")
    return str(value)


def line_name(settings: Mapping[str, Setting]) -> str:
    """What a line of a figure is called: the settings that its points share."""
    return ", ".join(_said(axis, value) for axis, value in settings.items())


def _said(axis: str, value: Setting) -> str:
    """A value in words that tell its axis, too."""
    if axis == "max_change" and value != NO_BOUND:
        return f"ε = {value:g}"
    before = {"layer": "layer ", "prefix_lengths": "prefixes: "}.get(axis, "")
    return before + setting_name(axis, value)


def sweep_title(sweep: Sweep) -> str:
    """The sweep in one line."""
    name = f"{editor_name(sweep.method)}: {DATA.get(sweep.data, sweep.data)}, {sweep.model}"
    return ", ".join([name, *(_said(axis, value) for axis, value in sweep.fixed.items())])


ASKED = {"consistent": "consistency with the fact", "fluent": "fluency"}


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


def training_title(course: TrainingCurve) -> str:
    """The training in one line."""
    data = DATA.get(course.data, course.data)
    return f"{editor_name(course.method)} trained on {data}, {course.model}, {course.steps} steps"
