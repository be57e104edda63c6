"""The gradient of a linear layer, as the factors that it is made of (MEND, §3).

For one line of tokens the gradient of a loss with respect to W is Σ_t δ_t x_tᵀ: x_t is what the
layer reads at token t, δ_t the gradient with respect to what it returns there. The factors are
small, each fact of a batch has its own, and whatever is made of them is an edit of low rank.

Lines of tokens and what should follow them, side by side as one batch.

The Space Needle is in downtown Paris
                             ▲ reads: what should follow here is the label

The model in two: below the first edited layer, which no edit changes, and from there on.

Which weights a learned editor changes: those of the last layers' MLPs, in and out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from factscope.editing.contexts import TokenRow
from factscope.editing.defaults import check_layer
from factscope.errors import BadSetting
from factscope.lm.forward import forward
from factscope.lm.hooks import hook_calls, hook_io, hook_outputs
from factscope.lm.replay import PackedView, Replay

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "LAST",
    "FactorChange",
    "GradientFactors",
    "SplitModel",
    "TargetModule",
    "TokenBatch",
    "WeightShape",
    "changes_applied",
    "gradient_factors",
    "last_layers",
    "target_modules",
]


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Lines of one length, shorter ones filled up on the right with what nothing looks at."""

    ids: Int[Tensor, "line token"]
    reads: Int[Tensor, "line read"]
    labels: Int[Tensor, "line read"]
    real: Bool[Tensor, "line read"]
    """Which reads a line has."""
    lengths: Int[Tensor, " line"]

    @classmethod
    def of(
        cls, lines: Sequence[TokenRow], device: torch.device, length: int = 0, reads: int = 0
    ) -> "TokenBatch":
        """The lines as tensors, at least so long and with room for at least so many reads."""
        length = max(length, *(len(line.ids) for line in lines))
        reads = max(reads, *(len(line.positions) for line in lines))

        def table(lists: Sequence[Sequence[int]], width: int) -> Tensor:
            return torch.tensor([[*x, *[0] * (width - len(x))] for x in lists], device=device)

        return cls(
            ids=table([line.ids for line in lines], length),
            reads=table([line.positions for line in lines], reads),
            labels=table([line.labels for line in lines], reads),
            real=table([[1] * len(line.positions) for line in lines], reads).bool(),
            lengths=torch.tensor([len(line.ids) for line in lines], device=device),
        )

    def logs(
        self, lm: "LM", hidden: Float[Tensor, "line token width"]
    ) -> Float[Tensor, "read vocabulary"]:
        """log P of every token at each read, the last layer's states given."""
        rows = torch.arange(len(self.ids), device=self.reads.device)[:, None]
        row, read = self._chosen(rows.expand_as(self.reads)), self._chosen(self.reads)
        logits = lm.decode(hidden[row.to(hidden.device), read.to(hidden.device)])
        return logits.float().log_softmax(-1).to(self.ids.device)

    def losses(self, logs: Float[Tensor, "read vocabulary"]) -> Float[Tensor, " line"]:
        """Each line's mean of -log P over its labels."""
        return self.means(-logs.gather(1, self._chosen(self.labels)[:, None])[:, 0])

    def means(self, numbers: Float[Tensor, " read"]) -> Float[Tensor, " line"]:
        """Each line's mean of what its reads gave."""
        none = numbers.new_zeros(self.real.shape)
        if self.alone:
            table = torch.where(self.real, numbers, none)
        else:
            table = none.masked_scatter(self.real, numbers)
        return table.sum(1) / self.real.sum(1)

    def all_said(self, logs: Float[Tensor, "read vocabulary"]) -> Bool[Tensor, " line"]:
        """Whether all labels of a line are the likeliest where they stand."""
        right = (logs.argmax(-1) == self._chosen(self.labels)).float()
        return self.means(right) == 1

    @property
    def alone(self) -> bool:
        """Whether there is one line only. All its reads are looked at, also those that it does not
        have and that count for nothing: how many there are need not be known (`learned.passes`)."""
        return len(self.ids) == 1

    def _chosen(self, table: Int[Tensor, "line slot"]) -> Int[Tensor, " read"]:
        """What the table has at the reads that are looked at."""
        return table[0] if self.alone else table[self.real]


class SplitModel:
    """A model cut below a layer: the lower half is run once, the upper one under many edits."""

    def __init__(self, lm: "LM", first: int) -> None:
        self.lm, self.first = lm, first
        self._replays: dict[int, Replay] = {}

    @torch.no_grad()
    def below(
        self, ids: Int[Tensor, "line token"], lengths: Sequence[int] = ()
    ) -> tuple[Float[Tensor, "line token width"], Float[Tensor, "line token width"]]:
        """What enters the first edited layer, and what the unedited model's last layer returns.

        After that lines of those lengths, or as long as one alone, need no run of their own.
        """
        lengths = lengths or ([ids.shape[1]] if len(ids) == 1 else [])
        if lengths:
            run = forward(self.lm, ids)
            for length in lengths:
                view = PackedView.whole(1, length, ids.device)
                self._replays[length] = Replay(self.lm, run, view)
            return (run.inputs, *run.states)[self.first], run.states[-1]
        entering: list[Tensor] = []
        last: list[Tensor] = []
        blocks = self.lm.blocks

        def enter(args: tuple, named: dict) -> None:
            entering.append(args[0] if args else named["hidden_states"])

        with hook_calls((blocks[self.first], enter)), hook_outputs((blocks[-1], last.append)):
            self.lm.model.base_model(ids, use_cache=False)
        return entering[0], last[0]

    def above(self, hidden: Float[Tensor, "line token width"]) -> Float[Tensor, "line token width"]:
        """The last layer's states, as the layers from the first edited one on are now."""
        replay = self._replay(hidden.shape[1])
        for layer in range(self.first, self.lm.n_layers):
            hidden = replay(layer, hidden)
        return hidden

    def _replay(self, length: int) -> Replay:
        """How the blocks are called on lines of a length; one line's calls serve any number."""
        if length not in self._replays:
            self.below(torch.zeros(1, length, dtype=torch.long, device=self.lm.device))
        return self._replays[length]


