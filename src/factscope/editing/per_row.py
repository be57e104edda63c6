"""Per-row edits: each row of a batch runs with its own edit.

The output of a linear layer whose weight is changed by ΔW = B A is W x + B (A x). A hook adds the
second term, with A and B of each row's edit, so no weight is written and one forward pass runs
hundreds of differently edited models.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.editing.edit import Change, Edit, LowRank, check_shapes, weight_of
from factscope.errors import BadEdit
from factscope.lm.hooks import hook_io

if TYPE_CHECKING:
    from factscope.lm.model import LM

MAX_FACTOR_RANK = 32
"""Up to this rank each row gets its own copy of A and B; above, rows are grouped by edit."""
RANK_MULTIPLE = 8
"""`factors_by_row` pads ranks above 1 to a multiple of this, so that few distinct shapes occur."""

OutputDelta = Callable[[Float[Tensor, "row token key"]], Float[Tensor, "row token value"]]
"""What is added to a module's output, as a function of its input."""
Hook = tuple[nn.Module, Callable[[Tensor, Tensor], Tensor | None]]
"""A module and a function of its input and output."""


@contextmanager
def edited(
    lm: "LM", edits: Sequence[Edit | None], edit_index: Sequence[int] | None = None
) -> Iterator[None]:
    """Inside, row i of every batch runs with edits[edit_index[i]]; None leaves a row unedited.

    Without `edit_index` row i gets edit i; a single edit is then given to all rows of any batch.
    """
    changes_by_weight = _changes_by_weight(lm, edits)
    indices = list(range(len(edits)) if edit_index is None else edit_index)
    if wrong := [i for i in indices if not 0 <= i < len(edits)]:
        raise BadEdit(f"a row is given edit {wrong[0]}, but there are {len(edits)}, from 0 on")
    rows = None if edit_index is None and len(edits) == 1 else len(indices)

    def check_rows(ids: Tensor, output: Tensor) -> None:
        # Where the batch enters the model: OPT's MLP sees flattened rows.
        if len(ids) != rows:
            raise BadEdit(f"the batch has shape {tuple(ids.shape)}, but edits for {rows} rows")

    hooks: list[Hook] = []
    if changes_by_weight and rows is not None:
        hooks.append((lm.embed, check_rows))
    for name, changes in changes_by_weight.items():
        module, kind = linear_of(lm, name), name.rpartition(".")[2]
        if module is None:
            raise BadEdit(
                f"{name} belongs to no linear layer; apply the edit instead of giving it to rows"
            )
        device = weight_of(lm, name).device
        changes = [None if change is None else change.to(device) for change in changes]
        if rows is None and changes[0] is not None:
            delta = _output_delta(changes[0], kind)
        else:
            delta = _output_delta_by_row(changes, torch.tensor(indices, device=device), kind)
        hooks.append((module, _add_to_output(delta, rows)))
    with hook_io(*hooks):
        yield


def factors_by_row(lm: "LM", edits: Sequence[Edit | None]) -> dict[str, tuple[Tensor, Tensor]]:
    """For each changed weight A and B of all edits, stacked, for `factors_applied`.

    Empty if an edit changes a bias, or has a change that is dense or of too high a rank.
    """
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    for name, changes in _changes_by_weight(lm, edits).items():
        stacked = _stack_factors(changes, RANK_MULTIPLE)
        if stacked is None or linear_of(lm, name) is None:
            return {}
        A, B = stacked
        device = weight_of(lm, name).device
        factors[name] = (A.to(device), B.to(device))
    return factors


