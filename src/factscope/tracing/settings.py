"""Settings of causal tracing and their presets. No torch: the command line derives its flags."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from factscope.errors import BadSetting
from factscope.records import KINDS
from factscope.settings import INTERNAL, Flag, Seed, check


def parse_noise_level(text: Any) -> tuple[float, bool]:
    """Noise level and whether it is in σ: "3s" is three σ, "0.25" is absolute."""
    number = str(text).strip()
    try:
        return float(number.removesuffix("s")), number.endswith("s")
    except ValueError:
        raise ValueError("write 3s for three σ, or 0.25 for an absolute level") from None


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """Corruption of the subject."""

    distribution: Literal["gaussian", "uniform", "embedding", "tokens"] = "gaussian"
    """Noise distribution: gaussian N(0, level²), uniform within ±level, or embedding: N(μ, Σ) of
    the token embeddings, whatever the level. tokens: no noise, the subject's tokens are replaced by
    those of another subject of equal length."""
    level: Annotated[
        float,
        Ge(0),
        Le(1_000_000),
        Flag(name="noise", parse=parse_noise_level, show="{:g}s".format, also=("in_sigmas",)),
    ] = 3.0  # App. B.1
    """Noise level: 3s is three standard deviations σ of the subjects' embeddings, 0.25 is
    absolute."""
    in_sigmas: Annotated[bool, INTERNAL] = True
    """Whether `level` is in σ or absolute."""
    replace: bool = False
    """Replace the embeddings by the noise instead of adding it."""
    extra_tokens: Annotated[int, Ge(0)] = 0  # App. B.4
    """Tokens after the subject to corrupt too."""
    samples: Annotated[int, Ge(1)] = 10
    """Noise samples to average over; 1 with token replacement."""
    seed: Seed = 0
    """Seed of the noise."""
    rng: Literal["per-fact", "paper"] = "per-fact"
    """Random numbers: per-fact draws independent noise for each fact; paper restarts numpy's
    RandomState(seed) for every fact, as the paper's code does (with seed 1)."""
    baseline: Literal["same", "added"] = "same"
    """Corrupted run that restored runs are compared with: the same corruption, or added noise even
    with --replace, an oversight of the paper's code."""

    def __post_init__(self) -> None:
        check(self)
        if self.replaces_tokens:
            object.__setattr__(self, "samples", 1)
            for name in ("replace", "extra_tokens"):
                if getattr(self, name):
                    raise BadSetting(f"{name} is for noise; leave it out with distribution tokens")

    @property
    def replaces_tokens(self) -> bool:
        """Whether the corrupted run has another subject, not noise."""
        return self.distribution == "tokens"

    def token_range(self, subject: tuple[int, int], length: int) -> tuple[int, int]:
        """The tokens to corrupt in a prompt, as [start, stop)."""
        return subject[0], min(length, subject[1] + self.extra_tokens)


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """Causal tracing."""

    corruption: Corruption = field(default_factory=Corruption)
    kinds: tuple[Literal["states", "mlp", "attn"], ...] = KINDS
    """What to restore: single states, windows of MLP outputs, windows of attention outputs."""
    metric: Literal["probability", "log-probability", "logit-difference", "kl", "rank"] = (
        "probability"
    )
    """What is measured in every run: the answer's probability or its logarithm; the difference of
    the answer's and the foil's logits; KL(clean ‖ run) of the next-token distribution; or the
    answer's rank, 1 for the most likely token."""
    direction: Literal["restore", "corrupt"] = "restore"
    """restore puts clean cells into the corrupted run (denoising), corrupt puts corrupted cells
    into the clean run (noising)."""
    heads: bool = False
    """Restore the output of every attention head too, one head and layer at a time."""
    window: Annotated[int, Ge(1)] = 10  # App. B.2
    """Layers of MLP or attention outputs restored together."""
    window_alignment: Literal["paper-text", "paper-code"] = "paper-text"
    """Layers in a window of 10 around layer l: l-4 … l+5 as in the paper's text, or l-5 … l+4 as in
    its code."""
    sever: tuple[Literal["mlp", "attn"], ...] = ()
    """Modules to sever: trace the states again with the module's outputs frozen at their corrupted
    values in all layers (Figure 3)."""
    sever_tokens: Literal["all", "last-subject"] = "all"
    """Tokens at which states are restored while a module is severed."""
    freeze_at: Literal["restored", "all"] = "restored"
    """Tokens at which a severed module is frozen: the restored one, as in the paper, or all."""
    sever_draws: Literal["one", "two"] = "one"
    """Noise of severed runs: one draw, or two as in the paper's code, where the frozen outputs are
    of a first draw and the subject has a second."""
    gradients: bool = False
    """Compute integrated gradients of the same states and outputs too."""
    gradient_path: Literal["layer", "state"] = "layer"
    """Integration path: scale all states of a layer together, or each state alone, which is slower
    by the number of tokens."""
    lens: bool = False
    """Logit lens: decode every state of the clean and corrupted runs with the final norm and the
    head."""
    knockout: bool = False
    """Attention knockout: block attention from the last token to the subject, to the other tokens
    and to itself, in a window around each layer of the clean run."""
    knockout_window: Annotated[int, Ge(1)] = 9  # Geva et al. (2023), their code for GPT-2 XL
    """Layers in which attention is blocked together."""
    attribution: Literal["none", "atp", "atp-star"] = "none"
    """Attribution patching: estimate the same cells by gradients too, to compare them with the
    measured ones. atp is gradient × difference; atp-star corrects it for attention saturation and
    cancellation."""
    known: Literal["first-token", "whole-word"] = "first-token"
    """A fact counts as known if the answer is the target's first token, or, as in the paper's code,
    if the answer token alone spells the whole target."""

    def __post_init__(self) -> None:
        check(self)
        if not (self.kinds or self.sever or self.heads or self.lens or self.knockout):
            raise BadSetting(
                f"kinds is none, and nothing else is traced; choose from {', '.join(KINDS)}"
            )
        if self.sever and self.sever_draws == "two" and self.freeze_at == "all":
            raise BadSetting("sever_draws is two; give one with freeze_at all")
        if self.attribution != "none":
            if self.metric == "rank" or (self.metric == "kl" and self.direction == "corrupt"):
                raise BadSetting(
                    f"metric is {self.metric!r}, direction {self.direction!r}: its gradient is "
                    "zero, so that attribution says nothing; use logit-difference"
                )
            if not (self.kinds or self.heads):
                raise BadSetting(
                    f"attribution is {self.attribution!r}, but neither kinds nor heads are traced; "
                    "choose kinds, or add heads"
                )

    @property
    def contributions(self) -> list[str]:
        """The outputs that a run must keep: those that are restored or severed."""
        heads = {"heads"} if self.heads else set()
        return sorted({*self.kinds, *self.sever, *heads} - {"states"})

    @property
    def tensors(self) -> int:
        """How many tensors of a state's width a run keeps per layer, beside keys and values."""
        one = 1 + len(self.contributions)
        return 2 * one + 2 if self.sever and self.sever_draws == "two" else one

    def window_around(self, layer: int, n_layers: int) -> tuple[int, int]:
        """The layers restored around a layer, as [start, stop), clipped at the edges."""
        before = (
            self.window // 2 if self.window_alignment == "paper-code" else (self.window - 1) // 2
        )
        start = layer - before
        return max(0, start), min(n_layers, start + self.window)

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON values, for records and run folders."""
        return dataclasses.asdict(self)


PRESETS = {
    "default": Tracing(),
    "paper": Tracing(
        corruption=Corruption(seed=1, rng="paper", baseline="added"),
        window_alignment="paper-code",
        sever_draws="two",
        known="whole-word",
    ),
}
"""`paper` reproduces the numbers of the paper's code. One difference is left: the mean and
covariance of `embedding` noise come from the facts' prompts, not from Wikipedia text."""
