"""A kept search looks at the next fact as a fresh one does, as long as nothing else changed."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch

from factscope.editing import value_search as values
from factscope.editing.contexts import edit_request
from factscope.editing.rome import Rome
from factscope.editing.value_search import ValueObjective, _looking, prepare_search
from factscope.facts import Fact
from factscope.lm.accel import linear as lm_quick
from factscope.lm.accel import search_cache as kept
from factscope.lm.accel.buckets import LengthBuckets
from factscope.lm.accel.graphs import CudaGraph
from factscope.lm.accel.search_cache import NAME, Shelf
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM

from editing_facts import FEW, PREFIXES, text_lm
from families import FAMILIES

FIRST = Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome")
SAME_SHAPE = Fact(subject="The Tower Eiffel", prompt="{} in is", target="Peru")


def posed(lm: LM, fact: Fact, layer: int = 0) -> ValueObjective:
    return prepare_search(
        lm, [edit_request(lm, fact, PREFIXES)], layer, "mlp", "subject-last", FEW
    ).problem


def looked(problem: ValueObjective, look: object = None) -> tuple[torch.Tensor, torch.Tensor]:
    state = torch.full((3, 1, problem.hidden.shape[-1]), 0.05)
    return (look or _looking(problem))(state, torch.tensor([0.1, 0.001]))  # pyright: ignore


def keep(lm: LM, fact: Fact) -> Shelf:
    """What a search does on a GPU."""
    problem = posed(lm, fact)
    shelf = lm.cache.setdefault(NAME, Shelf.of(lm))
    shelf.refresh(lm)
    shelf.add(problem, _looking(problem))
    return shelf


def kept_for(problem: ValueObjective) -> CudaGraph | None:
    """The same, where there is something on the shelf."""
    shelf = problem.lm.cache[NAME]
    shelf.refresh(problem.lm)
    return shelf.take(problem)


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "gptj", "gemma2", "bloom", "falcon, alibi", "opt", "gpt_neo"]
)
def test_it_looks_at_another_fact_as_a_fresh_one_does(family: str) -> None:
    lm = text_lm(family)
    first = looked(posed(lm, FIRST))
    keep(lm, FIRST)
    problem = posed(lm, SAME_SHAPE)
    wanted = looked(posed(lm, SAME_SHAPE))
    look = kept_for(problem)
    assert look is not None
    for found, right in zip(looked(problem, look), wanted, strict=True):
        assert torch.equal(found, right)
    assert not torch.allclose(wanted[0], first[0])


def test_another_shape_is_not_taken() -> None:
    lm = text_lm("gpt2")
    keep(lm, FIRST)
    assert kept_for(posed(lm, replace(FIRST, prompt="{} is in the"))) is None
    assert kept_for(posed(lm, FIRST)) is not None
    assert kept_for(posed(lm, FIRST, layer=1)) is None


def test_shapes_stand_side_by_side_and_the_one_unused_longest_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = text_lm("gpt2")
    shapes = [replace(FIRST, prompt=prompt) for prompt in ("{} is", "{} is in", "{} is in the")]
    monkeypatch.setattr(kept, "MOST", 2)
    keep(lm, shapes[0])
    keep(lm, shapes[1])
    assert kept_for(posed(lm, shapes[0])) is not None
    keep(lm, shapes[2])
    assert [kept_for(posed(lm, shape)) is not None for shape in shapes] == [True, False, True]


def test_another_precision_is_not_taken() -> None:
    lm = text_lm("gpt2")
    keep(lm, FIRST)
    torch.set_float32_matmul_precision("high")
    try:
        assert kept_for(posed(lm, FIRST)) is None
    finally:
        torch.set_float32_matmul_precision("highest")


ROOMY = Fact(subject="The Tower", prompt="{} is in the town of", target="Peru")


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_room_changes_no_loss_and_joins_shapes(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    facts = (FIRST, ROOMY, replace(FIRST, target="Peru Rome"))
    wanted = [looked(posed(lm, fact)) for fact in facts]
    monkeypatch.setattr(
        LengthBuckets, "of", lambda lm, facts: LengthBuckets(slots=32, past=32, reads=32)
    )
    keep(lm, FIRST)
    for fact, right in zip(facts, wanted, strict=True):
        problem = posed(lm, fact)
        look = kept_for(problem)
        assert look is not None
        for found, one in zip(looked(problem, look), right, strict=True):
            assert (found - one).norm() < 1e-4 * one.norm()


def test_weights_above_that_changed_are_noticed() -> None:
    lm = text_lm("gpt2")
    keep(lm, FIRST)
    with torch.no_grad():
        lm.mlp_weight(0).mul_(1.5)  # the edited layer itself is not replayed
    assert kept_for(posed(lm, FIRST)) is not None
    weight = lm.mlp_weight(2)
    weight.data[0, 0] += 1.0  # autograd does not count this one
    assert kept_for(posed(lm, FIRST)) is None
    assert not lm.cache[NAME].recordings
    keep(lm, FIRST)
    with torch.no_grad():
        weight[0, 0] = -weight[0, 0]  # and this one leaves every norm as it was
    assert kept_for(posed(lm, FIRST)) is None


def test_products_of_a_changed_block_are_made_again_and_others_stay() -> None:
    lm = text_lm("gpt2")
    shelf = keep(lm, FIRST)
    with shelf.quick(lm, range(lm.n_layers))():
        pass
    before = dict(shelf.products)
    assert sorted(before) == list(range(lm.n_layers))
    assert all(before.values())
    with torch.no_grad():
        lm.mlp_weight(0).mul_(1.5)
    shelf.refresh(lm)
    assert 0 not in shelf.products
    assert shelf.recordings
    with shelf.quick(lm, range(lm.n_layers))():
        changed = [i for i in before if shelf.products[i] is not before[i]]
    assert changed == [0]
    assert not any("forward" in vars(module) for block in lm.blocks for module in block.modules())
    with torch.no_grad():
        next(lm.norms[-1].parameters()).mul_(1.5)  # has no products, but is recorded
    shelf.refresh(lm)
    assert sorted(shelf.products) == list(range(lm.n_layers))
    assert not shelf.recordings


def test_a_hook_above_forbids_it() -> None:
    lm = text_lm("gpt2")
    keep(lm, FIRST)
    problem = posed(lm, FIRST)
    with ExitStack() as stack:
        stack.enter_context(hook_outputs((lm.mlp_out(2), lambda x: x * 2)))
        assert kept_for(problem) is None
    assert kept_for(problem) is not None


class Played(CudaGraph):
    """As on a GPU: the function that was recorded runs on the tensors that it was recorded with."""

    graph: Any = "there is one"

    def __init__(self, *args: Any, **more: Any) -> None:
        self.function, self.cost = args[0], 0.0

    def __call__(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.function(*given)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_facts_one_after_another_with_all_that_is_kept(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    rome = Rome(layer=1, prefixes=PREFIXES, second_moment="identity", search=FEW)
    facts = [FIRST, SAME_SHAPE, replace(FIRST, prompt="{} is"), replace(FIRST, target="Peru Rome")]
    wanted = [rome.each(lm, [fact])[0] for fact in facts]
    shelf = Shelf.of(lm)

    def shelf_for(lm: LM) -> Shelf:
        shelf.refresh(lm)
        return shelf

    monkeypatch.setattr(values, "shelf_for", shelf_for)
    monkeypatch.setattr(values, "CudaGraph", Played)
    monkeypatch.setattr(lm_quick, "_on_gpu", lambda weight: True)
    monkeypatch.setattr(
        LengthBuckets, "of", lambda lm, facts: LengthBuckets(slots=4, past=16, tokens=8, reads=32)
    )
    found = [rome.each(lm, [fact])[0] for fact in facts]
    assert sorted(shelf.products) == list(range(lm.n_layers + 1))
    assert len(shelf.recordings) < len(facts)
    assert shelf.products[lm.n_layers]
    for one, right in zip(found, wanted, strict=True):
        change, plain = (next(iter(x.changes.values())).matrix() for x in (one, right))
        assert 0 < (change - plain).norm() < 1e-3 * plain.norm()


class Failed(Played):
    """A recording that could not be made."""

    graph: Any = None
    failed = True


def test_after_a_failure_others_are_recorded_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")
    shelf = Shelf.of(lm, "the first pool")
    monkeypatch.setattr(values, "shelf_for", lambda lm: shelf)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "another")
    rome = Rome(layer=1, prefixes=PREFIXES, second_moment="identity", search=FEW)
    for kind, memory, count in ((Played, "the first pool", 1), (Failed, "another", 0)):
        monkeypatch.setattr(values, "CudaGraph", kind)
        shelf.recordings.clear()
        rome.each(lm, [FIRST])
        assert shelf.memory == memory
        assert len(shelf.recordings) == count
