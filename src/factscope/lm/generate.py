"""Many texts written at once, each up to the same length.

All rows begin at the first position, so none needs padding or a mask: a row whose prompt is longer
than another's takes its next token from the prompt while the other already takes it from the model.
What a row draws depends on its own name and the seed only, not on who stands beside it.

What a model says next: the likeliest words, or words drawn at random.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.tokens import decode_continuation, encode

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "Choose",
    "argmax_choice",
    "generate",
    "generate_greedy",
    "generate_ids",
    "sample_texts",
    "top_k_choice",
    "top_next_tokens",
    "uniform_draws",
]

FEW = 8
"""So few tokens are not worth getting ready for."""


def uniform_draws(names: Sequence[str], length: int, seed: int) -> Float[Tensor, "row position"]:
    """Uniform random numbers for each row by its name: the same wherever the row stands."""
    rows = []
    for name in names:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.rand(length, generator=generator))
    return torch.stack(rows)


@torch.no_grad()
def sample_texts(
    lm: "LM",
    rows: Sequence[Sequence[int]],
    draws: Float[Tensor, "row position"],
    *,
    k: int,
    steady: bool | None = None,
) -> list[list[int]]:
    """Every row continued to as many tokens as it has draws, each drawn from the k likeliest.

    `k` = 1 is the likeliest alone. Nothing stops at an end of text. `steady` steps (see
    `lm.steady`) are taken on a GPU if nothing else is said.
    """
    from transformers import DynamicCache

    from factscope.lm.accel.decode import steady_steps

    length = draws.shape[1]
    given = _side_by_side(rows, length).to(lm.device)
    shortest = min(map(len, rows))
    next_ = _Next(given, draws.to(lm.device), k)
    ids, cache = given.clone(), DynamicCache()
    new = ids[:, : min(shortest, length)]
    steady = lm.device.type == "cuda" if steady is None else steady
    for position in range(shortest, length):
        states = lm.model.base_model(new, past_key_values=cache, use_cache=True)
        logits = lm.head(states.last_hidden_state[:, -1])
        ids[:, position] = next_(logits, position)
        new = ids[:, position : position + 1]
        if steady and position == shortest and length - position > FEW:
            rest = steady_steps(lm, new[:, 0], cache, position, next_)
            if rest is not None:
                ids[:, position + 1 :] = rest
                break
    return ids.tolist()


class _Next:
    """Which token comes next in every row: its own, or one that is drawn."""

    def __init__(self, given: Tensor, draws: Tensor, k: int) -> None:
        self.given, self.draws, self.k = given, draws, k
        self.length = given.shape[1]

    def __call__(
        self, logits: Float[Tensor, "row vocabulary"], position: int | Tensor
    ) -> Int[Tensor, " row"]:
        """The tokens at a position; it may be a number or a tensor that holds one."""
        at = torch.as_tensor(position, device=self.given.device).reshape(1)
        own = self.given.index_select(1, at)[:, 0]
        draw = self.draws.index_select(1, at)[:, 0].to(logits.device)
        return torch.where(own < 0, _drawn(logits, draw, self.k).to(own.device), own)


def _side_by_side(rows: Sequence[Sequence[int]], length: int) -> Int[Tensor, "row position"]:
    """The rows' own tokens, and -1 where the model shall write."""
    given = torch.full((len(rows), length), -1)
    for i, row in enumerate(rows):
        given[i, : len(row)] = torch.tensor(list(row)[:length])
    return given


def _drawn(
    logits: Float[Tensor, "row vocabulary"], draws: Float[Tensor, " row"], k: int
) -> Int[Tensor, " row"]:
    """One of the k likeliest tokens each: the one in whose share of probability the draw falls."""
    best = logits.float().topk(min(k, logits.shape[-1]))
    reached = best.values.softmax(-1).cumsum(-1)[:, :-1]
    place = (draws[:, None] >= reached).sum(-1, keepdim=True)
    return best.indices.gather(1, place)[:, 0]


Choose = Callable[[Float[Tensor, "row vocabulary"]], Int[Tensor, " row"]]
"""How the next token is taken from the logits."""


def argmax_choice(logits: Float[Tensor, "row vocabulary"]) -> Int[Tensor, " row"]:
    """The token of the largest logit."""
    return logits.argmax(-1)


def top_k_choice(k: int, seed: int) -> Choose:
    """Draw among the k likeliest tokens; the draws are the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        best = logits.float().topk(min(k, logits.shape[-1]))
        weights = best.values.softmax(-1).cpu()
        drawn = torch.multinomial(weights, 1, generator=generator)
        return best.indices.gather(1, drawn.to(best.indices.device))[:, 0]

    return choose


@torch.no_grad()
def top_next_tokens(lm: "LM", text: str, count: int) -> list[tuple[str, float]]:
    """The likeliest next tokens with their probabilities, the likeliest first."""
    ids = encode(lm, text).ids
    states = lm.model.base_model(torch.tensor([ids], device=lm.device), use_cache=False)
    best = lm.head(states.last_hidden_state[:, -1]).float().softmax(-1)[0].topk(count)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(decode_continuation(lm, ids, [token]), probability) for token, probability in found]


def generate_greedy(lm: "LM", texts: Sequence[str], tokens: int, *, rows: int = 64) -> list[str]:
    """Each text's most likely continuation, up to so many tokens or the end of text."""
    return generate(lm, texts, tokens, argmax_choice, rows=rows)


def generate(
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
        new = generate_ids(lm, [coded[i] for i in some], tokens, choose)
        for i, ids in zip(some, new, strict=True):
            said[i] = decode_continuation(lm, coded[i], ids)
    return said


@torch.no_grad()
def generate_ids(
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
