"""Names, labels and colours that figures, tables, pages and the terminal share.

Needs no matplotlib: commands that only print to the terminal do not load it.
"""

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from factscope.analysis.effects import NORMALISED
from factscope.analysis.metrics import UNEDITED, Summary
from factscope.analysis.preferences import Interval, Preference
from factscope.analysis.sweep import NONE, Setting, Sweep
from factscope.records import CaseRecord, ChangedWeight, PromptChange, TraceRecord

# ---- texts and tokens

WHITESPACE = {"\n": "↵", "\r": "↵", "\t": "⇥"}
UNPRINTABLE = ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
"""Unicode categories: controls, invisible formats such as U+202E (which reverses text), surrogates,
unassigned, private use, separators."""
JOINERS = "\u200c\u200d"
"""Invisible too, but emoji and several scripts need them."""
MAX_TOKEN = 24
"""Characters of a token's label."""


def printable(text: str) -> str:
    """The text with line breaks, tabs and control characters replaced by visible signs."""
    if text.isprintable():
        return text
    return "".join(
        WHITESPACE.get(c)
        or (c if c in JOINERS or unicodedata.category(c) not in UNPRINTABLE else "\ufffd")
        for c in text
    )


def display_token(token: str) -> str:
    """A token as a label: without spaces around it, printable, and not too long."""
    label = printable(token.strip(" ")) or "␣"
    return label if len(label) <= MAX_TOKEN else label[: MAX_TOKEN - 1] + "…"


def token_labels(record: TraceRecord) -> list[str]:
    """Labels of the prompt's tokens; tokens of the subject have a star, as in Figure 1."""
    start, stop = record.subject
    return [
        display_token(token) + ("*" if start <= i < stop else "")
        for i, token in enumerate(record.tokens)
    ]


def percent(probability: float) -> str:
    """A probability in percent; a small one that is not zero is "<0.1%"."""
    return "<0.1%" if 0 < probability < 0.0005 else f"{probability:.1%}"


# ---- traces

RGB = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class KindStyle:
    """Colours and labels of one kind of restoration."""

    name: str
    colormap: str
    """Name of the heat map's colormap in matplotlib."""
    shades: tuple[RGB, RGB, RGB]
    """The colormap's lightest, middle and darkest colour, for the terminal and web pages."""
    color: str
    """Colour of lines and bars."""
    label: str
    """The restored module in titles and legends."""
    intervention: str
    """Completes "Average indirect effect of a ..."; a format string of `window`."""
    axis: str
    """Label of the layer axis; a format string of `window` and `model`."""

    def axis_label(self, window: int | None, model: str) -> str:
        """The label of the layer axis of cells with this window of layers."""
        if window == 1 and self.name != "states":
            return f"single restored {self.label} layer within {model}"
        return self.axis.format(window=window or "the", model=model)

    def intervention_label(self, window: int | None) -> str:
        """What is restored, after "Average indirect effect of a"."""
        if window == 1 and self.name != "states":
            return f"single {self.label} layer"
        return self.intervention.format(window=window or "the")


KIND_STYLES = {
    "states": KindStyle(
        name="states",
        colormap="Purples",
        shades=((252, 251, 253), (158, 154, 200), (63, 0, 125)),
        color="#6a51a3",
        label="state",
        intervention="single hidden state",
        axis="single restored layer within {model}",
    ),
    "mlp": KindStyle(
        name="MLP",
        colormap="Greens",
        shades=((247, 252, 245), (116, 196, 118), (0, 68, 27)),
        color="#238b45",
        label="MLP",
        intervention="run of {window} MLP layers",
        axis="center of interval of {window} restored MLP layers",
    ),
    "attn": KindStyle(
        name="attention",
        colormap="Reds",
        shades=((255, 245, 240), (251, 106, 74), (103, 0, 13)),
        color="#cb181d",
        label="Attn",
        intervention="run of {window} Attn layers",
        axis="center of interval of {window} restored Attn layers",
    ),
}
"""The paper's colours and wording (Figures 1 to 3, App. B)."""

LENS_COLORS, HEAD_COLORS = "Blues", "Oranges"
"""Colormaps of the logit lens and of heads."""
HEAD_SHADES: tuple[RGB, RGB, RGB] = ((255, 245, 235), (253, 141, 60), (127, 39, 4))
"""`HEAD_COLORS` on web pages, as `KindStyle.shades`."""

CELL_NAMES = {**{kind: style.name for kind, style in KIND_STYLES.items()}, "heads": "heads"}
"""All kinds of cells, in lines and tables."""
ATTRIBUTION_NAMES = {"atp": "AtP", "atp-star": "AtP*"}
"""Methods of attribution patching."""

GROUP_COLORS = {"subject": "#2ca02c", "relation": "#1f77b4", "last": "#d62728"}
GROUP_NAMES = {"subject": "subject tokens", "relation": "relation tokens", "last": "last token"}
"""Groups of tokens that attention knockout blocks."""

