"""Prefixes: texts put before a fact's prompt, so that its key and value hold in any context.

The model writes them itself (paper §3.1, App. E.5): so many of this length, so many of that.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from factscope.errors import BadSetting
from factscope.facts import PLACE
from factscope.lm.predict import continue_ids, top_k

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Lengths", "parse_lengths", "prefixes_for", "read_prefixes", "write_prefixes"]

Lengths = tuple[tuple[int, int], ...]
"""(tokens, how many) for each group of prefixes."""

AMONG = 5
"""Prefixes are drawn from the five likeliest tokens at each step."""
JOIN = ". "
"""What stands between a prefix and the prompt."""


def write_prefixes(
    lm: "LM", lengths: Lengths, seed: int, *, bos_counts: bool = False
) -> tuple[str, ...]:
    """Texts that the model writes from nothing, each ready to stand before a prompt."""
    choose = top_k(AMONG, seed)
    written: list[str] = []
    for tokens, count in lengths:
        new = tokens - 1 if bos_counts else tokens
        rows = continue_ids(lm, [[_first(lm)]] * count, new, choose, stop=False)
        written += [_plain(lm.tokenizer.decode(ids, skip_special_tokens=True)) for ids in rows]
    return tuple(text + JOIN for text in written)


def prefixes_for(
    lm: "LM",
    given: tuple[str, ...] | None,
    lengths: Lengths,
    seed: int,
    *,
    bos_counts: bool,
) -> tuple[str, ...]:
    """The given prefixes, or those that the model writes."""
    return write_prefixes(lm, lengths, seed, bos_counts=bos_counts) if given is None else given


def read_prefixes(path: Path) -> tuple[str, ...]:
    """Prefixes from a file, one a line: a text, or a template with {} where the prompt goes."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"cannot read the prefixes in {path}: {error}") from error
    prefixes = [line.split(PLACE)[0] if PLACE in line else line + JOIN for line in lines if line]
    return tuple(prefix for prefix in prefixes if prefix.strip())  # "{}" alone is always there


def parse_lengths(text: str) -> Lengths:
    """Lengths as people write them: "5x10,10x10" is ten of 5 tokens and ten of 10; "none"."""
    if text.strip() in ("", "none"):
        return ()
    groups = [part.strip().partition("x") for part in text.split(",")]
    try:
        lengths = tuple((int(tokens), int(count)) for tokens, _, count in groups)
    except ValueError:
        lengths = ((0, 0),)
    if min(min(group) for group in lengths) < 1:
        raise BadSetting(f"the prefixes {text!r} are not TOKENSxCOUNT, such as 5x10,10x10 or none")
    return lengths


def _first(lm: "LM") -> int:
    """The token that a text begins with; where a family has none, the one that ends texts."""
    known = (lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id)
    return next((token for token in known if token is not None), 0)


def _plain(text: str) -> str:
    """Without blank lines, and without braces, which would look like a place for the subject."""
    text = text.replace("\n\n", " ")
    return "".join(character for character in text if character not in "{}")
