"""The methods by name, as the command line and runs call them."""

from dataclasses import fields, replace
from typing import Any

from factscope.editing import finetune, memit, rome
from factscope.editing import knowledge_neurons as kn
from factscope.editing.editor import Editor
from factscope.editing.hypernet.editor import Ke, Mend
from factscope.errors import BadSetting

__all__ = ["EDITORS", "editor"]

EDITORS: dict[str, dict[str, Any]] = {
    "rome": {"default": rome.Rome(), "paper": rome.PAPER},
    "r-rome": {"default": rome.R_ROME, "paper": rome.R_ROME},
    **{
        name: {preset: make(preset) for preset in ("default", "paper")}
        for name, make in finetune.FINE_TUNES.items()
    },
    "kn": {"default": kn.KN(), "paper": kn.PAPER},
    "memit": {"default": memit.Memit(), "paper": memit.PAPER},
    "mend": {"default": Mend(), "paper": Mend()},
    "ke": {"default": Ke(), "paper": Ke()},
}
"""Method → preset → the editor with that preset's settings."""


def editor(method: str, preset: str = "default", **settings: Any) -> Editor:
    """The editor of a name and preset, some settings changed; None leaves one as it is."""
    if method not in EDITORS:
        raise BadSetting(f"no method {method!r}; choose one of {', '.join(EDITORS)}")
    presets = EDITORS[method]
    if preset not in presets:
        raise BadSetting(f"{method} has no preset {preset!r}; choose one of {', '.join(presets)}")
    made = presets[preset]
    changed = {name: value for name, value in settings.items() if value is not None}
    known = {field.name for field in fields(made)}
    unknown = [name for name in changed if name not in known]
    if unknown:
        raise BadSetting(
            f"{method} has no setting {unknown[0]!r}; it has {', '.join(sorted(known))}"
        )
    return replace(made, **changed)
