"""Edit checks: facts that took, neighbours that changed; many edits at once against one by one."""

from dataclasses import replace

import pytest
import torch

from factscope.data.readers import everyday_cases, everyday_facts
from factscope.editing import checks
from factscope.editing.checks import neighbour_prompts, with_checks
from factscope.editing.contexts import target_ids
from factscope.editing.edit import Dense, Edit
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from editing_facts import FACTS, text_lm
from edits import edit_of, low_rank, mlp


def top(lm: LM, ids: list[int]) -> tuple[int, float]:
    """The most likely next token and its probability, in a pass of its own."""
    best = lm.model(torch.tensor([ids])).logits[0, -1].softmax(-1).max(-1)
    return int(best.indices), float(best.values)


def predictions(lm: LM, texts: list[str]) -> list[tuple[int, float]]:
    return [top(lm, list(encode(lm, text).ids)) for text in texts]


def taken(lm: LM, fact: Fact) -> bool:
    ids, target = list(encode(lm, fact.text).ids), target_ids(lm, fact)
    return all(top(lm, [*ids, *target[:i]])[0] == token for i, token in enumerate(target))


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "bloom"])
@torch.no_grad()
def test_predictions_of_many_edits_equal_those_of_each_edit_applied(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "MIN_PROBABILITY", 0.05)
    lm = text_lm(family)
    edits = [
        edit_of(lm, {mlp(lm, 1): low_rank(lm, mlp(lm, 1), seed=i, size=size)}, facts=tuple(facts))
        for i, (size, facts) in enumerate([(0.1, FACTS[:1]), (1.0, FACTS[1:]), (1e-9, FACTS[:1])])
    ]
    # A fact that the first edit makes true: its most likely token is the new object.
    with edits[0].applied(lm, force=True):
        token = lm.tokenizer.decode([predictions(lm, [FACTS[0].text])[0][0]]).strip()
    edits[0] = replace(edits[0], facts=(replace(FACTS[0], target=token or "Rome"),))
    changed = []
    for edit, checked in zip(edits, with_checks(lm, edits), strict=True):
        texts = neighbour_prompts(edit.facts)
        before = predictions(lm, texts)
        with edit.applied(lm, force=True):
            after = predictions(lm, texts)
            expected = [taken(lm, fact) for fact in edit.facts]
        clear = [(b, a) for b, a in zip(before, after, strict=True) if b[1] >= 0.05]
        assert checked.checks is not None
        assert checked.checks.taken == sum(expected) / len(expected)
        assert clear
        fraction = sum(b[0] != a[0] for b, a in clear) / len(clear)
        assert checked.checks.neighbours_changed == fraction
        changed.append(fraction)
    assert changed[1] > changed[2] == 0


def test_predictions_of_an_edit_of_embeddings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MIN_PROBABILITY", 0.0)
    lm = text_lm("gpt2")
    name = lm.name_of(lm.embed) + ".weight"
    noise = torch.randn(lm.embed.weight.shape, generator=torch.Generator().manual_seed(0))
    [edit] = with_checks(lm, [edit_of(lm, {name: Dense(noise)}, checks=None)])
    assert edit.checks is not None
    assert edit.checks.neighbours_changed is not None
    assert edit.checks.neighbours_changed > 0.5


def test_neighbours_share_the_relation_and_not_the_subject() -> None:
    fact = Fact(subject="France", prompt="The capital of {} is", target="Rome")
    prompts = neighbour_prompts([fact])
    assert len(set(prompts)) == checks.NEIGHBOURS
    assert not any("France" in prompt for prompt in prompts)
    assert sum(prompt.startswith("The capital of") for prompt in prompts) >= checks.NEIGHBOURS // 2
    by_id = replace(fact, prompt="{} is a land whose people speak", relation="P37")
    assert sum("language" in prompt for prompt in neighbour_prompts([by_id])) >= 5


def test_edits_of_every_built_in_fact_have_neighbours() -> None:
    facts = [*everyday_facts(), *(case.fact for case in everyday_cases())]
    assert len(neighbour_prompts(facts)) == 0  # every subject is edited: nothing is left
    assert len(neighbour_prompts(facts[::2])) == checks.NEIGHBOURS


def test_neighbours_that_do_not_fit_the_context_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = text_lm("gpt2")
    assert len(checks._neighbour_rows(lm, FACTS)) == checks.NEIGHBOURS
    monkeypatch.setattr(lm.model.config, "n_positions", 4)
    assert checks._neighbour_rows(lm, FACTS) == []


def test_an_edit_without_facts_has_neighbours() -> None:
    lm = text_lm("gpt2")
    edit: Edit = edit_of(lm, {mlp(lm, 1): low_rank(lm, mlp(lm, 1))}, facts=())
    [checked] = with_checks(lm, [edit])
    assert checked.checks is not None
    assert checked.checks.taken is None


@torch.no_grad()
def test_facts_taken_equal_those_of_each_edit_applied() -> None:
    lm = text_lm("llama")
    expected, edit = [False], edit_of(lm, {})
    for seed in range(50):  # until the most likely token is a word, which can be a new object
        change = low_rank(lm, mlp(lm, 1), seed=seed, size=1.0)
        edit = edit_of(lm, {mlp(lm, 1): change}, facts=tuple(FACTS))
        with edit.applied(lm, force=True):
            token = lm.tokenizer.decode([predictions(lm, [FACTS[0].text])[0][0]]).strip() or "Rome"
            edit = replace(edit, facts=(replace(FACTS[0], target=token), *FACTS[1:]))
            expected = [taken(lm, fact) for fact in edit.facts]
        if expected[0]:
            break
    assert expected[0]
    assert checks.facts_taken(lm, [edit, edit]) == [expected, expected]
