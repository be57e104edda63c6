"""Hypernetworks, which map the gradient factors of facts to weight changes, and their files.

Gradients of linear layers have a factored form (MEND, §3). For one row of tokens the gradient of a
loss with respect to a weight is

    ∇W = Σ_t δ_t x_tᵀ

where x_t is the layer's input at token t and δ_t the gradient with respect to its output there.
The factors are small, each fact of a batch has its own, and an edit built from them has low rank:
ΔW = B A. Edits never change the layers below the first edited one. `SplitModel` runs those once and
repeats only the layers above under each edit.

MEND (Mitchell et al. 2021; App. E.4). Each token's x and δ are normalised and pass together through
a residual network of low-rank layers that starts as the identity:

    h ← h + σ(scale_i ⊙ (U V h + b) + shift_i),    h = [norm(x); norm(δ)]

Weights of one shape share U, V and b; scale and shift belong to the i-th of them. σ is a ReLU, and
the identity in the last layer. The outputs x̃ and δ̃ give the edit, with a learned step size α_W for
each weight:

    ΔW = -α_W Σ_t δ̃_t x̃_tᵀ

KE (De Cao et al. 2021; App. E.3). An LSTM reads the fact; its final states encode it. From them
come two rank-one matrices and a scalar gate g for each weight, with a learned step size α_W:

    ΔW = α_W σ(g) (∇W ⊙ a + b),    a = softmax(r) cᵀ,    b = softmax(r') c'ᵀ

∇W is a sum of outer products δ xᵀ, and (δ xᵀ) ⊙ (r cᵀ) = (δ ⊙ r)(x ⊙ c)ᵀ, so the edit keeps a low
rank. x and δ are divided by their running root mean square. At first a is a step against the
gradient and b is 0.

A trained network is a safetensors file. Its header holds the method, the model with its
fingerprint, the edited weights, the network's settings and how it was trained.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from factscope.editing.contexts import TokenBatch
from factscope.editing.defaults import check_layer
from factscope.editing.hypernet.settings import KeConfig, MendConfig, network_config
from factscope.errors import BadEditorWeights, BadInput, BadSetting
from factscope.io import sha256
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_calls, hook_io, hook_outputs
from factscope.lm.replay import PackedView, Replay

if TYPE_CHECKING:
    from factscope.lm.model import LM

EDITED_LAYERS = 3
"""Layers that are edited by default, as in MEND's own settings."""
EPSILON = 1e-7
"""Avoids a division by 0 for entries that never vary."""
LR_OF_STEP_SIZES = 1e-2
"""Adam's learning rate for the edits' step sizes, which are learned as logarithms."""
TABLE_SUFFIXES = {"counterfact": "-cf", "zsre": "-zsre", "text": ""}
"""Training data → what the paper appends to the method's name."""
FORMAT = "factscope-hypernetwork"
VERSION = 2
"""Version 1, of factscope 0.1.0.dev0, has other names of fields and tensors; it is read, too."""


# ---- the edited weights


class WeightShape(NamedTuple):
    """An edited weight: its name in the model and the widths of its input and output."""

    name: str
    keys: int
    values: int


class TargetModule(NamedTuple):
    """A linear layer whose weight is edited."""

    module: nn.Module
    layer: int
    shape: WeightShape


def target_modules(lm: "LM", layers: Sequence[int] | None = None) -> list[TargetModule]:
    """The linear layers of these layers' MLPs, lowest layer first; None: of the last layers."""
    if layers is None:
        layers = range(max(0, lm.n_layers - EDITED_LAYERS), lm.n_layers)
    if not layers:
        raise BadSetting("layers is empty; name at least one layer to edit")
    targets = []
    for layer in sorted({check_layer(lm, layer) for layer in layers}):
        for module in [*lm.mlp_in(layer), lm.mlp_out(layer)]:
            weight: Any = module.weight
            keys, values = weight.shape if lm.family.transposed else weight.shape[::-1]
            shape = WeightShape(f"{lm.name_of(module)}.weight", keys, values)
            targets.append(TargetModule(module, layer, shape))
    return targets


# ---- the model, split below the first edited layer


