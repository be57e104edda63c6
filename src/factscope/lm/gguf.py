"""Convert a GGUF file to safetensors and a fast tokenizer.

transformers reads the weights. This module removes the quantisation config, with which
transformers refuses to save, and corrects the tokenizer: BOS and the splitting of digits.
"""

from pathlib import Path
from typing import Any

from factscope.errors import BadModelFile, FactscopeError

BOS_PRE_TOKENIZERS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken", "lfm2"}
"""Byte-level tokenizers for which llama.cpp adds BOS if the file does not say whether to."""
SAMPLES = (
    "The Eiffel Tower is located in the city of",
    " Paris",
    "In  1969,\n\n  12 naïve 東京 😀\tdon't",
)


def convert_gguf(path: Path, folder: Path) -> None:
    """Save the GGUF's model as safetensors, with its tokenizer."""
    from transformers import AutoTokenizer

    model, tokenizer = read_gguf(path)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    saved = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    for text in SAMPLES:
        if saved(text)["input_ids"] != tokenizer(text)["input_ids"]:
            raise BadModelFile(
                f"the tokenizer of {path} encodes {text!r} differently after saving; give the "
                "model as a folder with safetensors and tokenizer.json"
            )


def read_gguf(path: Path) -> tuple[Any, Any]:
    """The model and tokenizer of a GGUF, ready to be saved."""
    from gguf import GGUFReader, GGUFValueType

    try:
        scalars = {
            key: field.contents()
            for key, field in GGUFReader(path).fields.items()
            if field.types and field.types[0] != GGUFValueType.ARRAY
        }
        return _model(path), _tokenizer(path, scalars)
    except FactscopeError:
        raise
    except Exception as error:  # a broken file can fail anywhere in its readers
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


def _tokenizer(path: Path, scalars: dict[str, Any]) -> Any:
    """The tokenizer, given the file's scalar fields."""
    from tokenizers import pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    backend = read.backend_tokenizer
    split = scalars.get("tokenizer.ggml.pre")
    if split == "smollm":
        # SmolLM splits numbers into digits; transformers reads its GGUF as GPT-2's tokenizer.
        digits = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    # Whether texts begin with BOS, by the rules of llama.cpp.
    add_bos = scalars.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        sentencepiece = scalars.get("tokenizer.ggml.model") == "llama"
        add_bos = sentencepiece or split in BOS_PRE_TOKENIZERS
    bos = read.bos_token
    if bos is not None and add_bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos}:1 $B:1",
            special_tokens=[(bos, read.bos_token_id)],
        )
    else:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    special = {name: getattr(read, name) for name in names if getattr(read, name) is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = read.chat_template
    return tokenizer
