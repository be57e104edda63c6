"""The relation of trace effects and edit success by layer."""

import math
from dataclasses import replace

import numpy as np
import pytest

from factscope.analysis.localization import correlate, edit_success, localizations
from factscope.errors import BadRecord
from factscope.records import CaseScores
from localization_records import LAYERS, random_values, runs

from case_records import case, scores


def test_means_and_correlations_equal_plain_numpy() -> None:
    effects, success = random_values(0), random_values(1)
    [found] = localizations(*runs(effects, success))
    assert (found.kind, found.layers, found.facts) == ("mlp", LAYERS, 8)
    np.testing.assert_allclose(found.effect.mean, effects.mean(0))
    np.testing.assert_allclose(found.success.mean, success.mean(0))
    means = np.corrcoef(effects.mean(0), success.mean(0))[0, 1]
    assert found.across_layers.value == pytest.approx(means)
    for column, within in enumerate(found.within_layer):
        assert within.value == pytest.approx(
            np.corrcoef(effects[:, column], success[:, column])[0, 1]
        )
    by_fact = [np.corrcoef(x, y)[0, 1] for x, y in zip(effects, success, strict=True)]
    assert found.within_fact.mean == pytest.approx(np.mean(by_fact))


def test_explained_variance_of_layer_and_effect() -> None:
    """Success that depends on the layer alone gains nothing from the effect; a sum gains all."""
    effects = random_values(0)
    by_layer = np.tile([0.2, 0.5, 0.8], (len(effects), 1))
    [layer_only] = localizations(*runs(effects, by_layer))
    assert layer_only.explained_by_layer == pytest.approx(1)
    [both] = localizations(*runs(effects, 0.5 * by_layer + 0.3 * effects))
    assert both.explained_by_layer < 0.99
    assert both.explained_by_both == pytest.approx(1)
    assert all(within.value == pytest.approx(1) for within in both.within_layer)


def test_the_interval_of_a_correlation_is_fishers() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=50)
    found = correlate(x, x + rng.normal(size=50))
    z = math.atanh(found.value)
    assert (found.low, found.high) == pytest.approx(
        (math.tanh(z - 1.96 / 47**0.5), math.tanh(z + 1.96 / 47**0.5))
    )
    assert math.isnan(correlate(x[:3], x[:3]).low)
    assert math.isnan(correlate(x, np.ones(50)).value)


def test_facts_are_joined_by_id_or_by_text() -> None:
    traces, cases = runs(random_values(0), random_values(1))
    extended = [replace(r, fact=replace(r.fact, prompt="The {} is in the city of")) for r in traces]
    assert localizations(extended, cases)[0].facts == 8
    by_text = [replace(r, fact=replace(r.fact, id=None)) for r in traces]
    assert localizations(by_text, cases)[0].facts == 8
    other = [replace(r, fact=replace(r.fact, id=None, prompt="{} no")) for r in traces]
    with pytest.raises(BadRecord, match="the same facts"):
        localizations(other, cases)


def test_failed_edits_and_unknown_facts_do_not_count() -> None:
    traces, cases = runs(random_values(0), random_values(1))
    cases[2][0] = replace(cases[2][0], after=None, error="no progress")
    cases[3] = [replace(r, after=None, error="no progress") for r in cases[0]]
    traces[7] = replace(traces[7], known=False)
    [found] = localizations(traces, cases)
    assert found.layers == LAYERS
    assert (found.facts, found.success.n.tolist()) == (7, [7, 6, 7])


def test_a_layer_that_was_not_traced_is_refused() -> None:
    traces, cases = runs(random_values(0), random_values(1))
    with pytest.raises(BadRecord, match="edits layer 9"):
        localizations(traces, {**cases, 9: cases[0]})


def test_the_rewrite_score_is_the_closed_fraction_of_the_gap_to_one() -> None:
    assert edit_success(case(before=scores(0.2), after=scores(0.6))) == pytest.approx(0.5)
    tokens = CaseScores(token_correct={"prompt": (True, False, True, True)})
    assert edit_success(case(after=tokens)) == 0.75
    assert math.isnan(edit_success(case(before=None)))
