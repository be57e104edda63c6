"""Edits for other tools: a LoRA adapter that peft loads, or a whole checkpoint with the edits in.

A LoRA layer computes W x + (alpha / r) B A x, which is an edit with alpha = r. An adapter is small
and leaves the weights alone; a checkpoint needs nothing but transformers.
"""

import json
import logging
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn

from factscope.editing.applied import applied_edits, is_transposed
from factscope.editing.edit import Change, Edit, LowRank
from factscope.editing.per_row import linear_of
from factscope.errors import BadEdit, BadSetting
from factscope.io import scratch_folder
from factscope.lm.sources import quiet

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["export_checkpoint", "export_peft"]

log = logging.getLogger(__name__)


def export_peft(
    edit: Edit, lm: "LM", folder: str | Path, *, rank: int | None = None, force: bool = False
) -> None:
    """Write the edit as a LoRA adapter, for `peft.PeftModel.from_pretrained(model, folder)`.

    It is exact: a dense change becomes an adapter of full rank. `rank` keeps the largest
    directions of each change instead. The model itself is not changed; `force` is as in `apply`.
    """
    if rank is not None and rank < 1:
        raise BadSetting(f"rank {rank} leaves nothing of the edit; give 1 or more")
    if not force:
        edit.check(lm)
        if edit.checks is not None:
            edit.checks.refuse()
    loras = _loras(edit, lm, rank)
    with _new_folder(Path(folder)) as partial:
        # By way of bytes: safetensors' own files can be read by their maker only.
        weights = save(_tensors(loras), {"format": "pt"})
        (partial / "adapter_model.safetensors").write_bytes(weights)
        config = json.dumps(_config(loras, lm), indent=2, sort_keys=True)
        (partial / "adapter_config.json").write_text(config + "\n", encoding="utf-8")


def export_checkpoint(
    edits: Sequence[Edit], lm: "LM", folder: str | Path, *, force: bool = False
) -> None:
    """Write the model and its tokenizer, with the edits, as a folder that transformers loads.

    The edits come on top of those that are in the model already. Weights are written in the
    number format that the model is loaded in; the model itself is afterwards as before.
    """
    there = applied_edits(lm)
    with _new_folder(Path(folder), room=_size(lm.model)) as partial, ExitStack() as stack, quiet():
        for edit in edits:
            if not any(edit is other for other in there):
                stack.enter_context(edit.applied(lm, force=force))
        stack.enter_context(_saveable(lm.model))
        lm.model.save_pretrained(partial)
        lm.tokenizer.save_pretrained(partial)


# ---- the adapter


@dataclass(frozen=True, eq=False)
class _Lora:
    """What peft adds to one linear layer's output: B A x + bias."""

    B: Float[Tensor, "value rank"]
    A: Float[Tensor, "rank key"]
    bias: Float[Tensor, " value"] | None
    turned: bool
    """Whether the layer stores its weight as (key, value)."""

    @property
    def rank(self) -> int:
        return self.A.shape[0]


def _loras(edit: Edit, lm: "LM", rank: int | None) -> dict[str, _Lora]:
    """A full module name → its adapter, for every layer that the edit changes."""
    if not edit.changes:
        raise BadEdit("the edit changes no weight; there is nothing to export")
    found: dict[str, dict[str, Change]] = {}
    for name in edit.changed_weights:
        owner, _, kind = name.rpartition(".")
        found.setdefault(owner, {})[kind] = _checked(edit.changes[name], lm, name)
    return {owner: _lora(changes, lm, owner, rank) for owner, changes in found.items()}


def _checked(change: Change, lm: "LM", name: str) -> Change:
    """The change on the CPU, where a LoRA adapter can carry it."""
    if linear_of(lm, name) is None:
        raise BadEdit(
            f"{name} belongs to no linear layer alone, so that no LoRA adapter can change it; "
            "export a whole checkpoint"
        )
    wanted = _shape(lm, name)
    if change.shape != wanted:
        raise BadEdit(
            f"{name} has shape {wanted}, the edit's change of it {change.shape}; "
            "is it for another model?"
        )
    if not math.isfinite(change.norm()):
        raise BadEdit(f"the edit's change of {name} is not finite; make it again")
    return change.to("cpu")


