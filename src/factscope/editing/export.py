"""Export edits to other tools: a LoRA adapter for peft, or an edited checkpoint for transformers.

A LoRA layer computes W x + (alpha / r) B A x, which is an edit with alpha = r. An adapter is small
and leaves the weights alone; a checkpoint needs no library but transformers.
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
from torch import Tensor

from factscope.editing.applied import applied_edits, is_transposed
from factscope.editing.edit import Change, Edit, LowRank
from factscope.editing.per_row import linear_of
from factscope.errors import BadEdit, BadSetting
from factscope.io import scratch_folder
from factscope.lm.sources import quiet_transformers

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)


def export_peft(
    edit: Edit, lm: "LM", folder: str | Path, *, rank: int | None = None, force: bool = False
) -> None:
    """Write the edit as a LoRA adapter, for `peft.PeftModel.from_pretrained(model, folder)`.

    The adapter is exact: a dense change becomes one of full rank. `rank` truncates each change to
    its largest singular values. The model is not changed; `force` is as in `Edit.apply`.
    """
    if rank is not None and rank < 1:
        raise BadSetting(f"rank is {rank}; it must be at least 1")
    if not force:
        edit.check_model(lm)
        if edit.checks is not None:
            edit.checks.raise_if_unsafe()
    adapters = _adapters(edit, lm, rank)
    with _new_folder(Path(folder)) as partial:
        # safetensors' save_file would create the file with mode 0600.
        weights = save(_peft_tensors(adapters), {"format": "pt"})
        (partial / "adapter_model.safetensors").write_bytes(weights)
        config = json.dumps(_peft_config(adapters, lm), indent=2, sort_keys=True)
        (partial / "adapter_config.json").write_text(config + "\n", encoding="utf-8")


def export_checkpoint(
    edits: Sequence[Edit], lm: "LM", folder: str | Path, *, force: bool = False
) -> None:
    """Write the edited model and its tokenizer as a folder that transformers loads.

    The edits are applied on top of those that are applied already, and reverted afterwards. Weights
    are written in the model's dtype.
    """
    size = sum(weight.numel() * weight.element_size() for weight in lm.model.parameters())
    with _new_folder(Path(folder), size) as partial, ExitStack() as stack, quiet_transformers():
        already = applied_edits(lm)
        for edit in edits:
            if not any(edit is other for other in already):
                stack.enter_context(edit.applied(lm, force=force))
        stack.enter_context(_valid_generation_config(lm.model))
        lm.model.save_pretrained(partial)
        lm.tokenizer.save_pretrained(partial)


# ---- the adapter


@dataclass(frozen=True, eq=False)
class _Adapter:
    """What peft adds to a linear layer's output: B A x + bias."""

    B: Float[Tensor, "value rank"]
    A: Float[Tensor, "rank key"]
    bias: Float[Tensor, " value"] | None
    transposed: bool
    """Whether the layer stores its weight as (key, value)."""

    @property
    def rank(self) -> int:
        return self.A.shape[0]


def _adapters(edit: Edit, lm: "LM", rank: int | None) -> dict[str, _Adapter]:
    """Full module name → its adapter, for each layer that the edit changes."""
    if not edit.changes:
        raise BadEdit("the edit changes no weight; there is nothing to export")
    by_module: dict[str, dict[str, Change]] = {}
    for name in edit.changed_weights:
        module, _, kind = name.rpartition(".")
        by_module.setdefault(module, {})[kind] = _checked(edit.changes[name], lm, name)
    return {module: _adapter(lm, module, x, rank) for module, x in by_module.items()}


def _checked(change: Change, lm: "LM", name: str) -> Change:
    """The change, on the CPU; raises if a LoRA adapter cannot express it."""
    if linear_of(lm, name) is None:
        raise BadEdit(
            f"{name} belongs to no linear layer alone, so no LoRA adapter can change it; export a "
            "whole checkpoint"
        )
    shape = _shape(lm, name)
    if change.shape != shape:
        raise BadEdit(
            f"{name} has shape {shape}, the edit's change of it {change.shape}; "
            "is it for another model?"
        )
    if not math.isfinite(change.norm()):
        raise BadEdit(f"the edit's change of {name} is not finite; make it again")
    return change.to("cpu")


