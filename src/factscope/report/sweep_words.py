"""The axes of a sweep and their values, as they are called in tables and figures."""

from collections.abc import Mapping

from factscope.analysis.sweep import NO_BOUND, Setting, Sweep
from factscope.report.evaluation_words import DATA, editor_name

__all__ = ["axis_name", "line_name", "setting_name", "sweep_title"]

AXIS = {"layer": "layer", "token": "token", "bound": "bound ε", "prefix_lengths": "prefixes"}
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
    if axis == "bound":
        return "no bound" if value == NO_BOUND else f"{value:g}"
    if axis == "prefix_lengths":
        return "none" if value == "none" else str(value).replace(",", ", ").replace("x", " × ")
    return str(value)


def line_name(settings: Mapping[str, Setting]) -> str:
    """What a line of a figure is called: the settings that its points share."""
    return ", ".join(_said(axis, value) for axis, value in settings.items())


def _said(axis: str, value: Setting) -> str:
    """A value in words that tell its axis, too."""
    if axis == "bound" and value != NO_BOUND:
        return f"ε = {value:g}"
    before = {"layer": "layer ", "prefix_lengths": "prefixes: "}.get(axis, "")
    return before + setting_name(axis, value)


def sweep_title(sweep: Sweep) -> str:
    """The sweep in one line."""
    name = f"{editor_name(sweep.method)}: {DATA.get(sweep.data, sweep.data)}, {sweep.model}"
    return ", ".join([name, *(_said(axis, value) for axis, value in sweep.fixed.items())])
