"""Load a model by name. Only safetensors are read, and no code that comes with a model is run."""

import copy
import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from factscope.errors import BadModelFile, BadSetting, DownloadFailed, FactscopeError
from factscope.lm.accel import best_device
from factscope.lm.check import check_family, check_likelihood, check_merges
from factscope.lm.families import family_of, unknown_family
from factscope.lm.gguf import check_reference
from factscope.lm.model import LM
from factscope.lm.sources import DEFAULT_MODEL, model_folder, quiet_transformers, unknown_model

log = logging.getLogger(__name__)

DTYPES: dict[str, torch.dtype | str] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": "auto",
}
"""Values of `dtype`. "tf32" has float32 weights but multiplies in TensorFloat-32 (10 bits of
mantissa), several times faster on recent NVIDIA GPUs; "auto" is the dtype of the file. PyTorch has
one float32 precision per process: the last load sets it."""


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "float32",
    device_map: str | dict[str, Any] | None = None,
    check: bool = True,
) -> LM:
    """Load a model by short name, folder with safetensors, GGUF file or hub id.

    `device` "auto" is a GPU if there is one. `device_map` spreads the model over several devices,
    as in transformers. `check` tests the family's entry and the tokenizer against the model (see
    `lm.check`) and, if the model came from a GGUF file, against that file (see `lm.gguf`).
    """
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise BadSetting(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}")
    target = _target(device, device_map)
    folder = model_folder(name, check=check)
    try:
        with quiet_transformers(progress_bars=folder is None):
            model, tokenizer = _read(str(name), folder, dtype=DTYPES[dtype], device_map=device_map)
        if target is not None:
            model = model.to(target)
    except torch.OutOfMemoryError as error:
        raise BadSetting(
            f"{name} does not fit into the memory of {target or 'the devices'}; "
            "try dtype bfloat16, device_map auto or device cpu"
        ) from error
    if check and folder is not None:
        check_reference(folder, tokenizer, str(name))
    if model.dtype == torch.float16 and model.device.type == "cpu":
        log.warning("float16 is several times slower than bfloat16 on a CPU; use dtype bfloat16")
    if dtype in ("float32", "tf32"):
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return _lm(model, tokenizer, str(name), check)


def from_model(
    model: nn.Module, tokenizer: Any, *, name: str | None = None, check: bool = True
) -> LM:
    """Wrap a loaded transformers model; freezes it and sets eval mode.

    The tokenizer is copied, because padding is set to the right.
    """
    config: Any = model.config
    default: str = getattr(config, "name_or_path", "") or config.model_type
    return _lm(model, copy.deepcopy(tokenizer), name or default, check)


def _lm(model: Any, tokenizer: Any, name: str, check: bool) -> LM:
    if not getattr(tokenizer, "is_fast", False):
        raise BadModelFile(
            f"{type(tokenizer).__name__} gives no character offsets; factscope needs a fast "
            "tokenizer (one with a tokenizer.json)"
        )
    tokenizer.padding_side = "right"
    if tokenizer.pad_token_id is None:  # any token will do, since padding is masked
        special = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token)
        tokenizer.pad_token = next(
            (token for token in special if token is not None), tokenizer.convert_ids_to_tokens(0)
        )
    model.eval().requires_grad_(False)
    lm = LM(model=model, tokenizer=tokenizer, family=family_of(model), name=name)
    if check:
        check_family(lm)
        check_merges(lm)
        check_likelihood(lm)
    return lm


def _target(device: str | torch.device, device_map: Any) -> torch.device | None:
    """The device to move the model to; None if it is placed by its device map."""
    if device_map is not None and str(device) != "auto":
        raise BadSetting(f"device is {str(device)!r} and device_map {device_map!r}; give only one")
    if device_map is not None:
        if importlib.util.find_spec("accelerate") is None:
            raise BadSetting("device_map needs accelerate; `pip install accelerate`")
        return None
    if str(device) == "auto":
        return torch.device(best_device())
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise BadSetting(
            f"device is {str(device)!r}, which cannot be used here ({reason}); give 'auto' or 'cpu'"
        ) from error
    return torch.device(device)


def tiny_lm(device: str = "auto") -> LM:
    """A random GPT-2 with 4 layers of width 64, whose tokens are bytes: checks an installation
    without a download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    # With the usual 0.02 all tokens are equally likely and no edit changes that.
    config = GPT2Config(
        vocab_size=len(alphabet), n_positions=1024, n_embd=64, n_layer=4, n_head=4,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = GPT2LMHeadModel(config)
    nn.Module.to(model, best_device() if device == "auto" else device)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return from_model(model, tokenizer, name="tiny", check=False)  # no check: it is random


# ---- reading


def _read(hub_id: str, folder: Path | None, **options: Any) -> tuple[Any, Any]:
    """The model and tokenizer of a folder, or of a hub id if there is none."""
    if folder is None:
        # A model in the hub's cache needs no request: runs are repeatable and work offline.
        try:
            return _from_pretrained(hub_id, local_files_only=True, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.debug("%s is not in the hub's cache: %s", hub_id, error)
    place = hub_id if folder is None else str(folder)
    try:
        _check_family_is_known(place)
        return _from_pretrained(place, local_files_only=folder is not None, **options)
    except (FactscopeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _explain(place, error) from error


def _check_family_is_known(place: str) -> None:
    """Build the model without weights, before gigabytes of them are downloaded."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(place, trust_remote_code=False)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # not a causal language model
        raise unknown_family(config.model_type) from error
    family_of(model)


def _from_pretrained(
    place: str, *, dtype: torch.dtype | str, device_map: Any, local_files_only: bool
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # False, not unset: if it is unset, transformers asks the user at the terminal.
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local_files_only}
    tokenizer = AutoTokenizer.from_pretrained(place, **safe)
    if not tokenizer("A text", add_special_tokens=False)["input_ids"]:
        # If the files are missing, transformers makes a tokenizer with an empty vocabulary.
        raise BadModelFile(f"{place} has no tokenizer; save its tokenizer.json beside the weights")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        place,
        dtype=dtype,
        device_map=device_map,
        use_safetensors=True,
        output_loading_info=True,
        **safe,
    )
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:  # transformers would initialise them at random
        raise BadModelFile(
            f"{place} lacks {len(missing)} weights of {type(model).__name__}, "
            f"such as {missing[0]}; fetch or save it again"
        )
    return model, tokenizer


def _explain(place: str, error: Exception) -> FactscopeError:
    """Translate an error of transformers or of the hub."""
    from huggingface_hub import errors as hub

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)

    def caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if caused_by(hub.GatedRepoError):
        return unknown_model(place, "accept its terms on the hub, then run `hf auth login`")
    if caused_by(hub.RepositoryNotFoundError, hub.HFValidationError):
        return unknown_model(place, "not on the hub, or you have no access")
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
