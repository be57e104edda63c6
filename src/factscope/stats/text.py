"""Text as windows of tokens, for statistics: a file, a Hugging Face data set, or text that the
model writes itself.

Documents are laid end to end with the tokenizer's end of text between them and cut into windows
of one length, so that no row needs padding. Every window begins as the model expects a text to
begin: with BOS where the tokenizer puts one or the family needs one.
"""

import gzip
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from factscope.errors import BadSetting, DownloadFailed
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.tokens import encode

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "WINDOW",
    "DataSet",
    "GeneratedText",
    "Window",
    "documents",
    "groups",
    "window_of",
    "windows",
]

WINDOW = 256
"""Tokens in a window: long enough for context, short enough for any device."""
TINY = 16
"""A last piece of fewer tokens is dropped."""
SHUFFLED = 1 << 30
"""A text file up to so many bytes is read whole and its documents are shuffled."""
AT_ONCE = 64
"""Documents that are given to the tokenizer together."""

Window = Sequence[int]
Item = TypeVar("Item")


def groups(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items, so many at a time."""
    left = iter(items)
    while some := list(islice(left, size)):
        yield some


def window_of(lm: "LM", asked: int | None = None) -> int:
    """The length of a window: as asked, or the default where the model can read it."""
    longest = lm.context or WINDOW
    if asked is None:
        return min(WINDOW, longest)
    if not 2 <= asked <= max(longest, 2):
        raise BadSetting(f"a window of {asked} tokens; {lm.name} takes 2 to {longest}")
    return asked


def windows(lm: "LM", texts: Iterable[str], window: int) -> Iterator[list[int]]:
    """The texts' tokens in windows; only a tiny rest at the end is dropped."""
    start = _beginning(lm)
    size = window - len(start)
    kept: list[int] = []
    cut = 0
    for ids in _separated(lm, texts):
        kept += ids
        whole = len(kept) // size * size
        for i in range(0, whole, size):
            cut += 1
            yield start + kept[i : i + size]
        kept = kept[whole:]
    if len(kept) >= TINY or (kept and not cut):
        yield start + kept


def _beginning(lm: "LM") -> list[int]:
    """What stands in front of every text."""
    bare = encode(lm, "A", special=False).ids
    whole = encode(lm, "A").ids
    return list(whole[: len(whole) - len(bare)])


def _separated(lm: "LM", texts: Iterable[str]) -> Iterator[list[int]]:
    """Each document's tokens, with the end of text in front of all but the first."""
    end = lm.tokenizer.eos_token_id
    between = [] if end is None else [end]
    first = True
    for some in groups(texts, AT_ONCE):
        # verbose=False: a document may well be longer than what the model reads at once.
        coded = lm.tokenizer(list(some), add_special_tokens=False, verbose=False)["input_ids"]
        for ids in coded:
            yield ids if first else between + ids
            first = False


# ---- from a file


def documents(path: Path, seed: int = 0) -> Iterator[str]:
    """The documents of a text file (also gzipped), which blank lines part, in a random order.

    The beginning of an encyclopaedia speaks of few things; so does the reference shuffle it. A
    file too large to hold is read in its own order.
    """
    try:
        found = _blocks(path)
        if path.stat().st_size <= SHUFFLED:
            held = list(found)
            random.Random(seed).shuffle(held)
            found = iter(held)
        first = next(found, None)
        if first is None:
            raise BadSetting(f"{path} holds no text")
        yield from chain([first], found)
    except (OSError, EOFError, zlib.error) as error:
        raise BadSetting(f"the text {path} cannot be read: {error}") from error


def _blocks(path: Path) -> Iterator[str]:
    """Stretches of lines between blank lines."""
    opened = gzip.open if path.suffix == ".gz" else open
    lines: list[str] = []
    with opened(path, "rt", encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.strip():
                lines.append(line)
            elif lines:
                yield "".join(lines).strip()
                lines = []
    if lines:
        yield "".join(lines).strip()


# ---- from a Hugging Face data set


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A data set on the hub, or a folder of one: `NAME[,CONFIG][:SPLIT][#COLUMN]`."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str = "text"

    @classmethod
    def parse(cls, text: str) -> "DataSet":
        """From words such as `wikimedia/wikipedia,20231101.en:train#text`."""
        rest, _, column = text.removeprefix("hf:").partition("#")
        rest, _, split = rest.partition(":")
        name, _, config = rest.partition(",")
        if not name:
            raise BadSetting(f"the data set {text!r} has no name; write NAME,CONFIG:SPLIT#COLUMN")
        return cls(
            name=name, config=config or None, split=split or "train", column=column or "text"
        )

    def __str__(self) -> str:
        config = f",{self.config}" if self.config else ""
        return f"{self.name}{config}:{self.split}#{self.column}"

    def documents(self, seed: int = 0) -> Iterator[str]:
        """Its texts as they stream in, shuffled as far as a stream can be."""
        for row in self._rows(seed):
            if self.column not in row:
                raise BadSetting(
                    f"the data set {self.name!r} has no column {self.column!r}; it has "
                    f"{', '.join(map(repr, row))}: choose one with #COLUMN"
                )
            if row[self.column].strip():
                yield row[self.column]

    def _rows(self, seed: int) -> Iterator[dict[str, Any]]:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise BadSetting(
                "data sets need the package datasets; `pip install datasets`, or give a file "
                "with --text"
            ) from error
        try:
            rows = datasets.load_dataset(
                self.name, self.config, split=self.split, streaming=True
            ).shuffle(seed=seed, buffer_size=10_000)
            yield from rows
        except (ConnectionError, TimeoutError) as error:
            raise DownloadFailed(f"the data set {self} could not be fetched: {error}") from error
        except (ValueError, OSError) as error:
            reason = " ".join(str(error).split())[:300]
            raise BadSetting(
                f"the data set {self} cannot be read ({type(error).__name__}: {reason}); "
                "write NAME,CONFIG:SPLIT#COLUMN"
            ) from error


# ---- from the model itself


@dataclass(frozen=True, kw_only=True)
class GeneratedText:
    """Windows that the model writes itself, for want of a text: drawn among the likeliest tokens.

    Such text is narrower than what people write, and so is its C. Each window is drawn with a
    seed of its own, so that any of them can be written without those before it.
    """

    lm: "LM"
    window: int
    seed: int = 0
    rows: int = 32
    """Windows that are written together."""
    likeliest: int = 50
    """Tokens among which each is drawn."""

    def pick(self, numbers: range) -> Iterator[list[int]]:
        """The windows of those numbers, counted from 0."""
        for some in groups(numbers, self.rows):
            yield from self._write(some)

    def pick_after(self, numbers: range, skipped: int) -> Iterator[list[int]]:
        """The same without the first so many; written in the same company, they are the same."""
        whole = skipped // self.rows * self.rows
        return islice(self.pick(numbers[whole:]), skipped - whole, None)

    def _write(self, numbers: Sequence[int]) -> list[list[int]]:
        draws = uniform_draws([str(number) for number in numbers], self.window, self.seed)
        return sample_texts(self.lm, [[self._start()] for _ in numbers], draws, k=self.likeliest)

    def _start(self) -> int:
        tokenizer = self.lm.tokenizer
        known = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        return next(token for token in known if token is not None)
