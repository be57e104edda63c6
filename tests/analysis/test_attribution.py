"""Grading of estimated cells against measured ones."""

import numpy as np
import pytest

from factscope.analysis.attribution import compare_attribution, places_of_top, ranks
from factscope.errors import BadRecord
from factscope.records import TraceRecord, as_cell_table

from trace_records import LAYERS, TOKENS, trace

FIRST = 1  # the subject's first token in the records


def traced(measured: np.ndarray, estimated: np.ndarray, **fields: object) -> TraceRecord:
    """A record whose states have these effects over the corrupted run's 0.1."""
    tables = {"restored": measured, "attribution": estimated}
    cells = {name: {"states": as_cell_table((0.1 + x).tolist())} for name, x in tables.items()}
    return trace(**{**cells, **fields})


def random_effects(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(len(TOKENS), LAYERS))


def test_a_scaled_copy_agrees_in_everything() -> None:
    effects = [random_effects(seed) for seed in range(4)]
    whole = compare_attribution([traced(x, 0.5 * x) for x in effects])[0]
    assert (whole.kind, whole.layers, whole.facts) == ("states", (0, LAYERS), 4)
    assert whole.cells == (len(TOKENS) - FIRST) * LAYERS
    for value in (whole.pearson, whole.spearman):
        assert value.mean == pytest.approx(1)
        assert value.half_width == pytest.approx(0, abs=1e-9)
    assert (whole.missed.mean, whole.to_verify.mean) == (0, whole.top)
    assert whole.recall[whole.top - 1].mean == 1


def test_correlations_are_means_over_facts_of_the_cells_from_the_subject_on() -> None:
    pairs = [(random_effects(i), random_effects(i) + random_effects(i + 9)) for i in range(5)]
    whole = compare_attribution([traced(*pair) for pair in pairs])[0]

    cells = [[x[FIRST:].ravel() for x in pair] for pair in pairs]
    pearson = [np.asarray(np.corrcoef(np.stack(pair)))[0, 1] for pair in cells]
    spearman = [
        np.asarray(np.corrcoef([np.argsort(np.argsort(x)) for x in p]))[0, 1] for p in cells
    ]
    assert whole.pearson.mean == pytest.approx(np.mean(pearson))
    assert whole.pearson.half_width == pytest.approx(1.96 * np.std(pearson, ddof=1) / 5**0.5)
    assert whole.spearman.mean == pytest.approx(np.mean(spearman))


def test_false_negatives_are_the_largest_effects_that_the_estimate_ranks_lower() -> None:
    measured = np.zeros((len(TOKENS), LAYERS))
    measured[FIRST, :4] = (9, -8, 7, 6)
    estimated = measured.copy()
    estimated[FIRST, 1] = 0.5  # the second largest becomes the fifth
    estimated[3, :] = (1, -2, 0, 0, 0, 0)
    whole = compare_attribution([traced(measured, estimated)], top=3)[0]
    assert whole.missed.mean == pytest.approx(1 / 3)
    assert whole.to_verify.mean == 6
    assert whole.recall.mean[:6].tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3, 2 / 3, 1])


def test_places_of_the_top_equal_a_search_of_the_sorted_estimates() -> None:
    measured, estimated = (random_effects(seed).ravel() for seed in (1, 2))
    order = sorted(range(len(estimated)), key=lambda i: -abs(estimated[i]))
    top = sorted(range(len(measured)), key=lambda i: -abs(measured[i]))[:7]
    assert places_of_top(measured, estimated, 7).tolist() == [order.index(i) for i in top]


def test_equal_values_share_their_mean_rank() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_bands_compare_their_own_layers_only() -> None:
    measured = random_effects(0)
    estimated = np.concatenate([measured[:, :4], -measured[:, 4:]], axis=1)
    rows = compare_attribution([traced(measured, estimated)])
    assert [row.layers for row in rows] == [(0, 6), (0, 2), (2, 4), (4, 6)]
    assert [round(row.pearson.mean) for row in rows[1:]] == [1, 1, -1]


def test_effects_of_noising_are_relative_to_the_clean_run() -> None:
    effects = random_effects(0)
    record = trace(
        settings={"direction": "corrupt"},
        restored={"states": as_cell_table((0.6 + effects).tolist())},
        attribution={"states": as_cell_table((0.6 + 2 * effects).tolist())},
    )
    whole = compare_attribution([record])[0]
    assert (whole.missed.mean, whole.to_verify.mean) == (0, whole.top)


def test_heads_are_compared_together() -> None:
    heads = [random_effects(seed) for seed in range(3)]
    record = trace(
        heads=tuple(as_cell_table((0.1 + x).tolist()) for x in heads),
        head_attribution=tuple(as_cell_table((0.1 + x).tolist()) for x in heads),
    )
    whole = compare_attribution([record])[0]
    assert (whole.kind, whole.cells) == ("heads", 3 * (len(TOKENS) - FIRST) * LAYERS)
    assert whole.pearson.mean == pytest.approx(1)


def test_records_without_estimates_or_of_unknown_facts_are_refused() -> None:
    effects = random_effects(0)
    with pytest.raises(BadRecord, match="--attribution"):
        compare_attribution([trace(), traced(effects, effects, known=False)])


def test_tables_of_different_sizes_are_refused() -> None:
    effects = random_effects(0)
    with pytest.raises(BadRecord, match="trace the fact again"):
        compare_attribution([traced(effects, effects[:, :3])])
    with pytest.raises(BadRecord, match="one model"):
        compare_attribution([traced(effects, effects), traced(effects[:, :3], effects[:, :3])])
