"""Layer "auto": the layer that a causal trace of the old object finds, or a refusal."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from factscope.editing import defaults
from factscope.editing.defaults import resolve_layer, traced_layer
from factscope.editing.settings import Rome
from factscope.errors import BadFact, BadSetting
from factscope.facts import Fact
from factscope.lm.model import LM

from editing_facts import FACTS, FEW, random_moment, text_lm
from trace_records import trace

Effects = dict[str, tuple[float, ...]]


@pytest.fixture(scope="module")
def lm() -> LM:
    return text_lm("gpt2")


@pytest.fixture
def traced(lm: LM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Make traces return the probabilities given for each subject, by layer; returns the calls."""

    def patch(effects: Effects, **fields: Any) -> list[Any]:
        calls = []

        def record(lm: LM, fact: Fact, settings: Any, *, answer: str | None) -> Any:
            calls.append((fact, answer))
            cells = ((0.1,) * lm.n_layers,) * 3 + (effects[fact.subject],)
            tables = {"restored": {"mlp": cells}, "severed": {}, "gradients": {}}
            return trace(**{**tables, **fields})

        lm.cache.pop("traced layers", None)
        monkeypatch.setattr(defaults, "trace", record)
        return calls

    return patch


def test_the_last_layer_is_never_chosen(lm: LM, traced: Any) -> None:
    assert lm.n_layers == 3
    traced({FACTS[0].subject: (0.2, 0.3, 0.9)})
    assert traced_layer(lm, FACTS[0]) == 1


def test_the_old_object_is_traced_if_it_is_known(lm: LM, traced: Any) -> None:
    calls = traced({FACTS[0].subject: (0.2, 0.3, 0.1)})
    traced_layer(lm, replace(FACTS[0], old="Paris"))
    traced_layer(lm, FACTS[0])
    assert [answer for _, answer in calls] == ["Paris", None]
    assert calls[0][0].target is None


@pytest.mark.parametrize(
    "fields",
    [
        {"clean": 0.05, "corrupted": 0.1},  # corrupting the subject helps
        {"clean": 0.108, "corrupted": 0.1},  # hardly any effect
        {"clean": 0.3, "corrupted": 0.2, "corrupted_samples": (0.0, 0.4)},  # noise
        {"clean": 0.9, "corrupted": 0.5},  # no MLP output restores it
    ],
)
def test_an_unclear_effect_is_refused(lm: LM, traced: Any, fields: Any) -> None:
    traced({FACTS[0].subject: (0.2, 0.3, 0.1)}, **fields)
    with pytest.raises(BadFact, match=r"does not show a layer: P\(' Seattle'\).*give --layer N"):
        traced_layer(lm, FACTS[0])


def test_several_facts_take_the_median_of_the_clear_ones_and_are_traced_once(
    lm: LM, traced: Any
) -> None:
    low, high, unclear = (0.5, 0.2, 0.1), (0.2, 0.5, 0.1), (0.1, 0.1, 0.1)
    calls = traced(dict(zip([f.subject for f in FACTS], [low, high, unclear], strict=True)))
    assert resolve_layer(lm, "auto", FACTS) == 1
    assert resolve_layer(lm, "auto", FACTS[:1]) == 0
    assert len(calls) == 3
    with pytest.raises(BadFact, match="does not show a layer"):
        resolve_layer(lm, "auto", FACTS[2:])


def test_given_statistics_limit_the_choice(lm: LM, traced: Any) -> None:
    traced({FACTS[0].subject: (0.2, 0.5, 0.1)})
    assert resolve_layer(lm, "auto", FACTS[:1], [random_moment(lm, 0)]) == 0
    with pytest.raises(BadSetting, match="below its last one has statistics"):
        resolve_layer(lm, "auto", FACTS[:1], random_moment(lm, 2))


def test_an_unclear_fact_does_not_end_the_others(lm: LM, traced: Any) -> None:
    clear, unclear = (0.2, 0.5, 0.1), (0.1, 0.1, 0.1)
    traced({FACTS[0].subject: unclear, FACTS[1].subject: clear})
    rome = Rome(layer="auto", prefixes=(), second_moment="identity", search=FEW)
    refused, edit = rome.attempt(lm, FACTS[:2])
    assert isinstance(refused, BadFact)
    assert not isinstance(edit, Exception)
    assert edit.settings["layer"] == 1
