"""Attention knockout equals a full forward pass with the attention blocked in the mask."""

import inspect
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from factscope.lm.forward import forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.memory import BatchSizes, Budget
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt
from factscope.tracing.knockout import GROUPS, knock_out, token_groups, window_around

from families import tiny

PROMPTS = [(7, (1, 3)), (9, (0, 3)), (4, (3, 4))]
"""Lengths and subjects, one of them the last token."""


def prompt(length: int, seed: int = 0) -> Prompt:
    ids = tuple(np.random.default_rng(seed + length).integers(3, 99, length).tolist())
    return Prompt(ids=ids, offsets=((0, 0),) * length, texts=("?",) * length)


def blocked_states(
    lm: LM, ids: tuple[int, ...], start: int, tokens: list[int], layers: range
) -> Tensor:
    """The last-layer states from `start` on, by a forward pass without a cache; in these layers
    they cannot attend to the tokens."""
    length = len(ids)
    causal = torch.ones(length, length, dtype=torch.bool).tril()

    def block(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        given = bound.arguments.pop("self") and bound.arguments.get("attention_mask")
        visible = causal[None, None].clone()
        visible[..., start:, tokens] = False
        if given is None:
            low = torch.finfo(torch.float32).min
            mask = torch.zeros(visible.shape).masked_fill(~visible, low)
        elif given.dtype == torch.bool:
            mask = given & visible
        else:
            mask = given.masked_fill(~visible, torch.finfo(given.dtype).min)
        arguments = dict(bound.arguments)
        arguments |= arguments.pop("kwargs", {})
        return (), arguments | {"attention_mask": mask}

    states: list[Tensor] = []
    with ExitStack() as hooks, hook_outputs((lm.blocks[-1], states.append)):
        for layer in layers:
            hook = lm.blocks[layer].register_forward_pre_hook(block, with_kwargs=True)
            hooks.enter_context(hook)
        lm.model(torch.tensor([ids]), use_cache=False)
    return states[0][0, start:]


@pytest.mark.parametrize("answer", [1, 3])
def test_every_window_and_group_of_every_family(lm: LM, answer: int) -> None:
    prompts = [(prompt(length), subject) for length, subject in PROMPTS]
    rows = [(*p.ids, *range(10, 9 + answer)) for p, _ in prompts]
    padded = [[*ids, *[5] * (12 - len(ids))] for ids in rows]
    run = forward(lm, torch.tensor(padded))
    found = knock_out(lm, run, prompts, answer, 2, Budget(2**30).batch_sizes(lm))
    for i, (p, subject) in enumerate(prompts):
        for g, group in enumerate(GROUPS):
            tokens = token_groups(lm, p, subject)[group]
            for layer in range(lm.n_layers):
                layers = range(*window_around(layer, 2, lm.n_layers))
                slow = blocked_states(lm, rows[i], len(p) - 1, tokens, layers)
                p_found, p_slow = (lm.decode(x).softmax(-1) for x in (found[i, g, layer], slow))
                torch.testing.assert_close(p_found, p_slow, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "falcon, alibi"])
def test_small_batches_change_nothing(family: str) -> None:
    lm = tiny(family)
    prompts = [(prompt(length), subject) for length, subject in PROMPTS]
    run = forward(lm, torch.tensor([[*p.ids, *[5] * (9 - len(p))] for p, _ in prompts]))
    whole = knock_out(lm, run, prompts, 1, 3, Budget(2**30).batch_sizes(lm))
    progress: list[float] = []
    sizes = BatchSizes(pending=1, call=1, logits=1)
    split = knock_out(lm, run, prompts, 1, 3, sizes, progress.append)
    torch.testing.assert_close(split, whole)
    assert sum(progress) == pytest.approx(1)


def test_groups_are_disjoint_and_leave_out_bos() -> None:
    lm = tiny("llama")
    bos = Prompt(ids=(1, 5, 6, 7, 8), offsets=((0, 0),) * 5, texts=("?",) * 5)
    assert token_groups(lm, bos, (1, 3)) == {"subject": [1, 2], "relation": [3], "last": [4]}
    # A subject that ends the prompt leaves its last token to "last".
    assert token_groups(lm, bos, (3, 5)) == {"subject": [3], "relation": [1, 2], "last": [4]}
    alone = Prompt(ids=(5,), offsets=((0, 1),), texts=("a",))
    assert token_groups(lm, alone, (0, 1)) == {"subject": [], "relation": [], "last": []}


def test_windows_are_centred_and_clipped() -> None:
    assert window_around(20, 9, 48) == (16, 25)
    assert window_around(1, 9, 48) == (0, 6)
    assert window_around(47, 9, 48) == (43, 48)
    assert window_around(20, 10, 48) == (15, 25)
