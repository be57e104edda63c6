"""Comparisons as tables, JSON values and pages: traces before and after an edit, and trace effects
with edit success."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from factscope.analysis.estimate import Estimate
from factscope.analysis.localization import Correlation, Localization
from factscope.records import EditTraces
from factscope.report.figures.comparisons import edit_traces_figure
from factscope.report.html import embed_figure, render
from factscope.report.labels import CELL_NAMES
from factscope.report.tables import Table
from factscope.report.traces import trace_values

# ---- before and after an edit


def edit_traces_page(traces: EditTraces) -> str:
    """The page of a fact's traces before and after an edit."""
    return render(
        "edit_traces.html",
        title=f"Before and after an edit: {traces.before.fact.text}",
        figure=embed_figure(edit_traces_figure(traces), "Indirect effects before and after"),
        traces={
            "Before the edit": trace_values(traces.before),
            "After the edit: the new answer": trace_values(traces.after),
            "After the edit: the old answer": trace_values(traces.old_after),
        },
        settings=traces.before.settings,
    )


# ---- trace effect and edit success


def localization_table(relations: Sequence[Localization]) -> Table:
    """The correlations of trace effect and edit success, one row per kind."""
    columns = (
        "traced", "facts", "layers", "across layers", "within a layer, mean", "within a fact",
        "R² of the layer", "R² with the effect",
    )  # fmt: skip
    rows = []
    for relation in relations:
        within = [c.value for c in relation.within_layer if not math.isnan(c.value)]
        rows.append(
            (
                CELL_NAMES[relation.kind], relation.facts, len(relation.layers),
                _correlation(relation.across_layers),
                round(sum(within) / len(within), 3) if within else None,
                relation.within_fact, round(relation.explained_by_layer, 3),
                round(relation.explained_by_both, 3),
            )
        )  # fmt: skip
    note = (
        "Correlation of the indirect effect at the last subject token with the rewrite score of "
        "the edit. Across layers: of the two means by layer, with its 95 % interval. Within a "
        "layer: over facts. Within a fact: over layers, the mean over facts."
    )
    return Table("Trace effect and edit success", columns, tuple(rows), note=note)


def layers_table(relations: Sequence[Localization]) -> Table:
    """Effect, success and their correlation over facts, by kind and layer."""
    rows = []
    for relation in relations:
        for i, layer in enumerate(relation.layers):
            within = relation.within_layer[i]
            values = (
                relation.effect[i],
                relation.success[i],
                within.value,
                within.low,
                within.high,
            )
            rows.append((CELL_NAMES[relation.kind], layer, *values, within.n))
    columns = ("traced", "layer", "effect", "success", "correlation", "low", "high", "facts")
    return Table("Trace effect and edit success by layer", columns, tuple(rows))


def localization_to_dict(relations: Iterable[Localization]) -> list[dict[str, Any]]:
    """The relations as JSON values; unknown values are null."""

    def values(correlation: Correlation) -> dict[str, Any]:
        return {name: _number(x) for name, x in asdict(correlation).items()}

    return [
        {
            "kind": r.kind,
            "facts": r.facts,
            "across_layers": values(r.across_layers),
            "within_fact": _interval(r.within_fact),
            "explained_by_layer": _number(r.explained_by_layer),
            "explained_by_both": _number(r.explained_by_both),
            "layers": [
                {
                    "layer": layer,
                    "effect": _interval(r.effect[i]),
                    "success": _interval(r.success[i]),
                    "correlation": values(r.within_layer[i]),
                }
                for i, layer in enumerate(r.layers)
            ],
        }
        for r in relations
    ]


def _interval(value: Estimate) -> dict[str, float | None]:
    return {"mean": _number(value.mean), "half_width": _number(value.half_width)}


def _number(value: float | int) -> float | int | None:
    return None if math.isnan(value) else value


def _correlation(value: Correlation) -> str:
    if math.isnan(value.value):
        return "–"
    interval = "" if math.isnan(value.low) else f" ({value.low:.2f} to {value.high:.2f})"
    return f"{value.value:.2f}{interval}"
