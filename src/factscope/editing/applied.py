"""Which edits are in a model's weights, so that each can come off again, bit by bit.

For every weight that an edit changed, the ledger keeps the weight as it was before the first, and
the edits in their order. Whatever edit comes off, the weight is computed anew from there: floating
point sums do not undo, copies do.
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

__all__ = ["applied_edits", "apply_edit", "is_transposed", "revert_edit", "weight_of"]


@dataclass
class _Ledger:
    originals: dict[str, Tensor] = field(default_factory=dict)
    edits: "list[Edit]" = field(default_factory=list)


_LEDGERS: "WeakKeyDictionary[nn.Module, _Ledger]" = WeakKeyDictionary()
"""One for each model that has edits, for as long as the model lives."""


def applied_edits(lm: "LM") -> "tuple[Edit, ...]":
    """The edits that are in the model's weights, oldest first."""
    found = _LEDGERS.get(lm.model)
    return () if found is None else tuple(found.edits)


def apply_edit(lm: "LM", edit: "Edit") -> None:
    """Write an edit on top of those that are there."""
    _ = lm.fingerprint  # of the weights before any edit
    there = applied_edits(lm)
    if any(other is edit for other in there):
        raise BadEdit("the edit is applied already; revert it first, or scale it to have it twice")
    _become(lm, [*there, edit], edit.changes, must_change=True)


def revert_edit(lm: "LM", edit: "Edit") -> None:
    """Compute the weights as if the edit had never been there."""
    there = applied_edits(lm)
    if not any(other is edit for other in there):
        raise BadEdit("the edit is not in this model; apply it first")
    _become(lm, [other for other in there if other is not edit], edit.changes)


def weight_of(lm: "LM", name: str) -> nn.Parameter:
    """The weight of that name; a tied weight has one name, so that edits of it meet."""
    try:
        weight = lm.model.get_parameter(name)
    except AttributeError as error:
        raise BadEdit(
            f"{lm.name} has no weight {name!r}; is the edit for another model?"
        ) from error
    if weight.is_meta:
        raise BadEdit(f"{name} is not in memory (offloaded); load the model without offloading")
    names = lm.cache.setdefault("weights by their one name", {})
    if names.get(name) is not weight:
        known = next(other for other, found in lm.model.named_parameters() if found is weight)
        if known != name:
            raise BadEdit(f"{name} is tied to {known}; name the change of it {known!r}")
        names[name] = weight
    return weight


def is_transposed(lm: "LM", name: str) -> bool:
    """Whether a weight is stored as (key, value), as GPT-2's Conv1D does, not its embeddings."""
    owner = lm.model.get_submodule(name.rpartition(".")[0])
    matrix = lm.model.get_parameter(name).dim() == 2
    return lm.family.transposed and matrix and not isinstance(owner, nn.Linear | nn.Embedding)


@torch.no_grad()
def _become(
    lm: "LM", edits: "list[Edit]", names: Iterable[str], *, must_change: bool = False
) -> None:
    """Make the named weights what the edits say: all of them or, after an error, none."""
    ledger = _LEDGERS.setdefault(lm.model, _Ledger())
    weights = {name: weight_of(lm, name) for name in names}
    before = {name: weight.clone() for name, weight in weights.items()}
    originals = {name: ledger.originals.get(name, before[name]) for name in weights}
    try:
        for name, weight in weights.items():
            edited = _edited(lm, originals[name], name, edits)
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
    ledger.edits = edits
    ledger.originals.update(originals)
    for name in weights:
        if not any(name in edit.changes for edit in edits):
            del ledger.originals[name]


def _edited(lm: "LM", original: Tensor, name: str, edits: "list[Edit]") -> Tensor:
    """The original weight with every edit's change of it."""
    changes = [edit.changes[name] for edit in edits if name in edit.changes]
    if not changes:
        return original
    flip = is_transposed(lm, name)
    total = original.to(torch.promote_types(original.dtype, torch.float32))
    for change in changes:
        delta = change.to(original.device).matrix().float()
        delta = delta.T if flip else delta
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
