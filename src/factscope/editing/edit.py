"""Edit: a change of a model's weights, as a value.

    LowRank, Dense   ΔW of one weight
    EditChecks       measurements that show whether an edit damages the model, and their limits
    Edit             ΔW by weight name, with the model it is for and the facts it writes

ΔW is float32 and in the paper's orientation W k = v, however the model stores W. An edit can be
applied and reverted, added and scaled, saved and loaded.
"""

import html
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
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


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return f"LowRank(rank {self.rank}, {' × '.join(map(str, self.shape))})"

    @cached_property  # computed once: on a GPU it waits for the device
    def is_finite(self) -> bool:
        """Whether no entry of ΔW can be NaN or infinite: |ΔW| ≤ ‖B‖ ‖A‖, without computing ΔW."""
        norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (self.B, self.A)]
        return bool(norms[0] * norms[1] <= torch.finfo(torch.float32).max)

    def norm(self) -> float:
        """The Frobenius norm of ΔW, computed without ΔW."""
        if self.rank == 1:  # the usual case; a matmul would wake BLAS threads
            return (self.B.double().norm() * self.A.double().norm()).item()
        gram = (self.B.T.double() @ self.B.double()) * (self.A.double() @ self.A.T.double())
        return gram.sum().clamp(min=0).sqrt().item()


