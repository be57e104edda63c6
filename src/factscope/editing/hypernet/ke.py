"""KE: an LSTM reads the fact and gates its gradient (De Cao et al. 2021; App. E.3).

The LSTM's final states encode the fact. From them come two rank-one matrices and a scalar gate g
for each weight, with a learned step size α_W:

    ΔW = α_W σ(g) (∇W ⊙ a + b),    a = softmax(r) cᵀ,    b = softmax(r') c'ᵀ

∇W is a sum of outer products δ xᵀ, and (δ xᵀ) ⊙ (r cᵀ) = (δ ⊙ r)(x ⊙ c)ᵀ, so the edit keeps a low
rank. x and δ are divided by their running root mean square. At first a is a step against the
gradient and b is 0.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.hypernet.gradients import FactorChange, GradientFactors, WeightShape
from factscope.editing.hypernet.model import (
    LR_OF_STEP_SIZES,
    EditedWeights,
    EmbeddedRequest,
    Hypernetwork,
)
from factscope.editing.hypernet.settings import KeConfig


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

    method: ClassVar[str] = "ke"

    def __init__(self, config: KeConfig, weights: EditedWeights) -> None:
        super().__init__(config, weights)
        self.lstm = nn.LSTM(
            weights.hidden_size, config.lstm_width, bidirectional=True, batch_first=True
        )
        self.linear = nn.Linear(2 * config.lstm_width, config.condition_width)
        self.gates = nn.ModuleList(Gate(config, shape) for shape in weights.shapes)

    def encode(self, request: EmbeddedRequest) -> Float[Tensor, "fact condition"]:
        """The LSTM's final states in both directions, mapped to one vector for each fact."""
        embedded = nn.functional.layer_norm(request.embedded.float(), request.embedded.shape[-1:])
        packed = nn.utils.rnn.pack_padded_sequence(
            embedded, request.lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (final, _) = self.lstm(packed)
        return self.linear(torch.cat([final[0], final[1]], dim=-1)).tanh()

    def changes(
        self, factors: Sequence[GradientFactors], encoded: Float[Tensor, "fact condition"]
    ) -> list[FactorChange]:
        """The change of each weight for each fact."""
        return [self._change(i, part, encoded) for i, part in enumerate(factors)]

    def _change(self, i: int, factors: GradientFactors, encoded: Tensor) -> FactorChange:
        x_norm, delta_norm = self.norms(i)
        x, delta = factors.x / x_norm.rms, factors.delta / delta_norm.rms
        c, r, c_, r_, gate = self.gates[i](encoded)
        # One rank for each token (∇W ⊙ a) and one more for b.
        B = torch.cat([delta * r[:, None], r_[:, None]], dim=1) * gate[:, None]
        return FactorChange(B=B.mT, A=torch.cat([x * c[:, None], c_[:, None]], dim=1))

    def parameter_groups(self, lr: float) -> list[dict[str, Any]]:
        """The network at `lr`, the step sizes at their own learning rate."""
        step_sizes = [gate.log_edit_lr for gate in self.gates]
        others = [p for name, p in self.named_parameters() if not name.endswith("log_edit_lr")]
        return [{"params": others, "lr": lr}, {"params": step_sizes, "lr": LR_OF_STEP_SIZES}]
