"""Where each model's facts are written by default, and where these numbers come from.

Where fine-tuning changes a model, and how far it may go: by model, with where that comes from.

A model that has a row in `KNOWN` takes it. Any other takes its layer by depth, and its bound as a
share of the changed weight's spread: what 5e-4 does to a weight depends on how large its entries
are, and the published bounds fall by a factor of 40 from GPT-2 medium to GPT-J.

Which layer a fact is written into: by number, by the model's default, or by a causal trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import trace

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "BY_DEPTH",
    "KNOWN",
    "ByDepth",
    "Known",
    "Layer",
    "MemitDefaults",
    "Method",
    "RomeDefaults",
    "check_layer",
    "defaults",
    "layer_for",
    "memit_defaults",
    "rome_defaults",
    "traced_layer",
]

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


Method = Literal["ft", "ft-l", "attn"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A method's layer and bound in one model."""

    layer: int
    max_change: float | None
    """The most that an entry of the weight may change by; None without a bound."""
    source: str
    """Where these come from."""

    def layer_in(self, lm: "LM") -> int:
        """The layer to change."""
        return self.layer

    def bound_for(self, spread: float) -> float | None:
        """The bound for a weight whose entries have this standard deviation."""
        return self.max_change


@dataclass(frozen=True, kw_only=True)
class ByDepth:
    """A method's layer and bound in a model that has no row."""

    depth: float
    """The layer, as a share of the number of layers."""
    spreads: float | None
    """The bound, in standard deviations of the changed weight; None without a bound."""
    source: str

    def layer_in(self, lm: "LM") -> int:
        """The layer to change."""
        return int(self.depth * lm.n_layers)

    def bound_for(self, spread: float) -> float | None:
        """The bound for a weight whose entries have this standard deviation."""
        return None if self.spreads is None else self.spreads * spread


def _published(file: str, layer: int, max_change: float | None) -> Known:
    return Known(layer=layer, max_change=max_change, source=f"kmeng01/rome, hparams/FT/{file}.json")


FINETUNE_DEFAULTS = "chosen on CounterFact cases apart from those reported (docs/results.md)"

KNOWN: dict[tuple[str, int, int], dict[Method, Known]] = {
    ("gpt2", 24, 1024): {"ft-l": _published("gpt2-medium_constr", 0, 2e-3)},
    ("gpt2", 36, 1280): {"ft-l": _published("gpt2-large_constr", 0, 1e-3)},
    ("gpt2", 48, 1600): {
        "ft": _published("gpt2-xl_unconstr", 1, None),
        "ft-l": _published("gpt2-xl_constr", 0, 5e-4),
        "attn": _published("gpt2-xl_attn", 33, 1e-3),
    },
    ("gptj", 28, 4096): {
        "ft": _published("EleutherAI_gpt-j-6B_unconstr", 21, None),
        "ft-l": _published("EleutherAI_gpt-j-6B_constr", 0, 5e-5),
    },
    ("llama", 30, 576): {
        "ft": Known(layer=0, max_change=None, source=FINETUNE_DEFAULTS),
        "ft-l": Known(layer=0, max_change=5e-3, source=FINETUNE_DEFAULTS),
        "attn": Known(layer=15, max_change=1e-2, source=FINETUNE_DEFAULTS),
    },
}
"""(model type, number of layers, width) → method → its layer and bound."""

TRIAL = "by trial on SmolLM2-135M"

BY_DEPTH: dict[Method, ByDepth] = {
    # The published layers disagree (1 of 48 in GPT-2 XL, 21 of 28 in GPT-J). In SmolLM2-135M early
    # layers reach paraphrases and leave neighbours alone; above two thirds neighbours follow.
    "ft": ByDepth(depth=0.0, spreads=None, source=f"layer 0 {TRIAL}"),
    "ft-l": ByDepth(
        depth=0.0, spreads=0.01, source=f"layer 0 as in every published file; bound {TRIAL}"
    ),
    "attn": ByDepth(
        depth=33 / 48,
        spreads=0.03,
        source=f"the depth of the paper's layer, 33 of 48 in GPT-2 XL; bound {TRIAL}",
    ),
}
"""Method → its layer and bound in any other model."""


def defaults(lm: "LM", method: Method) -> Known | ByDepth:
    """The method's layer and bound in this model."""
    config = lm.model.config
    row = KNOWN.get((config.model_type, lm.n_layers, lm.width), {})
    return row.get(method, BY_DEPTH[method])


Layer = int | Literal["auto"] | None
"""A number, "auto" for a causal trace, None for the model's default."""


def layer_for(lm: "LM", layer: Layer, facts: Sequence[Fact]) -> int:
    """The layer's number."""
    if layer is None:
        return rome_defaults(lm).layer
    if layer == "auto":
        found = sorted(traced_layer(lm, fact) for fact in facts)
        return found[len(found) // 2]
    return check_layer(lm, layer)


def check_layer(lm: "LM", layer: int) -> int:
    """The layer, if the model has it."""
    if not 0 <= layer < lm.n_layers:
        raise BadSetting(
            f"layer {layer} is out of range: {lm.name} has {lm.n_layers} layers, 0 to "
            f"{lm.n_layers - 1}"
        )
    return layer


def traced_layer(lm: "LM", fact: Fact) -> int:
    """Where restored MLP outputs at the subject's last token bring the answer back best."""
    record = trace(lm, replace(fact, target=None), Tracing(kinds=("mlp",)))
    row = record.subject[1] - 1
    return int(np.argmax(np.asarray(record.restored["mlp"])[row]))
