"""A fact traced before and after an edit: the three traces, and the unedited model afterwards."""

from dataclasses import replace

from factscope.evaluation.before_after import trace_edit
from factscope.facts import Fact
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace

from edits import assert_same, edit_of, low_rank, mlp, state_of
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


def _edited(target: str) -> Fact:
    return replace(FACT, target=target)
