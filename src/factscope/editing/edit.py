"""Edit: a change of a model's weights, as a value.

An edit names the weights that it changes and says by how much; it knows the model that it is for
and the facts that it writes. It can be applied and taken off, added to another and scaled, saved
and loaded. A rank-one edit is two vectors.

Edits as files: safetensors, with what they are for and what they write in the header.

A low-rank change of a weight is two tensors, `<weight>#B` and `<weight>#A`; any other is one,
`<weight>#delta`. All are float32, in the paper's orientation. Nothing in the file is code.

Guard rails: figures that tell an edit which would break the model.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from factscope.editing import applied as ledger
from factscope.errors import BadEdit, BadFact, UnsafeEdit
from factscope.facts import Fact
from factscope.io import write_atomic

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "Change",
    "CheckLimits",
    "Dense",
    "Edit",
    "EditChecks",
    "LowRank",
    "load_edit",
    "save_edit",
]


@dataclass(frozen=True, kw_only=True)
class CheckLimits:
    """How far an edit may go."""

    division_factor: float = 0.02
    """At least: the cosine between the key and C⁻¹k, by which the update is divided. Where it is
    near 0 the update is huge; docs/results.md says what is usual."""
    update_norm: float = 0.5
    """At most: ‖ΔW‖ / ‖W‖ of the weight that changes most."""
    perplexity: float = 1.5
    """At most: by what factor the perplexity of a plain text may grow."""


@dataclass(frozen=True, kw_only=True)
class EditChecks:
    """What the guard rails saw of an edit."""

    division_factor: float | None
    """The smallest cosine between a key and the direction it is divided by; None without one."""
    update_norm: float
    """The largest ‖ΔW‖ / ‖W‖ over the changed weights."""
    perplexity_before: float
    perplexity_after: float

    @property
    def perplexity_growth(self) -> float:
        """By what factor the plain text's perplexity grew."""
        return self.perplexity_after / self.perplexity_before

    def complaints(self, limits: CheckLimits | None = None) -> list[str]:
        """Each limit that the edit breaks, by name and with its value."""
        limits = limits or CheckLimits()
        found = []
        if self.division_factor is not None and not self.division_factor >= limits.division_factor:
            found.append(
                f"division factor {self.division_factor:.3g} below {limits.division_factor:g}"
            )
        if not self.update_norm <= limits.update_norm:
            found.append(
                f"update norm {self.update_norm:.3g} of the weight's, above {limits.update_norm:g}"
            )
        if not self.perplexity_growth <= limits.perplexity:
            found.append(
                f"perplexity of a plain text from {self.perplexity_before:.4g} to "
                f"{self.perplexity_after:.4g}, above {limits.perplexity:g} times"
            )
        return found

    def refuse(self, limits: CheckLimits | None = None) -> None:
        """Raise by name where a limit is broken."""
        complaints = self.complaints(limits)
        if complaints:
            raise UnsafeEdit(
                f"the edit is beyond the guard rails: {'; '.join(complaints)}. Try another layer "
                "or prompt; force it to have it all the same"
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


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


def add_changes(first: Change, second: Change) -> Change:
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
    checks: EditChecks | None = None
    """The guard rails' figures; None where they were not measured."""

    @cached_property
    def changed_weights(self) -> tuple[str, ...]:
        """Where it is written, in order."""
        return tuple(sorted(self.changes))

    def apply(self, lm: "LM", *, force: bool = False) -> None:
        """Write it into the model's weights, on top of the edits that are there.

        Refuses another model, and an edit beyond the guard rails; `force` does it all the same.
        """
        if not force:
            self.check(lm)
            if self.checks is not None:
                self.checks.refuse()
        ledger.apply_edit(lm, self)

    def revert(self, lm: "LM") -> None:
        """Take it off again, in whatever order edits were applied: bit by bit as without it."""
        ledger.revert_edit(lm, self)

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

        save_edit(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Edit":
        """The edit in a file."""

        return load_edit(path)

    def __add__(self, other: "Edit") -> "Edit":
        if self.fingerprint != other.fingerprint:
            raise BadEdit(
                f"an edit for {self.model} ({self.fingerprint[:12]}) and one for {other.model} "
                f"({other.fingerprint[:12]}) cannot be added"
            )
        changes = dict(self.changes)
        for name, change in other.changes.items():
            changes[name] = add_changes(changes[name], change) if name in changes else change
        return replace(
            self,
            changes=changes,
            method=_joined(self.method, other.method),
            facts=self.facts + other.facts,
            settings={"parts": [*_parts(self), *_parts(other)]},
            checks=None,
        )

    def __mul__(self, factor: float) -> "Edit":
        changes = {name: change * factor for name, change in self.changes.items()}
        scale = factor * self.settings.get("scale", 1.0)
        return replace(
            self, changes=changes, settings={**self.settings, "scale": scale}, checks=None
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


FORMAT = "factscope-edit"
VERSION = 1


def save_edit(edit: Edit, path: str | Path) -> None:
    """Write the edit, whole or not at all; `load_edit` gives the same one, bit by bit.

    Settings are kept as JSON: their tuples come back as lists.
    """
    path, header = Path(path), _header(edit)
    tensors = {
        f"{name}#{part}": _plain(tensor)
        for name, change in edit.changes.items()
        for part, tensor in _file_parts(change).items()
    }
    try:
        # By way of bytes: safetensors' own files can be read by their maker only.
        write_atomic(path, save(tensors, metadata=header))
    except (OSError, SafetensorError) as error:
        raise BadEdit(f"the edit cannot be written to {path} ({error}); give another") from error


def load_edit(path: str | Path) -> Edit:
    """The edit in a file, on the CPU."""
    path = Path(path)
    header, tensors = _read(path)
    try:
        checks = header.get("checks")
        return Edit(
            changes=_changes(tensors),
            model=header["model"],
            fingerprint=header["fingerprint"],
            method=header["method"],
            facts=tuple(Fact(**fact) for fact in json.loads(header["facts"])),
            settings=dict(json.loads(header["settings"])),
            checks=None if checks is None else EditChecks(**json.loads(checks)),
        )
    except (KeyError, ValueError, TypeError, AttributeError, BadFact) as error:
        reason = f"no {error} in its header" if isinstance(error, KeyError) else str(error)
        raise _unreadable(path, reason) from error


# ---- writing


def _header(edit: Edit) -> dict[str, str]:
    header = {
        "format": f"{FORMAT} {VERSION}",
        "model": edit.model,
        "fingerprint": edit.fingerprint,
        "method": edit.method,
        "facts": json.dumps([asdict(fact) for fact in edit.facts]),
        "settings": _json(edit.settings),
    }
    return header if edit.checks is None else {**header, "checks": _json(edit.checks.to_dict())}


def _json(values: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(values))
    except (TypeError, ValueError) as error:
        raise BadEdit(
            f"the edit's settings are not plain values ({error}); give numbers, text, lists"
        ) from error


def _file_parts(change: Change) -> dict[str, Tensor]:
    if isinstance(change, LowRank):
        return {"A": change.A, "B": change.B}
    return {"delta": change.delta}


def _plain(tensor: Tensor) -> Tensor:
    """A copy of its own, since safetensors takes no two tensors that share memory."""
    tensor = tensor.detach().to("cpu", torch.float32)
    return tensor.clone(memory_format=torch.contiguous_format)


# ---- reading


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a file that says it is an edit, of a version we know."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_format(path, header)
            # Copies: a tensor that still lay in the file would change with it.
            return header, {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadEdit(f"there is no file {path}; give one that `Edit.save` wrote") from error
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error


def _check_format(path: Path, header: Mapping[str, str]) -> None:
    kind, _, version = header.get("format", "").partition(" ")
    if kind != FORMAT or not version.isdigit():
        raise BadEdit(f"{path} holds no edit; give a file that `Edit.save` wrote")
    if int(version) > VERSION:
        raise BadEdit(
            f"{path} has format {version}, this factscope reads up to {VERSION}; update factscope"
        )


def _changes(tensors: Mapping[str, Tensor]) -> dict[str, Change]:
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("#")
        found.setdefault(name, {})[part] = tensor
    return {name: _change(name, parts) for name, parts in found.items()}


def _change(name: str, parts: Mapping[str, Tensor]) -> Change:
    if any(tensor.dtype != torch.float32 for tensor in parts.values()):
        raise ValueError(f"the change of {name!r} is not float32")
    if parts.keys() == {"delta"}:
        return Dense(parts["delta"])
    if parts.keys() != {"A", "B"}:
        raise ValueError(f"the change of {name!r} has the parts {sorted(parts)}, not A and B")
    B, A = parts["B"], parts["A"]
    if B.dim() != 2 or A.dim() != 2 or B.shape[1] != A.shape[0]:
        shapes = f"{tuple(B.shape)} and {tuple(A.shape)}"
        raise ValueError(f"B and A of {name!r} have shapes {shapes}, which do not fit together")
    return LowRank(B, A)


def _unreadable(path: Path, reason: str) -> BadEdit:
    return BadEdit(f"the edit {path} cannot be read ({reason}); fetch or make it again")
