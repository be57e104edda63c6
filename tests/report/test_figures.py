"""Figures: what they draw, and that unusual texts are drawn as text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from factscope.analysis.attention import average_heads, average_knockout
from factscope.analysis.effects import average_effects, average_kinds, severed_comparison
from factscope.analysis.metrics import Summary, summarize
from factscope.analysis.published import published
from factscope.errors import BadRecord, BadSetting
from factscope.report import figures
from factscope.report.edits import edit_page
from factscope.report.evaluations import with_published
from factscope.report.figures import before_after_figure, neurons_figure, save_figure
from factscope.report.figures.evaluation import distributions, distributions_figure, scores_figure
from factscope.report.labels import display_token, row_name, token_labels
from factscope.report.style import share_scales

from case_records import RECORDS, case
from edit_records import neurons_record, odd, record, scores
from trace_records import (
    KL,
    LAYERS,
    ODD_TOKENS,
    REPLACED,
    attention_trace,
    averages,
    random_cells,
    trace,
)


def ticks(fig: Figure, panel: int = 0) -> list[str]:
    return [label.get_text() for label in fig.axes[panel].get_yticklabels()]


def legend(fig: Figure) -> list[str]:
    found = fig.axes[0].get_legend()
    return [text.get_text() for text in found.get_texts()] if found else []


def bars(fig: Figure) -> Any:
    return fig.axes[0].containers[0]


def drawn(fig: Figure, panel: int = 0) -> Any:
    return fig.axes[panel].collections[0]


# ---- traces


def test_token_labels_make_invisible_characters_visible():
    assert [display_token(t) for t in (" Need", "  ", "\n", "a\tb", "\x00", "東京")] == [
        "Need", "␣", "↵", "a⇥b", "\ufffd", "東京",
    ]  # fmt: skip
    assert len(display_token("x" * 100)) < 30
    assert token_labels(trace()) == ["The", "Space*", "Need*", "le*", "is", "in"]


@pytest.mark.parametrize(
    ("kind", "colors", "title", "axis"),
    [
        ("states", "Purples", "restoring state", "single restored layer within tiny"),
        ("mlp", "Greens", "restoring MLP", "center of interval of 10 restored MLP layers"),
        ("attn", "Reds", "restoring Attn", "center of interval of 10 restored Attn layers"),
    ],
)
def test_a_trace_is_drawn_as_in_the_paper(kind, colors, title, axis):
    record = trace()
    fig = figures.trace_figure(record, kind)
    ax, bar = fig.axes
    assert title in ax.get_title()
    assert ax.get_xlabel() == axis
    assert ticks(fig) == token_labels(record)
    assert ax.yaxis_inverted()
    assert bar.get_ylabel() == "p(Seattle)"
    mesh = drawn(fig)
    assert mesh.get_cmap().name == colors
    assert mesh.norm.vmin == record.corrupted
    assert np.asarray(mesh.get_array()) == pytest.approx(np.array(record.restored[kind]))


def test_unmeasured_cells_are_blank():
    cells = ((None,) * LAYERS, *random_cells(0)[1:])
    mesh = drawn(figures.trace_figure(trace(restored={"states": cells})))
    assert mesh.get_array().mask[0].all()
    assert not mesh.get_array().mask[1:].any()


def test_all_kinds_are_drawn_side_by_side():
    fig = figures.traces_figure(trace())
    assert [drawn(fig, i).get_cmap().name for i in range(3)] == ["Purples", "Greens", "Reds"]
    with pytest.raises(BadRecord, match="restores nothing"):
        figures.traces_figure(trace(restored={}))
    with pytest.raises(BadSetting, match="no kind 'stats'"):
        figures.trace_figure(trace(), "stats")


def test_gradients_are_drawn_below_the_traces():
    fig = figures.gradients_figure(trace())
    titles = [ax.get_title() for ax in fig.axes if ax.get_title()]
    assert sum("Integrated gradients" in title for title in titles) == 3
    assert sum("Impact" in title for title in titles) == 3
    assert drawn(fig, 3).norm.vmin == 0


def test_cells_that_lower_the_metric_are_darkest_at_the_lowest_value():
    cells = ((2.0,) * LAYERS,) * 5 + ((0.5,) * LAYERS,)
    fig = figures.trace_figure(trace(restored={"states": cells}, **KL))
    mesh = drawn(fig)
    assert mesh.get_cmap().name == "Purples_r"
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0.5, 2.0)
    assert fig.axes[1].get_ylabel() == "KL(clean ‖ run)"


def test_direction_replacement_and_foil_are_named():
    record = trace(metric="logit-difference", foil=" Rome", settings=REPLACED)
    record = replace(record, fact=replace(record.fact, replacement="Big Ben"))
    fig = figures.traces_figure(record)
    assert fig.get_suptitle() == "subject replaced by “Big Ben”"
    assert fig.axes[0].get_title() == "Impact of corrupting state in the clean run"
    assert fig.axes[3].get_ylabel() == "logit(Seattle) − logit(Rome)"


def test_heads_are_drawn_at_the_token_with_the_strongest_one():
    flat = ((0.1,) * LAYERS,) * 6
    strong = (*flat[:3], (0.1, 0.1, 0.5, 0.1, 0.1, 0.1), *flat[4:])
    fig = figures.heads_figure(trace(heads=(flat, strong)))
    assert "head at “le”" in fig.axes[0].get_title()
    assert ticks(fig) == ["head 0", "head 1"]
    assert np.asarray(drawn(fig).get_array())[1, 2] == 0.5
    with pytest.raises(BadSetting, match="no token 9"):
        figures.heads_figure(trace(heads=(flat, strong)), 9)
    with pytest.raises(BadRecord, match="--heads"):
        figures.heads_figure(trace())


def test_knockout_is_drawn_as_relative_change_of_the_probability():
    record = attention_trace(knockout={"subject": (0.6, 0.3), "last": (0.6, 0.6)})
    fig = figures.knockout_figure(record)
    ax = fig.axes[0]
    assert [line.get_label() for line in ax.lines[1:]] == ["subject tokens", "last token"]
    assert ax.lines[1].get_ydata() == pytest.approx([0.0, -0.5])
    assert ax.get_ylabel() == "relative change of p(Seattle)"
    other = replace(record, metric="rank", clean_metric=1.0)
    assert figures.knockout_figure(other).axes[0].get_ylabel() == "change of rank of Seattle"


def test_average_knockout_heads_and_lens_over_facts():
    records = [attention_trace(seed) for seed in range(3)]
    knockout = average_knockout(records)
    ax = figures.average_knockout_figure(knockout).axes[0]
    assert ax.lines[1].get_ydata() == pytest.approx(knockout.changes["subject"].mean)
    assert len(ax.collections) == 3  # a band for each group
    heads = average_heads(records)
    fig = figures.average_heads_figure([heads])
    assert "last token over 3 facts" in fig.axes[0].get_title()
    shown = np.asarray(drawn(fig).get_array())
    assert shown == pytest.approx(np.clip(heads.mean, 0, None))
    lens = {run: average_effects(records, f"lens {run}") for run in ("clean", "corrupted")}
    fig = figures.average_lens(lens)
    assert [ax.get_title() for ax in fig.axes[:2]] == [
        "Logit lens on the clean run over 3 facts", "Logit lens on the corrupted run over 3 facts",
    ]  # fmt: skip
    assert drawn(fig, 1).norm.vmax == drawn(fig, 0).norm.vmax


def test_lens_of_one_fact():
    record = attention_trace()
    fig = figures.lens_figure(record)
    assert fig.axes[1].get_title() == "Logit lens on the corrupted run"
    assert np.asarray(drawn(fig).get_array()) == pytest.approx(
        np.array(record.lens["clean"].answer)
    )
    with pytest.raises(BadRecord, match="--lens"):
        figures.lens_figure(trace())


def test_average_lines_have_a_normalised_scale():
    effects = averages()
    fig = figures.average_lines(effects)
    [scale] = fig.axes[-1].child_axes
    assert scale.get_ylabel() == "fraction of the total effect"
    fig.draw_without_rendering()
    assert scale.get_ylim()[1] * effects["states"].total.mean == pytest.approx(
        fig.axes[-1].get_ylim()[1]
    )


def test_figures_side_by_side_have_the_same_scales():
    def half(cells: Any) -> Any:
        return tuple(tuple(0.1 + (x - 0.1) / 2 for x in row) for row in cells)

    strong = [trace(seed) for seed in range(4)]
    weak = [
        replace(r, restored={kind: half(cells) for kind, cells in r.restored.items()})
        for r in strong[:3]  # another number of facts: other titles
    ]
    low, high = average_kinds(weak), average_kinds(strong)
    heatmap, other = figures.average_heatmaps(low), figures.average_heatmaps(high)
    panels = range(len(low))
    assert all(drawn(heatmap, i).get_clim() != drawn(other, i).get_clim() for i in panels)
    share_scales(heatmap, other)
    assert all(drawn(heatmap, i).get_clim() == drawn(other, i).get_clim() for i in panels)
    lines, other = figures.average_lines(low), figures.average_lines(high)
    limits = [fig.axes[0].get_ylim() for fig in (lines, other)]
    share_scales(lines, other)
    assert lines.axes[0].get_ylim() == (min(limits)[0], max(limits, key=lambda x: x[1])[1])


def test_negative_average_effects_have_the_lightest_colour():
    cells = ((0.0,) * LAYERS,) * 5 + ((0.3,) * LAYERS,)
    low = [trace(i, restored={"states": cells}) for i in (1, 2)]
    effects = average_kinds(low)["states"]
    fig = figures.average_heatmap(effects)
    colored = np.ma.getdata(drawn(fig).get_array())
    assert effects.mean[2, 0] == pytest.approx(-0.1)
    assert colored[2, 0] == 0
    assert colored[5, 0] == pytest.approx(0.2)
    assert ticks(fig)[2] == "Last subject token"
    assert "over 2 facts" in fig.axes[0].get_title()


def test_average_lines_have_a_confidence_band_for_each_measured_role():
    effects = averages()
    fig = figures.average_lines(effects)
    line = next(x for x in fig.axes[0].lines if x.get_label() == "Last subject token")
    assert line.get_ydata() == pytest.approx(effects["states"].row("last subject token").mean)
    labels = legend(fig)
    assert "Further tokens" not in labels  # the prompt has none
    assert len(fig.axes[0].collections) == len(labels)


def test_severed_graphs_are_drawn_next_to_the_intact_graph():
    comparison = severed_comparison([trace(seed) for seed in range(3)])
    fig = figures.severed_figure(comparison)
    heights = [bar.get_height() for bar in bars(fig)]
    assert heights == pytest.approx(comparison.intact.mean.tolist())
    assert legend(fig)[1:] == ["Effect with MLP severed", "Effect with Attn severed"]


def test_severed_detail_uses_the_strongest_subject_token_or_the_given_token():
    record = trace()
    states = record.restored["states"]
    decisive = max(range(*record.subject), key=lambda t: max(x or 0 for x in states[t]))
    for token, fig in (
        (decisive, figures.severed_detail(record)),
        (3, figures.severed_detail(record, token=3)),
    ):
        tops = [bar.get_y() + bar.get_height() for bar in bars(fig)]
        assert tops == pytest.approx(list(states[token]))
    with pytest.raises(BadSetting, match="no token 9"):
        figures.severed_detail(record, token=9)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_figures_with_unusual_tokens_are_saved(tmp_path: Path, suffix: str):
    odd = trace(tokens=ODD_TOKENS, answer=" $x$", model="a_$b$")
    path = tmp_path / "new" / f"trace.{suffix}"
    for fig in (figures.traces_figure(odd), figures.severed_detail(odd)):
        figures.save_figure(fig, path)
    assert path.stat().st_size > 1000
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_dollar_signs_are_not_parsed_as_math():
    fig = figures.trace_figure(trace(tokens=ODD_TOKENS))
    assert "$5 and $6$" in ticks(fig)
    assert not any(label.get_parse_math() for label in fig.axes[0].get_yticklabels())


def test_unknown_figure_suffixes_are_rejected(tmp_path: Path):
    with pytest.raises(BadSetting, match=r"trace\.bmp"):
        figures.save_figure(figures.trace_figure(trace()), tmp_path / "trace.bmp")
    assert list(tmp_path.iterdir()) == []


# ---- edits


def test_before_after_figure_has_a_line_for_each_object_of_each_prompt(tmp_path: Path) -> None:
    fig = before_after_figure(record())
    [ax] = fig.axes
    ends = [tuple(map(float, np.asarray(line.get_xdata()))) for line in ax.lines]
    assert (0.01, 0.98) in ends
    assert (0.7, 0.0001) in ends
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels[0] == "The Eiffel Tower is in"
    assert ax.get_title(loc="left") == "The Eiffel Tower: Paris → Rome"
    legend = ax.get_legend()
    assert legend is not None
    assert [t.get_text() for t in legend.get_texts()][:2] == ["P(Rome)", "P(Paris)"]
    for i, made in enumerate((record(), odd(), odd(None))):
        save_figure(before_after_figure(made), tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 1000


def test_selected_neurons_are_drawn_by_layer(tmp_path: Path) -> None:
    made = neurons_record(2, 2, 5)
    fig = neurons_figure(made)
    upper, lower = fig.axes
    coarse, count = ([bar.get_height() for bar in bars] for bars in upper.containers)  # pyright: ignore[reportAttributeAccessIssue]
    assert coarse == [0.5] * 6
    assert count == [0, 0, 2, 0, 0, 1]
    assert [text.get_text() for text in lower.texts] == ["20", "20", "50"]
    assert upper.get_title(loc="left") == "Knowledge neurons for Paris"
    assert not neurons_figure(neurons_record(*range(6), *range(6), *range(6))).axes[1].texts
    with pytest.raises(BadRecord, match="rome has no neurons"):
        neurons_figure(record())
    for i, one in enumerate((made, replace(odd(), settings=made.settings))):
        save_figure(neurons_figure(one), tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 1000
    assert (
        edit_page(made).count("data:image/png") == edit_page(record()).count("data:image/png") + 1
    )


def test_long_prompts_are_shortened_to_their_end() -> None:
    made = record(prompts=(scores("prompt", "word " * 60 + "at the end"),))
    [ax] = before_after_figure(made).axes
    label = ax.get_yticklabels()[0].get_text()
    assert label.startswith("… ")
    assert label.endswith("at the end")
    assert label.count("\n") == 1


# ---- evaluations


def test_scores_figure_has_three_scores_per_row():
    rows = with_published(summarize(RECORDS))
    fig = scores_figure(rows)
    ax = fig.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == [row_name(row) for row in rows]
    assert len(ax.collections) == 3 * len(rows)
    assert ax.get_title(loc="left") == "CounterFact, gpt2-xl"
    assert scores_figure(published("gpt2-xl", "zsre")).axes[0].collections
    assert scores_figure([Summary(model="m", data="own", method="rome", cases=1)])


def test_distributions_are_over_cases(tmp_path: Path):
    spread = distributions(RECORDS)
    assert list(spread) == [
        "unedited", "ROME", "FT", "ROME, sequential, after its edit",
        "ROME, sequential, after all edits",
    ]  # fmt: skip
    assert spread["ROME"]["EM"] == pytest.approx([40.0] * 3)
    assert len(spread["FT"]["ES"]) == 2
    assert len(spread["unedited"]["NS"]) == 3
    figure = distributions_figure(RECORDS)
    save_figure(figure, tmp_path / "spread.svg")
    assert [ax.get_title().split()[-2] for ax in figure.axes[:2]] == ["ES", "PS"]
    with pytest.raises(BadRecord, match="no scores"):
        distributions_figure([case(before=None, after=None, error="no")])
