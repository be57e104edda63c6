"""TrainingRecord: how far a learned editor is, seen on examples that it is not trained on."""

import json
from dataclasses import asdict, dataclass
from typing import Any

from factscope.errors import BadRecord

__all__ = ["TrainingRecord"]


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """Means over the held-out examples at one step."""

    step: int
    seconds: float
    """Of training so far, interruptions not counted."""
    trained: float | None
    """The mean loss of training since the record before; None in the first."""
    loss: float
    """What training makes small."""
    before: float
    """The new object's loss before the edits."""
    edit: float
    """And after them."""
    rephrased: float
    """The same in other words."""
    local: float
    """KL(unedited ‖ edited) where nothing should change."""
    said: float
    """The share of edits after which the new object is the likeliest."""
    said_rephrased: float
    kept: float
    """The share of likeliest tokens that stayed where nothing should change."""

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "TrainingRecord":
        """The record of a line."""
        try:
            said: dict[str, Any] = json.loads(line)
            return cls(**said)
        except (ValueError, TypeError) as error:
            raise BadRecord(f"not a record of training ({error}): {line!r:.80}") from error