def _shape(lm: "LM", name: str) -> tuple[int, ...]:
    """The shape of a weight in the paper's orientation."""
    shape = tuple(lm.model.get_parameter(name).shape)
    return shape[::-1] if is_transposed(lm, name) else shape


def _adapter(lm: "LM", module: str, changes: Mapping[str, Change], rank: int | None) -> _Adapter:
    weight = f"{module}.weight"
    if "weight" in changes:
        factors = _factors(changes["weight"], rank)
    else:  # only the bias changes, but peft needs a rank of at least 1
        value, key = _shape(lm, weight)
        factors = LowRank(torch.zeros(value, 1), torch.zeros(1, key))
    bias = changes["bias"].matrix() if "bias" in changes else None
    return _Adapter(factors.B, factors.A, bias, is_transposed(lm, weight))


def _factors(change: Change, rank: int | None) -> LowRank:
    """ΔW as B A, truncated to a rank if that is lower."""
    if rank is not None and rank < change.rank:
        U, S, V = torch.linalg.svd(change.matrix().float(), full_matrices=False)
        return LowRank(U[:, :rank] * S[:rank], V[:rank])
    if isinstance(change, LowRank):
        return change
    # One factor is ΔW, the other, on its shorter side, the identity: exact.
    value, key = change.shape
    if value <= key:
        return LowRank(torch.eye(value), change.delta)
    return LowRank(change.delta, torch.eye(key))


def _peft_tensors(adapters: Mapping[str, _Adapter]) -> dict[str, Tensor]:
    """The tensors under peft's names. If one layer has a bias, peft expects one in all of them."""
    has_bias = any(adapter.bias is not None for adapter in adapters.values())
    tensors = {}
    for name, adapter in adapters.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = adapter.A
        tensors[f"base_model.model.{name}.lora_B.weight"] = adapter.B
        if has_bias:
            bias = torch.zeros(len(adapter.B)) if adapter.bias is None else adapter.bias
            tensors[f"base_model.model.{name}.lora_B.bias"] = bias
    return {name: x.detach().float().contiguous().clone() for name, x in tensors.items()}


def _peft_config(adapters: Mapping[str, _Adapter], lm: "LM") -> dict[str, Any]:
    """`adapter_config.json`; alpha equals the rank everywhere, so nothing is scaled."""
    rank = Counter(adapter.rank for adapter in adapters.values()).most_common(1)[0][0]
    # Full module names: a short one would match the same layer of other blocks.
    others = {name: adapter.rank for name, adapter in adapters.items() if adapter.rank != rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": lm.name,
        "target_modules": list(adapters),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": others,
        "alpha_pattern": others,
        "lora_bias": any(adapter.bias is not None for adapter in adapters.values()),
        "fan_in_fan_out": any(adapter.transposed for adapter in adapters.values()),
        "inference_mode": True,
        "lora_dropout": 0.0,
        "bias": "none",
    }


# ---- writing


@contextmanager
def _valid_generation_config(model: Any) -> Iterator[None]:
    """Replace an invalid generation config by the default one inside the block: transformers loads
    a contradictory one, as in old Vicuna checkpoints, but refuses to save it."""
    original = getattr(model, "generation_config", None)
    try:
        if original is not None:
            original.validate(strict=True)
    except ValueError:
        log.warning("the model's generation settings are invalid; the checkpoint gets the defaults")
        model.generation_config = type(original)()
    try:
        yield
    finally:
        model.generation_config = original


@contextmanager
def _new_folder(folder: Path, size: int = 0) -> Iterator[Path]:
    """A temporary folder that is renamed to `folder` at the end, or deleted after an error.

    Refuses a folder that is not empty, and a disk with less than `size` bytes free.
    """
    folder = folder.expanduser().absolute()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise BadSetting(f"{folder} already exists; give a new or empty folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if free < size:
            raise BadSetting(
                f"the checkpoint takes {size / 1e9:.1f} GB, but the disk of {folder.parent} has "
                f"{free / 1e9:.1f} GB free; give a folder on another disk"
            )
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
