"""The value search: its units, its stops, and its continuation where a fact is not taken."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.data.readers import everyday_facts
from factscope.editing.checks import facts_taken
from factscope.editing.contexts import target_ids
from factscope.editing.edit import Edit
from factscope.editing.settings import Memit, Rome, ValueSearch
from factscope.editing.value_search import USUAL_FACTS, EditSite, usual_norm
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.lm.tokens import encode_fact

from editing_facts import FACTS, FEW, PREFIXES, random_moment, text_lm


def rome_on(lm: LM, search: ValueSearch, **settings: Any) -> Rome:
    moment = random_moment(lm, 0)
    return Rome(layer=0, prefixes=PREFIXES, second_moment=moment, search=search, **settings)


def losses(edit: Edit) -> list[float]:
    return edit.settings["losses"][0]


# ---- units


@pytest.mark.parametrize("site", ["mlp", "state"])
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt"])
@torch.no_grad()
def test_the_usual_norm_is_the_median_of_single_prompts(family: str, site: EditSite) -> None:
    lm = text_lm(family)
    module = lm.mlp_out(1) if site == "mlp" else lm.blocks[1]
    norms = []
    for fact in everyday_facts()[:USUAL_FACTS]:
        prompt, subject = encode_fact(lm, replace(fact, target=None))
        seen: list[Tensor] = []
        with hook_outputs((module, lambda out, seen=seen: seen.append(out.clone()))):
            lm.model(torch.tensor([prompt.ids]))
        norms.append(seen[0].reshape(len(prompt.ids), -1)[subject[1] - 1].norm().item())
    median = sorted(norms)[(len(norms) - 1) // 2]
    assert usual_norm(lm, 1, site, "subject-last") == pytest.approx(median, rel=1e-4)


@torch.no_grad()
def scaled(lm: LM, factor: float) -> LM:
    """The same function with a residual stream `factor` times as long."""
    lm.embed.weight.mul_(factor)
    for layer in range(lm.n_layers):
        for name in ("attn", "mlp"):
            weight: Any = lm.contribution(name, layer).weight
            weight.mul_(factor)
    return lm


@pytest.mark.parametrize("method", ["rome", "memit"])
def test_the_search_does_not_depend_on_the_scale_of_the_model(method: str) -> None:
    search = replace(FEW, clamp=1.0, weight_decay=0.1)

    def edit(lm: LM) -> Edit:
        if method == "rome":
            return rome_on(lm, search)(lm, FACTS[:1])
        memit = Memit(layers=(0, 1), prefixes=PREFIXES, second_moment="identity", search=search)
        return memit(lm, FACTS[:1])

    plain, long = edit(text_lm("llama")), edit(scaled(text_lm("llama"), 64.0))
    assert losses(long) == pytest.approx(losses(plain), rel=1e-3)
    for name, change in plain.changes.items():
        wanted, found = 64 * change.matrix(), long.changes[name].matrix()
        assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max()


# ---- stops


def test_a_search_stops_at_a_probability() -> None:
    """With one context, one target token and no other terms the loss is -log P."""
    lm = text_lm("llama")
    [*_, fact] = FACTS
    fact = replace(fact, target="is")
    assert len(target_ids(lm, fact)) == 1
    search = replace(FEW, steps=12, weight_decay=0.0, kl_weight=0.0)
    rome = replace(rome_on(lm, search), prefixes=())
    whole = losses(rome(lm, [fact]))
    threshold = math.exp(-whole[8] - 1e-4)
    stopped = replace(rome, search=replace(search, stop_probability=threshold))
    assert losses(stopped(lm, [fact])) == pytest.approx(whole[:9], rel=1e-4)
    assert whole[7] > whole[8]


# ---- where a fact is not taken


@pytest.mark.parametrize("method", ["rome", "memit"])
def test_the_search_continues_once_where_a_fact_is_not_taken(method: str) -> None:
    """The continued search starts at the δ found, and only the facts that were missed go on."""
    lm = text_lm("llama")
    few = replace(FEW, steps=6, lr=0.3)
    editor: Rome | Memit = rome_on(lm, few)
    if method == "memit":
        editor = Memit(layers=(0, 1), covariance_weight=1.0, prefixes=PREFIXES,
                       second_moment="identity", search=few)  # fmt: skip
    once = editor.each(lm, FACTS)
    again = replace(editor, search=replace(few, retry=True)).each(lm, FACTS)
    taken = [facts == [True] for facts in facts_taken(lm, once)]
    assert not all(taken)
    for was_taken, before, after in zip(taken, once, again, strict=True):
        steps = len(losses(before))
        assert losses(after)[:steps] == pytest.approx(losses(before), rel=1e-4)
        assert (len(losses(after)) == steps) is was_taken
        if not was_taken:
            assert losses(after)[steps] < losses(before)[0]
            assert losses(after)[-1] < losses(before)[-1]


def test_a_joint_edit_continues_the_missed_facts() -> None:
    lm = text_lm("llama")
    few = replace(FEW, steps=6, lr=0.3)
    once = rome_on(lm, few)(lm, FACTS)
    again = rome_on(lm, replace(few, retry=True))(lm, FACTS)
    [taken] = facts_taken(lm, [once])
    lengths = [len(x) for x in again.settings["losses"]]
    assert lengths == [6 if was_taken else 12 for was_taken in taken]
    assert not all(taken)