METRIC_NAMES = {
    "probability": "p(o)",
    "log-probability": "log p(o)",
    "logit-difference": "logit difference",
    "kl": "KL divergence",
    "rank": "rank",
}
"""Metrics in axis labels and tables of averages."""
METRIC_LABELS = {
    "probability": "p({answer})",
    "log-probability": "log p({answer})",
    "logit-difference": "logit({answer}) − logit({foil})",
    "kl": "KL(clean ‖ run)",
    "rank": "rank of {answer}",
}
for _texts in (METRIC_NAMES, METRIC_LABELS):
    _texts |= {NORMALISED + metric: f"normalised {text}" for metric, text in _texts.items()}


def metric_label(record: TraceRecord) -> str:
    """What the numbers of a trace are: "p(Paris)"."""
    label = METRIC_LABELS.get(record.metric, record.metric)
    foil = "the corrupted answer" if record.foil is None else display_token(record.foil)
    return label.format(answer=display_token(record.answer), foil=foil)


def metric_text(metric: str, value: float, *, sign: bool = False) -> str:
    """A value of a metric: "70.2%", "2.31"; with `sign` a difference of two: "+2.31"."""
    digits = "1%" if metric == "probability" else "1f" if metric == "rank" else "2f"
    return format(value, f"{'+' if sign else ''}.{digits}")


def restores(record: TraceRecord) -> bool:
    """Whether clean cells are restored in the corrupted run, not the other way round."""
    return record.direction != "corrupt"


def cell_title(record: TraceRecord, label: str) -> str:
    """Title of a heat map: "Impact of restoring state after corrupted input"."""
    if restores(record):
        return f"Impact of restoring {label} after corrupted input"
    return f"Impact of corrupting {label} in the clean run"


def replaced_by(record: TraceRecord) -> str | None:
    """The subject whose tokens replace those of the fact's subject in the corrupted run."""
    tokens = record.settings.get("corruption", {}).get("distribution") == "tokens"
    return record.fact.replacement if tokens else None


def attribution_method(record: TraceRecord) -> str:
    """The name of the method that estimated the cells of a trace."""
    return ATTRIBUTION_NAMES.get(str(record.settings.get("attribution")), "AtP")


# ---- edits

PROMPT_HEADINGS = {
    "prompt": "the prompt",
    "paraphrase": "paraphrases should change",
    "neighbour": "neighbours should stay",
}
"""Kinds of prompts in the order in which they are listed."""


def old_object_label(prompts: Sequence[PromptChange]) -> str:
    """The old object if all prompts have the same one, else "old"."""
    objects = {prompt.old for prompt in prompts}
    only = objects.pop() if len(objects) == 1 else None
    return "old" if only is None else display_token(only)


def mean_change(prompts: Sequence[PromptChange], which: str) -> tuple[float, float] | None:
    """The mean probability of the "new" or "old" object before and after; None if unknown."""
    pairs = [(getattr(p.before, which), getattr(p.after, which)) for p in prompts]
    known = [pair for pair in pairs if pair[0] is not None]
    if not known:
        return None
    before, after = zip(*known, strict=True)
    return fmean(before), fmean(after)


@dataclass(frozen=True)
class CheckRow:
    """An edit check: its value, its limit, and whether the edit passed."""

    name: str
    value: str
    limit: str
    passed: bool


def check_rows(checks: Mapping[str, Any]) -> Iterator[CheckRow]:
    """The edit checks of a record, in which numbers that are not finite are null."""

    def number(x: float | None) -> str:
        return "not finite" if x is None else f"{x:.3g}" if x < 1000 else f"{x:,.0f}"

    limits = checks["limits"]
    if (factor := checks["division_factor"]) is not None:
        least = limits["division_factor"]
        yield CheckRow("division factor", f"{factor:.3g}", f"at least {least:g}", factor >= least)
    norm, most = checks["update_norm"], limits["update_norm"]
    passed = norm is not None and norm <= most
    yield CheckRow("update norm ‖ΔW‖ / ‖W‖", number(norm), f"at most {most:g}", passed)
    growth, most = checks["perplexity_growth"], limits["perplexity"]
    passed = growth is not None and growth <= most
    before, after = number(checks["perplexity_before"]), number(checks["perplexity_after"])
    value = f"{before} → {after}, × {number(growth)}"
    yield CheckRow("perplexity of unrelated text", value, f"at most × {most:g}", passed)
    if (changed := checks.get("neighbours_changed")) is not None:
        most = limits["neighbours_changed"]
        value, limit = f"{100 * changed:.0f} %", f"at most {100 * most:.0f} %"
        yield CheckRow("unrelated prompts that changed", value, limit, changed <= most)
    for name, prompts in (("taken", "prompt"), ("paraphrases_taken", "paraphrases")):
        if (taken := checks.get(name)) is not None:
            label = f"new object most likely, {prompts}"
            yield CheckRow(label, f"{100 * taken:.0f} %", "100 %", taken == 1)


