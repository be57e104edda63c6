"""Edit: a change of a model's weights, as a value.

    LowRank, Dense   ΔW of one weight
    EditChecks       measurements that show whether an edit damages the model, and their limits
    Edit             ΔW by weight name, with the model it is for and the facts it writes

ΔW is float32 and in the paper's orientation W k = v, however the model stores W. An edit can be
applied and reverted, added and scaled, saved and loaded.
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

from factscope.editing.applied import apply_edit, revert_edit
from factscope.errors import BadEdit, BadFact, UnsafeEdit
from factscope.facts import Fact
from factscope.io import write_atomic

if TYPE_CHECKING:
    from factscope.lm.model import LM

# ---- the change of one weight


@dataclass(frozen=True, eq=False)
class LowRank:
    """ΔW = B A."""

    B: Float[Tensor, "value rank"]
    A: Float[Tensor, "rank key"]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ΔW."""
        return self.B.shape[0], self.A.shape[1]

    @property
    def rank(self) -> int:
        """The number of columns of B."""
        return self.A.shape[0]

    def matrix(self) -> Float[Tensor, "value key"]:
        """ΔW."""
        return self.B @ self.A

    def to(self, device: torch.device | str) -> "LowRank":
        """The same change on a device."""
        return LowRank(self.B.to(device), self.A.to(device))

    def __mul__(self, factor: float) -> "LowRank":
        return LowRank(self.B * factor, self.A)

    def norm(self) -> float:
        """The Frobenius norm of ΔW, computed without ΔW."""
        if self.rank == 1:  # the usual case; a matmul would wake BLAS threads
            return (self.B.double().norm() * self.A.double().norm()).item()
        gram = (self.B.T.double() @ self.B.double()) * (self.A.double() @ self.A.T.double())
        return gram.sum().clamp(min=0).sqrt().item()


