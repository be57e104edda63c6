"""The unedited model's scores, asked once and shared by every method: files in the user's cache.

A file's name is a hash of the weights, the number format, the device, the cases themselves and
everything that is asked of them.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from factscope.errors import FactscopeError
from factscope.evaluation.cases import Asking
from factscope.facts import Case
from factscope.fetch import cache_folder
from factscope.files import write_whole
from factscope.lm.model import LM
from factscope.records import CaseScores
from factscope.records.case import scores_from

__all__ = ["Unedited"]

Scores = CaseScores | FactscopeError


class Unedited:
    """What the model as it is says of cases, where it was asked before."""

    def __init__(self, lm: LM, asking: Asking, references: Mapping[str, Any] | None) -> None:
        self.folder = cache_folder() / "unedited"
        self.key = [
            lm.fingerprint, str(lm.dtype), _precision(), lm.device.type, asdict(asking), references,
        ]  # fmt: skip

    def path(self, cases: Sequence[Case]) -> Path:
        """Where the scores of those cases are."""
        said = json.dumps([*self.key, [asdict(case) for case in cases]], sort_keys=True)
        return self.folder / f"{hashlib.sha256(said.encode()).hexdigest()[:32]}.json"

    def read(self, cases: Sequence[Case]) -> list[Scores] | None:
        """The scores, or None where they were not asked yet or the file is broken."""
        try:
            lines = json.loads(self.path(cases).read_text("utf-8"))
            found = [FactscopeError(x) if isinstance(x, str) else scores_from(x) for x in lines]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        complete = [scores for scores in found if scores is not None]
        return complete if len(complete) == len(cases) else None

    def write(self, cases: Sequence[Case], scores: Sequence[Scores]) -> None:
        """Keep the scores for the next method."""
        lines = [str(x) if isinstance(x, FactscopeError) else asdict(x) for x in scores]
        path = self.path(cases)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(lines, ensure_ascii=False, allow_nan=False))


def _precision() -> str:
    import torch

    return torch.get_float32_matmul_precision()
