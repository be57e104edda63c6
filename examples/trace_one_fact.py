"""Trace one fact: the three probabilities, the strongest cells, and a figure.

Usage: python examples/trace_one_fact.py [MODEL] [FIGURE]
"""

import sys
from pathlib import Path

import rich

from factscope import Corruption, Fact, TraceRecord, Tracing, load, trace
from factscope.report.figures import save_figure, traces_figure
from factscope.report.terminal import strongest_cells


def main(model: str = "smollm2-135m", out: str = "trace.png", *, samples: int = 10) -> TraceRecord:
    """Trace where the model stores the Eiffel Tower's city, and draw it."""
    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Paris")
    record = trace(load(model), fact, Tracing(corruption=Corruption(samples=samples)))
    print(f"{fact.text!r} → {record.answer!r}, known: {record.known}")
    print(f"clean {record.clean:.3f}, corrupted {record.corrupted:.3f}")
    for kind in record.restored:
        rich.print(strongest_cells(record, kind, count=3))
    save_figure(traces_figure(record), Path(out))
    return record


if __name__ == "__main__":
    main(*sys.argv[1:3])
