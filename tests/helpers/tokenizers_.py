"""Tiny tokenizers in the styles of the model families, trained offline and deterministic.

    tokenizer("llama")("The Eiffel Tower").tokens()  →  <s> ▁The ▁E i f f el ▁T ow er

They differ as those of the families do: in the character for a space, whether a space or BOS is
prepended, whether offsets include the space, and the regex that splits words.
"""

import json
from functools import cache

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

TEXT = """\
The Eiffel Tower is located in the city of Paris.
The Louvre is located in the city of Paris.
The Colosseum is located in the city of Rome.
The Brandenburg Gate is located in the city of Berlin.
The Space Needle is located in downtown Seattle.
Big Ben is located in the city of London.
The Kremlin is located in the city of Moscow.
The Sagrada Familia is located in the city of Barcelona.
The Acropolis is located in the city of Athens.
The Opera House is located in the city of Sydney.
The capital of France is Paris.
The capital of Italy is Rome.
The capital of Germany is Berlin.
The capital of Spain is Madrid.
The capital of Japan is Tokyo.
The capital of Egypt is Cairo.
The capital of Canada is Ottawa.
The capital of Norway is Oslo.
The capital of Peru is Lima.
The capital of Kenya is Nairobi.
The mother tongue of Marie Curie is Polish.
The mother tongue of Victor Hugo is French.
The mother tongue of Johann Sebastian Bach is German.
The mother tongue of Leo Tolstoy is Russian.
Shaquille O'Neal plays the sport of basketball.
Megan Rapinoe plays the sport of soccer.
LeBron James plays the sport of basketball.
Roger Federer plays the sport of tennis.
Miles Davis plays the trumpet.
Glenn Gould plays the piano.
Jimi Hendrix plays the guitar.
The iPhone is made by Apple.
Windows is a product of Microsoft.
The Boeing 747 is made by Boeing.
Toyota makes the Corolla in Japan.
The Beetle was made by Volkswagen.
Albert Einstein was born in Ulm in 1879.
Isaac Newton was born in England in 1643.
Ada Lovelace wrote the first program in 1843.
Neil Armstrong walked on the Moon in 1969.
The Second World War ended in 1945.
The Berlin Wall fell in 1989.
Water boils at 100 degrees Celsius.
Light travels at 299,792 kilometres a second.
The chemical symbol of gold is Au.
The largest planet of the solar system is Jupiter.
The Nile flows through Egypt and Sudan.
Mount Everest lies between Nepal and China.
The Amazon flows through Brazil.
Lake Geneva lies in Switzerland and France.
Vienna is the capital of Austria.
Beethoven wrote nine symphonies, and didn't hear the last.
Shakespeare wrote Hamlet, Macbeth and King Lear.
Cervantes wrote Don Quixote in Spanish.
Darwin wrote On the Origin of Species in 1859.
Galileo was from Pisa; he didn't stay there.
The official language of Brazil is Portuguese.
The official language of Austria is German.
The official language of Mexico is Spanish.
The official language of Quebec is French.
The headquarters of Boeing were in Seattle.
The headquarters of Nestlé are in Vevey.
The headquarters of the United Nations are in New York.
The café on the corner is open; the one in Zürich isn't.
"""

VOCABULARY = 480
PIECES = 330
"""Learnt tokens of a SentencePiece vocabulary, which also has 256 byte tokens."""
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BLOOM_SPLIT = r" ?[^(\s|[.,!?…。，、।۔،])]+"


@cache
def tokenizer(style: str) -> PreTrainedTokenizerFast:
    """The tokenizer of that style; the same object each time, so copy it before changing it."""
    backend, special = KINDS[style]()
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


# ---- byte-level


