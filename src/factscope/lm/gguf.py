"""The tokenizer that a GGUF file describes, computed from the file's data alone.

transformers builds a tokenizer from the same data, and some versions build a wrong one without an
error. This is the slow reference, which encodes as llama.cpp does. `lm.sources` saves its encodings
of `SAMPLES` with the converted model; the model's tokenizer must agree whenever it is loaded.
"""

import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import regex

from factscope.errors import BadModelFile

WORDS = ("The", "Eiffel", " Tower", " located", " city", " Paris", " unbelievable", "tokenizers")
"""Samples that every pre-tokenizer leaves whole."""
SAMPLES = (
    *WORDS,
    "The Eiffel Tower is located in the city of Paris, isn't it? I'd say they've SEEN it: we'LL.",
    "In 1969 12,345.67 people paid $1000000 on 2024-05-31.",
    "  two leading spaces,  two inside,    four, and one at the end ",
    "a line\nanother\n\na paragraph\n\n\n\ttabs\t\there\r\n",
    "naïve café, Straße, São Paulo, Łódź, Ærøskøbing",
    "Москва — столица России. Ελλάδα",
    "東京は日本の首都です。北京是中国的首都。서울",
    "القاهرة هي عاصمة مصر. दिल्ली भारत की राजधानी है।",
    "fun 😀👩‍🚀🇫🇷 → ✓ ½ x² ™",
    "def f(x):\n    return {\"a\": [x ** 2, 0x1F], 'b': not x}  # !!! <b>&amp;</b>\n",
)
"""Texts that are encoded by both tokenizers."""

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _llama3(digits: str, letters: str = r"\p{L}") -> str:
    symbols = rf"[^\s{letters}\p{{N}}]"
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[{letters}]+|{digits}| ?{symbols}+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _cased(digits: str, contractions: str = "") -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{contractions}|{start}{_UPPER}+{_LOWER}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    (_GPT2,): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "exaone4", "trillion"),
    (r"\p{N}", _GPT2): ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"),
    (r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"): ("falcon",),
    (_llama3(r"\p{N}{1,3}"),): (
        "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx",
        "smaug-bpe", "glm4", "chatglm-bpe",
    ),
    (_llama3(r"\p{N}"),): ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
    (_llama3(r"\p{N}", r"\p{L}\p{M}"),): ("qwen35",),
    (_cased(r"\p{N}"),): ("tekken",),
    (_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),): ("gpt-4o", "llama4"),
    (" ?[^(\\s|.,!?…。，、।۔،)]+",): ("bloom", "poro-chat", "gpt3-finnish"),
}  # fmt: skip
PRE_TOKENIZERS = {name: patterns for patterns, names in _SPLITS.items() for name in names}
"""`tokenizer.ggml.pre` → the patterns that split a text, one after the other, as in llama.cpp."""
LLAMA3_RULES = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken", "lfm2",
}  # fmt: skip
"""For these llama.cpp adds BOS unless the file says otherwise, and takes a word of the vocabulary
as one token even if the merges do not lead to it."""
NORMAL, USER_DEFINED = 1, 4
"""Of `tokenizer.ggml.token_type`."""
REFERENCE_FILE = "reference_tokens.json"
"""In the folder of a converted model: the encodings that its tokenizer must reproduce."""
GO_ON = "--no-check-model (in Python check=False) uses it as it is"
"""The end of messages about a tokenizer that is wrong."""


# ---- reading

_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)


