"""Edit: a change of a model's weights, as a value.

    LowRank, Dense   ΔW of one weight
    EditChecks       measurements that show whether an edit damages the model, and their limits
    Edit             ΔW by weight name, with the model it is for and the facts it writes

ΔW is float32 and in the paper's orientation W k = v, however the model stores W. An edit can be
applied and reverted, added and scaled, saved and loaded.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

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
        _ = lm.fingerprint  # computed once; must be that of the unedited weights
        edits = applied_edits(lm)
        if any(other is self for other in edits):
            raise BadEdit(
                "the edit is applied already; revert it first, or scale it to apply it twice"
            )
        _set_edits(lm, [*edits, self], self.changes, must_change=True)

    def revert(self, lm: "LM") -> None:
        """Remove the edit from the weights, bit-for-bit; edits may be reverted in any order."""
        edits = applied_edits(lm)
        if not any(other is self for other in edits):
            raise BadEdit("the edit is not applied to this model; apply it first")
        _set_edits(lm, [other for other in edits if other is not self], self.changes)

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
        try:
            settings = json.dumps(dict(self.settings))
        except (TypeError, ValueError) as error:
            raise BadEdit(
                f"the edit's settings are not plain values ({error}); give numbers, text, lists"
            ) from error
        header = {
            "format": f"{FORMAT} {VERSION}",
            "model": self.model,
            "fingerprint": self.fingerprint,
            "method": self.method,
            "facts": json.dumps([asdict(fact) for fact in self.facts]),
            "settings": settings,
        }
        if self.checks is not None:
            header["checks"] = json.dumps(self.checks.to_dict())
        tensors: dict[str, Tensor] = {}
        for name, change in self.changes.items():
            for part, tensor in vars(change).items():  # B and A, or delta
                tensor = tensor.detach().to("cpu", torch.float32)
                # safetensors rejects tensors that share memory.
                tensors[f"{name}#{part}"] = tensor.clone(memory_format=torch.contiguous_format)
        try:
            # safetensors' save_file would create the file with mode 0600.
            write_atomic(Path(path), save(tensors, metadata=header))
        except (OSError, SafetensorError) as error:
            raise BadEdit(
                f"the edit cannot be written to {path} ({error}); give another path"
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> "Edit":
        """Read an edit from a file, to the CPU."""
        header, tensors = _read(path)
        by_weight: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, part = key.rpartition("#")
            by_weight.setdefault(name, {})[part] = tensor
        try:
            checks = header.get("health" if header["format"] == f"{FORMAT} 1" else "checks")
            return cls(
                changes={name: _change(name, parts) for name, parts in by_weight.items()},
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


# ---- the edits applied to a model
#
# For each changed weight the original tensor is stored while any edit changes it. Applying or
# reverting an edit recomputes its weights from the originals, with the remaining edits in order of
# application: subtracting a delta again would leave rounding errors.


@dataclass
class _Applied:
    edits: list[Edit] = field(default_factory=list)
    originals: dict[str, Tensor] = field(default_factory=dict)
    """Name of a changed weight → the weight before any edit."""


_APPLIED: WeakKeyDictionary[nn.Module, _Applied] = WeakKeyDictionary()


def applied_edits(lm: "LM") -> tuple[Edit, ...]:
    """The edits applied to the model, oldest first."""
    state = _APPLIED.get(lm.model)
    return () if state is None else tuple(state.edits)


@torch.no_grad()
def _set_edits(
    lm: "LM", edits: list[Edit], names: Iterable[str], *, must_change: bool = False
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


def _edited_weight(lm: "LM", original: Tensor, name: str, edits: list[Edit]) -> Tensor:
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


# ---- the file format: safetensors
#
# The header holds all fields but the changes, as text or JSON. A low-rank change of a weight is
# the tensors `<weight>#B` and `<weight>#A`, a dense one is `<weight>#delta`, all float32.

FORMAT = "factscope-edit"
VERSION = 2
"""Version 1 is read, too. Its header has `health` for `checks`; its settings keep the names that
they had then."""


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
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


def _unreadable(path: str | Path, reason: str) -> BadEdit:
    return BadEdit(f"the edit {path} cannot be read ({reason}); fetch or make it again")
