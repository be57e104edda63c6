"""Load a model by name → LM. Safetensors only, and never code that comes with a model."""

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factscope.errors import BadModelFile, BadSetting, DownloadFailed, FactscopeError
from factscope.lm import families as family
from factscope.lm.model import LM
from factscope.lm.sources import DEFAULT, HubId, locate, quiet, resolve, unknown

__all__ = ["DTYPES", "LM", "from_model", "load"]

DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}
"""What `dtype` may be. "tf32" keeps float32 weights but multiplies them with TensorFloat-32 (10
bits of mantissa), several times faster on recent NVIDIA GPUs; "auto" is what the file has.
PyTorch holds the choice between float32 and TF32 for the whole process: the last load decides."""


def load(
    name: str | Path = DEFAULT,
    *,
    device: str | torch.device = "auto",
    dtype: str = "float32",
    device_map: str | dict[str, Any] | None = None,
    check: bool = True,
) -> LM:
    """The model of that name, ready to be looked into.

    `name` is a short name, a folder with safetensors, a GGUF file or a hub id. `device` "auto" is
    the GPU where there is one; `device_map` spreads a model over several, as in transformers.
    With `check` the family's row is tried on the model (see `lm.arch.check`).
    """
    place = None if device_map is not None else _device(device)
    _check_device_map(device, device_map)
    kind = _dtype(dtype)
    source = resolve(name)
    with quiet(bars=isinstance(source, HubId)):
        model, tokenizer = _read(source, locate(source), dtype=kind, device_map=device_map)
    _set_matmul_precision(dtype)
    if place is not None:
        model = _move(model, place, str(name))
    return _finish(model, _paddable(tokenizer), str(name), check)


def from_model(
    model: nn.Module, tokenizer: Any, *, name: str | None = None, check: bool = True
) -> LM:
    """The LM of a transformers model that is loaded already; freezes it and sets eval mode.

    The tokenizer is copied, since ours pads on the right.
    """
    config: Any = model.config
    called = name or getattr(config, "name_or_path", "") or config.model_type
    return _finish(model, _paddable(copy.deepcopy(tokenizer)), called, check)


def _finish(model: Any, tokenizer: Any, name: str, check: bool) -> LM:
    model.eval().requires_grad_(False)
    lm = LM(model=model, tokenizer=tokenizer, family=family.family_of(model), name=name)
    if check:
        family.check_family(lm)
    return lm


# ---- settings


def _dtype(name: str) -> torch.dtype | str:
    if name not in DTYPES:
        raise BadSetting(f"no dtype {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str | torch.device) -> torch.device:
    if str(name) == "auto":
        return torch.device(_best_device())
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadSetting(
            f"device {str(name)!r} cannot be used here ({reason}); give 'auto' or 'cpu'"
        ) from error
    return device


def _best_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _check_device_map(device: str | torch.device, device_map: str | dict[str, Any] | None) -> None:
    if device_map is None:
        return
    if str(device) != "auto":
        raise BadSetting(f"device {str(device)!r} and device_map {device_map!r}: give one of them")
    if importlib.util.find_spec("accelerate") is None:
        raise BadSetting("device_map needs accelerate; `pip install accelerate`")


def _set_matmul_precision(dtype: str) -> None:
    """Float32 means float32 also after a model was loaded as TF32, and the other way round."""
    if dtype in ("float32", "tf32"):
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def _move(model: Any, device: torch.device, name: str) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        raise _too_large(name, str(device)) from error


def _too_large(name: str, where: str) -> BadSetting:
    return BadSetting(
        f"{name} does not fit into the memory of {where}; "
        "try dtype='bfloat16', device_map='auto' or device='cpu'"
    )


def _paddable(tokenizer: Any) -> Any:
    """Make padding possible with a token that exists: which one never matters, as it is masked."""
    if not getattr(tokenizer, "is_fast", False):
        raise BadModelFile(
            f"{type(tokenizer).__name__} gives no character offsets; factscope needs a fast "
            "tokenizer (one with a tokenizer.json)"
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:
        known = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token)
        tokenizer.pad_token = next(
            (token for token in known if token is not None), tokenizer.convert_ids_to_tokens(0)
        )
    return tokenizer


# ---- reading


def _read(source: Any, place: str, **how: Any) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder or hub id; every failure by its own name."""
    if not isinstance(source, HubId):
        _try(place, _check_family, place)
        return _try(place, _pretrained, place, local_files_only=True, **how)
    # What is in the hub's cache is taken as it is: runs repeat, and work without a network.
    try:
        return _pretrained(place, local_files_only=True, **how)
    except torch.OutOfMemoryError as error:
        raise _too_large(place, "the devices") from error
    except Exception:
        _try(place, _check_family, place)
        return _try(place, _pretrained, place, local_files_only=False, **how)


def _try(place: str, read: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return read(*args, **kwargs)
    except FactscopeError:
        raise
    except torch.OutOfMemoryError as error:
        raise _too_large(place, "the devices") from error
    except Exception as error:
        raise _explain(place, error) from error


def _pretrained(
    place: str, *, dtype: torch.dtype | str, device_map: Any, local_files_only: bool
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # trust_remote_code=False and not unset: unset, transformers asks the user at the terminal.
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local_files_only}
    tokenizer = AutoTokenizer.from_pretrained(place, **safe)
    if not tokenizer("A text", add_special_tokens=False)["input_ids"]:
        # Where the files are missing, transformers makes a tokenizer that knows no word.
        raise BadModelFile(f"{place} has no tokenizer; save its tokenizer.json beside the weights")
    read: Any = AutoModelForCausalLM.from_pretrained(
        place,
        dtype=dtype,
        device_map=device_map,
        use_safetensors=True,
        output_loading_info=True,
        **safe,
    )
    model, info = read
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would go on with random numbers in their place
        raise BadModelFile(
            f"{place} lacks {len(missing)} weights of {type(model).__name__}, "
            f"such as {missing[0]}; fetch or save it again"
        )
    return model, tokenizer


def _check_family(id: str) -> None:
    """Look the family up on a model without weights, before gigabytes of them are fetched."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(id, trust_remote_code=False)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # not a language model of the kind that says what comes next
        raise family.unknown_family(config.model_type) from error
    family.family_of(model)


def _explain(place: str, error: Exception) -> FactscopeError:
    """The error in our words."""
    from huggingface_hub import errors as hub

    causes = list(_causes(error))

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(hub.GatedRepoError):
        return unknown(place, "the hub asks you to accept its terms; then `hf auth login`")
    if caused_by(hub.RepositoryNotFoundError, hub.HFValidationError):
        return unknown(place, "the hub does not have it, or not for you")
    if caused_by(hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ConnectionError):
        return DownloadFailed(
            f"{place!r} is no short name, folder or file here, and the hub cannot be reached; "
            "check the name and the network, or give a folder with safetensors"
        )
    reason = " ".join(str(error).split())
    return BadModelFile(
        f"the model {place} cannot be read ({type(error).__name__}: {reason[:300]}); it needs "
        "config.json, .safetensors weights (pickles are not read) and tokenizer.json"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
