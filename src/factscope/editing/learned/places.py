"""Which weights a learned editor changes: those of the last layers' MLPs, in and out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from factscope.editing.layers import check_layer
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["LAST", "Place", "Shape", "last_layers", "places_of"]

LAST = 3
"""How many layers are edited where nothing is said, as in MEND's own settings."""

Shape = tuple[str, int, int]
"""A weight's full name, the width of its input (key) and of its output (value)."""


@dataclass(frozen=True, eq=False)
class Place:
    """A weight that is edited."""

    module: nn.Module
    layer: int
    shape: Shape

    @property
    def name(self) -> str:
        """The weight's full name in the model."""
        return self.shape[0]


def last_layers(lm: "LM") -> tuple[int, ...]:
    """The layers that are edited where nothing is said."""
    return tuple(range(max(0, lm.n_layers - LAST), lm.n_layers))


def places_of(lm: "LM", layers: Sequence[int]) -> list[Place]:
    """The weights of those layers' MLPs, lowest layer first."""
    if not layers:
        raise BadSetting("no layer to edit; name at least one")
    found = []
    for layer in sorted({check_layer(lm, layer) for layer in layers}):
        for module in [*lm.mlp_in(layer), lm.mlp_out(layer)]:
            found.append(Place(module, layer, _shape(lm, module)))
    return found


def _shape(lm: "LM", module: Any) -> Shape:
    rows, columns = module.weight.shape
    keys, values = (rows, columns) if lm.arch.transposed else (columns, rows)
    return f"{lm.name_of(module)}.weight", keys, values
