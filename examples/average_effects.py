"""Trace every fact of a file and draw the average effect by token role and layer.

Usage: python examples/average_effects.py FACTS [MODEL] [FOLDER]
"""

import sys
from pathlib import Path

from factscope import Tracing, load, trace_many, write_records
from factscope.analysis.effects import AverageEffects, average_kinds
from factscope.data.readers import read_facts
from factscope.report.figures import average_heatmaps, average_lines, save_figure


def main(
    facts: str,
    model: str = "smollm2-135m",
    out: str = "averages",
    *,
    settings: Tracing | None = None,
) -> dict[str, AverageEffects]:
    """Write records and two figures; averages leave out facts that the model does not know."""
    folder = Path(out)
    records = list(trace_many(load(model), read_facts(Path(facts)).facts, settings))
    write_records(folder / "records.jsonl", records)
    effects = average_kinds(records)
    save_figure(average_heatmaps(effects), folder / "heatmaps.png")
    save_figure(average_lines(effects), folder / "lines.png")
    for kind, average in effects.items():
        layer, peak = average.peak("last subject token")
        print(f"{kind}: the last subject token peaks at layer {layer} with {peak}")
    return effects


if __name__ == "__main__":
    main(*sys.argv[1:4])
