"""Write src/factscope/serve/first_trace.json: the trace that the page shows at its start.

    python docs/tools/first_trace.py

It is the trace of a default request on the default model. Probabilities are rounded to six digits.
"""

import dataclasses
from pathlib import Path
from typing import Any

from factscope.data.readers import everyday_facts
from factscope.io import write_atomic
from factscope.lm.load import load
from factscope.lm.sources import DEFAULT_MODEL
from factscope.serve.examples import FINGERPRINT, TRACE_FILE
from factscope.serve.limits import ServerLimits
from factscope.serve.schemas import default_tracing
from factscope.tracing.trace import trace

FILE = Path(__file__).parents[2] / "src" / "factscope" / "serve" / TRACE_FILE


def rounded(value: Any) -> Any:
    """The value with all floats rounded to six digits."""
    if isinstance(value, dict):
        return {name: rounded(x) for name, x in value.items()}
    if isinstance(value, tuple):
        return tuple(map(rounded, value))
    return float(f"{value:.6g}") if isinstance(value, float) else value


def main() -> None:
    """Trace the first of the built-in facts and write the record."""
    lm, settings = load(DEFAULT_MODEL), default_tracing(ServerLimits())
    record = trace(lm, everyday_facts()[0], settings)
    record = dataclasses.replace(
        record,
        clean=rounded(record.clean),
        corrupted=rounded(record.corrupted),
        corrupted_samples=rounded(record.corrupted_samples),
        restored=rounded(record.restored),
        settings={**settings.to_dict(), FINGERPRINT: lm.fingerprint},
    )
    write_atomic(FILE, record.to_json() + "\n")


if __name__ == "__main__":
    main()
