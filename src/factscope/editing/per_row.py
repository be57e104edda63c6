"""Per-row edits: in one batch, every row sees a model edited in its own way.

An edit of one matrix is ΔW = B A, so the edited output of that module is W x + B (A x): each row
brings its own A and B, and no weight is written. Hundreds of differently edited models are run
in one forward pass.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.editing.applied import weight_of
from factscope.editing.edit import Change, Edit, LowRank
from factscope.errors import BadEdit
from factscope.lm.hooks import hook_io

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["edited", "factors_applied", "factors_by_row", "linear_of"]

GRAIN = 8
"""Ranks above one are filled up to a multiple of this where that makes them alike."""
FEW = 32
"""Up to this rank each row carries its own factors; above, rows go edit by edit."""

Shift = Callable[[Float[Tensor, "row token key"]], Float[Tensor, "row token value"]]
"""What a module's output moves by, given its input."""


@contextmanager
def edited(
    lm: "LM", edits: Sequence[Edit | None], rows: Sequence[int] | None = None
) -> Iterator[None]:
    """Inside, row i of every batch sees edits[rows[i]], or the model as it is where that is None.

    Without `rows`, row i sees edit i. One edit and no `rows`: every row sees it.
    """
    shifts: list[tuple[nn.Module, Callable[[Tensor, Tensor], Tensor | None]]] = []
    by_weight = _by_weight(lm, edits)
    seats = list(range(len(edits))) if rows is None else list(rows)
    if wrong := [seat for seat in seats if not 0 <= seat < len(edits)]:
        raise BadEdit(f"a row asks for edit {wrong[0]}, but there are {len(edits)}, from 0 on")
    everyone = rows is None and len(edits) == 1
    for name, changes in by_weight.items():
        module, kind = linear_of(lm, name), name.rpartition(".")[2]
        if module is None:
            raise BadEdit(
                f"{name} belongs to no linear layer; apply the edit instead of giving it to rows"
            )
        device = weight_of(lm, name).device
        changes = [None if change is None else change.to(device) for change in changes]
        if everyone and changes[0] is not None:
            shift = _same_for_all(changes[0], kind)
        else:
            shift = _by_row(changes, torch.tensor(seats, device=device), kind)
        shifts.append((module, _adding(shift, None if everyone else len(seats))))
    count = [] if everyone or not shifts else [(lm.embed, _counting(len(seats)))]
    with hook_io(*count, *shifts):
        yield


def factors_by_row(lm: "LM", edits: Sequence[Edit | None]) -> dict[str, tuple[Tensor, Tensor]]:
    """By weight, the factors A and B of each row's own edit; of ranks that often come again.

    Nothing where an edit has a change that is too large for that, or of a bias.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, changes in _by_weight(lm, edits).items():
        small = [c for c in changes if c is None or (isinstance(c, LowRank) and c.rank <= FEW)]
        if len(small) < len(changes) or linear_of(lm, name) is None:
            return {}
        alone = all(change is None or change.rank == 1 for change in small)
        device = weight_of(lm, name).device
        A, B = _side_by_side(small, 1 if alone else GRAIN)
        found[name] = (A.to(device), B.to(device))
    return found


@contextmanager
def factors_applied(lm: "LM", factors: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, row i of every batch sees the i-th of the factors (`factors_by_row`)."""
    shifts: list[tuple[nn.Module, Callable[[Tensor, Tensor], Tensor | None]]] = []
    for name, (A, B) in factors.items():
        module = linear_of(lm, name)
        assert module is not None
        shifts.append((module, _adding(_by_factors(A, B), len(A))))
    with hook_io(*shifts):
        yield


def _by_weight(lm: "LM", edits: Sequence[Edit | None]) -> dict[str, list[Change | None]]:
    """For each weight that an edit changes, every edit's change; they must be for this model."""
    there = [edit for edit in edits if edit is not None]
    for edit in there:
        edit.check(lm)
    names = dict.fromkeys(name for edit in there for name in edit.changes)
    return {
        name: [None if edit is None else edit.changes.get(name) for edit in edits] for name in names
    }


