"""KE: an LSTM reads the fact and gates its gradient (De Cao et al. 2021; App. E.3).

From the state in which the LSTM leaves the fact's tokens come, for each weight, two rank-one
matrices and a gate:

    ΔW = rate · σ(g) · (∇W ⊙ a + b),    a = softmax(r) cᵀ,    b = softmax(r') c'ᵀ

∇W is a sum of outer products δ xᵀ, and ∇W ⊙ (r cᵀ) = Σ (δ ⊙ r)(x ⊙ c)ᵀ: the edit stays of low rank.
The gradient enters in units of its usual size, a begins as the step against it and b as nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.hypernet.gradients import FactorChange, GradientFactors
from factscope.editing.hypernet.model import EmbeddedRequest, HypernetConfig, Hypernetwork

__all__ = ["KeConfig", "KeNetwork"]


@dataclass(frozen=True, kw_only=True)
class KeConfig(HypernetConfig):
    """How a KE network is built; the widths are the published ones."""

    lstm: int = 512
    """Width of the LSTM's states, in each direction."""
    condition: int = 768
    """Width of what the LSTM's end state is mapped to."""
    hidden: int = 128
    """Width of each place's own layer."""
    lr: float = 5e-5
    """How far an edit goes at first: ‖ΔW‖ is about this times √(keys · values) for each token."""


class Gate(nn.Module):
    """One place's rank-one matrices and gate, given the LSTM's state."""

    def __init__(self, design: KeConfig, keys: int, values: int) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.inner = nn.Linear(design.condition, design.hidden)
        self.outer = nn.Linear(design.hidden, 2 * (keys + values) + 1)
        self.log_rate = nn.Parameter(torch.tensor(math.log(2 * design.lr)))  # σ(0) = 1/2
        with torch.no_grad():
            self.outer.weight *= 0.1
            self.outer.bias.zero_()
            self.outer.bias[:keys] = -1  # a begins as -1: against the gradient

    def forward(self, state: Float[Tensor, "fact condition"]) -> tuple[Tensor, ...]:
        """c, r, c', r' and the gate with the rate, for each fact."""
        said = self.outer(self.inner(state).tanh())
        widths = [self.keys, self.values, self.keys, self.values, 1]
        c, r, c_, r_, gate = said.split(widths, dim=-1)
        # Times its width, so that a is about c whatever the width; b, as published, is not.
        r, r_ = r.softmax(-1) * self.values, r_.softmax(-1)
        return c, r, c_, r_, gate.sigmoid() * self.log_rate.exp()


class KeNetwork(Hypernetwork):
    """The LSTM, each place's gate, and how large factors usually are."""

    method: ClassVar[str] = "ke"

    def __init__(self, design: KeConfig) -> None:
        super().__init__(design)
        self.lstm = nn.LSTM(design.width, design.lstm, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * design.lstm, design.condition)
        self.gates = nn.ModuleList(Gate(design, keys, values) for _, keys, values in design.places)

    def changes(
        self, factors: Sequence[GradientFactors], read: Float[Tensor, "fact condition"]
    ) -> list[FactorChange]:
        """Each place's change for each fact."""
        return [self._change(i, some, read) for i, some in enumerate(factors)]

    def read(self, told: EmbeddedRequest) -> Float[Tensor, "fact condition"]:
        """The facts as the LSTM leaves them, from both ends."""
        embedded = nn.functional.layer_norm(told.embedded.float(), told.embedded.shape[-1:])
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, told.lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (ends, _) = self.lstm(packed)
        return self.linear(torch.cat([ends[0], ends[1]], dim=-1)).tanh()

    def _change(self, place: int, factors: GradientFactors, state: Tensor) -> FactorChange:
        usual_x, usual_delta = self.usual(place)
        x, delta = factors.x / usual_x.size, factors.delta / usual_delta.size
        c, r, c_, r_, gate = self.gates[place](state)
        B = torch.cat([delta * r[:, None], r_[:, None]], dim=1) * gate[:, None]
        return FactorChange(B=B.mT, A=torch.cat([x * c[:, None], c_[:, None]], dim=1))

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Everything at the rate, but for the edits' own."""
        rates = [gate.log_rate for gate in self.gates]
        others = [p for name, p in self.named_parameters() if not name.endswith("log_rate")]
        return [{"params": others, "lr": lr}, {"params": rates, "lr": 1e-2}]
