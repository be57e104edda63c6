"""Edit: a change of a model's weights, as a value.

An edit names the weights that it changes and says by how much; it knows the model that it is for
and the facts that it writes. It can be applied and taken off, added to another and scaled, saved
and loaded. A rank-one edit is two vectors.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing import ledger
from factscope.editing.health import Health
from factscope.errors import BadEdit
from factscope.facts import Fact

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Change", "Dense", "Edit", "LowRank"]


@dataclass(frozen=True, eq=False)
class LowRank:
    """ΔW = B A, in the paper's orientation W k = v."""

    B: Float[Tensor, "value rank"]
    A: Float[Tensor, "rank key"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ΔW."""
        return self.B.shape[0], self.A.shape[1]

    @property
    def rank(self) -> int:
        """How many directions it has."""
        return self.A.shape[0]

    def matrix(self) -> Float[Tensor, "value key"]:
        """ΔW itself."""
        return self.B @ self.A

    def to(self, device: torch.device | str) -> "LowRank":
        """The same on a device."""
        return LowRank(self.B.to(device), self.A.to(device))

    def __mul__(self, factor: float) -> "LowRank":
        return LowRank(self.B * factor, self.A)

    def norm(self) -> float:
        """The Frobenius norm of ΔW, without making it."""
        if self.rank == 1:  # the usual case, without the threads that a product would wake
            return (self.B.double().norm() * self.A.double().norm()).item()
        gram = (self.B.T.double() @ self.B.double()) * (self.A.double() @ self.A.T.double())
        return gram.sum().clamp(min=0).sqrt().item()


@dataclass(frozen=True, eq=False)
class Dense:
    """ΔW entry by entry, in the paper's orientation; or a change of a bias."""

    delta: Float[Tensor, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ΔW."""
        return tuple(self.delta.shape)

    @property
    def rank(self) -> int:
        """The most directions that it can have."""
        return min(self.delta.shape)

    def matrix(self) -> Float[Tensor, "..."]:
        """ΔW itself."""
        return self.delta

    def to(self, device: torch.device | str) -> "Dense":
        """The same on a device."""
        return Dense(self.delta.to(device))

    def __mul__(self, factor: float) -> "Dense":
        return Dense(self.delta * factor)

    def norm(self) -> float:
        """The Frobenius norm of ΔW."""
        return self.delta.double().norm().item()


Change = LowRank | Dense


def added(first: Change, second: Change) -> Change:
    """The sum of two changes of one weight: two low ranks stay one, as long as that is smaller."""
    if first.shape != second.shape:
        raise BadEdit(f"changes of shape {first.shape} and {second.shape} cannot be added")
    if isinstance(first, LowRank) and isinstance(second, LowRank):
        both = first.rank + second.rank
        if both * sum(first.shape) < first.shape[0] * first.shape[1]:
            return LowRank(
                torch.cat([first.B, second.B], dim=1), torch.cat([first.A, second.A], dim=0)
            )
    return Dense(first.matrix() + second.matrix())


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """Changes of named weights of one model, in float32."""

    changes: Mapping[str, Change]
    """The full name of a parameter → its change."""
    model: str
    """The name of the model that the edit is for."""
    fingerprint: str
    """That model's fingerprint before any edit."""
    method: str
    facts: tuple[Fact, ...]
    """What it writes: each fact's target is its new object."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """How it was made, every default spelled out."""
    health: Health | None = None
    """The guard rails' figures; None where they were not measured."""

    @cached_property
    def places(self) -> tuple[str, ...]:
        """Where it is written, in order."""
        return tuple(sorted(self.changes))

    def apply(self, lm: "LM", *, force: bool = False) -> None:
        """Write it into the model's weights, on top of the edits that are there.

        Refuses another model, and an edit beyond the guard rails; `force` does it all the same.
        """
        if not force:
            self.check(lm)
            if self.health is not None:
                self.health.refuse()
        ledger.add(lm, self)

    def revert(self, lm: "LM") -> None:
        """Take it off again, in whatever order edits were applied: bit by bit as without it."""
        ledger.remove(lm, self)

    @contextmanager
    def applied(self, lm: "LM", *, force: bool = False) -> Iterator["LM"]:
        """Applied inside the block; afterwards the weights are as before, also after an error."""
        self.apply(lm, force=force)
        try:
            yield lm
        finally:
            self.revert(lm)

    def check(self, lm: "LM") -> None:
        """Refuse a model that the edit is not for."""
        if lm.fingerprint != self.fingerprint:
            raise BadEdit(
                f"the edit is for {self.model} (fingerprint {self.fingerprint[:12]}), not for "
                f"{lm.name} ({lm.fingerprint[:12]}); load the model that it was made for"
            )

    def to(self, device: torch.device | str) -> "Edit":
        """The same edit with its tensors on a device."""
        return replace(self, changes={name: x.to(device) for name, x in self.changes.items()})

    def save(self, path: str | Path) -> None:
        """Write it to a file, whole or not at all; see `editing.edit_file`."""
        from factscope.editing.edit_file import save_edit

        save_edit(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Edit":
        """The edit in a file."""
        from factscope.editing.edit_file import load_edit

        return load_edit(path)

    def __add__(self, other: "Edit") -> "Edit":
        if self.fingerprint != other.fingerprint:
            raise BadEdit(
                f"an edit for {self.model} ({self.fingerprint[:12]}) and one for {other.model} "
                f"({other.fingerprint[:12]}) cannot be added"
            )
        changes = dict(self.changes)
        for name, change in other.changes.items():
            changes[name] = added(changes[name], change) if name in changes else change
        return replace(
            self,
            changes=changes,
            method=_joined(self.method, other.method),
            facts=self.facts + other.facts,
            settings={"parts": [*_parts(self), *_parts(other)]},
            health=None,
        )

    def __mul__(self, factor: float) -> "Edit":
        changes = {name: change * factor for name, change in self.changes.items()}
        scale = factor * self.settings.get("scale", 1.0)
        return replace(
            self, changes=changes, settings={**self.settings, "scale": scale}, health=None
        )

    __rmul__ = __mul__


def _joined(first: str, second: str) -> str:
    names = dict.fromkeys([*first.split(" + "), *second.split(" + ")])
    return " + ".join(names)


def _parts(edit: Edit) -> list[dict[str, Any]]:
    if "parts" not in edit.settings:
        return [{"method": edit.method, **edit.settings}]
    parts, scale = edit.settings["parts"], edit.settings.get("scale")
    if scale is None:
        return list(parts)
    return [{**part, "scale": scale * part.get("scale", 1.0)} for part in parts]
