"""Apply edits to a model and revert them in any order, bit-for-bit.

For each changed weight the original tensor is stored while any edit changes it. Applying or
reverting an edit recomputes its weights from the originals, with the remaining edits in order of
application: subtracting a delta again would leave rounding errors.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from factscope.errors import BadEdit

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.lm.model import LM


@dataclass
class _Applied:
    edits: "list[Edit]" = field(default_factory=list)
    originals: dict[str, Tensor] = field(default_factory=dict)
    """Name of a changed weight → the weight before any edit."""


_APPLIED: "WeakKeyDictionary[nn.Module, _Applied]" = WeakKeyDictionary()


def applied_edits(lm: "LM") -> "tuple[Edit, ...]":
    """The edits applied to the model, oldest first."""
    state = _APPLIED.get(lm.model)
    return () if state is None else tuple(state.edits)


def apply_edit(lm: "LM", edit: "Edit") -> None:
    """Add an edit to the model's weights, after the edits that are applied already."""
    _ = lm.fingerprint  # computed once; must be that of the unedited weights
    edits = applied_edits(lm)
    if any(other is edit for other in edits):
        raise BadEdit("the edit is applied already; revert it first, or scale it to apply it twice")
    _set_edits(lm, [*edits, edit], edit.changes, must_change=True)


def revert_edit(lm: "LM", edit: "Edit") -> None:
    """Remove an edit from the model's weights."""
    edits = applied_edits(lm)
    if not any(other is edit for other in edits):
        raise BadEdit("the edit is not applied to this model; apply it first")
    _set_edits(lm, [other for other in edits if other is not edit], edit.changes)


@torch.no_grad()
def _set_edits(
    lm: "LM", edits: "list[Edit]", names: Iterable[str], *, must_change: bool = False
) -> None:
    """Recompute the named weights for the given edits: all of them or, on an error, none."""
    state = _APPLIED.setdefault(lm.model, _Applied())
    weights = {name: weight_of(lm, name) for name in names}
    before = {name: weight.clone() for name, weight in weights.items()}
    originals = {name: state.originals.get(name, before[name]) for name in weights}
    try:
        for name, weight in weights.items():
            edited = _edited_weight(lm, originals[name], name, edits)
            if must_change and torch.equal(edited, before[name]):
                raise BadEdit(
                    f"the edit is so small that {name} does not change in {weight.dtype}; "
                    "not applied"
                )
            weight.copy_(edited)
    except BaseException:
        for name, weight in weights.items():
            weight.copy_(before[name])
        raise
    state.edits = edits
    state.originals.update(originals)
    for name in weights:
        if not any(name in edit.changes for edit in edits):
            del state.originals[name]


def _edited_weight(lm: "LM", original: Tensor, name: str, edits: "list[Edit]") -> Tensor:
    """The original weight plus the edits' changes of it, summed in float32."""
    changes = [edit.changes[name] for edit in edits if name in edit.changes]
    if not changes:
        return original
    transposed = is_transposed(lm, name)
    total = original.to(torch.promote_types(original.dtype, torch.float32))
    for change in changes:
        delta = change.to(original.device).matrix().float()
        delta = delta.T if transposed else delta
        if delta.shape != total.shape:
            raise BadEdit(
                f"{name} has shape {tuple(total.shape)}, the edit's change of it "
                f"{tuple(delta.shape)}; is it for another model?"
            )
        total = total + delta
    edited = total.to(original.dtype)
    if not edited.isfinite().all():
        raise BadEdit(f"the edit would make {name} infinite in {original.dtype}; not applied")
    return edited


def weight_of(lm: "LM", name: str) -> nn.Parameter:
    """The parameter of that name. A tied weight must be given by its first name: edits of it would
    not be found under two names."""
    try:
        weight = lm.model.get_parameter(name)
    except AttributeError as error:
        raise BadEdit(
            f"{lm.name} has no weight {name!r}; is the edit for another model?"
        ) from error
    if weight.is_meta:
        raise BadEdit(f"{name} is not in memory (offloaded); load the model without offloading")
    checked = lm.cache.setdefault("weights by first name", {})
    if checked.get(name) is not weight:
        first = next(other for other, found in lm.model.named_parameters() if found is weight)
        if first != name:
            raise BadEdit(f"{name} is tied to {first}; name the change of it {first!r}")
        checked[name] = weight
    return weight


def is_transposed(lm: "LM", name: str) -> bool:
    """Whether a matrix is stored as (key, value), as in GPT-2's Conv1D layers."""
    owner = lm.model.get_submodule(name.rpartition(".")[0])
    is_matrix = lm.model.get_parameter(name).dim() == 2
    return lm.family.transposed and is_matrix and not isinstance(owner, nn.Linear | nn.Embedding)
