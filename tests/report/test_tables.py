"""Tables as Markdown, LaTeX and CSV."""

import csv
import io
import math

import pytest

from factscope.analysis.effects import severed_comparison
from factscope.analysis.estimate import Estimate
from factscope.report.tables import (
    Score,
    Table,
    as_csv,
    as_latex,
    as_markdown,
    effects_table,
    severed_table,
    summary_table,
)

from trace_records import averages, trace

TABLE = Table("A|B", ("name", "mean"), (("x_1 & $y$", Estimate(0.1234, 0.01, 9)), ("<b>", 3)))


def test_markdown():
    lines = as_markdown(TABLE).splitlines()
    assert lines[0] == r"**A\|B**"
    assert lines[2:5] == ["| name | mean |", "| :-- | --: |", r"| x\_1 & $y$ | 12.3 ± 1.0 % |"]


def test_latex():
    text = as_latex(TABLE)
    assert r"x\_1 \& \$y\$ & 12.3 $\pm$ 1.0 \% \\" in text
    assert r"\begin{tabular}{lr}" in text


def test_csv_is_not_rounded():
    table = Table("t", ("name", "mean", "n"), (("a,b", Estimate(0.1234, float("nan"), 1), 1),))
    heads, row = csv.reader(io.StringIO(as_csv(table)))
    assert heads == ["name", "mean", "mean ±", "n"]
    assert row == ["a,b", "0.1234", "", "1"]


def test_rows_must_match_the_columns():
    with pytest.raises(ValueError, match="does not fit"):
        Table("t", ("a", "b"), (("x",),))


def test_tables_of_average_effects():
    effects = averages()
    rows = effects_table(effects).rows
    layer, peak = effects["states"].peak("last subject token")
    total = effects["states"].total.mean
    part = Estimate(peak.mean / total, peak.half_width / total, 4)
    assert ("states", "last subject token", layer, peak, part, 4) in rows
    assert ("average total effect", effects["states"].total, 4) in summary_table(effects).rows
    comparison = severed_comparison([trace(seed) for seed in range(3)])
    assert severed_table(comparison).columns == ("layer", "intact", "MLP severed", "Attn severed")


def test_scores_are_formatted_as_in_the_paper():
    assert str(Score(Estimate(0.8921, 0.0034, 9))) == "89.2 (0.3)"
    assert str(Score(Estimate(6.219, 0.005, 9))) == "621.9 (0.5)"
    assert str(Score(Estimate(0.892, math.nan, 1))) == "89.2"
    assert str(Score(Estimate(-0.0001, 0.0, 9))) == "0.0 (0.0)"
    assert str(Score(Estimate(math.nan, math.nan, 0))) == "–"
