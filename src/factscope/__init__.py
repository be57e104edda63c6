"""factscope: find where a language model stores a fact, edit it, and measure what changed.

These are the public names. Each is imported at its first use, so that reading records needs no
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from factscope.analysis.metrics import summarize
    from factscope.data.readers import read_cases
    from factscope.editing.edit import Edit, applied_edits
    from factscope.editing.hypernet.settings import KeConfig, MendConfig, Training
    from factscope.editing.per_row import edited
    from factscope.editing.settings import KN, FineTune, Ke, Memit, Mend, Rome, editor
    from factscope.errors import FactscopeError
    from factscope.evaluation.protocols import Evaluation
    from factscope.facts import Case, Fact
    from factscope.lm.load import from_model, load
    from factscope.lm.model import LM
    from factscope.records import (
        CaseRecord,
        TraceRecord,
        read_case_records,
        read_trace_records,
        write_records,
    )
    from factscope.runs.train import FromCases, FromText, TrainRun
    from factscope.stats.second_moment import SecondMoment
    from factscope.tracing.settings import PRESETS, Corruption, Tracing
    from factscope.tracing.trace import find_known, trace, trace_many

__version__ = "0.1.0.dev0"

__all__ = [
    "KN",
    "LM",
    "PRESETS",
    "Case",
    "CaseRecord",
    "Corruption",
    "Edit",
    "Evaluation",
    "Fact",
    "FactscopeError",
    "FineTune",
    "FromCases",
    "FromText",
    "Ke",
    "KeConfig",
    "Memit",
    "Mend",
    "MendConfig",
    "Rome",
    "SecondMoment",
    "TraceRecord",
    "Tracing",
    "TrainRun",
    "Training",
    "applied_edits",
    "edited",
    "editor",
    "find_known",
    "from_model",
    "load",
    "read_case_records",
    "read_cases",
    "read_trace_records",
    "summarize",
    "trace",
    "trace_many",
    "write_records",
]

_MODULES = {
    "factscope.analysis.metrics": ("summarize",),
    "factscope.data.readers": ("read_cases",),
    "factscope.editing.edit": ("Edit", "applied_edits"),
    "factscope.editing.settings": ("KN", "FineTune", "Ke", "Memit", "Mend", "Rome", "editor"),
    "factscope.editing.per_row": ("edited",),
    "factscope.errors": ("FactscopeError",),
    "factscope.evaluation.protocols": ("Evaluation",),
    "factscope.facts": ("Case", "Fact"),
    "factscope.editing.hypernet.settings": ("KeConfig", "MendConfig", "Training"),
    "factscope.lm.load": ("from_model", "load"),
    "factscope.lm.model": ("LM",),
    "factscope.records": (
        "CaseRecord",
        "TraceRecord",
        "read_case_records",
        "read_trace_records",
        "write_records",
    ),
    "factscope.runs.train": ("FromCases", "FromText", "TrainRun"),
    "factscope.stats.second_moment": ("SecondMoment",),
    "factscope.tracing.settings": ("PRESETS", "Corruption", "Tracing"),
    "factscope.tracing.trace": ("find_known", "trace", "trace_many"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'factscope' has no attribute {name!r}")
