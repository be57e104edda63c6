"""Text as token ids, and where in them the subject is.

Everything goes by ids and character offsets, never by joining strings: leading spaces, byte
pieces and BOS differ by family, offsets do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from factscope.errors import BadFact, PromptTooLong
from factscope.facts import Fact

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "Prompt",
    "continuation_ids",
    "decode_continuation",
    "encode",
    "encode_fact",
    "first_token",
]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A text as the model reads it."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """Each token's characters as [start, stop); empty for a special token."""
    texts: tuple[str, ...]
    """Each token as people read it."""

    def __len__(self) -> int:
        return len(self.ids)

    def tokens_of(self, span: tuple[int, int]) -> tuple[int, int]:
        """The tokens that touch a span of characters, as [start, stop)."""
        touching = [
            i
            for i, (start, stop) in enumerate(self.offsets)
            if start < stop and start < span[1] and stop > span[0]
        ]
        if not touching:
            raise BadFact(f"no token lies in the characters {span} of {''.join(self.texts)!r}")
        return touching[0], touching[-1] + 1


def encode(lm: "LM", text: str, *, special: bool = True) -> Prompt:
    """The text's tokens; with `special`, as the model expects a text to begin."""
    coded = lm.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    ids, offsets = list(coded["input_ids"]), [tuple(o) for o in coded["offset_mapping"]]
    eos, bos = lm.tokenizer.eos_token_id, lm.tokenizer.bos_token_id
    # Some tokenizers close a text with EOS; a prompt is meant to go on.
    if special and len(ids) > 1 and ids[-1] == eos and offsets[-1][0] == offsets[-1][1]:
        ids, offsets = ids[:-1], offsets[:-1]
    if special and lm.family.needs_bos and bos is not None and ids[:1] != [bos]:
        ids, offsets = [bos, *ids], [(0, 0), *offsets]
    if not ids:
        raise BadFact(f"the text {text!r} has no tokens; give a text that leads up to the object")
    if lm.context is not None and len(ids) > lm.context:
        raise PromptTooLong(
            f"the prompt has {len(ids)} tokens, {lm.name} reads at most {lm.context}; shorten it"
        )
    texts = [
        text[a:b] if a < b else lm.tokenizer.decode([i])
        for i, (a, b) in zip(ids, offsets, strict=True)
    ]
    return Prompt(ids=tuple(ids), offsets=tuple(offsets), texts=tuple(texts))


def encode_fact(lm: "LM", fact: Fact) -> tuple[Prompt, tuple[int, int]]:
    """The fact's prompt and the tokens of its subject."""
    prompt = encode(lm, fact.text)
    return prompt, prompt.tokens_of(fact.subject_span)


def first_token(lm: "LM", prompt: Prompt, text: str, target: str) -> int:
    """The token with which the target begins when it continues the text."""
    return continuation_ids(lm, prompt, text, target)[0]


def continuation_ids(lm: "LM", prompt: Prompt, text: str, target: str) -> tuple[int, ...]:
    """The target's tokens when it continues the text, with a space between where none is.

    Where the last word of the text and the first of the target would share a token, the target
    is coded alone.
    """
    gap = "" if not text or text[-1].isspace() or target[:1].isspace() else " "
    joined = encode(lm, text + gap + target)
    if joined.ids[: len(prompt)] == prompt.ids and len(joined) > len(prompt):
        return joined.ids[len(prompt) :]
    return encode(lm, gap + target, special=False).ids


def decode_continuation(lm: "LM", prompt: Sequence[int], ids: Sequence[int]) -> str:
    """What new ids add to a prompt: alone, some tokenizers drop their first space."""
    before = lm.tokenizer.decode(list(prompt))
    return lm.tokenizer.decode([*prompt, *ids])[len(before) :]
