"""Where each model's facts are written by default, and where these numbers come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["MemitDefaults", "RomeDefaults", "memit_defaults", "rome_defaults"]

Shape = tuple[str, int, int]
"""Family, layers, width: what tells a model from its siblings whatever it is called."""


@dataclass(frozen=True, kw_only=True)
class RomeDefaults:
    """ROME's settings that depend on the model."""

    layer: int
    clamp: float = 4.0
    why: str


@dataclass(frozen=True, kw_only=True)
class MemitDefaults:
    """MEMIT's settings that depend on the model."""

    layers: tuple[int, ...]
    weight: float
    """λ: how many keys of ordinary text the second moment stands for."""
    steps: int = 20
    clamp: float = 0.75
    why: str


PAPER = "the paper's own settings files"
EASYEDIT = "EasyEdit's settings files"
OURS = "tried on the default model (docs/results.md)"

ROME: dict[Shape, RomeDefaults] = {
    ("gpt2", 24, 1024): RomeDefaults(layer=8, clamp=3.0, why=PAPER),
    ("gpt2", 36, 1280): RomeDefaults(layer=12, why=PAPER),
    ("gpt2", 48, 1600): RomeDefaults(layer=17, why=PAPER),
    ("gptj", 28, 4096): RomeDefaults(layer=5, why=PAPER),
    ("gpt_neox", 44, 6144): RomeDefaults(layer=15, why="MEMIT's settings files"),
    ("llama", 32, 4096): RomeDefaults(layer=5, why=EASYEDIT),
    ("qwen2", 28, 3584): RomeDefaults(layer=5, why=EASYEDIT),
    ("llama", 30, 576): RomeDefaults(layer=5, why=OURS),
}

MEMIT: dict[Shape, MemitDefaults] = {
    ("gpt2", 48, 1600): MemitDefaults(
        layers=(13, 14, 15, 16, 17), weight=20_000.0, why="MEMIT's settings files"
    ),
    ("gptj", 28, 4096): MemitDefaults(
        layers=(3, 4, 5, 6, 7, 8), weight=15_000.0, steps=25, why="MEMIT's settings files"
    ),
    ("llama", 30, 576): MemitDefaults(layers=(4, 5, 6, 7, 8), weight=100.0, why=OURS),
}

DEPTH = 0.18
"""Where a model without a row is edited, as a share of its depth: between GPT-J's 5 of 28 and what
the trials on the default model favour."""


def rome_defaults(lm: "LM") -> RomeDefaults:
    """The model's row, or a layer at the usual depth."""
    guess = RomeDefaults(
        layer=min(lm.n_layers - 1, round(DEPTH * lm.n_layers)),
        why=f"{DEPTH:g} of the depth, as in the models that were tried",
    )
    return ROME.get(shape_of(lm), guess)


def memit_defaults(lm: "LM") -> MemitDefaults:
    """The model's row, or the five layers that end where ROME writes."""
    last = rome_defaults(lm).layer
    first = max(0, last - 4)
    guess = MemitDefaults(
        layers=tuple(range(first, last + 1)),
        weight=15_000.0,
        why="the five layers up to ROME's, as in the published settings",
    )
    return MEMIT.get(shape_of(lm), guess)


def shape_of(lm: "LM") -> Shape:
    """What tells the model from its siblings."""
    return lm.model.config.model_type, lm.n_layers, lm.width