@dataclass(frozen=True, eq=False)
class Dense:
    """ΔW entry by entry; also the change of a bias."""

    delta: Float[Tensor, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ΔW."""
        return tuple(self.delta.shape)

    @property
    def rank(self) -> int:
        """The highest rank that ΔW can have."""
        return min(self.delta.shape)

    def matrix(self) -> Float[Tensor, "..."]:
        """ΔW."""
        return self.delta

    def to(self, device: torch.device | str) -> "Dense":
        """The same change on a device."""
        return Dense(self.delta.to(device))

    def __mul__(self, factor: float) -> "Dense":
        return Dense(self.delta * factor)

    def norm(self) -> float:
        """The Frobenius norm of ΔW."""
        return self.delta.double().norm().item()


Change = LowRank | Dense


def add_changes(first: Change, second: Change) -> Change:
    """The sum of two changes of one weight; low rank while that takes less memory than dense."""
    if first.shape != second.shape:
        raise BadEdit(f"changes of shape {first.shape} and {second.shape} cannot be added")
    if isinstance(first, LowRank) and isinstance(second, LowRank):
        value, key = first.shape
        if (first.rank + second.rank) * (value + key) < value * key:
            return LowRank(torch.cat([first.B, second.B], 1), torch.cat([first.A, second.A], 0))
    return Dense(first.matrix() + second.matrix())


# ---- checks


@dataclass(frozen=True, kw_only=True)
class CheckLimits:
    """Limits within which an edit counts as safe."""

    division_factor: float = 0.02
    """Minimum cosine between the key k and C⁻¹k, by which the update is divided. Near 0 the update
    explodes; docs/results.md lists usual values."""
    update_norm: float = 0.5
    """Maximum ‖ΔW‖ / ‖W‖ of the weight that changes most."""
    perplexity: float = 1.5
    """Maximum factor by which the perplexity of an unrelated text may grow."""


@dataclass(frozen=True, kw_only=True)
class EditChecks:
    """Measurements of an edit that show whether it damages the model (see `editing.checks`)."""

    division_factor: float | None
    """Smallest cosine between a key and the direction it is divided by; None if the method has
    none."""
    update_norm: float
    """Largest ‖ΔW‖ / ‖W‖ over the changed weights."""
    perplexity_before: float
    perplexity_after: float

    @property
    def perplexity_growth(self) -> float:
        """The factor by which the unrelated text's perplexity grew."""
        return self.perplexity_after / self.perplexity_before

    def complaints(self, limits: CheckLimits | None = None) -> list[str]:
        """One sentence for each limit that the edit breaks. A NaN breaks its limit."""
        limits = limits or CheckLimits()
        messages = []
        if self.division_factor is not None and not self.division_factor >= limits.division_factor:
            messages.append(
                f"division factor {self.division_factor:.3g} below {limits.division_factor:g}"
            )
        if not self.update_norm <= limits.update_norm:
            messages.append(
                f"update norm {self.update_norm:.3g} of the weight's, above {limits.update_norm:g}"
            )
        if not self.perplexity_growth <= limits.perplexity:
            messages.append(
                f"perplexity of unrelated text from {self.perplexity_before:.4g} to "
                f"{self.perplexity_after:.4g}, above {limits.perplexity:g} times"
            )
        return messages

    def raise_if_unsafe(self, limits: CheckLimits | None = None) -> None:
        """Raise `UnsafeEdit` if a limit is broken."""
        complaints = self.complaints(limits)
        if complaints:
            raise UnsafeEdit(
                f"the edit fails its checks: {'; '.join(complaints)}. Try another layer or prompt, "
                "or force the edit"
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


# ---- edits


@dataclass(frozen=True, kw_only=True, eq=False)
class Edit:
    """Changes of named weights of one model."""

    changes: Mapping[str, Change]
    """Full parameter name → its change."""
    model: str
    """Name of the model that the edit is for."""
    fingerprint: str
    """Fingerprint of that model's unedited weights."""
    method: str
    facts: tuple[Fact, ...]
    """The facts that the edit writes; a fact's target is its new object."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The method's settings, with all defaults resolved, and its results, such as losses."""
    checks: EditChecks | None = None
    """None if not measured."""

    @cached_property
    def changed_weights(self) -> tuple[str, ...]:
        """The names of the changed weights, sorted."""
        return tuple(sorted(self.changes))

    def apply(self, lm: "LM", *, force: bool = False) -> None:
        """Add the changes to the model's weights, on top of the edits applied before.

        Refuses another model and an edit that fails its checks, unless `force`.
        """
        if not force:
            self.check_model(lm)
            if self.checks is not None:
                self.checks.raise_if_unsafe()
        apply_edit(lm, self)

    def revert(self, lm: "LM") -> None:
        """Remove the edit from the weights, bit-for-bit; edits may be reverted in any order."""
        revert_edit(lm, self)

    @contextmanager
    def applied(self, lm: "LM", *, force: bool = False) -> Iterator["LM"]:
        """Apply the edit inside the block and revert it afterwards, also after an error."""
        self.apply(lm, force=force)
        try:
            yield lm
        finally:
            self.revert(lm)

    def check_model(self, lm: "LM") -> None:
        """Refuse a model that the edit is not for."""
        if lm.fingerprint != self.fingerprint:
            raise BadEdit(
                f"the edit is for {self.model} (fingerprint {self.fingerprint[:12]}), not for "
                f"{lm.name} ({lm.fingerprint[:12]}); load the model that it was made for"
            )

    def to(self, device: torch.device | str) -> "Edit":
        """The same edit with its tensors on a device."""
        return replace(self, changes={name: x.to(device) for name, x in self.changes.items()})

    def __add__(self, other: "Edit") -> "Edit":
        if self.fingerprint != other.fingerprint:
            raise BadEdit(
                f"an edit for {self.model} ({self.fingerprint[:12]}) and one for {other.model} "
                f"({other.fingerprint[:12]}) cannot be added"
            )
        changes = dict(self.changes)
        for name, change in other.changes.items():
            changes[name] = add_changes(changes[name], change) if name in changes else change
        methods = dict.fromkeys([*self.method.split(" + "), *other.method.split(" + ")])
        return replace(
            self,
            changes=changes,
            method=" + ".join(methods),
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

    def save(self, path: str | Path) -> None:
        """Write the edit to a file, atomically; `load` returns it bit-for-bit.

        Settings are stored as JSON: tuples come back as lists.
        """
        path, header = Path(path), _header(self)
        try:
            # safetensors' save_file would create the file with mode 0600.
            write_atomic(path, save(_tensors(self.changes), metadata=header))
        except (OSError, SafetensorError) as error:
            raise BadEdit(
                f"the edit cannot be written to {path} ({error}); give another path"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> "Edit":
        """Read an edit from a file, to the CPU."""
        path = Path(path)
        header, tensors = _read(path)
        try:
            checks = header.get("health" if header["format"] == f"{FORMAT} 1" else "checks")
            return cls(
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


def _parts(edit: Edit) -> list[dict[str, Any]]:
    """The settings of the edits that an edit is the sum of, or its own."""
    if "parts" not in edit.settings:
        return [{"method": edit.method, **edit.settings}]
    parts, scale = edit.settings["parts"], edit.settings.get("scale")
    if scale is None:
        return list(parts)
    return [{**part, "scale": scale * part.get("scale", 1.0)} for part in parts]


# ---- the file format: safetensors
#
# The header holds all fields but the changes, as text or JSON. A low-rank change of a weight is
# the tensors `<weight>#B` and `<weight>#A`, a dense one is `<weight>#delta`, all float32.

FORMAT = "factscope-edit"
VERSION = 2
"""Version 1 is read, too. Its header has `health` for `checks`; its settings keep the names that
they had then."""


def _header(edit: Edit) -> dict[str, str]:
    header = {
        "format": f"{FORMAT} {VERSION}",
        "model": edit.model,
        "fingerprint": edit.fingerprint,
        "method": edit.method,
        "facts": json.dumps([asdict(fact) for fact in edit.facts]),
    }
    try:
        header["settings"] = json.dumps(dict(edit.settings))
    except (TypeError, ValueError) as error:
        raise BadEdit(
            f"the edit's settings are not plain values ({error}); give numbers, text, lists"
        ) from error
    if edit.checks is not None:
        header["checks"] = json.dumps(edit.checks.to_dict())
    return header


def _tensors(changes: Mapping[str, Change]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, change in changes.items():
        for part, tensor in vars(change).items():  # B and A, or delta
            tensor = tensor.detach().to("cpu", torch.float32)
            # safetensors rejects tensors that share memory.
            tensors[f"{name}#{part}"] = tensor.clone(memory_format=torch.contiguous_format)
    return tensors


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of an edit file of a known version."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            kind, _, version = header.get("format", "").partition(" ")
            if kind != FORMAT or not version.isdigit():
                raise BadEdit(f"{path} is not an edit; give a file that `Edit.save` wrote")
            if int(version) > VERSION:
                raise BadEdit(
                    f"{path} has format version {version}, this factscope reads up to {VERSION}; "
                    "update factscope"
                )
            # Tensors are views of the mapped file, which may change: copy them.
            return header, {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadEdit(f"there is no file {path}; give one that `Edit.save` wrote") from error
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, str(error)) from error


def _changes(tensors: Mapping[str, Tensor]) -> dict[str, Change]:
    by_weight: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, part = key.rpartition("#")
        by_weight.setdefault(name, {})[part] = tensor
    return {name: _change(name, parts) for name, parts in by_weight.items()}


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
        raise ValueError(f"B and A of {name!r} have shapes {shapes}, which do not match")
    return LowRank(B, A)


def _unreadable(path: Path, reason: str) -> BadEdit:
    return BadEdit(f"the edit {path} cannot be read ({reason}); fetch or make it again")