LAST = 3
"""How many layers are edited where nothing is said, as in MEND's own settings."""

WeightShape = tuple[str, int, int]
"""A weight's full name, the width of its input (key) and of its output (value)."""


@dataclass(frozen=True, eq=False)
class TargetModule:
    """A weight that is edited."""

    module: nn.Module
    layer: int
    shape: WeightShape

    @property
    def name(self) -> str:
        """The weight's full name in the model."""
        return self.shape[0]


def last_layers(lm: "LM") -> tuple[int, ...]:
    """The layers that are edited where nothing is said."""
    return tuple(range(max(0, lm.n_layers - LAST), lm.n_layers))


def target_modules(lm: "LM", layers: Sequence[int]) -> list[TargetModule]:
    """The weights of those layers' MLPs, lowest layer first."""
    if not layers:
        raise BadSetting("no layer to edit; name at least one")
    found = []
    for layer in sorted({check_layer(lm, layer) for layer in layers}):
        for module in [*lm.mlp_in(layer), lm.mlp_out(layer)]:
            found.append(TargetModule(module, layer, _shape(lm, module)))
    return found


def _shape(lm: "LM", module: Any) -> WeightShape:
    rows, columns = module.weight.shape
    keys, values = (rows, columns) if lm.family.transposed else (columns, rows)
    return f"{lm.name_of(module)}.weight", keys, values


@dataclass(frozen=True, eq=False)
class GradientFactors:
    """One weight's gradient, fact by fact."""

    x: Float[Tensor, "fact token key"]
    delta: Float[Tensor, "fact token value"]

    @cached_property
    def real(self) -> Bool[Tensor, "fact token"]:
        """The tokens that the loss depends on."""
        return (self.delta != 0).any(-1)

    @property
    def alone(self) -> bool:
        """Whether there is one fact only. All its tokens are looked at, so that how many are real
        need not be known (`learned.passes`)."""
        return len(self.x) == 1

    def rows(self, table: Float[Tensor, "fact token width"]) -> Float[Tensor, "row width"]:
        """What the table has at the tokens that are looked at."""
        return table[0] if self.alone else table[self.real]

    def table(self, rows: Float[Tensor, "row width"]) -> Float[Tensor, "fact token width"]:
        """Those rows where they came from; zeros at the tokens that are not real."""
        real = self.real[..., None]
        none = rows.new_zeros(*self.real.shape, rows.shape[-1])
        return torch.where(real, rows, none) if self.alone else none.masked_scatter(real, rows)

    def gradient(self) -> Float[Tensor, "fact value key"]:
        """The gradient itself."""
        return self.delta.mT @ self.x


@dataclass(frozen=True, eq=False)
class FactorChange:
    """One weight's change, fact by fact: ΔW = B A."""

    B: Float[Tensor, "fact value rank"]
    A: Float[Tensor, "fact rank key"]

    def matrix(self) -> Float[Tensor, "fact value key"]:
        """ΔW itself."""
        return self.B @ self.A


def gradient_factors(
    lm: "LM", places: Sequence[TargetModule], halves: SplitModel,
    entering: Float[Tensor, "fact token width"], lines: TokenBatch,
) -> tuple[list[GradientFactors], Float[Tensor, " fact"]]:  # fmt: skip
    """Every place's factors of each fact's loss, and the losses."""
    read: list[Tensor] = [torch.empty(0)] * len(places)
    probes: list[Tensor] = [torch.empty(0)] * len(places)

    def probe(i: int, x: Tensor, output: Tensor) -> Tensor:
        """Add a zero whose gradient is δ."""
        read[i] = x.detach()
        probes[i] = torch.zeros_like(output, requires_grad=True)
        return output + probes[i]

    def at(i: int) -> "tuple":
        return places[i].module, lambda x, output: probe(i, x, output)

    with torch.enable_grad(), hook_io(*map(at, range(len(places)))):
        losses = lines.losses(lines.logs(lm, halves.above(entering)))
        slopes = torch.autograd.grad(losses.sum(), probes)

    def by_fact(tensor: Tensor) -> Tensor:
        return tensor.reshape(len(entering), -1, tensor.shape[-1]).float().to(lm.device)

    both = zip(read, slopes, strict=True)
    return [GradientFactors(by_fact(x), by_fact(delta)) for x, delta in both], losses.detach()


@contextmanager
def changes_applied(
    places: Sequence[TargetModule], changes: Sequence[FactorChange]
) -> Iterator[None]:
    """Inside, each fact's lines see its own change; lines of a fact follow one another."""

    def at(place: TargetModule, change: FactorChange) -> "tuple":
        def add(x: Tensor, output: Tensor) -> Tensor:
            A, B = change.A.to(x.device), change.B.to(x.device)
            mine = x.reshape(len(A), -1, x.shape[-1]).float()
            shift = torch.bmm(torch.bmm(mine, A.mT), B.mT)
            return output + shift.reshape(output.shape).to(output.dtype)

        return place.module, add

    with hook_io(*(at(p, c) for p, c in zip(places, changes, strict=True))):
        yield
