"""The paper's figures, by name. Each takes values and returns a matplotlib `Figure`.

trace_figure       Figure 1e-g   one fact: tokens × layers of one kind
traces_figure      Figure 1e-g   the same, every kind side by side
average_heatmap    Figure 2      token roles × layers, averaged over facts
average_heatmaps   Figure 2      the same, every kind side by side
severed_figure     Figure 3      states with MLP or attention severed, averaged over facts
average_lines      App. B        the averages as lines with 95 % intervals
severed_detail     App. B        one fact at one token, with and without severing
gradients_figure   App. B        one fact: causal traces above integrated gradients
before_after_figure              one edit: every prompt's probabilities before and after
neurons_figure                   one edit by Knowledge Neurons: the chosen neurons by layer
scores_figure      Table 4       many edits: the scores of each method with 95 % intervals
distributions_figure  Figure 24  the same, how each score is spread over cases
sweep_figure       Figures 5, 17 one method over layers, tokens, bounds or prefixes
preferences_figure Figure 26     whom people chose
"""

from factscope.report.figures.edits import before_after_figure, neurons_figure
from factscope.report.figures.effects import (
    average_heatmap,
    average_heatmaps,
    average_lines,
    distributions_figure,
    severed_figure,
)
from factscope.report.figures.evaluation import scores_figure
from factscope.report.figures.studies import preferences_figure
from factscope.report.figures.sweeps import sweep_figure
from factscope.report.figures.traces import (
    gradients_figure,
    severed_detail,
    trace_figure,
    traces_figure,
)
from factscope.report.style import save_figure

__all__ = [
    "average_heatmap",
    "average_heatmaps",
    "average_lines",
    "before_after_figure",
    "distributions_figure",
    "gradients_figure",
    "neurons_figure",
    "preferences_figure",
    "save_figure",
    "scores_figure",
    "severed_detail",
    "severed_figure",
    "sweep_figure",
    "trace_figure",
    "traces_figure",
]