@contextmanager
def factors_applied(lm: "LM", factors: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, row i of every batch runs with the i-th factors of `factors_by_row`."""
    hooks: list[Hook] = []
    for name, (A, B) in factors.items():
        module = lm.model.get_submodule(name.rpartition(".")[0])
        hooks.append((module, _add_to_output(_factor_delta(A, B), len(A))))
    with hook_io(*hooks):
        yield


def linear_of(lm: "LM", name: str) -> nn.Module | None:
    """The linear layer that owns the weight or bias of that name; None if no such layer does, or
    not alone (an embedding that is tied to the head)."""
    weight = weight_of(lm, name)
    owner, _, kind = name.rpartition(".")
    module: Any = lm.model.get_submodule(owner)
    matrix = getattr(module, "weight", None)
    linear = isinstance(matrix, Tensor) and matrix.dim() == 2 and kind in ("weight", "bias")
    if not linear or isinstance(module, nn.Embedding) or weight is lm.embed.weight:
        return None
    return module


def _changes_by_weight(lm: "LM", edits: Sequence[Edit | None]) -> dict[str, list[Change | None]]:
    """Weight name → the change of it by each edit."""
    for edit in edits:
        if edit is not None:
            edit.check_model(lm)
    names = dict.fromkeys(name for edit in edits if edit is not None for name in edit.changes)
    by_weight = {
        name: [None if edit is None else edit.changes.get(name) for edit in edits] for name in names
    }
    for name, changes in by_weight.items():
        check_shapes(lm, name, [change for change in changes if change is not None])
    return by_weight


# ---- hooks


def _add_to_output(delta: OutputDelta, rows: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """Add delta(input) to a module's output. Some families flatten rows and tokens: undo that."""

    def add(x: Tensor, output: Tensor) -> Tensor:
        if rows is None:
            return output + delta(x).to(output.dtype)
        if x.numel() % (rows * x.shape[-1]) or (x.dim() == 3 and len(x) != rows):
            raise BadEdit(f"the batch has shape {tuple(x.shape)}, but edits for {rows} rows")
        by_row = x.reshape(rows, -1, x.shape[-1])
        return output + delta(by_row).reshape(output.shape).to(output.dtype)

    return add


# ---- ΔW x


def _output_delta(change: Change, kind: str) -> OutputDelta:
    """The same change for all rows."""
    if kind == "bias":
        bias = change.matrix()
        return lambda x: bias
    if isinstance(change, LowRank):
        return lambda x: (x.float() @ change.A.T) @ change.B.T
    return lambda x: x @ change.matrix().T.to(x.dtype)


def _output_delta_by_row(
    changes: Sequence[Change | None], edit_index: Int[Tensor, " row"], kind: str
) -> OutputDelta:
    """Row i is changed by changes[edit_index[i]]."""
    stacked = _stack_factors(changes)
    if stacked is not None:
        A, B = stacked
        return _factor_delta(A[edit_index], B[edit_index])
    value = next(change.shape[0] for change in changes if change is not None)
    # A copy for each row would be too large: group the rows by edit.
    groups = [
        ((edit_index == i).nonzero()[:, 0], _output_delta(change, kind))
        for i, change in enumerate(changes)
        if change is not None
    ]

    def delta(x: Tensor) -> Tensor:
        total = x.new_zeros(*x.shape[:-1], value, dtype=torch.float32)
        for rows, group_delta in groups:
            total[rows] = group_delta(x[rows]).float()
        return total

    return delta


def _factor_delta(
    A: Float[Tensor, "row rank key"], B: Float[Tensor, "row value rank"]
) -> OutputDelta:
    return lambda x: torch.bmm(torch.bmm(x.float(), A.mT), B.mT)


def _stack_factors(
    changes: Sequence[Change | None], multiple: int = 1
) -> tuple[Float[Tensor, "edit rank key"], Float[Tensor, "edit value rank"]] | None:
    """A and B of all changes; None if one is dense, or its rank too high for a copy per row.

    Ranks are padded with zeros to the highest one, which is rounded up to `multiple` if above 1.
    """
    low_rank = {i: change for i, change in enumerate(changes) if isinstance(change, LowRank)}
    rank = max((change.rank for change in low_rank.values()), default=0)
    dense = any(change is not None and i not in low_rank for i, change in enumerate(changes))
    if dense or rank > MAX_FACTOR_RANK:
        return None
    rank = rank if rank == 1 else math.ceil(rank / multiple) * multiple
    first = next(iter(low_rank.values()))
    A = first.A.new_zeros(len(changes), rank, first.shape[1])
    B = first.B.new_zeros(len(changes), first.shape[0], rank)
    for i, change in low_rank.items():
        A[i, : change.rank], B[i, :, : change.rank] = change.A, change.B
    return A, B
