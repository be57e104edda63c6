"""The value search with cached fast layers and captured steps equals the plain one."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from factscope.editing.checks import with_checks
from factscope.editing.contexts import edit_request
from factscope.editing.edit import Edit, LowRank
from factscope.editing.settings import Rome
from factscope.editing.value_search import ValueObjective, prepare_search
from factscope.facts import Fact
from factscope.lm.accel import linear, model_cache, run, search
from factscope.lm.accel.graphs import CACHE, LengthBuckets
from factscope.lm.accel.model_cache import ModelCache
from factscope.lm.accel.search import _key, _Steps
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM

from editing_facts import FEW, PREFIXES, text_lm
from fake_graph import FakeGraph, use_fake_graphs
from families import FAMILIES

FIRST = Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome")
SAME_SHAPE = Fact(subject="The Tower Eiffel", prompt="{} in is", target="Peru")


def objective_of(lm: LM, fact: Fact, layer: int = 0) -> ValueObjective:
    requests = [edit_request(lm, fact, PREFIXES)]
    return prepare_search(lm, requests, layer, "mlp", "subject-last", FEW)[0]


def one_step(objective: ValueObjective, step: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.full((3, 1, objective.hidden.shape[-1]), 0.05)
    return (step or objective.step)(state, torch.tensor([0.1, 0.001]))


def cached(lm: LM, fact: Fact) -> ModelCache:
    """A cache with one captured step, as after the search of a fact."""
    cache = lm.cache.setdefault("test", ModelCache.of(lm))
    cache.refresh(lm)
    objective = objective_of(lm, fact)
    step: Any = FakeGraph(objective.step)
    cache.add(_key(objective), objective.lowest_block, objective.tensors(), step)
    return cache


def found(lm: LM, objective: ValueObjective) -> Any:
    """A cached step for the objective, if there is one."""
    cache = lm.cache["test"]
    cache.refresh(lm)
    return cache.find(_key(objective), objective.tensors())


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "gptj", "gemma2", "bloom", "falcon, alibi", "opt", "gpt_neo"]
)
def test_a_cached_step_serves_another_fact(family: str) -> None:
    lm = text_lm(family)
    first = one_step(objective_of(lm, FIRST))
    cached(lm, FIRST)
    expected = one_step(objective_of(lm, SAME_SHAPE))
    objective = objective_of(lm, SAME_SHAPE)
    step = found(lm, objective)
    for one, right in zip(one_step(objective, step), expected, strict=True):
        assert torch.equal(one, right)
    assert not torch.allclose(expected[0], first[0])


def test_a_step_of_another_shape_layer_or_precision_is_not_used() -> None:
    lm = text_lm("gpt2")
    cached(lm, FIRST)
    assert found(lm, objective_of(lm, replace(FIRST, prompt="{} is in the"))) is None
    assert found(lm, objective_of(lm, FIRST)) is not None
    assert found(lm, objective_of(lm, FIRST, layer=1)) is None
    torch.set_float32_matmul_precision("high")
    try:
        assert found(lm, objective_of(lm, FIRST)) is None
    finally:
        torch.set_float32_matmul_precision("highest")


def test_the_least_recently_used_step_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")
    shapes = [replace(FIRST, prompt=prompt) for prompt in ("{} is", "{} is in", "{} is in the")]
    monkeypatch.setattr(model_cache, "MAX_GRAPHS", 2)
    cached(lm, shapes[0])
    cached(lm, shapes[1])
    assert found(lm, objective_of(lm, shapes[0])) is not None
    cached(lm, shapes[2])
    there = [found(lm, objective_of(lm, shape)) is not None for shape in shapes]
    assert there == [True, False, True]


LONGER = Fact(subject="The Tower", prompt="{} is in the town of", target="Peru")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_padding_changes_no_loss_and_joins_shapes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    facts = (FIRST, LONGER, replace(FIRST, target="Peru Rome"))
    expected = [one_step(objective_of(lm, fact)) for fact in facts]
    padded = LengthBuckets(slots=32, past=32, targets=32)
    monkeypatch.setattr(LengthBuckets, "of", lambda lm, facts: padded)
    cached(lm, FIRST)
    for fact, right in zip(facts, expected, strict=True):
        objective = objective_of(lm, fact)
        step = found(lm, objective)
        assert step is not None
        for one, other in zip(one_step(objective, step), right, strict=True):
            assert (one - other).norm() < 1e-4 * other.norm()


def test_a_changed_weight_above_invalidates_steps_and_fast_layers() -> None:
    lm = text_lm("gpt2")
    cache = cached(lm, FIRST)
    cache.build(lm, range(lm.n_layers))
    before = dict(cache.forwards)
    with torch.no_grad():
        lm.mlp_weight(0).mul_(1.5)  # the edited layer itself is not part of a step
    assert found(lm, objective_of(lm, FIRST)) is not None
    assert sorted(cache.forwards) == list(range(1, lm.n_layers))
    cache.build(lm, range(lm.n_layers))
    assert [i for i in before if cache.forwards[i] is not before[i]] == [0]
    weight = lm.mlp_weight(2)
    weight.data[0, 0] += 1.0  # torch's version counter misses this; the norm shows it
    assert found(lm, objective_of(lm, FIRST)) is None
    cached(lm, FIRST)
    with torch.no_grad():
        weight[0, 0] = -weight[0, 0]  # the norm misses this; the version shows it
    assert found(lm, objective_of(lm, FIRST)) is None
    cached(lm, FIRST)
    with torch.no_grad():
        next(lm.norms[-1].parameters()).mul_(1.5)  # the final norm is part of a step, too
    assert found(lm, objective_of(lm, FIRST)) is None


def test_a_hook_above_prevents_cached_steps() -> None:
    lm = text_lm("gpt2")
    objective = objective_of(lm, FIRST)
    with _Steps(cached(lm, FIRST), split=True) as steps, ExitStack() as stack:
        assert steps.make(objective) is not None
        assert steps.new is None  # from the cache
        stack.enter_context(hook_outputs((lm.mlp_out(2), lambda x: x * 2)))
        steps.make(objective)
        assert steps.new is not None


def test_the_order_of_static_tensors_does_not_depend_on_earlier_calls() -> None:
    """Gemma 2 has two kinds of masks, of equal shape: a cached step must not swap them."""
    lm = text_lm("gemma2")
    first, second = objective_of(lm, FIRST, 1), objective_of(lm, FIRST, 1)
    second.last_block(second.hidden)
    masks = [x for x in first.tensors() if x.dim() == 4 and x.shape[1] == 1]
    assert len(masks) == 2
    assert not torch.equal(*masks)
    for x, y in zip(first.tensors(), second.tensors(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_edits_in_sequence_equal_unaccelerated_ones(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    rome = Rome(layer=1, prefixes=PREFIXES, second_moment="identity", search=FEW)
    facts = [FIRST, SAME_SHAPE, replace(FIRST, prompt="{} is"), replace(FIRST, target="Peru Rome")]
    expected = [rome.each(lm, [fact])[0] for fact in facts]
    fake = use_fake_graphs(monkeypatch)
    cache = ModelCache.of(lm)

    def fresh(lm: LM, refresh: bool = True) -> ModelCache:
        if refresh:
            cache.refresh(lm)
        return cache

    for module in (search, run):
        monkeypatch.setattr(module, "model_cache", fresh)
    monkeypatch.setattr(search, "_uses_cache", lambda objective: True)
    monkeypatch.setattr(run, "on_gpu", lambda lm: True)
    monkeypatch.setattr(linear, "_on_gpu", lambda weight: True)
    edits = [rome.each(lm, [fact])[0] for fact in facts]
    assert sorted(cache.forwards) == list(range(lm.n_layers + 1))
    assert len(cache.graphs) < len(facts)
    assert fake.replays > len(facts) * FEW.max_steps // 2
    passes = sum(known.graph is not None for known in lm.cache[CACHE].values())
    assert fake.captures == len(cache.graphs) + passes  # each shape is captured once
    for edit, right in zip(edits, expected, strict=True):
        change, plain = (next(iter(x.changes.values())).matrix() for x in (edit, right))
        assert 0 < (change - plain).norm() < 1e-3 * plain.norm()
        assert edit.checks is not None
        assert right.checks is not None
        for name, figure in right.checks.to_dict().items():
            if figure is not None:
                assert edit.checks.to_dict()[name] == pytest.approx(figure, rel=1e-3)


def test_a_failed_capture_uses_a_fresh_memory_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (1, 1))
    for failed, pool, count in ((False, (0, 0), 1), (True, (1, 1), 0)):
        cache = ModelCache.of(lm, (0, 0))
        with _Steps(cache, split=True) as steps:
            objective = objective_of(lm, FIRST)
            step = steps.make(objective)
            step.failed, step.graph = failed, None if failed else "captured"  # pyright: ignore
            steps.cache_captured(objective)
        assert cache.pool == pool
        assert len(cache.graphs) == count


def test_checks_of_each_edit_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured passes over the check text get each edit's factors as inputs."""
    fake = use_fake_graphs(monkeypatch)
    monkeypatch.setattr(run, "on_gpu", lambda lm: True)
    monkeypatch.setattr(run, "model_cache", lambda lm: None)
    lm = text_lm("gpt2")
    name = lm.name_of(lm.mlp_out(1)) + ".weight"
    keys = lm.mlp_weight(1).shape[1]
    edits = [
        Edit(changes={name: LowRank(torch.randn(lm.width, rank), torch.randn(rank, keys))},
             model=lm.name, fingerprint=lm.fingerprint, method="x", facts=())
        for rank in (1, 1, 1, 3, 5, 2, 40)
    ]  # fmt: skip
    checks = [with_checks(lm, [edit])[0].checks for edit in edits]
    assert fake.replays == 2  # the third of rank 1, and the third of rank 2 to 8
    for edit, seen in zip(edits, checks, strict=True):
        assert seen is not None
        plain = replace(edit, checks=None)
        with plain.applied(lm, force=True):
            now = with_checks(lm, [plain])[0].checks
        assert now is not None
        assert seen.perplexity_after == pytest.approx(now.perplexity_before, rel=1e-4)
