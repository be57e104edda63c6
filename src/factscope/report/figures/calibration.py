"""Figure of a calibration: the scores of trials by each setting, and the movement of C⁻¹k."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from factscope.analysis.calibration import CalibrationResult
from factscope.report.labels import editor_name
from factscope.report.style import MEDIUM, SMALL, blank_figure, literal_text, panel_axes, style_axes

COLORS = {"S": "#3b0f70", "ES": "#2171b5", "PS": "#41ab5d", "NS": "#d95f0e"}


def calibration_figure(calibration: CalibrationResult) -> Figure:
    """A panel for each method and setting: S, ES, PS and NS of the trials that vary it from the
    best trial so far, with 95 % intervals; in the panel of ROME's layer the traced effect too. The
    last panel has the movement of C⁻¹k by tokens, at each layer that was chosen."""
    trials = calibration.evidence["trials"]
    panels = [
        (method, name)
        for method, settings in calibration.settings.items()
        for name in settings
        if len({_key(t["settings"][name]) for t in trials if t["method"] == method}) > 1
    ] or [(method, next(iter(settings))) for method, settings in calibration.settings.items()]
    statistics = [x for x in calibration.evidence["statistics"] if x.get("movement")]
    count = len(panels) + bool(statistics)
    columns = min(4, count)
    rows = -(-count // columns)
    fig = blank_figure(max(5.5, 2.7 * columns + 0.5), 2.5 * rows + 0.8)
    axes = panel_axes(fig, count, columns)
    if statistics:
        _draw_movement(axes[-1], statistics)
    for ax, (method, name) in zip(axes, panels, strict=False):
        _draw(ax, [t for t in trials if t["method"] == method], name)
        label = name.replace("_", " ")
        ax.set_title(f"{editor_name(method)}: {label}", fontsize=MEDIUM)
        if (method, name) == ("rome", "layer"):
            _draw_effects(ax, calibration.evidence["trace"]["effects"])
        if name in ("layer", "clamp", "lr", "weight_decay", "covariance_weight", "max_change"):
            chosen = float(calibration.settings[method][name])
            ax.axvline(chosen, color="0.6", linewidth=0.8, linestyle=":")
        if name in ("clamp", "lr", "weight_decay", "covariance_weight", "max_change"):
            ax.set_xscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=SMALL)
    title = f"Calibration of {calibration.model} on {calibration.evidence['data']}"
    cases = calibration.evidence["cases"]["choose"]
    fig.suptitle(f"{title}, {cases} cases", fontsize=MEDIUM, fontweight="bold", **literal_text())
    return fig


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _draw(ax: Axes, trials: list[Mapping[str, Any]], name: str) -> None:
    """The trials by one setting; of several with the same value the one with the best score."""
    by_value: dict[Any, Mapping[str, Any]] = {}
    for trial in sorted(trials, key=lambda t: t["score"]):
        if trial["metrics"]:
            by_value[_key(trial["settings"][name])] = trial
    values = sorted(by_value, key=lambda x: x if isinstance(x, tuple) else float(x))
    named = any(isinstance(value, tuple | str) for value in values)
    xs = list(range(len(values))) if named else [float(value) for value in values]
    for i, (metric, color) in enumerate(COLORS.items()):
        found = [by_value[value]["metrics"][metric] for value in values]
        y = [100 * x["mean"] for x in found]
        error = [100 * (x["half_width"] or 0.0) for x in found]
        ax.errorbar(xs, y, yerr=error, color=color, marker="o", markersize=3,
                    linewidth=1.4 if i == 0 else 0.9, elinewidth=0.6, label=metric)  # fmt: skip
    if named:
        ax.set_xticks(xs, [_label(value) for value in values])
    ax.set_ylim(-3, 103)
    style_axes(ax, zero=False)


def _label(value: Any) -> str:
    if isinstance(value, tuple):  # a range of layers: the first and the last
        return "–".join(map(str, value[:: max(1, len(value) - 1)]))
    return "none" if value == "inf" else f"{value:g}"


def _draw_movement(ax: Axes, statistics: Sequence[Mapping[str, Any]]) -> None:
    """The movement of C⁻¹k by tokens, a line for each layer."""
    shades = colormaps["Greens"]
    for i, x in enumerate(statistics):
        points = [(n, 100 * moved) for n, moved in x["movement"] if moved is not None]
        if points:
            color = shades(0.45 + 0.5 * (i + 1) / len(statistics))
            ax.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3,
                    linewidth=1.0)  # fmt: skip
            ax.annotate(str(x["layer"]), points[-1], fontsize=SMALL, textcoords="offset points",
                        xytext=(4, 0), va="center")  # fmt: skip
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    style_axes(ax, zero=False)
    ax.set_title("movement of C⁻¹k in %, by tokens and layer", fontsize=MEDIUM)


def _draw_effects(ax: Axes, effects: list[float]) -> None:
    """The traced effect by layer, scaled to the panel: only its shape matters here."""
    top = max(effects, default=0.0)
    if top <= 0:
        return
    scaled = [100 * max(0.0, x) / top for x in effects]
    ax.fill_between(range(len(effects)), 0, scaled, color="0.85", linewidth=0, zorder=0,
                    label="traced MLP effect, scaled")  # fmt: skip
