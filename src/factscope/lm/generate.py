"""Generation: the likeliest continuation, sampled continuations, and the likeliest next tokens."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.errors import BadModelFile
from factscope.facts import check_list
from factscope.lm.model import LM
from factscope.lm.tokens import decode_continuation, encode
from factscope.progress import Progress, no_progress

Choose = Callable[[Float[Tensor, "row vocabulary"]], Int[Tensor, " row"]]
"""Chooses the next token of each row from the logits."""


def argmax_choice(logits: Float[Tensor, "row vocabulary"]) -> Int[Tensor, " row"]:
    """The token with the largest logit."""
    return logits.argmax(-1)


def top_k_choice(k: int, seed: int) -> Choose:
    """Sample among the k likeliest tokens; the samples are the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:
        best = logits.float().topk(min(k, logits.shape[-1]))
        weights = best.values.softmax(-1).cpu()
        chosen = torch.multinomial(weights, 1, generator=generator)
        return best.indices.gather(1, chosen.to(best.indices.device))[:, 0]

    return choose


@torch.no_grad()
def top_next_tokens(lm: LM, text: str, count: int) -> list[tuple[str, float]]:
    """The likeliest next tokens with their probabilities, the likeliest first."""
    ids = encode(lm, text).ids
    states = lm.model.base_model(torch.tensor([ids], device=lm.device), use_cache=False)
    best = lm.head(states.last_hidden_state[:, -1]).float().softmax(-1)[0].topk(count)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(decode_continuation(lm, ids, [token]), probability) for token, probability in pairs]


def generate_greedy(lm: LM, texts: Sequence[str], tokens: int, *, rows: int = 64) -> list[str]:
    """The most likely continuation of each text, up to `tokens` tokens or the end of text."""
    return generate(lm, texts, tokens, argmax_choice, rows=rows)


def fitting_tokens(lm: LM, texts: Sequence[str], tokens: int) -> int:
    """`tokens`, or fewer if the longest text leaves less of the model's context."""
    if lm.context is None or not texts:
        return tokens
    return max(0, min(tokens, lm.context - max(len(encode(lm, text)) for text in texts)))


def generate(
    lm: LM, texts: Sequence[str], tokens: int, choose: Choose, *, rows: int = 64
) -> list[str]:
    """The continuation of each text, up to `tokens` tokens or the end of text.

    Texts with the same number of tokens share a batch of up to `rows`, so none needs padding.
    """
    check_list("texts", texts)
    encoded = [encode(lm, text).ids for text in texts]
    order = sorted(range(len(texts)), key=lambda i: len(encoded[i]))
    continuations = [""] * len(texts)
    while order:
        length = len(encoded[order[0]])
        batch = [i for i in order[:rows] if len(encoded[i]) == length]
        order = order[len(batch) :]
        new = generate_ids(lm, [encoded[i] for i in batch], tokens, choose)
        for i, ids in zip(batch, new, strict=True):
            continuations[i] = decode_continuation(lm, encoded[i], ids)
    return continuations


@torch.no_grad()
def generate_ids(
    lm: LM, rows: Sequence[Sequence[int]], tokens: int, choose: Choose, *, stop: bool = True
) -> list[list[int]]:
    """The new ids of rows of equal length; with `stop`, a row ends at the end of text."""
    from transformers import DynamicCache

    cache = DynamicCache()
    new = torch.tensor(rows, device=lm.device)
    ids: list[list[int]] = [[] for _ in rows]
    unfinished = [True] * len(rows)
    for step in range(tokens):
        states = lm.model.base_model(new, past_key_values=cache, use_cache=True)
        logits = lm.head(states.last_hidden_state[:, -1])
        if not step and logits.isnan().any():  # later steps cost time to check
            raise BadModelFile(
                f"{lm.name} predicts NaN: its weights or edits are NaN or infinite, or overflow in "
                f"{lm.dtype}; try dtype float32, or fetch or save the model again"
            )
        chosen = choose(logits)
        for i, token in enumerate(chosen.tolist()):
            unfinished[i] = unfinished[i] and not (stop and token == lm.tokenizer.eos_token_id)
            if unfinished[i]:
                ids[i].append(token)
        if not any(unfinished):
            break
        new = chosen.to(lm.device)[:, None]
    return ids


# ---- sampling texts to a fixed length, reproducibly in any batch


def uniform_draws(names: Sequence[str], length: int, seed: int) -> Float[Tensor, "row position"]:
    """Uniform random numbers per row, which depend only on its name and the seed."""
    rows = []
    for name in names:
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        rows.append(torch.rand(length, generator=generator))
    return torch.stack(rows)


@torch.no_grad()
def sample_texts(
    lm: LM,
    rows: Sequence[Sequence[int]],
    draws: Float[Tensor, "row position"],
    *,
    k: int,
    static: bool | None = None,
    progress: Progress = no_progress,
) -> list[list[int]]:
    """Continue every row to as many tokens as it has draws, sampling from the k likeliest.

    k = 1 is greedy. Rows continue past an end-of-text token. All rows begin at the first position,
    so none needs padding or a mask: a row with a longer prompt takes its next token from the prompt
    while another already takes it from the model. By default, decoding is `static` on a GPU.
    """
    from transformers import DynamicCache

    from factscope.lm.accel.decode import static_decode

    length = draws.shape[1]
    prompts = torch.full((len(rows), length), -1)  # -1 where the model generates
    for prompt, row in zip(prompts, rows, strict=True):
        prompt[: len(row)] = torch.tensor(row[:length])
    prompts, draws = prompts.to(lm.device), draws.to(lm.device)

    def choose(logits: Float[Tensor, "row vocabulary"], position: int | Tensor) -> Tensor:
        """The tokens at a position: those of the prompt, or sampled ones after its end."""
        at = torch.as_tensor(position, device=prompts.device).reshape(1)
        given = prompts.index_select(1, at)[:, 0]
        draw = draws.index_select(1, at)[:, 0].to(logits.device)
        return torch.where(given < 0, _sampled(logits, draw, k).to(given.device), given)

    shortest = min(map(len, rows))
    ids, cache = prompts.clone(), DynamicCache()
    new = ids[:, : min(shortest, length)]
    for position in range(shortest, length):
        states = lm.model.base_model(new, past_key_values=cache, use_cache=True)
        ids[:, position] = choose(lm.head(states.last_hidden_state[:, -1]), position)
        new = ids[:, position : position + 1]
        progress(1 / (length - shortest))
        if position == shortest and static is not False:
            rest = static_decode(lm, new[:, 0], cache, position, length, choose, force=bool(static))
            if rest is not None:
                ids[:, position + 1 :] = rest
                break
    return ids.tolist()


def _sampled(
    logits: Float[Tensor, "row vocabulary"], draws: Float[Tensor, " row"], k: int
) -> Int[Tensor, " row"]:
    """Sample from the k likeliest tokens by inverting the cumulative distribution at the draw."""
    best = logits.float().topk(min(k, logits.shape[-1]))
    cumulative = best.values.softmax(-1).cumsum(-1)[:, :-1]
    chosen = (draws[:, None] >= cumulative).sum(-1, keepdim=True)
    return best.indices.gather(1, chosen)[:, 0]
