"""A GGUF as a plain model and tokenizer, free of what ties them to the file.

transformers reads the weights; what it leaves unread, or refuses to save, is put right here.
"""

from pathlib import Path
from typing import Any

from factscope.errors import BadModelFile, FactscopeError

__all__ = ["convert_gguf", "read_gguf"]


def convert_gguf(path: Path, folder: Path) -> None:
    """Save the GGUF's model as safetensors, with its tokenizer."""
    model, tokenizer = read_gguf(path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    _check_tokenizer(path, tokenizer, folder)


def read_gguf(path: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF, both free of what ties them to the file."""
    try:
        metadata = _metadata(path)
        return _model(path), _tokenizer(path, metadata)
    except FactscopeError:
        raise
    except Exception as error:  # a broken file can break its readers in any way
        raise BadModelFile(
            f"{path} cannot be read as a GGUF ({type(error).__name__}: {error}); fetch it again, "
            "or give the model as a folder with safetensors"
        ) from error


def _metadata(path: Path) -> dict[str, Any]:
    """The file's scalar fields."""
    from gguf import GGUFReader, GGUFValueType

    fields = GGUFReader(path).fields
    return {
        key: field.contents()
        for key, field in fields.items()
        if field.types and field.types[0] != GGUFValueType.ARRAY
    }


def _model(path: Path) -> Any:
    import torch
    import transformers

    # Ask for plain weights where transformers could also keep the packed ones.
    plain: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        plain["quantization_config"] = transformers.GgufConfig(dequantize=True)
    read: Any = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        output_loading_info=True,
        trust_remote_code=False,
        **plain,
    )
    packed, info = read
    state = packed.state_dict()
    broken = sorted(info["missing_keys"]) + [n for n, w in state.items() if not w.isfinite().all()]
    if broken:
        raise BadModelFile(
            f"{path} lacks weights, or they are not numbers: {', '.join(broken[:3])}"
        )
    return _plain_model(packed.config, packed.generation_config, state, _narrowest(state))


def _plain_model(config: Any, generation_config: Any, state: dict[str, Any], dtype: Any) -> Any:
    """The same model without the marks of quantisation, which transformers refuses to save."""
    import torch
    from transformers import AutoModelForCausalLM

    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.load_state_dict({n: w.to(dtype) for n, w in state.items()}, assign=True)
    model.tie_weights()
    model.generation_config = generation_config
    return model


def _narrowest(state: dict[str, Any]) -> Any:
    """The shortest number format that holds every weight exactly.

    A quantised weight is a sum such as d·q + m of float16 and 4 bits: it needs float32 (float16
    would move SmolLM2's by up to 0.002). What was stored as float16 or bfloat16 stays so.
    """
    import torch

    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(w.to(dtype).float(), w.float()) for w in state.values()):
            return dtype
    return torch.float32


BOS_PRE_TOKENIZERS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "lfm2"}
"""Byte-level tokenizers that begin with BOS where the file does not say, as in llama.cpp."""


def _tokenizer(path: Path, metadata: dict[str, Any]) -> Any:
    """The file's tokenizer, with two things that transformers leaves unread put right."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    backend = read.backend_tokenizer
    _split_digits(backend, metadata.get("tokenizer.ggml.pre"))
    bos = read.bos_token if _begins_with_bos(metadata) else None
    backend.post_processor = _begin_with(bos, read.bos_token_id)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: getattr(read, name) for name in names if getattr(read, name) is not None}
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    plain.chat_template = read.chat_template
    return plain


def _begins_with_bos(metadata: dict[str, Any]) -> bool:
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    by_pieces = metadata.get("tokenizer.ggml.model") == "llama"  # SentencePiece
    return by_pieces or metadata.get("tokenizer.ggml.pre") in BOS_PRE_TOKENIZERS


def _begin_with(bos: str | None, bos_id: int | None) -> Any:
    from tokenizers.processors import TemplateProcessing

    if bos is None or bos_id is None:
        return TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _split_digits(backend: Any, pre: str | None) -> None:
    """SmolLM reads numbers digit by digit; transformers reads its GGUF as if it were GPT-2."""
    from tokenizers import pre_tokenizers

    if pre == "smollm":
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )


SAMPLES = (
    "The Eiffel Tower is located in the city of",
    " Paris",
    "In  1969,\n\n  12 naïve 東京 😀\tdon't",
)


def _check_tokenizer(gguf: Path, tokenizer: Any, folder: Path) -> None:
    """What was saved must read text as what was converted."""
    from transformers import AutoTokenizer

    saved = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in SAMPLES:
        if saved(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise BadModelFile(
                f"the tokenizer of {gguf} reads {text!r} otherwise after saving; give the model "
                "as a folder with safetensors and tokenizer.json"
            )
