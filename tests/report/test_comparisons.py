"""Estimated with measured cells, and traces before and after an edit, in reports."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from factscope.analysis.attribution import compare_attribution, over_all_layers
from factscope.analysis.localization import localizations
from factscope.errors import BadRecord
from factscope.records import KINDS, EditTraces, TraceRecord
from factscope.report.comparisons import edit_traces_page
from factscope.report.figures import (
    attribution_figure,
    attribution_heatmaps,
    edit_traces_figure,
    localization_figure,
)
from factscope.report.tables import as_rows, attribution_table
from factscope.report.terminal import attribution_lines
from factscope.report.traces import trace_page, write_trace_report
from localization_records import LAYERS, random_values, runs

from pages import check_escaped, check_self_contained, check_well_formed
from trace_records import ODD_TOKENS, attention_trace, random_cells, trace


def estimated(seed: int = 0) -> TraceRecord:
    """A trace with random measured and random estimated cells."""
    return attention_trace(
        seed,
        attribution={kind: random_cells(seed + 60 + i) for i, kind in enumerate(KINDS)},
        head_attribution=(random_cells(seed + 70), random_cells(seed + 71)),
        settings={"window": 1, "attribution": "atp-star"},
    )


def test_estimates_have_the_colour_scale_of_the_measured_cells() -> None:
    axes = [ax for ax in attribution_heatmaps(estimated()).axes if ax.collections]
    measured, guessed = axes[:3], axes[3:6]
    for above, below in zip(measured, guessed, strict=True):
        assert above.collections[0].get_clim() == below.collections[0].get_clim()
        assert below.get_title().startswith("AtP* estimate")
    with pytest.raises(BadRecord, match="--attribution"):
        attribution_heatmaps(trace())


def test_attribution_figure_has_every_cell_and_the_recall() -> None:
    records = [estimated(seed) for seed in range(3)]
    agreements = compare_attribution(records)
    figure = attribution_figure(records, agreements)
    *scatters, recall = figure.axes
    assert [ax.get_title() for ax in scatters] == ["states", "MLP", "attention", "heads"]
    offsets = np.array(scatters[0].collections[0].get_offsets())
    first = records[0].subject[0]
    assert len(offsets) == sum(np.array(r.restored["states"])[first:].size for r in records)
    states = over_all_layers(agreements)[0]
    line = np.asarray(recall.lines[0].get_ydata(), dtype=float)
    np.testing.assert_allclose(line, states.recall.mean)
    assert "3 facts" in figure.get_suptitle()


@pytest.mark.usefixtures("no_drawing")
def test_attribution_in_the_report_of_a_run_and_in_the_terminal(tmp_path: Path) -> None:
    records = [estimated(seed) for seed in range(2)]
    files = {path.name for path in write_trace_report(records, tmp_path)}
    assert {"attribution.png", "attribution.csv", "attribution.md"} <= files
    assert "Attribution patching against measured cells" in (tmp_path / "index.html").read_text()
    agreements = compare_attribution(records)
    rows = as_rows(attribution_table(agreements))
    assert [row["cells"] for row in rows[:4]] == ["states"] * 4
    assert rows[0]["top k missed"]["mean"] == agreements[0].missed.mean
    assert "Attribution patching" in trace_page(records[0])
    text = attribution_lines(records[0]).plain
    assert text.count("AtP* of") == 4
    assert "heads" in text


def edit_traces() -> EditTraces:
    before, after = trace(0, ODD_TOKENS), trace(1, ODD_TOKENS, answer=" Rome")
    return EditTraces(before=before, after=after, old_after=replace(trace(2, ODD_TOKENS)))


def test_traces_before_and_after_an_edit_share_a_scale() -> None:
    traces = edit_traces()
    axes = [ax for ax in edit_traces_figure(traces).axes if ax.collections]
    before, after, difference, old = axes[:4]
    limits = [ax.collections[0].get_clim() for ax in (before, after, old)]
    assert limits[0] == limits[1] == limits[2]
    assert difference.collections[0].get_clim() == (-limits[0][1], limits[0][1])
    cells = [np.array(r.restored["states"]) for r in (traces.before, traces.after)]
    drawn = np.asarray(difference.collections[0].get_array(), dtype=float)
    np.testing.assert_allclose(drawn.ravel(), (cells[1] - cells[0]).ravel(), atol=1e-12)


def test_page_of_an_edit_shows_three_traces() -> None:
    page = edit_traces_page(edit_traces())
    check_self_contained(page)
    check_escaped(page)
    check_well_formed(page)
    assert page.count('class="heat"') == 9


def test_localization_figure_has_a_line_over_the_layers() -> None:
    figure = localization_figure(localizations(*runs(random_values(0), random_values(1))), "m")
    success, effect, correlation = figure.axes
    for ax in (success, effect, correlation):
        assert list(LAYERS) in [np.asarray(line.get_xdata()).tolist() for line in ax.lines]
