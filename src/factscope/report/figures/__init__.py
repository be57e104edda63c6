"""The figures of the paper and of the reports. Each function returns a matplotlib `Figure`.

trace_figure          Figure 1e-g    one fact: tokens × layers, one kind
traces_figure         Figure 1e-g    the same, all kinds side by side
average_heatmap       Figure 2       average over facts: token roles × layers, one kind
average_heatmaps      Figure 2       the same, all kinds side by side
severed_figure        Figure 3       average over facts with MLP or attention severed
average_lines         App. B         average over facts as lines with 95 % intervals
severed_detail        App. B         one fact at one token, intact and severed
gradients_figure      App. B         one fact: causal traces and integrated gradients
heads_figure                         one fact at one token: heads × layers
lens_figure                          one fact: logit lens on the clean and the corrupted run
knockout_figure                      one fact: attention knockout by layer
average_heads_figure                 average over facts of each head
average_lens                         average over facts of the logit lens
average_knockout_figure              average over facts of attention knockout
attribution_heatmaps                 one fact: measured and estimated cells
attribution_figure                   estimated against measured cells over facts
edit_traces_figure                   one fact before and after an edit
localization_figure                  trace effect and edit success by layer
before_after_figure                  one edit: probabilities before and after
neurons_figure                       one edit by Knowledge Neurons: selected neurons by layer
scores_figure         Table 4        the scores of each method with 95 % intervals
distributions_figure  Figure 24      the distribution of each score over cases
sweep_figure          Figures 5, 17  one method over layers, tokens, bounds or prefixes
preferences_figure    Figure 26      human preferences between methods
"""

from factscope.report.figures.comparisons import (
    attribution_figure,
    edit_traces_figure,
    localization_figure,
)
from factscope.report.figures.edits import before_after_figure, neurons_figure
from factscope.report.figures.evaluation import (
    distributions_figure,
    preferences_figure,
    scores_figure,
    sweep_figure,
)
from factscope.report.figures.traces import (
    attribution_heatmaps,
    average_heads_figure,
    average_heatmap,
    average_heatmaps,
    average_knockout_figure,
    average_lens,
    average_lines,
    gradients_figure,
    heads_figure,
    knockout_figure,
    lens_figure,
    severed_detail,
    severed_figure,
    trace_figure,
    traces_figure,
)
from factscope.report.style import save_figure

__all__ = [
    "attribution_figure", "attribution_heatmaps", "average_heads_figure", "average_heatmap",
    "average_heatmaps", "average_knockout_figure", "average_lens", "average_lines",
    "before_after_figure", "distributions_figure", "edit_traces_figure", "gradients_figure",
    "heads_figure", "knockout_figure", "lens_figure", "localization_figure", "neurons_figure",
    "preferences_figure", "save_figure", "scores_figure", "severed_detail", "severed_figure",
    "sweep_figure", "trace_figure", "traces_figure",
]  # fmt: skip
