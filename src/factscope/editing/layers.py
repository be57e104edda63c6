"""Which layer a fact is written into: by number, by the model's default, or by a causal trace."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from factscope.editing.defaults import rome_defaults
from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import trace

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Layer", "check_layer", "layer_for", "traced_layer"]

Layer = int | Literal["auto"] | None
"""A number, "auto" for a causal trace, None for the model's default."""


def layer_for(lm: "LM", layer: Layer, facts: Sequence[Fact]) -> int:
    """The layer's number."""
    if layer is None:
        return rome_defaults(lm).layer
    if layer == "auto":
        found = sorted(traced_layer(lm, fact) for fact in facts)
        return found[len(found) // 2]
    return check_layer(lm, layer)


def check_layer(lm: "LM", layer: int) -> int:
    """The layer, if the model has it."""
    if not 0 <= layer < lm.n_layers:
        raise BadSetting(
            f"layer {layer} is out of range: {lm.name} has {lm.n_layers} layers, 0 to "
            f"{lm.n_layers - 1}"
        )
    return layer


def traced_layer(lm: "LM", fact: Fact) -> int:
    """Where restored MLP outputs at the subject's last token bring the answer back best."""
    record = trace(lm, replace(fact, target=None), Tracing(kinds=("mlp",)))
    row = record.subject[1] - 1
    return int(np.argmax(np.asarray(record.restored["mlp"])[row]))