class SplitModel:
    """A model split below its first edited layer."""

    def __init__(self, lm: "LM", targets: Sequence[TargetModule]) -> None:
        self.lm, self.targets = lm, list(targets)
        self.first = targets[0].layer
        self._replays: dict[int, Replay] = {}
        """By row length: replay of the blocks on rows of that length."""

    @torch.no_grad()
    def below(
        self, ids: Int[Tensor, "row token"], lengths: Sequence[int] = ()
    ) -> tuple[Float[Tensor, "row token width"], Float[Tensor, "row token width"]]:
        """The input of the first edited layer, and the unedited model's output of the last layer.

        With `lengths`, or for a single row, the pass also prepares `above` for rows of these
        lengths; otherwise `above` runs the model once for each new length.
        """
        lengths = lengths or ([ids.shape[1]] if len(ids) == 1 else [])
        if lengths:
            run = forward(self.lm, ids)
            for length in lengths:
                # Masks and positions of one row serve any number of rows.
                view = PackedView.whole(1, length, ids.device)
                self._replays[length] = Replay(self.lm, run, view)
            return (run.inputs, *run.states)[self.first], run.states[-1]
        entering: list[Tensor] = []
        last: list[Tensor] = []
        blocks = self.lm.blocks

        def enter(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering.append(args[0] if args else kwargs["hidden_states"])

        with hook_calls((blocks[self.first], enter)), hook_outputs((blocks[-1], last.append)):
            self.lm.model.base_model(ids, use_cache=False)
        return entering[0], last[0]

    def above(self, hidden: Float[Tensor, "row token width"]) -> Float[Tensor, "row token width"]:
        """The output of the last layer, from the input of the first edited one."""
        length = hidden.shape[1]
        if length not in self._replays:
            self.below(torch.zeros(1, length, dtype=torch.long, device=self.lm.device))
        for layer in range(self.first, self.lm.n_layers):
            hidden = self._replays[length](layer, hidden)
        return hidden


# ---- gradients and changes


@dataclass(frozen=True, eq=False)
class GradientFactors:
    """The gradient of one weight for each fact: ∇W = Σ_t δ_t x_tᵀ."""

    x: Float[Tensor, "fact token key"]
    delta: Float[Tensor, "fact token value"]

    @cached_property
    def mask(self) -> Bool[Tensor, "fact token"]:
        """The tokens that contribute to the gradient."""
        return (self.delta != 0).any(-1)

    def select(self, table: Float[Tensor, "fact token width"]) -> Float[Tensor, "row width"]:
        """The rows of the tokens that are processed: of a single fact all, as in `TokenBatch`."""
        return table[0] if len(table) == 1 else table[self.mask]

    def scatter(self, rows: Float[Tensor, "row width"]) -> Float[Tensor, "fact token width"]:
        """The inverse of `select`, with zeros at tokens that do not contribute."""
        mask = self.mask[..., None]
        zeros = rows.new_zeros(*self.mask.shape, rows.shape[-1])
        single = len(self.x) == 1
        return torch.where(mask, rows, zeros) if single else zeros.masked_scatter(mask, rows)


@dataclass(frozen=True, eq=False)
class FactorChange:
    """The change of one weight for each fact: ΔW = B A."""

    B: Float[Tensor, "fact value rank"]
    A: Float[Tensor, "fact rank key"]


def gradient_factors(
    split: SplitModel, hidden: Float[Tensor, "fact token width"], batch: TokenBatch
) -> tuple[list[GradientFactors], Float[Tensor, " fact"]]:
    """The factors of each fact's loss for every target, and the losses; `above` gets `hidden`."""
    inputs: dict[int, Tensor] = {}
    probes: dict[int, Tensor] = {}

    def add_zeros(i: int, x: Tensor, output: Tensor) -> Tensor:
        # The gradient with respect to zeros added to the output is δ. No weight needs one.
        inputs[i] = x.detach()
        probes[i] = torch.zeros_like(output, requires_grad=True)
        return output + probes[i]

    numbers = range(len(split.targets))
    hooks = [(split.targets[i].module, partial(add_zeros, i)) for i in numbers]
    with torch.enable_grad(), hook_io(*hooks):
        losses = batch.losses(batch.log_probs(split.lm, split.above(hidden)))
        deltas = torch.autograd.grad(losses.sum(), [probes[i] for i in numbers])

    def by_fact(tensor: Tensor) -> Tensor:  # some families flatten rows and tokens in their MLPs
        return tensor.reshape(len(hidden), -1, tensor.shape[-1]).float().to(split.lm.device)

    factors = [GradientFactors(by_fact(inputs[i]), by_fact(deltas[i])) for i in numbers]
    return factors, losses.detach()


def changes_applied(
    targets: Sequence[TargetModule], changes: Sequence[FactorChange]
) -> AbstractContextManager[None]:
    """Inside, every fact's rows run with its own changes; rows of one fact are adjacent."""

    def add(change: FactorChange, x: Tensor, output: Tensor) -> Tensor:
        A, B = change.A.to(x.device), change.B.to(x.device)
        by_fact = x.reshape(len(A), -1, x.shape[-1]).float()
        shift = torch.bmm(torch.bmm(by_fact, A.mT), B.mT)
        return output + shift.reshape(output.shape).to(output.dtype)

    pairs = zip(targets, changes, strict=True)
    return hook_io(*((target.module, partial(add, change)) for target, change in pairs))


# ---- networks


class RunningNorm(nn.Module):
    """Running mean and standard deviation of each entry of a vector."""

    count: Tensor
    mean: Tensor
    m2: Tensor
    """Sum of squared deviations from the mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("m2", torch.zeros(width))

    @torch.no_grad()
    def update(self, rows: Float[Tensor, "row width"]) -> None:
        """Include more vectors (Chan's parallel form of Welford's algorithm)."""
        new = len(rows)
        if not new:
            return
        total = self.count + new
        mean = rows.mean(0)
        gap = mean - self.mean
        self.m2 += (rows - mean).square().sum(0) + gap.square() * (self.count * new / total)
        self.mean += gap * (new / total)
        self.count += new

    @property
    def std(self) -> Float[Tensor, " width"]:
        """The standard deviation of each entry; 1 with fewer than two vectors."""
        std = (self.m2 / (self.count - 1).clamp(min=1)).sqrt()
        return torch.where(self.count > 1, std, torch.ones_like(std))

    @property
    def rms(self) -> Float[Tensor, ""]:
        """The root mean square over all entries; 1 without a vector."""
        rms = (self.m2 / self.count.clamp(min=1) + self.mean.square()).mean().sqrt()
        return torch.where(self.count > 0, rms, torch.ones_like(rms)) + EPSILON

    def normalise(self, rows: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Shift and scale vectors to mean 0 and standard deviation 1."""
        return (rows - self.mean) / (self.std + EPSILON)


@dataclass(frozen=True, kw_only=True)
class EditedWeights:
    """The weights of a model that a network edits; they determine the network's widths."""

    shapes: tuple[WeightShape, ...]
    layers: tuple[int, ...]
    hidden_size: int
    """Width of the model's hidden states."""


class Hypernetwork(nn.Module, ABC):
    """A network that maps each fact's gradient factors, on their own, to changes of the weights."""

    def __init__(self, config: Any, weights: EditedWeights) -> None:
        super().__init__()
        self.config, self.weights, self.method = config, weights, config.method
        self.x_norms = nn.ModuleList(RunningNorm(shape.keys) for shape in weights.shapes)
        self.delta_norms = nn.ModuleList(RunningNorm(shape.values) for shape in weights.shapes)

    def norms(self, i: int) -> tuple[RunningNorm, RunningNorm]:
        """The running normalisation of x and δ at the i-th weight."""
        return cast("RunningNorm", self.x_norms[i]), cast("RunningNorm", self.delta_norms[i])

    def update_norms(self, factors: Sequence[GradientFactors]) -> None:
        """Include the factors of training examples in the running normalisation."""
        for i, part in enumerate(factors):
            x_norm, delta_norm = self.norms(i)
            x_norm.update(part.x[part.mask])
            delta_norm.update(part.delta[part.mask])

    def encode(
        self, embedded: Float[Tensor, "fact token width"], lengths: Int[Tensor, " fact"]
    ) -> Float[Tensor, "fact state"]:
        """An encoding of the facts, from padded token embeddings; empty by default."""
        return embedded.new_zeros(len(lengths), 0)

    def forward(
        self, factors: Sequence[GradientFactors], encoded: Float[Tensor, "fact state"]
    ) -> list[FactorChange]:
        """The change of each weight for each fact, given `encode`'s result."""
        return [self.change(i, part, encoded) for i, part in enumerate(factors)]

    @abstractmethod
    def change(
        self, i: int, factors: GradientFactors, encoded: Float[Tensor, "fact state"]
    ) -> FactorChange:
        """The change of the i-th weight for each fact."""

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The parameters with their learning rates, as torch's optimisers take them."""
        named = list(self.named_parameters())
        step_sizes = [p for name, p in named if name.endswith("log_edit_lr")]
        others = [p for name, p in named if not name.endswith("log_edit_lr")]
        return [{"params": others, "lr": lr}, {"params": step_sizes, "lr": LR_OF_STEP_SIZES}]


# ---- MEND


class LowRankLayer(nn.Module):
    """h + σ(scale_i ⊙ (U V h + b) + shift_i); U = 0 at first, so it starts as the identity."""

    def __init__(self, width: int, rank: int, weights: int, *, relu: bool) -> None:
        super().__init__()
        rank = min(rank, width)
        self.down = nn.Parameter(torch.randn(rank, width) / math.sqrt(width))
        self.up = nn.Parameter(torch.zeros(width, rank))
        self.bias = nn.Parameter(torch.zeros(width))
        self.scale = nn.Parameter(torch.ones(weights, width))
        self.shift = nn.Parameter(torch.zeros(weights, width))
        self.relu = relu

    def forward(self, h: Float[Tensor, "row width"], i: int) -> Float[Tensor, "row width"]:
        """Transform rows that belong to the i-th weight of this shape."""
        update = (h @ self.down.T) @ self.up.T + self.bias
        update = update * self.scale[i] + self.shift[i]
        # At 0, where training starts, clamp has gradient 1; relu would have 0 and learn nothing.
        return h + (update.clamp(min=0) if self.relu else update)


class MendNetwork(Hypernetwork):
    """A network for each shape of weight, and a step size for each weight."""

    def __init__(self, config: MendConfig, weights: EditedWeights) -> None:
        super().__init__(config, weights)
        sizes = [(shape.keys, shape.values) for shape in weights.shapes]
        distinct = list(dict.fromkeys(sizes))
        self.slots = [(distinct.index(size), sizes[:i].count(size)) for i, size in enumerate(sizes)]
        """For each weight the index of its network, and its index within that network."""
        self.networks = nn.ModuleList(
            nn.ModuleList(
                LowRankLayer(
                    sum(size), config.rank, sizes.count(size), relu=i < config.hidden_layers
                )
                for i in range(config.hidden_layers + 1)
            )
            for size in distinct
        )
        self.log_edit_lr = nn.Parameter(torch.full((len(sizes),), math.log(config.edit_lr)))

    def change(
        self, i: int, factors: GradientFactors, encoded: Float[Tensor, "fact state"]
    ) -> FactorChange:
        """The change of the i-th weight for each fact; one rank for each token."""
        x_norm, delta_norm = self.norms(i)
        x = x_norm.normalise(factors.select(factors.x))
        delta = delta_norm.normalise(factors.select(factors.delta))
        network, slot = self.slots[i]
        h = torch.cat([x, delta], dim=-1)
        for layer in self.networks[network]:  # pyright: ignore[reportGeneralTypeIssues]
            h = layer(h, slot)
        x, delta = h.split([x.shape[-1], delta.shape[-1]], dim=-1)
        edit_lr = self.log_edit_lr[i].exp()
        return FactorChange(B=factors.scatter(-edit_lr * delta).mT, A=factors.scatter(x))


# ---- KE


class Gate(nn.Module):
    """The rank-one matrices and the gate of one weight, computed from the encoded fact."""

    def __init__(self, config: KeConfig, shape: WeightShape) -> None:
        super().__init__()
        self.keys, self.values = shape.keys, shape.values
        self.inner = nn.Linear(config.condition_width, config.hidden_width)
        self.outer = nn.Linear(config.hidden_width, 2 * (self.keys + self.values) + 1)
        self.log_edit_lr = nn.Parameter(torch.tensor(math.log(2 * config.edit_lr)))  # σ(0) = 1/2
        with torch.no_grad():
            self.outer.weight *= 0.1
            self.outer.bias.zero_()
            self.outer.bias[: self.keys] = -1  # c = -1 at first: against the gradient

    def forward(self, encoded: Float[Tensor, "fact condition"]) -> tuple[Tensor, ...]:
        """c, softmax(r), c', softmax(r') and α_W σ(g) for each fact."""
        widths = [self.keys, self.values, self.keys, self.values, 1]
        c, r, c_, r_, g = self.outer(self.inner(encoded).tanh()).split(widths, dim=-1)
        # Times its width, so that a ≈ c for every width; b is not scaled, as published.
        r, r_ = r.softmax(-1) * self.values, r_.softmax(-1)
        return c, r, c_, r_, g.sigmoid() * self.log_edit_lr.exp()


class KeNetwork(Hypernetwork):
    """The LSTM and a gate for each weight."""

    def __init__(self, config: KeConfig, weights: EditedWeights) -> None:
        super().__init__(config, weights)
        self.lstm = nn.LSTM(
            weights.hidden_size, config.lstm_width, bidirectional=True, batch_first=True
        )
        self.linear = nn.Linear(2 * config.lstm_width, config.condition_width)
        self.gates = nn.ModuleList(Gate(config, shape) for shape in weights.shapes)

    def encode(
        self, embedded: Float[Tensor, "fact token width"], lengths: Int[Tensor, " fact"]
    ) -> Float[Tensor, "fact condition"]:
        """The LSTM's final states in both directions, mapped to one vector for each fact."""
        # Training the network must not train the model's embeddings.
        embedded = nn.functional.layer_norm(embedded.detach().float(), embedded.shape[-1:])
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (final, _) = self.lstm(packed)
        return self.linear(torch.cat([final[0], final[1]], dim=-1)).tanh()

    def change(
        self, i: int, factors: GradientFactors, encoded: Float[Tensor, "fact condition"]
    ) -> FactorChange:
        """The change of the i-th weight for each fact."""
        x_norm, delta_norm = self.norms(i)
        x, delta = factors.x / x_norm.rms, factors.delta / delta_norm.rms
        c, r, c_, r_, gate = self.gates[i](encoded)
        # One rank for each token (∇W ⊙ a) and one more for b.
        B = torch.cat([delta * r[:, None], r_[:, None]], dim=1) * gate[:, None]
        return FactorChange(B=B.mT, A=torch.cat([x * c[:, None], c_[:, None]], dim=1))


# ---- new and trained networks

NETWORKS: dict[str, Any] = {"mend": MendNetwork, "ke": KeNetwork}


def build_network(
    config: MendConfig | KeConfig, weights: EditedWeights, seed: int = 0
) -> Hypernetwork:
    """An untrained network. The global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return NETWORKS[config.method](config, weights)


def network_for(
    lm: "LM", targets: Sequence[TargetModule], config: MendConfig | KeConfig, seed: int = 0
) -> Hypernetwork:
    """An untrained network, on the CPU, that edits these modules of a model."""
    weights = EditedWeights(
        shapes=tuple(target.shape for target in targets),
        layers=tuple(sorted({target.layer for target in targets})),
        hidden_size=lm.embed.weight.shape[1],
    )
    return build_network(config, weights, seed)


@dataclass(frozen=True, kw_only=True, eq=False)
class HypernetWeights:
    """A trained network and the model that it edits."""

    network: Hypernetwork
    model: str
    fingerprint: str
    """Fingerprint of the model that it edits."""
    training: Mapping[str, Any]
    """The data and settings of its training, with the step and the validation loss."""
    sha256: str
    """Of the file, or of the tensors if they were never in one."""

    @property
    def row(self) -> str:
        """The editor's name in the paper's tables, such as "mend-cf"."""
        data = str(self.training.get("data", "text"))
        return self.network.method + TABLE_SUFFIXES.get(data, f"-{data}")

    def targets(self, lm: "LM") -> list[TargetModule]:
        """The modules of the model that the network edits; raises if it is another model."""
        if lm.fingerprint != self.fingerprint:
            raise BadEditorWeights(
                f"the {self.network.method} weights are for {self.model} (fingerprint "
                f"{self.fingerprint[:12]}), not for {lm.name} ({lm.fingerprint[:12]}); load that "
                f"model, or train others: factscope train {self.network.method} --model {lm.name}"
            )
        weights = self.network.weights
        key = ("hypernetwork targets", weights)
        if key in lm.cache:  # looking up module names takes longer than an edit
            return lm.cache[key]
        try:
            targets = target_modules(lm, weights.layers)
        except BadInput as error:
            raise BadEditorWeights(f"the weights do not fit {lm.name}: {error}") from error
        shapes = tuple(target.shape for target in targets)
        if shapes != weights.shapes:
            missing = next((x for x in weights.shapes if x not in shapes), weights.shapes[0])
            raise BadEditorWeights(
                f"the weights do not fit {lm.name}: they change {missing.name} ({missing.keys} → "
                f"{missing.values}), and layers {', '.join(map(str, weights.layers))} have "
                f"{', '.join(shape.name for shape in shapes)}; train others for these layers"
            )
        lm.cache[key] = targets
        return targets


# ---- weights files


def pack_weights(weights: HypernetWeights) -> bytes:
    """The bytes of a weights file."""
    network = weights.network
    header = {
        "format": f"{FORMAT} {VERSION}",
        "method": network.method,
        "model": weights.model,
        "fingerprint": weights.fingerprint,
        "weights": asdict(network.weights),
        "network": asdict(network.config),
        "training": dict(weights.training),
    }
    return pack_tensors(network.state_dict(), header)


def load_weights(path: str | Path, method: str | None = None) -> HypernetWeights:
    """Read a weights file; raises if it is for another method than the given one."""
    path = Path(path)
    version, header, tensors = read_tensors(path, FORMAT, (1, VERSION))
    try:
        if version == 1:
            header, tensors = _from_version_1(header, tensors)
        file_method = header["method"]
        if file_method not in NETWORKS or (method is not None and file_method != method):
            expected = method or " or ".join(NETWORKS)
            raise BadEditorWeights(f"{path} holds weights of {file_method!r}, not of {expected}")
        weights = EditedWeights(
            shapes=tuple(WeightShape(*shape) for shape in header["weights"]["shapes"]),
            layers=tuple(header["weights"]["layers"]),
            hidden_size=header["weights"]["hidden_size"],
        )
        network = build_network(network_config(file_method, **header["network"]), weights)
        network.load_state_dict(tensors)
        return HypernetWeights(
            network=network,
            model=header["model"],
            fingerprint=header["fingerprint"],
            training=header["training"],
            sha256=sha256(path),
        )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise _unreadable(path, str(error).split("\n")[0]) from error


def _from_version_1(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and tensors under the names of version 2."""
    design = dict(header["design"])
    weights = {
        "shapes": design.pop("places"),
        "layers": design.pop("layers"),
        "hidden_size": design.pop("width"),
    }
    names = {
        "hidden": "hidden_layers" if header["method"] == "mend" else "hidden_width",
        "rate": "edit_lr",
        "lstm": "lstm_width",
        "condition": "condition_width",
    }
    network = {names.get(name, name): value for name, value in design.items()}

    def renamed(name: str) -> str:
        name = re.sub(r"^usual_(x|delta)\.", r"\1_norms.", name)
        name = re.sub(r"\.squares$", ".m2", name)
        return re.sub(r"log_rates?$", "log_edit_lr", name)

    return (
        {**header, "weights": weights, "network": network, "training": header["trained"]},
        {renamed(name): x for name, x in tensors.items()},
    )


def pack_tensors(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> bytes:
    """A safetensors file. The header is one metadata entry, as several have no fixed order."""
    # Copies: safetensors rejects tensors that share memory, as those of an LSTM may.
    copies = {name: cpu_copy(tensor) for name, tensor in tensors.items()}
    return save(copies, metadata={"factscope": json.dumps(header)})


def cpu_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy in main memory, detached."""
    return tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)


def read_tensors(
    path: Path, kind: str, versions: Sequence[int]
) -> tuple[int, dict[str, Any], dict[str, Tensor]]:
    """The version, header and tensors of a file of a kind, in one of these versions."""
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("factscope", "{}"))
            file_kind, _, version = header.get("format", "").partition(" ")
            if file_kind != kind or not version.isdigit():
                raise BadEditorWeights(
                    f"{path} is not a {kind.removeprefix('factscope-')} file; give one written by "
                    "`factscope train`"
                )
            if int(version) not in versions:
                known = " and ".join(map(str, versions))
                advice = "update factscope" if int(version) > max(versions) else "train it again"
                raise BadEditorWeights(
                    f"{path} has format {version}, and this factscope reads {known}; {advice}"
                )
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return int(version), header, tensors
    except FileNotFoundError as error:
        raise BadEditorWeights(f"there is no file {path}; `factscope train` writes one") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error


def _unreadable(path: Path, reason: str) -> BadEditorWeights:
    return BadEditorWeights(f"cannot read the weights {path} ({reason}); train them again")
