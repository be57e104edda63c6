"""factscope: find where a language model keeps a fact, rewrite it, and measure what changed.

The names below are the public ones. They are imported when first used, so that reading records
needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from factscope.errors import FactscopeError
    from factscope.facts import Fact
    from factscope.lm.load import from_model, load
    from factscope.lm.model import LM
    from factscope.records import TraceRecord, read_records, write_records
    from factscope.tracing.corrupt import Corruption
    from factscope.tracing.discover import find_known
    from factscope.tracing.settings import PRESETS, Tracing
    from factscope.tracing.trace import trace, trace_many

__all__ = [
    "LM",
    "PRESETS",
    "Corruption",
    "Fact",
    "FactscopeError",
    "TraceRecord",
    "Tracing",
    "find_known",
    "from_model",
    "load",
    "read_records",
    "trace",
    "trace_many",
    "write_records",
]

_HOMES = {
    "factscope.errors": ("FactscopeError",),
    "factscope.facts": ("Fact",),
    "factscope.lm.load": ("from_model", "load"),
    "factscope.lm.model": ("LM",),
    "factscope.records": ("TraceRecord", "read_records", "write_records"),
    "factscope.tracing.corrupt": ("Corruption",),
    "factscope.tracing.discover": ("find_known",),
    "factscope.tracing.settings": ("PRESETS", "Tracing"),
    "factscope.tracing.trace": ("trace", "trace_many"),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'factscope' has no attribute {name!r}")
