"""Text as token ids, and the token range of the subject.

Positions come from the tokenizer's character offsets, never from joined token strings: leading
spaces, byte tokens and BOS differ between families, offsets do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from factscope.errors import BadFact, BadSetting, FactscopeError, PromptTooLong
from factscope.facts import Fact, check_unicode
from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A tokenized text."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]  # characters as [start, stop); empty for special tokens
    texts: tuple[str, ...]  # characters, or the name of a special token, for display

    def __len__(self) -> int:
        return len(self.ids)

    def token_range(self, span: tuple[int, int]) -> tuple[int, int]:
        """The tokens that overlap a span of characters, as [start, stop)."""
        overlapping = [
            i
            for i, (start, stop) in enumerate(self.offsets)
            if start < stop and start < span[1] and stop > span[0]
        ]
        if not overlapping:
            raise BadFact(f"no token overlaps the characters {span} of {''.join(self.texts)!r}")
        return overlapping[0], overlapping[-1] + 1


def encode(lm: LM, text: str, *, special: bool = True) -> Prompt:
    """Tokenize a text; `special` adds the special tokens at its start that the model expects."""
    [prompt] = encode_each(lm, [text], special=special)
    if isinstance(prompt, FactscopeError):
        raise prompt
    return prompt


def encode_each(
    lm: LM, texts: Sequence[str], *, special: bool = True
) -> list[Prompt | FactscopeError]:
    """Tokenize texts at once; one without tokens or with too many gives its error."""
    for text in texts:
        check_unicode(text)
    coded = lm.tokenizer(list(texts), add_special_tokens=special, return_offsets_mapping=True)
    columns = zip(texts, coded["input_ids"], coded["offset_mapping"], strict=True)
    return [_prompt(lm, text, ids, offsets, special) for text, ids, offsets in columns]


def _prompt(
    lm: LM, text: str, ids: list[int], offsets: list[tuple[int, int]], special: bool
) -> Prompt | FactscopeError:
    """The prompt, given what the tokenizer made of its text."""
    eos, bos = lm.tokenizer.eos_token_id, lm.tokenizer.bos_token_id
    # Some tokenizers append EOS, after which the model would not continue the prompt.
    if special and len(ids) > 1 and ids[-1] == eos and offsets[-1][0] == offsets[-1][1]:
        ids, offsets = ids[:-1], offsets[:-1]
    if special and lm.family.needs_bos and bos is not None and ids[:1] != [bos]:
        ids, offsets = [bos, *ids], [(0, 0), *offsets]
    if not ids:
        return BadFact(f"the text {text!r} has no tokens; give a text that leads up to the object")
    if lm.context is not None and len(ids) > lm.context:
        return PromptTooLong(
            f"the prompt has {len(ids)} tokens, {lm.name} reads at most {lm.context}; shorten it"
        )
    texts = tuple(
        text[start:stop] if start < stop else lm.tokenizer.decode([i])
        for i, (start, stop) in zip(ids, offsets, strict=True)
    )
    return Prompt(ids=tuple(ids), offsets=tuple(offsets), texts=texts)


def encode_fact(lm: LM, fact: Fact) -> tuple[Prompt, tuple[int, int]]:
    """The tokenized prompt of a fact, and its subject's token range."""
    prompt = encode(lm, fact.text)
    return prompt, prompt.token_range(fact.subject_span)


def chat_text(lm: LM, text: str) -> str:
    """The text as a user's message in the tokenizer's chat template, up to the model's reply."""
    if not getattr(lm.tokenizer, "chat_template", None):
        raise BadSetting(
            f"the tokenizer of {lm.name} has no chat template; leave --chat out, or use a model "
            "that was trained for chat"
        )
    message = [{"role": "user", "content": text}]
    try:
        chat = lm.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program: it raises what it likes
        reason = " ".join(str(error).split())
        raise BadSetting(f"the chat template of {lm.name} fails ({reason[:200]})") from error
    # Many templates begin with BOS, which `encode` adds too.
    bos = lm.tokenizer.bos_token
    adds_bos = encode(lm, "a").ids[0] == lm.tokenizer.bos_token_id
    return chat.removeprefix(bos) if bos and adds_bos else chat


def chat_fact(lm: LM, fact: Fact) -> Fact:
    """The fact with its prompt as a user's message; the object begins the reply."""
    chat = chat_text(lm, fact.prompt)
    # Prefixes belong into the message. A template may change the message; then they come first.
    return replace(fact, prompt=chat, context_start=max(0, chat.find(fact.prompt)))


def first_token(lm: LM, prompt: Prompt, text: str, target: str) -> int:
    """The first token of the target as a continuation of the text."""
    return continuation_ids(lm, prompt, text, target)[0]


def continuation_ids(lm: LM, prompt: Prompt, text: str, target: str) -> tuple[int, ...]:
    """The target's tokens as a continuation of the text, after a space if there is none.

    If a token would span the boundary between text and target, the target is tokenized alone.
    """
    gap = "" if not text or text[-1].isspace() or target[:1].isspace() else " "
    joined = encode(lm, text + gap + target)
    if joined.ids[: len(prompt)] == prompt.ids and len(joined) > len(prompt):
        return joined.ids[len(prompt) :]
    return encode(lm, gap + target, special=False).ids


def decode_continuation(lm: LM, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of new ids; decoded after the prompt, since alone their first space can be lost."""
    before = lm.tokenizer.decode(list(prompt))
    return lm.tokenizer.decode([*prompt, *ids])[len(before) :]
