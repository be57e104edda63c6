"""What a model says next: the likeliest words, or words drawn at random."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.tokens import encode, spoken

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Choose", "continue_ids", "greedy", "likeliest", "next_tokens", "say", "top_k"]

Choose = Callable[[Float[Tensor, "row vocabulary"]], Int[Tensor, " row"]]
"""How the next token is taken from the logits."""


def likeliest(logits: Float[Tensor, "row vocabulary"]) -> Int[Tensor, " row"]:
    """The token of the largest logit."""
    return logits.argmax(-1)


def top_k(k: int, seed: int) -> Choose:
    """Draw among the k likeliest tokens; the draws are the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        best = logits.float().topk(min(k, logits.shape[-1]))
        weights = best.values.softmax(-1).cpu()
        drawn = torch.multinomial(weights, 1, generator=generator)
        return best.indices.gather(1, drawn.to(best.indices.device))[:, 0]

    return choose


@torch.no_grad()
def next_tokens(lm: "LM", text: str, count: int) -> list[tuple[str, float]]:
    """The likeliest next tokens with their probabilities, the likeliest first."""
    ids = encode(lm, text).ids
    states = lm.model.base_model(torch.tensor([ids], device=lm.device), use_cache=False)
    best = lm.head(states.last_hidden_state[:, -1]).float().softmax(-1)[0].topk(count)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(spoken(lm, ids, [token]), probability) for token, probability in found]


def greedy(lm: "LM", texts: Sequence[str], tokens: int, *, rows: int = 64) -> list[str]:
    """Each text's most likely continuation, up to so many tokens or the end of text."""
    return say(lm, texts, tokens, likeliest, rows=rows)


def say(
    lm: "LM", texts: Sequence[str], tokens: int, choose: Choose, *, rows: int = 64
) -> list[str]:
    """Each text's continuation, token by token, up to so many or the end of text.

    Texts of the same length in tokens go together, so that no row needs padding.
    """
    coded = [encode(lm, text).ids for text in texts]
    order = sorted(range(len(texts)), key=lambda i: len(coded[i]))
    said = [""] * len(texts)
    while order:
        length = len(coded[order[0]])
        some = [i for i in order[:rows] if len(coded[i]) == length]
        order = order[len(some) :]
        new = continue_ids(lm, [coded[i] for i in some], tokens, choose)
        for i, ids in zip(some, new, strict=True):
            said[i] = spoken(lm, coded[i], ids)
    return said


@torch.no_grad()
def continue_ids(
    lm: "LM", rows: Sequence[Sequence[int]], tokens: int, choose: Choose, *, stop: bool = True
) -> list[list[int]]:
    """The new ids of rows of one length, by the key-value cache; `stop` at the end of text."""
    from transformers import DynamicCache

    cache = DynamicCache()
    new = torch.tensor(rows, device=lm.device)
    ids: list[list[int]] = [[] for _ in rows]
    going = [True] * len(rows)
    end = lm.tokenizer.eos_token_id if stop else None
    for _ in range(tokens):
        states = lm.model.base_model(new, past_key_values=cache, use_cache=True)
        new = choose(lm.head(states.last_hidden_state[:, -1]))[:, None].to(lm.device)
        for i, token in enumerate(new[:, 0].tolist()):
            going[i] = going[i] and token != end
            if going[i]:
                ids[i].append(token)
        if not any(going):
            break
    return ids