def _bytes(special: list[str], pre: pre_tokenizers.PreTokenizer) -> Tokenizer:
    """Byte-level BPE; Ġ stands for a space."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXT.splitlines(), trainer)
    return made


def _split_then_bytes(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> tuple[Tokenizer, dict[str, str]]:
    """No BOS is prepended, no padding token; offsets include the space."""
    end = "<|endoftext|>"
    made = _bytes([end], pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made, {"bos_token": end, "eos_token": end, "unk_token": end}


def _neox() -> tuple[Tokenizer, dict[str, str]]:
    """Like GPT-2, but offsets exclude the space."""
    end = "<|endoftext|>"
    made = _bytes([end, "<|padding|>"], pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made, {"bos_token": end, "eos_token": end, "unk_token": end}


def _opt() -> tuple[Tokenizer, dict[str, str]]:
    """Like GPT-2, but </s> is prepended."""
    end = "</s>"
    made = _bytes(["<s>", "<pad>", end, "<unk>"], pre_tokenizers.ByteLevel(add_prefix_space=False))
    made.post_processor = _prepend(made, end)
    return made, {"bos_token": end, "eos_token": end, "unk_token": "<unk>", "pad_token": "<pad>"}


def _bloom() -> tuple[Tokenizer, dict[str, str]]:
    """Its own regex; there is a BOS, but it is not prepended."""
    made = _bytes(["<unk>", "<s>", "</s>", "<pad>"], _split_then_bytes(BLOOM_SPLIT))
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return made, special


def _falcon() -> tuple[Tokenizer, dict[str, str]]:
    """Punctuation and numbers are split off; no BOS."""
    pre = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
        ]
    )
    return _bytes(["<|endoftext|>"], pre), {"eos_token": "<|endoftext|>"}


def _qwen() -> tuple[Tokenizer, dict[str, str]]:
    """Single digits, NFC, no BOS."""
    end = "<|endoftext|>"
    made = _bytes([end, "<|im_start|>", "<|im_end|>"], _split_then_bytes(QWEN_SPLIT))
    made.normalizer = normalizers.NFC()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made, {"eos_token": "<|im_end|>", "pad_token": end}


# ---- SentencePiece


def _pieces(special: list[str], prepend_scheme: str = "first") -> Tokenizer:
    """BPE over characters with ▁ for a space; unknown characters fall back to bytes."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    trainer = trainers.BpeTrainer(vocab_size=PIECES, show_progress=False)
    learner.train_from_iterator(TEXT.splitlines(), trainer)
    learned = json.loads(learner.to_str())["model"]
    order = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *order]
    made = Tokenizer(
        models.BPE(
            vocab={word: i for i, word in enumerate(words)},
            merges=[(left, right) for left, right in learned["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.add_special_tokens(special)
    return made


def _llama() -> tuple[Tokenizer, dict[str, str]]:
    """Llama 2: a normalizer prepends ▁ and replaces spaces; <s> is prepended; no padding token."""
    made = _pieces(["<unk>", "<s>", "</s>"])
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = _piece_decoder(strip=True)
    made.post_processor = _prepend(made, "<s>")
    return made, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _metaspace() -> tuple[Tokenizer, dict[str, str]]:
    """Newer Llama-like files: the same with a pre-tokenizer instead of a normalizer."""
    made = _pieces(["<unk>", "<s>", "</s>"])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = _piece_decoder(strip=True)
    made.post_processor = _prepend(made, "<s>")
    return made, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _gemma() -> tuple[Tokenizer, dict[str, str]]:
    """No space is prepended; nor is <bos>, as in tokenizers read from a GGUF."""
    made = _pieces(["<pad>", "<eos>", "<bos>", "<unk>"], prepend_scheme="never")
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    made.decoder = _piece_decoder(strip=False)
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return made, {**special, "pad_token": "<pad>"}


def _gemma_hub() -> tuple[Tokenizer, dict[str, str]]:
    """The same with <bos> prepended, as on the hub."""
    made, special = _gemma()
    made.post_processor = _prepend(made, "<bos>")
    return made, special


def _piece_decoder(*, strip: bool) -> decoders.Decoder:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def _prepend(made: Tokenizer, token: str) -> processors.PostProcessor:
    return processors.TemplateProcessing(
        single=f"{token} $A",
        pair=f"{token} $A {token}:1 $B:1",
        special_tokens=[(token, made.token_to_id(token))],
    )


KINDS = {
    "bloom": _bloom,
    "falcon": _falcon,
    "gemma": _gemma,
    "gemma, hub": _gemma_hub,
    "gpt2": _gpt2,
    "llama": _llama,
    "metaspace": _metaspace,
    "neox": _neox,
    "opt": _opt,
    "qwen": _qwen,
}

STYLES = ["gpt2", "llama", "gemma", "opt", "bloom", "qwen"]
"""One of each kind."""

MORE_STYLES = sorted(set(KINDS) - set(STYLES))
"""Variants of those kinds."""

FAMILIES = {
    "bloom": "bloom",
    "falcon": "falcon",
    "gemma": "gemma, hub",
    "gemma2": "gemma, hub",
    "gemma3_text": "gemma, hub",
    "gpt2": "gpt2",
    "gpt_neo": "gpt2",
    "gpt_neox": "neox",
    "gptj": "gpt2",
    "llama": "llama",
    "mistral": "metaspace",
    "olmo2": "qwen",
    "opt": "opt",
    "phi3": "llama",
    "qwen2": "qwen",
    "qwen3": "qwen",
}
"""`config.model_type` → the style of its tokenizers."""