def read_fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file. The gguf package takes a minute for 260,000 tokens."""
    with path.open("rb") as file:

        def number(form: str) -> Any:
            [x] = struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))
            return x

        def value(kind: int) -> Any:
            if kind == _STRING:
                return file.read(number("Q")).decode()
            if kind == _ARRAY:
                kind, length = number("I"), number("Q")
                return [value(kind) for _ in range(length)]
            return number(_NUMBERS[kind])

        magic, version, _, n_fields = file.read(4), number("I"), number("Q"), number("Q")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"GGUF version {version}; only 2 and 3 are read")
        return {value(_STRING): value(number("I")) for _ in range(n_fields)}


# ---- encoding


@dataclass(frozen=True, kw_only=True)
class GgufTokenizer:
    """The fields `tokenizer.ggml.*` of a GGUF file."""

    model: str  # "gpt2": byte-level BPE; "llama": SentencePiece
    pre: str | None
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str]
    bos: int | None
    eos: int | None
    add_bos: bool
    add_space_prefix: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "GgufTokenizer":
        """From the fields of a file; defaults are those of llama.cpp."""

        def field(name: str, default: Any = None) -> Any:
            return fields.get(f"tokenizer.ggml.{name}", default)

        model, pre, tokens = field("model"), field("pre"), field("tokens", ())
        return cls(
            model=model,
            pre=pre,
            tokens=tokens,
            types=field("token_type", [NORMAL] * len(tokens)),
            scores=field("scores", ()),
            merges=field("merges", ()),
            bos=field("bos_token_id"),
            eos=field("eos_token_id"),
            add_bos=field("add_bos_token", model == "llama" or pre in LLAMA3_RULES),
            add_space_prefix=field("add_space_prefix", model == "llama"),
        )

    @property
    def patterns(self) -> tuple[str, ...] | None:
        """How a byte-level tokenizer splits a text; None if `pre` is not known."""
        return PRE_TOKENIZERS.get(self.pre or "")

    @property
    def unchecked(self) -> str | None:
        """What `encode` does not know about the file; None if it knows everything."""
        if self.model not in ("gpt2", "llama"):
            return f"the tokenizer model {self.model!r} is not known, so no token was checked"
        if self.model == "gpt2" and self.patterns is None:
            return (
                f"the pre-tokenizer {self.pre!r} is not known, so only single words were checked, "
                "not where spaces, digits and punctuation are split"
            )
        return None

    @property
    def samples(self) -> tuple[str, ...]:
        """The texts that `encode` can encode."""
        if self.model == "llama" or (self.model == "gpt2" and self.patterns is not None):
            return SAMPLES
        return WORDS if self.model == "gpt2" else ()

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        # Tokens that the user defined are never split and never merged with their neighbours.
        parts = [text] if self._defined is None else self._defined.split(text)
        ids: list[int] = []
        for i, part in enumerate(parts):
            if part in self._ids and i % 2:
                ids.append(self._ids[part])
            elif part and self.model == "llama":
                ids += self._sentencepiece(" " + part if self.add_space_prefix and not i else part)
            elif part:
                ids += self._byte_level(part)
        return ids

    def _byte_level(self, text: str) -> Iterator[int]:
        for word in _split(text, self.patterns or ()):
            symbols = [_BYTES[byte] for byte in word.encode()]
            whole = "".join(symbols)
            if self.pre in LLAMA3_RULES and whole in self._ids:
                yield self._ids[whole]
            else:
                for symbol in _merge(symbols, lambda a, b: self._ranks.get(f"{a} {b}")):
                    yield self._ids[symbol]

    def _sentencepiece(self, text: str) -> Iterator[int]:
        def rank(left: str, right: str) -> float | None:
            token = self._ids.get(left + right)
            return None if token is None else -self.scores[token]

        for symbol in _merge(list(text.replace(" ", "▁")), rank):
            if symbol in self._ids:
                yield self._ids[symbol]
            else:
                yield from (self._ids[f"<0x{byte:02X}>"] for byte in symbol.encode())

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: i for i, token in enumerate(self.tokens)}

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {merge: i for i, merge in enumerate(self.merges)}

    @cached_property
    def _defined(self) -> re.Pattern[str] | None:
        pairs = zip(self.tokens, self.types, strict=True)
        defined = sorted((t for t, kind in pairs if kind == USER_DEFINED), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, defined))})") if defined else None


def _split(text: str, patterns: Sequence[str]) -> list[str]:
    """The text cut by each pattern in turn, into its matches and what is between them."""
    parts = [text]
    for pattern in patterns:
        parts = [x for part in parts for x in regex.split(f"({pattern})", part) if x]
    return parts


def _merge(symbols: list[str], rank: Callable[[str, str], float | None]) -> list[str]:
    """Merge the adjacent pair of the lowest rank until no pair has one; the leftmost of equals."""
    while True:
        ranks = [(rank(a, b), i) for i, (a, b) in enumerate(pairwise(symbols))]
        ranked = [(r, i) for r, i in ranks if r is not None]
        if not ranked:
            return symbols
        _, i = min(ranked)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's character for each byte: itself if it can be printed, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


# ---- comparison


def save_reference(reference: GgufTokenizer, folder: Path) -> None:
    """Save the reference's encodings in the folder of a converted model."""
    content = {
        "start": [reference.bos] if reference.add_bos and reference.bos is not None else [],
        "eos": reference.eos,
        "samples": {text: reference.encode(text) for text in reference.samples},
    }
    (folder / REFERENCE_FILE).write_text(json.dumps(content), encoding="utf-8")


def check_reference(folder: Path, tokenizer: Any, name: str) -> None:
    """Raise BadModelFile if a tokenizer differs from the reference in its folder, if there is one.

    Compared are token ids with and without special tokens, the texts that they decode to, and EOS.
    """
    file = folder / REFERENCE_FILE
    if not file.is_file():
        return
    reference = json.loads(file.read_text(encoding="utf-8"))
    start, eos = reference["start"], reference["eos"]
    advice = (
        "; upgrade transformers, or give the model as a folder with safetensors and "
        f"tokenizer.json. {GO_ON}"
    )

    def names(ids: Sequence[int]) -> str:
        return " ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in ids)

    for text, ids in reference["samples"].items():
        encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        if encoded != ids:
            same = takewhile(lambda pair: pair[0] == pair[1], zip(encoded, ids, strict=False))
            first = len(list(same))
            part = slice(first, first + 4)
            raise BadModelFile(
                f"the tokenizer of {name} encodes {text!r} as {names(encoded[part])} where the "
                f"file's vocabulary gives {names(ids[part])} (from token {first}){advice}"
            )
        special: list[int] = tokenizer(text)["input_ids"]
        if special != start + ids:
            raise BadModelFile(
                f"the tokenizer of {name} encodes {text!r} with special tokens as "
                f"{names(special[:4])}, the file's rules give {names((start + ids)[:4])}{advice}"
            )
        decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if decoded != text:
            raise BadModelFile(
                f"the tokenizer of {name} decodes the tokens of {text!r} as {decoded!r}{advice}"
            )
    if tokenizer.eos_token_id != eos:
        raise BadModelFile(
            f"the tokenizer of {name} has the EOS token {tokenizer.eos_token_id}, "
            f"the file has {eos}{advice}"
        )
