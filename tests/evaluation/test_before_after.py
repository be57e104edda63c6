"""An edit before and after: its checks with the prompts of a case, and traces."""

from dataclasses import replace

from factscope.editing.edit import Change, Edit
from factscope.evaluation.before_after import before_after, trace_edit
from factscope.evaluation.score import Query, score_queries
from factscope.facts import Case, Fact
from factscope.lm.generate import generate_greedy
from factscope.lm.model import LM
from factscope.lm.tokens import continuation_ids, encode_fact
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace

from edits import PASSED, assert_same, edit_of, low_rank, mlp, state_of
from families import tiny_text_lm

FACT = Fact(subject="The Louvre", prompt="{} is in the city of")
QUICK = Tracing(corruption=Corruption(samples=2), window=2, metric="logit-difference")


def test_the_old_and_the_new_answer_are_traced_with_each_other_as_foil() -> None:
    lm = tiny_text_lm("qwen2", spread=0.2)
    weights = state_of(lm)
    weight = mlp(lm, 1)
    edit = edit_of(lm, {weight: low_rank(lm, weight, size=0.5)}, facts=(_edited("Rome"),))
    fractions: list[float] = []
    traces = trace_edit(lm, edit, FACT, QUICK, name="edited", progress=fractions.append)
    assert_same(state_of(lm), weights)
    assert abs(sum(fractions) - 1) < 1e-6
    old = trace(lm, FACT, QUICK).answer
    assert traces.before == trace(lm, FACT, QUICK, foil="Rome")
    with edit.applied(replace(lm, name="edited"), force=True) as edited:
        assert traces.after == trace(edited, FACT, QUICK, answer="Rome", foil=old)
        assert traces.old_after == trace(edited, FACT, QUICK, answer=old, foil="Rome")
    assert traces.after.restored != traces.before.restored


def test_without_an_edit_of_the_subject_the_new_answer_is_the_prediction() -> None:
    lm = tiny_text_lm("qwen2", spread=0.2)
    weight = mlp(lm, 1)
    edit = edit_of(lm, {weight: low_rank(lm, weight, size=2.0)}, facts=())
    traces = trace_edit(lm, edit, FACT, replace(QUICK, metric="probability"))
    with edit.applied(lm, force=True):
        assert traces.after.answer == trace(lm, FACT, QUICK).answer
    assert traces.after.model == f"{lm.name} + edit"
    assert traces.old_after.answer == traces.before.answer == trace(lm, FACT, QUICK).answer


PARAPHRASES = ("To see The Louvre, travel to", "The Louvre lies in", "One goes to The Louvre in")
NEIGHBOURS = ("The Kremlin is in the city of", "The Nile is in", "Vienna is the city of")


def _edit_towards(lm: LM, target: str, seed: int) -> Edit:
    """An edit that makes one token likelier where the last MLP's key is on one side of a plane."""
    prompt = encode_fact(lm, FACT)[0]
    [token] = continuation_ids(lm, prompt, FACT.text, target)
    change = low_rank(lm, mlp(lm, lm.n_layers - 1), seed=seed)
    row = lm.model.get_output_embeddings().weight[token]
    checks = replace(PASSED, taken=1.0, neighbours_changed=0.1)
    changes: dict[str, Change] = {
        mlp(lm, lm.n_layers - 1): replace(change, B=1000 * row[:, None] / row.norm())
    }
    return edit_of(lm, changes, facts=(_edited(target),), checks=checks)


def test_the_checks_count_the_paraphrases_and_neighbours_of_the_case() -> None:
    lm, target = tiny_text_lm("qwen2", spread=0.2), "Paris"
    queries = [Query(text, target, None) for text in PARAPHRASES]
    before = generate_greedy(lm, NEIGHBOURS, 1)
    counts = set()
    for seed in range(8):
        edit = _edit_towards(lm, target, seed)
        with edit.applied(lm, force=True):
            taken = [all(score.correct) for score in score_queries(lm, queries, [])]
            after = generate_greedy(lm, NEIGHBOURS, 1)
        changed = sum(x != y for x, y in zip(before, after, strict=True)) / 3
        case = Case(fact=edit.facts[0], true="Oslo", paraphrases=PARAPHRASES, neighbours=NEIGHBOURS)
        checks = before_after(lm, edit, case, generation_tokens=0).checks
        assert checks["paraphrases_taken"] == sum(taken) / 3
        assert checks["neighbours_changed"] == max(0.1, changed)
        assert checks["verdict"].startswith("took") == (changed <= 0.25)
        counts.add((sum(taken), changed > 0.1))
        alone = before_after(lm, edit, replace(case, paraphrases=(), neighbours=()))
        assert (alone.checks["paraphrases_taken"], alone.checks["verdict"]) == (None, "took")
    assert len(counts) > 2


def test_an_edit_without_checks_has_none_in_its_record() -> None:
    lm = tiny_text_lm("qwen2", spread=0.2)
    edit = replace(_edit_towards(lm, "Paris", 0), checks=None)
    case = Case(fact=_edited("Paris"), true="Oslo", paraphrases=PARAPHRASES)
    assert before_after(lm, edit, case, generation_tokens=0).checks == {}


def _edited(target: str) -> Fact:
    return replace(FACT, target=target)
