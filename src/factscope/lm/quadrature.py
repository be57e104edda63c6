"""Quadrature rules on [0, 1], for gradients integrated along a path."""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

Rule = Literal["gauss", "radau", "ends"]
"""`gauss`: Gauss-Legendre nodes, none at the ends. `radau`: Radau nodes, one of them at 0. `ends`:
equally spaced nodes from 0 to 1 with equal weights, which gives the two ends too much weight."""


def quadrature(
    steps: int, rule: Rule = "gauss"
) -> tuple[Float[Tensor, " point"], Float[Tensor, " point"]]:
    """The nodes of a rule in [0, 1] and their weights, which sum to 1."""
    if rule == "ends":
        nodes = torch.linspace(0, 1, steps, dtype=torch.float64)
        return nodes, torch.full_like(nodes, 1 / steps)
    points, weights = np.polynomial.legendre.leggauss(steps) if rule == "gauss" else _radau(steps)
    return torch.tensor((points + 1) / 2), torch.tensor(weights / 2)


def _radau(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Radau nodes in [-1, 1] and their weights: -1, and the other roots of Pₙ₋₁ + Pₙ."""
    legendre = np.polynomial.legendre
    roots = legendre.legroots([0.0] * (steps - 1) + [1.0, 1.0])
    nodes = np.sort(roots.real)  # the roots are real; numpy may return complex numbers
    nodes[0] = -1.0
    previous = legendre.legval(nodes, [0.0] * (steps - 1) + [1.0])
    return nodes, (1 - nodes) / (steps * previous) ** 2
