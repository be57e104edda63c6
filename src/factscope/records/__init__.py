"""What a run writes to disk: one record a line, JSON, raw scores only. No torch."""

from factscope.records.case import Asked, CaseRecord, CaseScores, Moment, Protocol
from factscope.records.edit import EditRecord, Generation, Place, PromptScores, Scores
from factscope.records.files import (
    read_case_records,
    read_edit_records,
    read_records,
    read_training_records,
    write_records,
)
from factscope.records.trace import KINDS, Grid, TraceRecord, as_grid
from factscope.records.training import TrainingRecord

__all__ = [
    "KINDS",
    "Asked",
    "CaseRecord",
    "CaseScores",
    "EditRecord",
    "Generation",
    "Grid",
    "Moment",
    "Place",
    "PromptScores",
    "Protocol",
    "Scores",
    "TraceRecord",
    "TrainingRecord",
    "as_grid",
    "read_case_records",
    "read_edit_records",
    "read_records",
    "read_training_records",
    "write_records",
]
