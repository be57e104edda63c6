"""Settings of hypernetwork training. No torch: the command line derives its flags from them."""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from factscope.errors import BadSetting
from factscope.settings import Seed, check

Locality = Literal["unrelated", "neighbours"]
"""Prompts that an edit must not change: of unrelated facts, or of neighbours of the same fact."""


@dataclass(frozen=True, kw_only=True)
class MendConfig:
    """Size of a MEND network."""

    method: ClassVar[str] = "mend"

    rank: Annotated[int, Ge(1)] = 512
    """Rank of its layers; the published networks have 1920, for weights of 1600 × 6400."""
    hidden_layers: Annotated[int, Ge(0)] = 1
    """Layers with an activation, before the last one."""
    edit_lr: Annotated[float, Gt(0)] = 1e-4
    """Initial step size of an edit; training learns one per weight."""

    __post_init__ = check


@dataclass(frozen=True, kw_only=True)
class KeConfig:
    """Size of a KE network; the defaults are the published widths."""

    method: ClassVar[str] = "ke"

    lstm_width: Annotated[int, Ge(1)] = 512
    """Width of the LSTM's states, in each direction."""
    condition_width: Annotated[int, Ge(1)] = 768
    """Width of the vector that encodes the fact."""
    hidden_width: Annotated[int, Ge(1)] = 128
    """Width of the hidden layer of each edited weight."""
    edit_lr: Annotated[float, Gt(0)] = 5e-5
    """Initial step size: ‖ΔW‖ is about edit_lr · √(inputs · outputs) for each token."""

    __post_init__ = check


NETWORK_CONFIGS: dict[str, type[MendConfig] | type[KeConfig]] = {"mend": MendConfig, "ke": KeConfig}
"""Method → the settings of its network."""


def network_config(method: str, **settings: Any) -> MendConfig | KeConfig:
    """The network settings of a method; unknown names raise `BadSetting`."""
    if method not in NETWORK_CONFIGS:
        known = ", ".join(NETWORK_CONFIGS)
        raise BadSetting(f"method is {method!r}; only these are trained: {known}")
    config = NETWORK_CONFIGS[method]
    known = sorted(field.name for field in fields(config))
    for name in settings:
        if name not in known:
            raise BadSetting(f"{method} networks have no setting {name!r}; use {', '.join(known)}")
    return config(**settings)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a hypernetwork is trained."""

    network: MendConfig | KeConfig
    """The network: `MendConfig` or `KeConfig`."""
    layers: tuple[int, ...] | None = None
    """Layers whose MLP weights are edited; default: the last three."""
    lr: Annotated[float, Gt(0)] = 3e-4
    """Learning rate of Adam."""
    warmup_steps: Annotated[int, Ge(0)] = 20
    """Steps over which the learning rate rises from 0."""
    batch_size: Annotated[int, Ge(2)] = 16
    """Edits per step."""
    edit_weight: Annotated[float, Ge(0)] = 0.1
    """Weight c_edit of the edit loss."""
    locality_weight: Annotated[float, Ge(0)] = 1.0
    """Weight c_loc of the KL divergence on unrelated prompts."""
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    validation_examples: Annotated[int, Ge(2)] = 64
    """Examples held out for validation; at most a fifth of all."""
    eval_every: Annotated[int, Ge(1)] = 50
    """Steps between evaluations on the validation examples."""
    patience: Annotated[int | None, Ge(1)] = 20
    """Stop after this many evaluations without improvement; None: never."""
    seed: Seed = 0
    """Seed of the network's initial weights and of the order of the batches."""

    __post_init__ = check

    @property
    def method(self) -> str:
        """The method whose network is trained: "mend" or "ke"."""
        return self.network.method

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values."""
        return {"method": self.method, **asdict(self)}