def linear_of(lm: "LM", name: str) -> nn.Module | None:
    """The linear layer whose weight or bias has that name; None where it belongs to none alone."""
    weight = weight_of(lm, name)
    owner, _, kind = name.rpartition(".")
    module: Any = lm.model.get_submodule(owner)
    matrix = getattr(module, "weight", None)
    linear = isinstance(matrix, Tensor) and matrix.dim() == 2 and kind in ("weight", "bias")
    if not linear or isinstance(module, nn.Embedding) or weight is lm.embed.weight:
        return None
    return module


def _counting(rows: int) -> Callable[[Tensor, Tensor], None]:
    """Refuse a batch of another size where it enters: OPT's MLP no longer knows its rows."""

    def count(ids: Tensor, output: Tensor) -> None:
        if len(ids) != rows:
            raise BadEdit(f"the batch has shape {tuple(ids.shape)}, but edits for {rows} rows")

    return count


def _adding(shift: Shift, rows: int | None) -> Callable[[Tensor, Tensor], Tensor]:
    """A module's output with the shift added; some families flatten rows and tokens into one."""

    def add(x: Tensor, output: Tensor) -> Tensor:
        if rows is None:
            return output + shift(x).to(output.dtype)
        if x.numel() % (rows * x.shape[-1]) or (x.dim() == 3 and len(x) != rows):
            raise BadEdit(f"the batch has shape {tuple(x.shape)}, but edits for {rows} rows")
        by_row = x.reshape(rows, -1, x.shape[-1])
        return output + shift(by_row).reshape(output.shape).to(output.dtype)

    return add


def _same_for_all(change: Change, kind: str) -> Shift:
    if kind == "bias":
        bias = change.matrix()
        return lambda x: bias
    if isinstance(change, LowRank):
        return lambda x: (x.float() @ change.A.T) @ change.B.T
    return lambda x: x @ change.matrix().T.to(x.dtype)


def _by_row(changes: list[Change | None], rows: Tensor, kind: str) -> Shift:
    present = [change for change in changes if change is not None]
    if kind == "bias":
        zero = torch.zeros_like(present[0].matrix())
        biases = torch.stack([zero if c is None else c.matrix() for c in changes])[rows]
        return lambda x: biases[:, None].expand(-1, x.shape[1], -1)
    if all(isinstance(change, LowRank) and change.rank <= FEW for change in present):
        return _factors_by_row(changes, rows)  # pyright: ignore[reportArgumentType]
    return _edit_by_edit(changes, rows, present[0].shape[0])


def _factors_by_row(changes: "list[LowRank | None]", rows: Tensor) -> Shift:
    """Every row with its own two thin matrices."""
    A, B = (x[rows] for x in _side_by_side(changes))
    return _by_factors(A, B)


def _side_by_side(changes: "Sequence[LowRank | None]", grain: int = 1) -> tuple[Tensor, Tensor]:
    """The factors A and B of all changes, ranks filled up with zeros to a multiple of the grain."""
    known = next(change for change in changes if change is not None)
    largest = max(change.rank for change in changes if change is not None)
    rank = math.ceil(largest / grain) * grain
    A = known.A.new_zeros(len(changes), rank, known.A.shape[1])
    B = known.B.new_zeros(len(changes), known.B.shape[0], rank)
    for i, change in enumerate(changes):
        if change is not None:
            A[i, : change.rank], B[i, :, : change.rank] = change.A, change.B
    return A, B


def _by_factors(A: Tensor, B: Tensor) -> Shift:
    return lambda x: torch.bmm(torch.bmm(x.float(), A.mT), B.mT)


def _edit_by_edit(changes: list[Change | None], rows: Tensor, width: int) -> Shift:
    """Rows of the same edit together, for changes too large to give each row a copy."""
    groups = [
        ((rows == i).nonzero()[:, 0], _same_for_all(change, "weight"))
        for i, change in enumerate(changes)
        if change is not None
    ]

    def shift(x: Tensor) -> Tensor:
        total = torch.zeros(*x.shape[:-1], width, dtype=torch.float32, device=x.device)
        for some, part in groups:
            total[some] = part(x[some]).float()
        return total

    return shift
