"""Evaluation runs for a server to show, and traces that never end."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import TOWER


def case_record(method: str, new: float) -> dict[str, Any]:
    """A record of one CounterFact case; its generated text contains markup."""
    score = {"new": abs(new), "true": 1.0, "new_correct": True, "true_correct": False}
    texts = [f"{TOWER} is in Rome <script>alert(1)</script>"]
    scores = {
        "prompts": {"prompt": [score], "paraphrase": [score], "neighbour": [score]},
        "token_correct": {}, "texts": texts, "reference_similarity": None,
    }  # fmt: skip
    fact = {"subject": TOWER, "prompt": "{} is in", "target": "Rome", "id": "7"}
    return {
        "kind": "case", "fact": fact, "true": "Paris", "data": "counterfact", "model": "tiny",
        "method": method, "before": {**scores, "texts": ["It is in Paris"]}, "after": scores,
    }  # fmt: skip


def write_evaluation(folder: Path, method: str, new: float) -> None:
    """A run of `factscope evaluate` with one case."""
    folder.mkdir()
    spec = f'command = "evaluate"\nmodel = "tiny"\nmethod = "{method}"\ndata = "counterfact"\n'
    (folder / "spec.toml").write_text(spec)
    (folder / "records.jsonl").write_text(json.dumps(case_record(method, new)) + "\n")


def endless_traces(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make traces run until they are cancelled; the event is set when one has started."""
    started = threading.Event()

    def endless(*args: Any, progress: Any, **more: Any) -> Iterator[Any]:
        started.set()
        while True:
            time.sleep(0.01)
            progress(0.0)
        yield

    monkeypatch.setattr("factscope.serve.routes_trace.stream_trace", endless)
    return started
