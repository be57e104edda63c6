"""What to trace and how: one frozen value, and the two presets.

How the subject is hidden from the model: noise on its token embeddings (paper §2.1, App. B).

A `Corruption` says which noise; `measure` finds how large one σ of this model's embeddings is;
`draw` makes the numbers. The same seed gives the same numbers, whatever is batched with what.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from factscope.errors import BadSetting
from factscope.records import KINDS

__all__ = ["PRESETS", "Corruption", "Tracing", "parse_noise_level", "window_around"]


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """The noise of a corrupted run."""

    distribution: Literal["gaussian", "uniform", "embedding"] = "gaussian"
    """`gaussian`: N(0, level²); `uniform`: within ± level; `embedding`: N(μ, Σ) of the token
    embeddings, as they are (the level plays no part)."""
    level: float = 3.0
    """How strong the noise is: three times σ, App. B.1."""
    in_sigmas: bool = True
    """Whether `level` counts in standard deviations of the subjects' embeddings, or is absolute."""
    replace: bool = False
    """Put the noise in place of the embeddings instead of adding it."""
    extra_tokens: int = 0
    """How many tokens after the subject are corrupted too (App. B.4)."""
    samples: int = 10
    """How many draws of the noise are averaged."""
    seed: int = 0
    stream: Literal["fact", "paper"] = "fact"
    """`fact`: each fact has a stream of its own, so that facts are independent samples.
    `paper`: numpy's RandomState(seed), begun anew for every fact; the paper's seed is 1."""
    baseline: Literal["same", "added"] = "same"
    """`added`: with `replace`, the corrupted run still adds. The paper's code does so by
    oversight; restored runs are then compared with a differently corrupted one."""

    def __post_init__(self) -> None:
        for name, choices in (
            ("distribution", ("gaussian", "uniform", "embedding")),
            ("stream", ("fact", "paper")),
            ("baseline", ("same", "added")),
        ):
            if getattr(self, name) not in choices:
                raise BadSetting(f"{name} is {getattr(self, name)!r}; choose from {choices}")
        if self.samples < 1:
            raise BadSetting(f"samples is {self.samples}; at least 1 is needed")
        if not (self.level >= 0 and math.isfinite(self.level)):
            raise BadSetting(f"the noise level is {self.level}; give a number of 0 or more")
        if self.extra_tokens < 0:
            raise BadSetting(f"extra_tokens is {self.extra_tokens}; give 0 or more")
        if not 0 <= self.seed < 2**32:
            raise BadSetting(f"the seed is {self.seed}; give a number from 0 to 2³²-1")

    def tokens(self, subject: tuple[int, int], length: int) -> tuple[int, int]:
        """The tokens to corrupt, as [start, stop)."""
        return subject[0], min(length, subject[1] + self.extra_tokens)


def parse_noise_level(text: str) -> tuple[float, bool]:
    """A noise level as people write it: "3s" is three σ, "0.25" is absolute."""
    number = text.strip().removesuffix("s")
    try:
        return float(number), text.strip().endswith("s")
    except ValueError:
        raise BadSetting(
            f"the noise {text!r} is not a level; write 3s for three σ or 0.25 for an absolute one"
        ) from None


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """The settings of a causal trace."""

    corruption: Corruption = field(default_factory=Corruption)
    kinds: tuple[str, ...] = KINDS
    """What is restored: single `states`, windows of `mlp` or of `attn` outputs."""
    window: int = 10
    """How many layers of MLP or attention outputs are restored together (App. B.2)."""
    alignment: Literal["text", "code"] = "text"
    """Which layers a window of 10 around l holds: l-4 … l+5 as the paper says, or l-5 … l+4 as its
    code does."""
    sever: tuple[str, ...] = ()
    """Modules ("mlp", "attn") to sever: states are traced once more in a graph where the module's
    outputs are frozen at their corrupted values in all layers (Figure 3)."""
    sever_rows: Literal["last_subject", "all"] = "all"
    """Restore in the severed graph at the last subject token only, or at every token."""
    sever_at: Literal["restored", "every"] = "restored"
    """Freeze the module at the restored token, as the paper does, or at every token."""
    gradients: bool = False
    """Also compute integrated gradients of the same cells."""
    gradient_path: Literal["layer", "state"] = "layer"
    """Along the path of a gradient all states of a layer grow together, or one state alone: dearer
    by a factor of the prompt's length."""
    known: Literal["first_token", "whole_word"] = "first_token"
    """When the answer counts as the target: it is the target's first token, or, as in the paper's
    code, the token alone spells the whole target."""

    def __post_init__(self) -> None:
        _choices("kind", self.kinds, KINDS)
        _choices("sever", self.sever, ("mlp", "attn"))
        _choices("alignment", [self.alignment], ("text", "code"))
        _choices("sever_rows", [self.sever_rows], ("last_subject", "all"))
        _choices("sever_at", [self.sever_at], ("restored", "every"))
        _choices("known", [self.known], ("first_token", "whole_word"))
        _choices("gradient_path", [self.gradient_path], ("layer", "state"))
        if self.window < 1:
            raise BadSetting(f"the window is {self.window}; it must hold at least 1 layer")

    @property
    def contributions(self) -> list[str]:
        """What a run must keep besides the states: the outputs that are restored or frozen."""
        return sorted({*self.kinds, *self.sever} - {"states"})

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, for records and run folders."""
        return dataclasses.asdict(self)


def _choices(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    for value in values:
        if value not in known:
            raise BadSetting(f"{name} is {value!r}; choose from {', '.join(known)}")


PRESETS = {
    "default": Tracing(),
    "paper": Tracing(
        corruption=Corruption(seed=1, stream="paper", baseline="added"),
        alignment="code",
        known="whole_word",
    ),
}
"""`paper` computes what the paper's own code does, number for number; only the mean and covariance
of `embedding` noise come from the facts' prompts, where that code takes another text."""


def window_around(settings: Tracing, layer: int, n_layers: int) -> tuple[int, int]:
    """The layers restored around a centre, as [start, stop), clipped at the edges."""
    width = settings.window
    start = layer - (width // 2 if settings.alignment == "code" else (width - 1) // 2)
    return max(0, start), min(n_layers, start + width)
