"""Records of traces."""

from typing import Any

import numpy as np

from factscope.analysis.effects import AverageEffects, average_kinds
from factscope.facts import Fact
from factscope.records import KINDS, Lens, TraceRecord

LAYERS = 6


TOKENS = ("The", " Space", " Need", "le", " is", " in")


ODD_TOKENS = ("<script>", "alert(1)</script>", " 東京", "\n", " $5 and $6$", "\x00")


def random_cells(seed: int, tokens: int = 6) -> tuple[tuple[float, ...], ...]:
    cells = 0.05 + 0.5 * np.random.default_rng(seed).random((tokens, LAYERS))
    return tuple(tuple(float(x) for x in row) for row in cells)


def trace(seed: int = 0, tokens: tuple[str, ...] = TOKENS, **fields: Any) -> TraceRecord:
    """A trace with every table, of scores drawn at random."""
    defaults: dict[str, Any] = {
        "fact": Fact.from_text("".join(tokens), "".join(tokens[1:4]).strip()),
        "model": "tiny",
        "subject": (1, 4),
        "answer": " Seattle",
        "answer_id": 7,
        "known": True,
        "clean": 0.6,
        "corrupted": 0.1,
        "corrupted_samples": (0.1, 0.1),
        "restored": {kind: random_cells(seed + i) for i, kind in enumerate(KINDS)},
        "severed": {"mlp": random_cells(seed + 10), "attn": random_cells(seed + 11)},
        "gradients": {kind: random_cells(seed + 20 + i) for i, kind in enumerate(KINDS)},
        "settings": {"window": 10, "seed": 1, "corruption": {"kind": "gaussian"}},
    }
    return TraceRecord(tokens=tokens, **(defaults | fields))


def lens(seed: int) -> Lens:
    """A lens with random probabilities, the same two tokens on top of every state."""
    top = ((" Seattle", 0.5), ("</script>", 0.25))
    return Lens(answer=random_cells(seed), top=((top,) * LAYERS,) * len(TOKENS))


def attention_trace(seed: int = 0, **fields: Any) -> TraceRecord:
    """A trace with two heads, knockout and the logit lens."""
    defaults: dict[str, Any] = {
        "heads": (random_cells(seed + 30), random_cells(seed + 31)),
        "knockout": {
            group: random_cells(seed + 40 + i)[0]
            for i, group in enumerate(("subject", "relation", "last"))
        },
        "lens": {"clean": lens(seed + 50), "corrupted": lens(seed + 51)},
    }
    return trace(seed, **(defaults | fields))


KL = {"metric": "kl", "clean_metric": 0.0, "corrupted_metric": 2.0}
REPLACED = {"corruption": {"distribution": "tokens"}, "direction": "corrupt", "window": 10}


def averages(count: int = 4) -> dict[str, AverageEffects]:
    return average_kinds([trace(seed) for seed in range(count)])
