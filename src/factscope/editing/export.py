"""Export edits to other tools: a LoRA adapter for peft, or an edited checkpoint for transformers.

A LoRA layer computes W x + (alpha / r) B A x, which is an edit with alpha = r. An adapter is small
and leaves the weights alone; a checkpoint needs no library but transformers.
"""

import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from factscope.editing.checks import raise_if_unsafe
from factscope.editing.edit import Change, Edit, LowRank, applied_edits, is_transposed
from factscope.editing.per_row import linear_of
from factscope.errors import BadEdit, BadSetting
from factscope.io import scratch_folder
from factscope.lm.sources import SHORT_NAMES, quiet_transformers

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)


def export_peft(
    edit: Edit, lm: "LM", folder: str | Path, *, rank: int | None = None, force: bool = False
) -> Edit:
    """Write the edit as a LoRA adapter, for `peft.PeftModel.from_pretrained(model, folder)`.

    The adapter is exact: a dense change becomes one of full rank. `rank` truncates each change to
    its largest singular values. Returns the edit that the adapter contains; `energy_kept` compares
    the two. The model is not changed; `force` is as in `Edit.apply`.
    """
    if rank is not None and rank < 1:
        raise BadSetting(f"rank is {rank}; it must be at least 1")
    if not force:
        raise_if_unsafe(lm, edit)
    if not edit.changes:
        raise BadEdit("the edit changes no weight; there is nothing to export")
    whole = {name: _checked(edit.changes[name], lm, name) for name in edit.changed_weights}
    changes = {name: _truncated(change, rank) for name, change in whole.items()}
    factors, biases = _factors_and_biases(changes, lm)
    tensors: dict[str, Tensor] = {}
    for module, change in factors.items():
        name = f"base_model.model.{module}"
        tensors |= {f"{name}.lora_A.weight": change.A, f"{name}.lora_B.weight": change.B}
        if biases:  # if one layer has a bias, peft expects one in all of them
            tensors[f"{name}.lora_B.bias"] = biases.get(module, torch.zeros(len(change.B)))
    tensors = {name: x.detach().float().contiguous().clone() for name, x in tensors.items()}
    config = _peft_config(factors, lm) | {"lora_bias": bool(biases)}
    with _new_folder(Path(folder)) as partial:
        # safetensors' save_file would create the file with mode 0600.
        (partial / "adapter_model.safetensors").write_bytes(save(tensors, {"format": "pt"}))
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (partial / "adapter_config.json").write_text(text, encoding="utf-8")
    if all(changes[name] is change for name, change in whole.items()):
        return edit
    exported = replace(edit, changes=changes, checks=None)
    kept = energy_kept(edit, exported)[0]
    log.warning("rank %d keeps %.1f %% of the edit's energy (squared norm)", rank, 100 * kept)
    return exported


def energy_kept(edit: Edit, exported: Edit) -> tuple[float, dict[str, float]]:
    """The fraction of ‖ΔW‖² (squared Frobenius norm) that an export keeps: overall, by weight."""
    energies = {
        name: (exported.changes[name].norm() ** 2, edit.changes[name].norm() ** 2)
        for name in edit.changed_weights
    }
    kept, whole = (sum(column) for column in zip(*energies.values(), strict=True))
    return kept / whole if whole else 1.0, {
        n: a / b if b else 1.0 for n, (a, b) in energies.items()
    }


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


def _factors_and_biases(
    changes: Mapping[str, Change], lm: "LM"
) -> tuple[dict[str, LowRank], dict[str, Tensor]]:
    """ΔW as B A, and the change of the bias, by the full name of each changed layer.

    All factors have one rank, padded with zeros: not every program that loads adapters reads
    `rank_pattern` and `alpha_pattern`, and without them it would scale other ranks by alpha / r.
    """
    factors: dict[str, LowRank] = {}
    biases: dict[str, Tensor] = {}
    for name, change in changes.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            factors[module] = _factors(change)
            continue
        biases[module] = change.matrix()
        if f"{module}.weight" not in changes:  # peft needs a rank of at least 1
            value, key = _shape(lm, f"{module}.weight")
            factors[module] = LowRank(torch.zeros(value, 1), torch.zeros(1, key))
    rank = max(change.rank for change in factors.values())
    for module, change in factors.items():
        zeros = rank - change.rank
        B, A = F.pad(change.B, (0, zeros)), F.pad(change.A, (0, 0, 0, zeros))
        factors[module] = LowRank(B, A)
    return factors, biases


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
    return change.to("cpu")


def _shape(lm: "LM", name: str) -> tuple[int, ...]:
    """The shape of a weight in the paper's orientation."""
    shape = tuple(lm.model.get_parameter(name).shape)
    return shape[::-1] if is_transposed(lm, name) else shape


def _truncated(change: Change, rank: int | None) -> Change:
    """The change with only its largest singular values, if its rank is higher."""
    if rank is None or len(change.shape) < 2 or change.rank <= rank:  # a bias has one dimension
        return change
    U, S, V = torch.linalg.svd(change.matrix().float(), full_matrices=False)
    return LowRank(U[:, :rank] * S[:rank], V[:rank])


def _factors(change: Change) -> LowRank:
    """ΔW as B A."""
    if isinstance(change, LowRank):
        return change
    # One factor is ΔW, the other, on its shorter side, the identity: exact.
    value, key = change.shape
    if value <= key:
        return LowRank(torch.eye(value), change.delta)
    return LowRank(change.delta, torch.eye(key))


def _peft_config(factors: Mapping[str, LowRank], lm: "LM") -> dict[str, Any]:
    """`adapter_config.json`; alpha equals the rank, so nothing is scaled."""
    rank = next(iter(factors.values())).rank
    short = SHORT_NAMES.get(lm.name)  # a name that only factscope knows
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": short.hub_id if short else lm.name,
        # Full module names: a short one would match the same layer of other blocks.
        "target_modules": list(factors),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "fan_in_fan_out": any(is_transposed(lm, f"{module}.weight") for module in factors),
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