@dataclass(frozen=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        return f"Dense({' × '.join(map(str, self.shape))})"

    @cached_property  # computed once: on a GPU it waits for the device
    def is_finite(self) -> bool:
        """Whether no entry of ΔW is NaN or infinite."""
        return bool(self.delta.isfinite().all())

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
    neighbours_changed: float = 0.25
    """Maximum fraction of unrelated prompts whose most likely next token may change."""
    broken_perplexity: float = 5.0
    """Above this factor the model counts as broken, not only as changed."""


@dataclass(frozen=True, kw_only=True)
class EditChecks:
    """Measurements of an edit: whether it took, and whether it damages the model (see
    `editing.checks`)."""

    division_factor: float | None
    """Smallest cosine between a key and the direction it is divided by; None if the method has
    none."""
    update_norm: float
    """Largest ‖ΔW‖ / ‖W‖ over the changed weights."""
    perplexity_before: float
    perplexity_after: float
    taken: float | None = None
    """Fraction of the edit's facts whose new object is the most likely one, token by token, after
    their prompt; None if not measured."""
    neighbours_changed: float | None = None
    """Fraction of unrelated prompts whose most likely next token changed; None if not measured."""
    paraphrases_taken: float | None = None
    """Fraction of the given paraphrases after which the new object is the most likely one; None
    if there are none."""

    @property
    def perplexity_growth(self) -> float:
        """The factor by which the unrelated text's perplexity grew."""
        return self.perplexity_after / self.perplexity_before

    @property
    def broken(self) -> str | None:
        """Why the edited model is broken: it no longer predicts unrelated text; None if it does."""
        return broken_text(self.perplexity_before, self.perplexity_after)

    @property
    def verdict(self) -> str:
        """How "The edit …" ends: "took", "did not take", "damaged others", "did not take and
        damaged others" or "broke the model"; also "took for 50 % of its facts", and "took, but only
        in 50 % of its paraphrases"."""
        if self.broken:
            return "broke the model"
        if self.complaints():
            return "did not take and damaged others" if self.taken == 0 else "damaged others"
        if self.taken is None:
            return "was not tried on its prompt"
        if 0 < self.taken < 1:
            return f"took for {100 * self.taken:.0f} % of its facts"
        if not self.taken:
            return "did not take"
        if self.paraphrases_taken is not None and self.paraphrases_taken < 1:
            return f"took, but only in {100 * self.paraphrases_taken:.0f} % of its paraphrases"
        return "took"

    def complaints(self) -> list[str]:
        """One sentence for each limit that the edit breaks. A NaN breaks its limit."""
        limits, messages = CheckLimits(), []
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
        changed = self.neighbours_changed
        if changed is not None and not changed <= limits.neighbours_changed:
            messages.append(
                f"{100 * changed:.0f} % of unrelated prompts have another most likely next token, "
                f"above {100 * limits.neighbours_changed:.0f} %"
            )
        return messages

    def raise_if_unsafe(self) -> None:
        """Raise `UnsafeEdit` if a limit is broken."""
        if complaints := self.complaints():
            raise UnsafeEdit(
                f"the edit fails its checks: {'; '.join(complaints)}. Try another layer or prompt, "
                "or force the edit"
            )

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def broken_text(before: float, after: float) -> str | None:
    """Why a model is broken, by the perplexity of unrelated text without and with its edits."""
    limit = CheckLimits().broken_perplexity
    if after <= limit * before:
        return None
    return f"perplexity of unrelated text from {before:.4g} to {after:.4g}, above {limit:g} times"


# ---- edits


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
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
    """None if not measured, as in a sum or a multiple; `apply` measures them then."""

    def __post_init__(self) -> None:
        for name, change in self.changes.items():
            if not change.is_finite:
                raise BadEdit(
                    f"the change of {name} is NaN or infinite; make the edit again, with the model "
                    "in float32"
                )

    @cached_property
    def changed_weights(self) -> tuple[str, ...]:
        """The names of the changed weights, sorted."""
        return tuple(sorted(self.changes))

    def apply(self, lm: "LM", *, force: bool = False) -> None:
        """Add the changes to the model's weights, on top of the edits applied before.

        Refuses another model, an edit that fails its checks, and a weight that was changed by hand
        since an edit of it was applied, unless `force`. Missing checks are measured, as
        `editing.checks.raise_if_unsafe` explains.
        """
        edits = applied_edits(lm)
        if any(other is self for other in edits):
            raise BadEdit(
                "the edit is applied already; revert it first, or scale it to apply it twice"
            )
        if not force:
            from factscope.editing.checks import raise_if_unsafe

            raise_if_unsafe(lm, self)
        _ = lm.fingerprint  # computed once; must be that of the unedited weights
        _set_edits(lm, [*edits, self], self.changes, must_change=True, force=force)

    def revert(self, lm: "LM", *, force: bool = False) -> None:
        """Remove the edit from the weights, bit-for-bit; edits may be reverted in any order.

        Refuses if a weight was changed by hand since, because that change would be lost; `force`
        drops it.
        """
        edits = applied_edits(lm)
        if not any(other is self for other in edits):
            raise BadEdit("the edit is not applied to this model; apply it first")
        remaining = [other for other in edits if other is not self]
        _set_edits(lm, remaining, self.changes, force=force)

    @contextmanager
    def applied(self, lm: "LM", *, force: bool = False) -> Iterator["LM"]:
        """Apply the edit inside the block and revert it afterwards, also after an error."""
        self.apply(lm, force=force)
        try:
            yield lm
        finally:
            self.revert(lm, force=force)

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
        if not isinstance(other, Edit):
            return NotImplemented
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

    def __radd__(self, other: object) -> "Edit":
        """For `sum`, which starts with 0."""
        return self if other == 0 else NotImplemented

    def __neg__(self) -> "Edit":
        return self * -1.0

    def __sub__(self, other: "Edit") -> "Edit":
        return self + -other if isinstance(other, Edit) else NotImplemented

    def __repr__(self) -> str:
        return f"Edit({self.method} for {self.model}: {'; '.join(self._lines())})"

    def _repr_html_(self) -> str:
        """The edit in a notebook."""
        title = html.escape(f"{self.method} for {self.model}")
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self._lines(10))
        return f"<b>Edit: {title}</b><ul>{lines}</ul>"

    def _lines(self, most: int = 1) -> list[str]:
        """The first facts and weights, and the checks, as short texts."""
        facts = [f"{fact.text!r} → {fact.target!r}" for fact in self.facts]
        weights = [f"{name}: {self.changes[name]!r}" for name in self.changed_weights]
        complaints = ["not checked"] if self.checks is None else self.checks.complaints()
        return [
            *facts[:most],
            *([f"{len(facts) - most} more facts"] if len(facts) > most else []),
            *weights[:most],
            *([f"{len(weights) - most} more weights"] if len(weights) > most else []),
            *complaints,
        ]

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the edit to a file, atomically; `load` returns it bit-for-bit.

        Settings are stored as JSON: tuples come back as lists. Replaces an edit file; any other
        file only with `force`.
        """
        if not force:
            check_replaceable(path)
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
            for part in (x.name for x in fields(change)):  # B and A, or delta
                tensor = getattr(change, part).detach().to("cpu", torch.float32)
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
        except (KeyError, ValueError, TypeError, AttributeError, BadFact, BadEdit) as error:
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
    edited: dict[str, Tensor] = field(default_factory=dict)
    """Name of a changed weight → the weight with the edits. Compared with the weight before it is
    overwritten: exact, and cheaper than computing W + ΔW once more."""


_APPLIED: WeakKeyDictionary[nn.Module, _Applied] = WeakKeyDictionary()


def applied_edits(lm: "LM") -> tuple[Edit, ...]:
    """The edits applied to the model, oldest first."""
    state = _APPLIED.get(lm.model)
    return () if state is None else tuple(state.edits)


@torch.no_grad()
def _set_edits(
    lm: "LM",
    edits: list[Edit],
    names: Iterable[str],
    *,
    must_change: bool = False,
    force: bool = False,
) -> None:
    """Recompute the named weights for the given edits: all of them or, on an error, none."""
    state = _APPLIED.setdefault(lm.model, _Applied())
    weights = {name: weight_of(lm, name) for name in names}
    for name, weight in weights.items():
        check_shapes(lm, name, [edit.changes[name] for edit in edits if name in edit.changes])
        expected = state.edited.get(name, weight)
        if not force and not torch.equal(weight, expected.to(weight.device, weight.dtype)):
            raise BadEdit(
                f"{name} was changed by hand since an edit of it was applied, which would be lost; "
                "copy the weight first, or drop the change with force=True"
            )
    before = {name: weight.clone() for name, weight in weights.items()}
    originals = {name: state.originals.get(name, before[name]) for name in weights}
    edited = {}
    try:
        for name, weight in weights.items():
            edited[name] = _edited_weight(lm, originals[name], name, edits)
            if must_change and torch.equal(edited[name], before[name]):
                raise BadEdit(
                    f"the edit is so small that {name} does not change in {weight.dtype}; "
                    "not applied"
                )
            weight.copy_(edited[name])
    except BaseException:
        for name, weight in weights.items():
            weight.copy_(before[name])
        raise
    state.edits = edits
    state.originals.update(originals)
    state.edited.update(edited)
    for name in weights:
        if not any(name in edit.changes for edit in edits):
            del state.originals[name], state.edited[name]


def _edited_weight(lm: "LM", original: Tensor, name: str, edits: list[Edit]) -> Tensor:
    """The original weight plus the edits' changes of it, summed in float32."""
    changes = [edit.changes[name] for edit in edits if name in edit.changes]
    if not changes:
        return original
    transposed = is_transposed(lm, name)
    total = original.to(torch.promote_types(original.dtype, torch.float32))
    for change in changes:
        delta = change.to(original.device).matrix().float()
        total = total + (delta.T if transposed else delta)
    edited = total.to(original.dtype)
    if not edited.isfinite().all():
        raise BadEdit(f"the edit would make {name} infinite in {original.dtype}; not applied")
    return edited


def check_shapes(lm: "LM", name: str, changes: Iterable[Change]) -> None:
    """Refuse changes that have another shape than the weight of that name."""
    stored, transposed = tuple(weight_of(lm, name).shape), is_transposed(lm, name)
    for change in changes:
        shape = change.shape[::-1] if transposed else change.shape
        if shape != stored:
            raise BadEdit(
                f"{name} has shape {stored}, the edit's change of it {shape}; is it for another "
                "model?"
            )


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


def check_replaceable(path: str | Path) -> None:
    """Refuse to replace a file that is neither an edit nor empty."""
    path = Path(path)
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("format", "").startswith(FORMAT):
                return
    except (SafetensorError, OSError):
        pass
    raise BadEdit(
        f"{path} exists and is not an edit file; give another path, or force it (--force; in "
        "Python force=True) to replace the file"
    )


def _read(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of an edit file of a known version."""
    if Path(path).is_dir():
        raise _unreadable(path, "it is a folder")
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
