"""Scores of cases: many under their own edits equal one at a time on edited weights."""

from dataclasses import replace

import pytest
import torch

from factscope.editing.edit import Edit, LowRank
from factscope.evaluation.cases import score_cases
from factscope.evaluation.score import Query, score_queries
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case, Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from editing_facts import text_lm

CASES = [
    Case(
        fact=Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome", id="1"),
        true="Paris",
        paraphrases=("Where is it? The Eiffel Tower is in", "One finds the Eiffel Tower in"),
        neighbours=("The Louvre is in", "Notre-Dame is in"),
        attributes=("The Colosseum is in",),
        generations=("The Eiffel Tower", "The Eiffel Tower is near the"),
    ),
    Case(
        fact=Fact(subject="Miles Davis", prompt="{} plays the", target="piano", id="2"),
        true="trumpet",
        paraphrases=("What Miles Davis plays is the",),
        neighbours=("Chet Baker plays the",),
        generations=("Miles Davis", "Miles Davis"),
    ),
]
QUESTION = Case(
    fact=Fact(subject="Vienna", prompt="What country is {} in?", target="Austria", id="3"),
    paraphrases=("Which country has Vienna?",),
    neighbours=("nq question: who wrote it?",),
    neighbour_answers=("Miles Davis",),
)
SHORT = ScoringOptions(length=14)


def edits_of(lm: LM) -> list[Edit]:
    generator = torch.Generator().manual_seed(5)
    weight = lm.mlp_weight(1)
    name = lm.name_of(lm.mlp_out(1)) + ".weight"

    def thin(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return [
        Edit(
            changes={name: LowRank(thin(weight.shape[0], 1), thin(1, weight.shape[1]))},
            model=lm.name, fingerprint=lm.fingerprint, method="noise", facts=(), settings={},
        )
        for _ in CASES
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "opt", "bloom"])
def test_a_batch_of_edits_equals_each_edit_applied_alone(family: str) -> None:
    lm = text_lm(family)
    edits = edits_of(lm)
    found = score_cases(lm, [*CASES, CASES[0]], edits, [0, 1, None], scoring=SHORT)
    wanted = []
    for case, edit in [(CASES[0], edits[0]), (CASES[1], edits[1])]:
        with edit.applied(lm, force=True):
            wanted += score_cases(lm, [case], scoring=SHORT)
    wanted += score_cases(lm, [CASES[0]], scoring=SHORT)
    for found_scores, expected in zip(found, wanted, strict=True):
        assert found_scores.texts == expected.texts
        assert found_scores.prompts.keys() == expected.prompts.keys()
        for kind, prompts in found_scores.prompts.items():
            for a, b in zip(prompts, expected.prompts[kind], strict=True):
                assert (a.new, a.true) == pytest.approx((b.new, b.true), rel=1e-4)
    assert found[0].prompts["prompt"] != found[2].prompts["prompt"]


def test_counterfact_scores_both_objects_after_every_prompt() -> None:
    lm = text_lm("gpt2")
    (scores,) = score_cases(lm, CASES[:1], scoring=SHORT)
    counts = {kind: len(prompts) for kind, prompts in scores.prompts.items()}
    assert counts == {"prompt": 1, "paraphrase": 2, "neighbour": 2, "attribute": 1}
    assert not scores.token_correct
    text = CASES[0].paraphrases[1]
    new, true = score_queries(lm, [Query(text, "Rome"), Query(text, "Paris")])
    score = scores.prompts["paraphrase"][1]
    assert (score.new, score.true) == pytest.approx((new.nll, true.nll), rel=1e-5)
    assert score.new_correct == all(new.correct)


def test_generated_texts_start_with_their_prompts_and_have_the_given_length() -> None:
    lm = text_lm("gpt2")
    first, second = score_cases(lm, CASES, scoring=SHORT)
    assert [t.startswith(o) for t, o in zip(first.texts, CASES[0].generations, strict=True)]
    assert all(len(encode(lm, text)) >= 10 for text in first.texts)
    assert second.texts[0] != second.texts[1]  # the same prompt, sampled twice
    assert score_cases(lm, CASES, scoring=replace(SHORT, seed=1))[0].texts != first.texts
    assert score_cases(lm, CASES, scoring=ScoringOptions(length=0))[0].texts == ()


def test_zsre_scores_each_token_of_the_answer() -> None:
    """The correct answer, and the neighbour's own."""
    lm = text_lm("gpt2")
    (scores,) = score_cases(lm, [QUESTION], scoring=SHORT)
    assert not scores.prompts
    wanted = {
        "prompt": score_queries(lm, [Query(QUESTION.fact.text, "Austria")])[0].correct,
        "paraphrase": score_queries(lm, [Query(QUESTION.paraphrases[0], "Austria")])[0].correct,
        "neighbour": score_queries(lm, [Query(QUESTION.neighbours[0], "Miles Davis")])[0].correct,
    }
    assert scores.token_correct == wanted
    assert len(scores.token_correct["neighbour"]) > 1


def test_similarity_is_computed_from_the_generated_texts() -> None:
    lm = text_lm("gpt2")
    seen = []

    def similarity(case: Case, texts) -> float:
        seen.append((case, tuple(texts)))
        return 0.5

    found = score_cases(lm, CASES, scoring=SHORT, similarity=similarity)
    assert [scores.reference_similarity for scores in found] == [0.5, 0.5]
    assert seen == [(case, s.texts) for case, s in zip(CASES, found, strict=True)]