def weight_label(weight: ChangedWeight) -> str:
    """A changed weight: its name, shape, and the rank and norm of the change."""
    shape = " × ".join(map(str, weight.shape))
    return f"{weight.name}: rank {weight.rank} of {shape}, ‖ΔW‖ {weight.norm:.3g}"


# ---- evaluations

METHOD_NAMES = {
    **{name: name.upper() for name in ("rome", "memit", "ft", "kn", "ke", "ke-cf", "mend")},
    UNEDITED: "unedited",
    "r-rome": "r-ROME",
    "ft-l": "FT+L",
    "attn": "AttnEdit",
    "ke-zsre": "KE-zsRE",
    "mend-cf": "MEND-CF",
    "mend-zsre": "MEND-zsRE",
}
"""Methods as the paper writes them."""
METRIC_TITLES = {
    "S": "Score, S (%)",
    "ES": "Efficacy, ES (%)",
    "PS": "Paraphrases, PS (%)",
    "NS": "Neighbours, NS (%)",
    "EM": "Efficacy, EM (%)",
    "PM": "Paraphrases, PM (%)",
    "NM": "Neighbours, NM (%)",
    "RS": "Consistency, RS (%)",
    "GE": "Fluency, GE",
    "efficacy": "Efficacy (%)",
    "paraphrase": "Paraphrases (%)",
    "specificity": "Specificity (%)",
}
"""Panel titles."""


def dataset_name(data: str) -> str:
    """A data set as the paper writes it."""
    return {"counterfact": "CounterFact", "zsre": "zsRE"}.get(data, data)


def editor_name(method: str) -> str:
    """A method as the paper writes it; settings that follow its name are preserved."""
    name = base_method(method)
    return METHOD_NAMES.get(name, name) + method[len(name) :]


def base_method(method: str) -> str:
    """The method without settings that follow its name: "rome (layer 5)" → "rome"."""
    return re.split(r"[ ,(]", method, maxsplit=1)[0]


def group_title(rows: Sequence[Summary]) -> str:
    """Data set and model of rows that differ in neither; published rows may spell it otherwise."""
    row = next((row for row in rows if not row.published), rows[0])
    return f"{dataset_name(row.data)}, {row.model}"


def row_name(row: Summary | CaseRecord) -> str:
    """Label in tables and figures: "ROME, sequential, after all edits"."""
    parts = [editor_name(row.method)]
    if row.protocol != "single":
        parts.append(row.protocol)
    if row.protocol == "sequential":
        parts.append({"edit": "after its edit", "end": "after all edits"}[row.phase])
    if isinstance(row, Summary) and row.published:
        parts.append("published")
    return ", ".join(parts)


# ---- sweeps

AXIS_NAMES = {"max_change": "max change ε", "prefix_lengths": "prefixes"}
TOKEN_NAMES = {
    "subject-first": "first subject token",
    "subject-last": "last subject token",
    "after-subject": "first token after the subject",
    "last": "last token",
}


def setting_name(axis: str, value: Setting) -> str:
    """Label of a value on its axis."""
    if axis == "token":
        return TOKEN_NAMES.get(str(value), str(value))
    if axis == "max_change":
        return "no limit" if value == NONE else f"{value:g}"
    if axis == "prefix_lengths":
        return NONE if value == NONE else str(value).replace(",", ", ").replace("x", " × ")
    return str(value)


def line_label(settings: Mapping[str, Setting]) -> str:
    """The settings that the points of a line share: "layer 5, ε = 0.001"."""

    def label(axis: str, value: Setting) -> str:
        if axis == "max_change" and value != NONE:
            return f"ε = {value:g}"
        prefix = {"layer": "layer ", "prefix_lengths": "prefixes: "}.get(axis, "")
        return prefix + setting_name(axis, value)

    return ", ".join(label(axis, value) for axis, value in settings.items())


def sweep_title(sweep: Sweep) -> str:
    """Method, data set, model, and settings that are not swept."""
    title = f"{editor_name(sweep.method)}: {dataset_name(sweep.data)}, {sweep.model}"
    return f"{title}, {line_label(sweep.fixed)}" if sweep.fixed else title


# ---- human evaluation

QUESTION_LABELS = {"consistent": "consistency with the fact", "fluent": "fluency"}


def ratio_text(preference: Preference) -> str:
    """The ratio of votes with its interval: "1.8 (1.2 to 2.7)"."""
    if not preference.votes:
        return "–"
    return f"{ratio_number(preference.ratio)} ({interval_text(preference.ratio_interval)})"


def interval_text(interval: Interval) -> str:
    """An interval of ratios: "1.2 to 2.7"."""
    return f"{ratio_number(interval.low)} to {ratio_number(interval.high)}"


def ratio_number(ratio: float) -> str:
    """A ratio with at least two digits."""
    if math.isinf(ratio):
        return "∞"
    return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


# ---- settings


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings with nested ones by their dotted names: {"a": {"b": 1}} → ("a.b", 1)."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flatten_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def setting_text(value: Any) -> str:
    """A setting's value: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
