"""Trace one fact under two corruptions: noise added to the subject, or replacing it.

Usage: python examples/compare_corruptions.py [MODEL] [FOLDER]
"""

import sys
from pathlib import Path

from factscope import Corruption, Fact, TraceRecord, Tracing, load, trace
from factscope.report.figures import save_figure, trace_figure


def main(
    model: str = "smollm2-135m", out: str = "corruptions", *, samples: int = 10
) -> dict[str, TraceRecord]:
    """Draw the trace of the states under each corruption."""
    lm = load(model)
    fact = Fact(subject="The Colosseum", prompt="{} is located in the city of", target="Rome")
    corruptions = {
        "added": Corruption(samples=samples),
        "replaced": Corruption(samples=samples, distribution="embedding", replace=True),
    }
    records = {}
    for name, corruption in corruptions.items():
        settings = Tracing(corruption=corruption, kinds=("states",))
        records[name] = record = trace(lm, fact, settings)
        print(f"{name}: clean {record.clean:.3f}, corrupted {record.corrupted:.3f}")
        save_figure(trace_figure(record), Path(out) / f"{name}.png")
    return records


if __name__ == "__main__":
    main(*sys.argv[1:3])
