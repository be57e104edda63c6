"""What a model says next."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from factscope.lm.tokens import encode, spoken

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["greedy"]


@torch.no_grad()
def greedy(lm: "LM", texts: Sequence[str], tokens: int, *, rows: int = 64) -> list[str]:
    """Each text's most likely continuation, token by token, up to so many or the end of text.

    Texts of the same length in tokens go together, so that no row needs padding.
    """
    coded = [encode(lm, text).ids for text in texts]
    order = sorted(range(len(texts)), key=lambda i: len(coded[i]))
    said = [""] * len(texts)
    while order:
        length = len(coded[order[0]])
        some = [i for i in order[:rows] if len(coded[i]) == length]
        order = order[len(some) :]
        for i, ids in zip(some, _continue(lm, [coded[i] for i in some], tokens), strict=True):
            said[i] = spoken(lm, coded[i], ids)
    return said


def _continue(lm: "LM", rows: list[tuple[int, ...]], tokens: int) -> list[list[int]]:
    """The new ids of rows of one length, by the key-value cache."""
    from transformers import DynamicCache

    cache = DynamicCache()
    new = torch.tensor(rows, device=lm.device)
    ids: list[list[int]] = [[] for _ in rows]
    going = [True] * len(rows)
    end = lm.tokenizer.eos_token_id
    for _ in range(tokens):
        states = lm.model.base_model(new, past_key_values=cache, use_cache=True)
        logits = lm.head(states.last_hidden_state[:, -1])
        new = logits.argmax(-1, keepdim=True).to(lm.device)
        for i, token in enumerate(new[:, 0].tolist()):
            going[i] = going[i] and token != end
            if going[i]:
                ids[i].append(token)
        if not any(going):
            break
    return ids
