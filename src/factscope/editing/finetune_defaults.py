"""Where fine-tuning changes a model, and how far it may go: by model, with where that comes from.

A model that has a row in `KNOWN` takes it. Any other takes its layer by depth, and its bound as a
share of the changed weight's spread: what 5e-4 does to a weight depends on how large its entries
are, and the published bounds fall by a factor of 40 from GPT-2 medium to GPT-J.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["BY_DEPTH", "KNOWN", "ByDepth", "Known", "Method", "defaults"]

Method = Literal["ft", "ft-l", "attn"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """A method's layer and bound in one model."""

    layer: int
    bound: float | None
    """The most that an entry of the weight may change by; None without a bound."""
    source: str
    """Where these come from."""

    def layer_in(self, lm: "LM") -> int:
        """The layer to change."""
        return self.layer

    def bound_for(self, spread: float) -> float | None:
        """The bound for a weight whose entries have this standard deviation."""
        return self.bound


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


def _published(file: str, layer: int, bound: float | None) -> Known:
    return Known(layer=layer, bound=bound, source=f"kmeng01/rome, hparams/FT/{file}.json")


OURS = "chosen on CounterFact cases apart from those reported (docs/results.md)"

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
        "ft": Known(layer=0, bound=None, source=OURS),
        "ft-l": Known(layer=0, bound=5e-3, source=OURS),
        "attn": Known(layer=15, bound=1e-2, source=OURS),
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