def _shape(lm: "LM", name: str) -> tuple[int, ...]:
    """The shape of a weight in the paper's orientation."""
    shape = tuple(lm.model.get_parameter(name).shape)
    return shape[::-1] if is_transposed(lm, name) else shape


def _lora(changes: Mapping[str, Change], lm: "LM", owner: str, rank: int | None) -> _Lora:
    weight = f"{owner}.weight"
    value, key = _shape(lm, weight)
    # An adapter has a rank of one at least, also where only the bias changes.
    factors = LowRank(torch.zeros(value, 1), torch.zeros(1, key))
    if "weight" in changes:
        factors = _factors(changes["weight"], rank)
    bias = changes["bias"].matrix() if "bias" in changes else None
    return _Lora(factors.B, factors.A, bias, is_transposed(lm, weight))


def _factors(change: Change, rank: int | None) -> LowRank:
    """ΔW = B A: as it is, with one factor the identity, or its largest directions."""
    if rank is not None and rank < change.rank:
        U, S, V = torch.linalg.svd(change.matrix().float(), full_matrices=False)
        return LowRank(U[:, :rank] * S[:rank], V[:rank])
    if isinstance(change, LowRank):
        return change
    delta = change.matrix()
    value, key = delta.shape
    if value <= key:
        return LowRank(torch.eye(value), delta)
    return LowRank(delta, torch.eye(key))


def _tensors(loras: Mapping[str, _Lora]) -> dict[str, Tensor]:
    """The adapter's tensors under peft's names; with one bias, every layer has one."""
    biased = any(lora.bias is not None for lora in loras.values())
    found = {}
    for name, lora in loras.items():
        found[f"base_model.model.{name}.lora_A.weight"] = lora.A
        found[f"base_model.model.{name}.lora_B.weight"] = lora.B
        if biased:
            bias = torch.zeros(len(lora.B)) if lora.bias is None else lora.bias
            found[f"base_model.model.{name}.lora_B.bias"] = bias
    return {name: x.detach().float().contiguous().clone() for name, x in found.items()}


def _config(loras: Mapping[str, _Lora], lm: "LM") -> dict[str, Any]:
    """What peft reads; alpha equals the rank everywhere, so that nothing is scaled."""
    rank = Counter(lora.rank for lora in loras.values()).most_common(1)[0][0]
    # Full names, so that the same layer of another block is not meant.
    others = {name: lora.rank for name, lora in loras.items() if lora.rank != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lm.name,
        "target_modules": list(loras),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "lora_bias": any(lora.bias is not None for lora in loras.values()),
        "fan_in_fan_out": any(lora.turned for lora in loras.values()),
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
    }


# ---- folders


@contextmanager
def _saveable(model: Any) -> Iterator[None]:
    """Without its own settings for generation where they are contradictory, as in old Vicuna:
    transformers loads such a file, but does not save it."""
    kept = getattr(model, "generation_config", None)
    try:
        if kept is not None:
            kept.validate(strict=True)
    except ValueError:
        log.warning("the checkpoint gets plain generation settings, as the model's are invalid")
        model.generation_config = type(kept)()
    try:
        yield
    finally:
        model.generation_config = kept


def _size(model: nn.Module) -> int:
    """The bytes of a model's weights."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


@contextmanager
def _new_folder(folder: Path, room: int = 0) -> Iterator[Path]:
    """A folder to fill, that becomes `folder` when the block ends well and vanishes otherwise."""
    folder = folder.expanduser().absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadSetting(f"{folder} is there already; give a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        _check_room(folder.parent, room)
        with scratch_folder(folder.parent) as temporary:
            partial = temporary / folder.name
            partial.mkdir()
            yield partial
            if folder.is_dir():
                folder.rmdir()
            partial.rename(folder)
    except (OSError, SafetensorError) as error:
        raise BadSetting(
            f"{folder} cannot be written ({error}); nothing was left there, give another folder"
        ) from error


def _check_room(folder: Path, room: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < room:
        raise BadSetting(
            f"the checkpoint takes {room / 1e9:.1f} GB, but the disk of {folder} has "
            f"{free / 1e9:.1f} GB free; give a folder on another disk"
        )
