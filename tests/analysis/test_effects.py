"""Token roles, average effects and intervals against numbers computed by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from factscope.analysis.effects import (
    ROLES,
    TABLES,
    average_effects,
    average_kinds,
    cell_table,
    effect_sign,
    has_severed,
    indirect_effects,
    normalised,
    normalised_run,
    roles,
    severed_comparison,
    strongest_subject_cell,
    total_effect,
    trace_warnings,
)
from factscope.analysis.estimate import Estimate, estimate
from factscope.errors import BadRecord, BadSetting
from factscope.facts import Fact
from factscope.records import Lens, TraceRecord

NONE = (None, None)


def record(tokens: str, subject: tuple[int, int], **fields: Any) -> TraceRecord:
    """A trace of the words in `tokens`; clean 0.9 and corrupted 0.1 by default."""
    words = tokens.split()
    name = " ".join(words[slice(*subject)])
    defaults: dict[str, Any] = {
        "model": "tiny",
        "answer": " x",
        "answer_id": 0,
        "known": True,
        "clean": 0.9,
        "corrupted": 0.1,
        "corrupted_samples": (0.1,),
    }
    return TraceRecord(
        fact=Fact.from_text(tokens, name),
        tokens=tuple(words),
        subject=subject,
        **(defaults | fields),
    )


def traced(scores: dict[int, tuple[float | None, ...]], **fields: Any) -> TraceRecord:
    """ "the a b c is in" with the subject "a b c"; other rows hold the corrupted score."""
    rows = tuple(scores.get(i, (0.1, 0.1)) for i in range(6))
    return record("the a b c is in", (1, 4), restored={"states": rows}, **fields)


def row(effects: Any, role: str) -> list[float]:
    return effects.row(role).mean.tolist()


def test_an_estimate_is_the_mean_and_its_95_percent_interval():
    e = estimate([0.1, 0.2, 0.3])
    assert e.mean == pytest.approx(0.2)
    assert e.half_width == pytest.approx(1.96 * 0.1 / math.sqrt(3))
    assert e.n == 3
    assert str(Estimate(0.186, 0.009, 1000)) == "18.6 ± 0.9 % (n=1000)"


def test_one_value_has_no_interval_and_no_value_has_no_mean():
    one, none = estimate([0.5]), estimate([])
    assert math.isnan(one.half_width)
    assert str(one) == "50.0 % (n=1)"
    assert str(none) == "– (n=0)"


def test_an_interval_exceeds_another():
    assert Estimate(0.5, 0.1, 9).exceeds(Estimate(0.2, 0.1, 9))
    assert not Estimate(0.3, 0.1, 9).exceeds(Estimate(0.2, 0.1, 9))


def test_every_token_has_its_role():
    first, middle, last, subsequent, further, end = ((role,) for role in ROLES)
    names = roles(record("BOS the a b c d is in the city", (2, 6)))
    assert names == ((), (), first, middle, middle, last, subsequent, further, further, end)


@pytest.mark.parametrize(
    ("tokens", "subject", "default", "paper"),
    [
        (
            "a is in",
            (0, 1),
            [("last subject token",), ("first subsequent token",), ("last token",)],
            [
                ("last subject token", "first subject token"),
                ("first subsequent token",),
                ("last token",),
            ],
        ),
        (
            "a b is",
            (0, 2),
            [("first subject token",), ("last subject token",), ("last token",)],
            [
                ("first subject token",),
                ("last subject token",),
                ("last token", "first subsequent token"),
            ],
        ),
        (
            "in a b",
            (1, 3),
            [(), ("first subject token",), ("last token",)],
            [(), ("first subject token",), ("last token", "last subject token")],
        ),
    ],
    ids=["one-token subject", "one token after", "subject at the end"],
)
def test_if_several_roles_fit_the_one_nearer_to_the_prediction_counts(
    tokens, subject, default, paper
):
    assert list(roles(record(tokens, subject))) == default
    assert list(roles(record(tokens, subject), paper=True)) == paper


def test_the_average_indirect_effect_by_hand():
    effects = average_effects([traced({3: (0.5, 0.3)}), traced({3: (0.7, 0.1), 5: (0.1, 0.9)})])
    assert row(effects, "last subject token") == pytest.approx([0.5, 0.1])  # .4, .6 and .2, 0
    assert row(effects, "last token") == pytest.approx([0.0, 0.4])
    assert effects.half_width[2, 0] == pytest.approx(1.96 * np.std([0.4, 0.6], ddof=1) / 2**0.5)
    assert effects.peak("last subject token")[0] == 0
    assert effects.total.mean == pytest.approx(0.8)
    assert effects.best_at_subject.mean == pytest.approx(0.6)  # .5 and .7
    assert effects.best_anywhere.mean == pytest.approx(0.7)  # .5 and .9
    assert (effects.facts, effects.layers, effects.n[2, 0]) == (2, 2, 2)


def test_unknown_facts_are_counted_and_never_averaged():
    effects = average_effects(
        [traced({3: (0.5, 0.3)}), traced({3: (1.0, 1.0)}, known=False, clean=0.0)]
    )
    assert (effects.facts, effects.skipped) == (1, 1)
    assert row(effects, "last subject token") == pytest.approx([0.4, 0.2])
    assert effects.clean.mean == pytest.approx(0.9)


def test_cells_that_were_not_measured_are_ignored():
    effects = average_effects([traced({3: (None, 0.3), 4: NONE}), traced({3: (0.5, 0.5), 4: NONE})])
    assert row(effects, "last subject token") == pytest.approx([0.4, 0.3])
    assert effects.row("last subject token").n.tolist() == [1, 2]
    assert not effects.measured("first subsequent token")
    assert not effects.measured("further tokens")  # there are none in the prompt
    with pytest.raises(BadRecord, match="first subsequent"):
        effects.peak("first subsequent token")


def two_lengths() -> list[TraceRecord]:
    """One fact with one middle token and one with three, which differ in their corrupted score."""
    short = tuple((x,) for x in (0.1, 0.4, 0.1, 0.1))
    long = tuple((x,) for x in (0.2, 0.2, 0.3, 0.4, 0.2, 0.2))
    return [
        record("a b c is", (0, 3), restored={"states": short}),
        record("a b c d e is", (0, 5), restored={"states": long}, corrupted=0.2),
    ]


def test_pooling_facts_gives_each_fact_the_same_weight():
    middle = average_effects(two_lengths()).row("middle subject tokens")
    assert middle.mean.tolist() == pytest.approx([0.2])  # 0.3, and the mean of 0, 0.1, 0.2
    assert middle.n.tolist() == [2]


def test_pooling_tokens_as_in_the_paper():
    middle = average_effects(two_lengths(), pooling="tokens").row("middle subject tokens")
    scores = [0.4, 0.2, 0.3, 0.4]
    assert middle.mean.tolist() == pytest.approx([np.mean(scores) - 0.15])
    assert middle.half_width.tolist() == pytest.approx([1.96 * np.std(scores) / 2])
    assert middle.n.tolist() == [4]


def test_paper_roles_count_a_one_token_subject_twice():
    one = record("a is in", (0, 1), restored={"states": ((0.5,), (0.1,), (0.9,))})
    assert not average_effects([one]).measured("first subject token")
    assert row(average_effects([one], paper_roles=True), "first subject token") == [0.4]


def test_traces_with_different_numbers_of_layers_are_refused():
    deep = record("a is in", (0, 1), restored={"states": ((0.5,) * 3,) * 3})
    with pytest.raises(BadRecord, match=r"numbers of layers \[2, 3\]"):
        average_effects([traced({}), deep])


def test_nothing_to_average_is_an_error():
    with pytest.raises(BadRecord, match="known fact"):
        average_effects([traced({}, known=False)])
    with pytest.raises(BadRecord, match="'mlp'"):
        average_effects([traced({})], "mlp")
    assert average_kinds([traced({}, known=False)]) == {}
    assert list(average_kinds([traced({})])) == ["states"]


def test_a_table_with_missing_rows_is_an_error():
    with pytest.raises(BadRecord, match="1 rows"):
        cell_table(record("a is in", (0, 1), restored={"states": ((0.5,),)}), "states")


def test_an_unknown_table_is_refused():
    assert "states severed mlp" in TABLES
    with pytest.raises(BadSetting, match="table is 'stats'"):
        average_effects([traced({})], "stats")


def test_gradients_have_no_baseline():
    grads = record("a is", (0, 1), gradients={"mlp": ((0.5, 0.2), (0.0, 0.3))})
    assert indirect_effects(grads, "gradients mlp").tolist() == [[0.5, 0.2], [0.0, 0.3]]


def severed(intact: float, mlp: float, attn: float) -> TraceRecord:
    """A fact traced at its last subject token only where a module is severed."""

    def rows(score: float) -> tuple[tuple[float | None, ...], ...]:
        return (NONE, NONE, NONE, (score, 0.1), NONE, NONE)

    return traced({3: (intact, 0.1)}, severed={"mlp": rows(mlp), "attn": rows(attn)})


def test_the_severed_comparison_by_hand():
    alone = traced({3: (0.9, 0.9)})  # has no severed tables: not compared
    comparison = severed_comparison([severed(0.5, 0.1, 0.5), severed(0.7, 0.3, 0.6), alone])
    assert comparison.facts == 2
    assert comparison.intact.mean.tolist() == pytest.approx([0.5, 0])
    assert comparison.severed["mlp"].mean.tolist() == pytest.approx([0.1, 0])
    assert comparison.severed["attn"].mean.tolist() == pytest.approx([0.45, 0])
    assert comparison.lost["mlp"][0].mean == pytest.approx(0.4)
    assert comparison.lost["mlp"][0].half_width == pytest.approx(0)  # 0.4 in both facts


def test_the_severed_comparison_of_a_metric_that_falls_with_the_effect():
    metric = {"metric": "rank", "clean_metric": 1.0, "corrupted_metric": 50.0}
    records = [
        replace(severed(2.0, 30.0, 2.0), **metric),
        replace(severed(4.0, 40.0, 2.0), **metric),
    ]
    comparison = severed_comparison(records)
    assert comparison.intact[0].mean == pytest.approx(47)
    assert comparison.lost["mlp"][0].mean == pytest.approx(32)
    assert not comparison.lost["mlp"].fraction  # ranks are not shown in percent


def test_without_severed_tables_there_is_no_comparison():
    assert not has_severed([traced({})])
    with pytest.raises(BadRecord, match="severed"):
        severed_comparison([traced({})])


def test_early_and_late_site_are_the_peaks():
    facts = [traced({3: (0.5 + d, 0.2), 5: (0.1, 0.9 - d)}) for d in (-0.01, 0.0, 0.01)]
    effects = average_effects(facts)
    (early_layer, early), (late_layer, late) = map(
        effects.peak, ("last subject token", "last token")
    )
    assert (early_layer, late_layer) == (0, 1)
    assert early.mean == pytest.approx(0.4)
    assert early.low > 0
    assert late.low > 0
    assert effects.stands_out()
    contested = average_effects([traced({1: (0.5, 0.1), 3: (0.5, 0.2)})] * 3)
    assert not contested.stands_out()


# ---- other metrics and directions

METRICS = [  # metric, direction, clean, corrupted, a cell → its effect, and the total effect
    ("log-probability", "restore", -0.5, -3.0, -1.5, 1.5, 2.5),
    ("logit-difference", "restore", 4.0, -1.0, 2.0, 3.0, 5.0),
    ("kl", "restore", 0.0, 2.0, 0.5, 1.5, 2.0),
    ("rank", "restore", 1.0, 50.0, 8.0, 42.0, 49.0),
    ("probability", "corrupt", None, None, 0.3, 0.6, 0.8),
    ("kl", "corrupt", 0.0, 2.0, 0.5, 0.5, 2.0),
]


@pytest.mark.parametrize(("metric", "direction", "clean", "corrupted", "x", "ie", "te"), METRICS)
def test_an_effect_is_the_distance_moved_towards_the_other_run(
    metric, direction, clean, corrupted, x, ie, te
):
    values = {"metric": metric, "clean_metric": clean, "corrupted_metric": corrupted}
    settings = {"direction": direction}
    base = {"clean": 0.9, "corrupted": 0.1} if clean is None else {}
    traces = [traced({3: (x, x)}, settings=settings, **values, **base) for _ in range(2)]
    assert indirect_effects(traces[0], "states")[3] == pytest.approx([ie, ie])
    assert total_effect(traces[0]) == pytest.approx(te)
    average = average_effects(traces)
    assert (average.metric, average.direction) == (metric, direction)
    assert average.peak("last subject token")[1].mean == pytest.approx(ie)
    assert average.best_at_subject.mean == pytest.approx(x)
    assert average.total.mean == pytest.approx(te)
    pooled = average_effects(traces, pooling="tokens", paper_roles=True)
    assert pooled.peak("last subject token")[1].mean == pytest.approx(ie)
    assert ("%" in average.total.text) == (metric == "probability")
    assert (effect_sign(traces[0]) > 0) == (x > traces[0].base_value)


def test_normalised_cells_are_0_in_the_corrupted_and_1_in_the_clean_run():
    tables = {
        "heads": (((2.0, None),) * 6,),
        "attribution": {"states": ((1.0, 0.0),) * 6},
        "knockout": {"subject": (0.0, 2.0)},
    }
    trace = traced({3: (2.0, -1.0)}, metric="kl", clean_metric=0.0, corrupted_metric=2.0, **tables)
    shown = normalised(trace)
    assert shown.restored["states"][3] == pytest.approx([0.0, 1.5])
    assert shown.heads[0][0] == (0.0, None)
    assert shown.attribution["states"][0] == (0.5, 1.0)
    assert shown.knockout["subject"] == (1.0, 0.0)
    assert (shown.corrupted_value, shown.clean_value, total_effect(shown)) == (0.0, 1.0, 1.0)
    # The effect is the same fraction of the total effect, whatever the direction of the metric.
    raw = indirect_effects(trace, "states") / total_effect(trace)
    np.testing.assert_allclose(indirect_effects(shown, "states"), raw)
    assert shown.metric == "normalised kl"
    assert (shown.clean, shown.fact) == (trace.clean, trace.fact)
    same = replace(trace, clean_metric=2.0)
    assert normalised(same) is same


def test_a_normalised_average_is_a_fraction_of_the_average_total_effect():
    traces = [traced({3: (p, p)}, clean=clean) for p, clean in ((0.5, 0.9), (0.2, 0.3))]
    raw, shown = average_effects(traces), average_effects(normalised_run(traces))
    np.testing.assert_allclose(shown.mean, raw.mean / raw.total.mean)
    assert (shown.clean.mean, shown.total.mean) == pytest.approx((1.0, 1.0))
    assert shown.corrupted.mean == 0.0
    assert shown.metric == "normalised probability"


def test_traces_with_different_metrics_are_not_averaged():
    with pytest.raises(BadRecord, match="different metrics"):
        average_effects([traced({}), traced({}, metric="kl")])


def test_lens_probabilities_are_averaged_like_tables_without_a_baseline():
    cells = ((0.0, 0.0),) * 3 + ((0.2, 0.4),) + ((0.0, 0.0),) * 2
    lens = Lens(answer=cells, top=((((" x", 0.4),),) * 2,) * 6)
    average = average_effects([traced({}, metric="kl", lens={"clean": lens})], "lens clean")
    assert row(average, "last subject token") == pytest.approx([0.2, 0.4])
    assert "%" in average.row("last subject token")[1].text


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({}, []),
        ({"answer": "."}, ["'.', which names no object"]),
        ({"answer": " the", "clean": 0.15}, ["'the', which names no object"]),
        ({"clean": 0.15}, ["hardly knows this fact: P('x') is only 15.0%"]),
        ({"corrupted": 0.95}, ["total effect -5.0%"]),
        (
            {
                "corrupted": 0.9,
                "settings": {"corruption": {"distribution": "gaussian", "level": 0}},
            },
            ["noise level is 0"],
        ),
    ],
)
def test_traces_that_cannot_be_interpreted_have_warnings(
    fields: dict[str, Any], parts: list[str]
) -> None:
    warnings = trace_warnings(traced({}, **fields))
    assert len(warnings) == len(parts)
    for warning, part in zip(warnings, parts, strict=True):
        assert part in warning


def test_the_strongest_cell_may_be_at_any_token_of_the_subject():
    trace = traced({2: (0.1, 0.6), 3: (0.2, None), 5: (0.9, 0.9)})
    assert strongest_subject_cell(trace, "states") == (2, 1, pytest.approx(0.5))
