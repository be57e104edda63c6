"""Attention knockout: at which layers the last token reads the subject (Geva et al., 2023).

In the clean run, attention from the last token to a group of tokens is blocked in a window of
layers around each layer. How far the answer's probability falls shows where the last token gets
what it needs from that group.

Only the last token's states differ from the clean run, so one pass over the layers carries one
state per group and window, with the clean run's keys and values as its past. Of an answer with
several tokens, every token that predicts one is blocked.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from factscope.lm.forward import ActivationCache
from factscope.lm.memory import BatchSizes
from factscope.lm.model import LM
from factscope.lm.replay import PackedView, Replay
from factscope.lm.tokens import Prompt
from factscope.progress import Progress, no_progress

GROUPS = ("subject", "relation", "last")
"""Groups of prompt tokens that the last token is kept from reading."""


def token_groups(lm: LM, prompt: Prompt, subject: tuple[int, int]) -> dict[str, list[int]]:
    """The tokens of each group; every token is in at most one.

    The paper's groups, with two differences. BOS is in no group: models use it as an attention
    sink, and blocking it has effects of its own. The last token is in "last" even if it is the
    subject's last, so that a token whose attention is blocked still sees others or itself.
    """
    last = len(prompt) - 1
    first = int(prompt.ids[0] == lm.tokenizer.bos_token_id)
    tokens = range(first, last)
    return {
        "subject": [t for t in tokens if subject[0] <= t < subject[1]],
        "relation": [t for t in tokens if not subject[0] <= t < subject[1]],
        "last": [last] if last else [],
    }


def window_around(layer: int, window: int, n_layers: int) -> tuple[int, int]:
    """The layers in which attention is blocked, as [start, stop), clipped at the edges."""
    start = layer - window // 2  # as in the paper's code
    return max(0, start), min(n_layers, start + window)


@torch.no_grad()
def knock_out(
    lm: LM,
    run: ActivationCache,
    prompts: Sequence[tuple[Prompt, tuple[int, int]]],
    predicting: int,
    window: int,
    sizes: BatchSizes,
    progress: Progress = no_progress,
) -> Float[Tensor, "prompt group layer token width"]:
    """The last-layer states that predict the answer, for each blocked group and window.

    The first rows of `run` are the clean runs of the prompts, each with its subject's tokens.
    `predicting` is the number of tokens of every answer.
    """
    starts = [len(prompt) - 1 for prompt, _ in prompts]
    # GPT-Neo masks by a key's index in the row: there all tokens of a batch have the same one.
    batches = [list(range(len(prompts)))]
    if not lm.family.supports_packing:
        batches = [[i for i, s in enumerate(starts) if s == start] for start in set(starts)]
    shape = len(prompts), len(GROUPS), lm.n_layers, predicting, run.inputs.shape[-1]
    states = run.inputs.new_empty(shape)
    for rows in batches:
        first = torch.tensor([starts[i] for i in rows], device=run.inputs.device)[:, None]
        view = PackedView(
            row=torch.tensor(rows, device=run.inputs.device),
            position=first + torch.arange(predicting, device=run.inputs.device),
            start=first.expand(-1, predicting),
            past=max(starts[i] for i in rows),
        )
        groups = [token_groups(lm, *prompts[i]) for i in rows]
        blocked = torch.zeros(len(GROUPS), *view.key_position.shape, dtype=torch.bool)
        for i, name in enumerate(GROUPS):
            for row, tokens in enumerate(groups):
                key = view.key_position[row].cpu()
                blocked[i, row] = torch.isin(key, torch.tensor(tokens[name], dtype=torch.long))
        weight = len(rows) / len(prompts)
        states[rows] = _propagate(
            lm, run, view, blocked, window, sizes, lambda f, w=weight: progress(f * w)
        )
    return states


def _propagate(
    lm: LM,
    run: ActivationCache,
    view: PackedView,
    blocked: Bool[Tensor, "group row key"],
    window: int,
    sizes: BatchSizes,
    progress: Progress,
) -> Float[Tensor, "row group layer token width"]:
    """Carry the states of all windows and groups through the layers."""
    layers, rows, tokens = lm.n_layers, *view.position.shape
    windows = [window_around(layer, window, layers) for layer in range(layers)]
    replay = Replay(lm, run, view)
    pending = run.inputs.new_empty(layers, len(blocked), rows, tokens, run.inputs.shape[-1])
    # A call repeats the past keys for each state, so they count like states.
    at_once = max(1, sizes.call // (len(blocked) * rows * (tokens + view.past)))
    started = 0
    for layer in range(layers):
        before = run.inputs if layer == 0 else run.states[layer - 1]
        clean = before[view.row.to(before.device)[:, None], view.position.to(before.device)]
        while started < layers and windows[started][0] <= layer:
            pending[started] = clean
            started += 1
        for first in range(0, started, at_once):
            batch = pending[first : min(started, first + at_once)]
            hidden = batch.flatten(0, 2)
            arguments = replay.arguments(layer, hidden)
            inside = [a <= layer < b for a, b in windows[first : first + len(batch)]]
            mask = arguments["attention_mask"]
            arguments["attention_mask"] = _block(mask, torch.tensor(inside), blocked)
            output = lm.blocks[layer](hidden, **arguments)
            output = output[0] if isinstance(output, tuple) else output
            batch.copy_(output.view(batch.shape))
        progress(1 / layers)
    return pending.permute(2, 1, 0, 3, 4)


def _block(
    mask: Tensor, inside: Bool[Tensor, " window"], blocked: Bool[Tensor, "group row key"]
) -> Tensor:
    """The attention mask with the blocked keys hidden in the windows that a layer is inside of."""
    hidden = inside[:, None, None, None] & blocked  # (window, group, row, key)
    hidden = hidden.flatten(0, 2)[:, None, None, :].to(mask.device)
    if mask.dtype == torch.bool:
        return mask & ~hidden
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)
