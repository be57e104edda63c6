"""Second moments for tests: random token sequences, hand-made matrices, relative differences."""

from typing import Any

import torch
from torch import Tensor

from factscope.stats.second_moment import SecondMoment

from families import VOCABULARY

LENGTH = 8


def random_sequences(count: int, length: int = LENGTH, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count, length), generator=generator).tolist()


def relative_difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def second_moment(matrix: Tensor | None = None, **fields: Any) -> SecondMoment:
    """A second moment without a model."""
    defaults: dict[str, Any] = {
        "matrix": torch.eye(4) if matrix is None else matrix,
        "layer": 1, "tokens": 100, "corpus": "a text", "model": "m", "fingerprint": "f" * 64,
    }  # fmt: skip
    return SecondMoment(**{**defaults, **fields})
