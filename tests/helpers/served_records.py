"""Records on a server, and traces that never end."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from factscope.serve.sessions import ServerState

from serving import TOWER


def case_record(method: str, new: float) -> dict[str, Any]:
    asked = {"new": abs(new), "true": 1.0, "new_correct": True, "true_correct": False}
    texts = [f"{TOWER} is in Rome <script>alert(1)</script>"]
    scores = {
        "prompts": {"prompt": [asked], "paraphrase": [asked], "neighbour": [asked]},
        "token_correct": {}, "texts": texts, "reference_similarity": None,
    }  # fmt: skip
    fact = {"subject": TOWER, "prompt": "{} is in", "target": "Rome", "id": "7"}
    return {
        "kind": "case", "fact": fact, "true": "Paris", "data": "counterfact", "model": "tiny",
        "method": method, "before": {**scores, "texts": ["It is in Paris"]}, "after": scores,
    }  # fmt: skip


def slow(served: ServerState, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Make traces endless until they are called off; the event says that one has begun."""
    begun = threading.Event()

    def endless(*args: Any, progress: Any, **more: Any) -> Iterator[Any]:
        begun.set()
        while True:
            time.sleep(0.01)
            progress(0.0)
        yield

    monkeypatch.setattr("factscope.serve.routes_trace.stream_trace", endless)
    return begun
