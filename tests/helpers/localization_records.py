"""Traces and a layer sweep of the same facts, with given effects and rewrite scores."""

from dataclasses import replace

import numpy as np

from factscope.facts import Fact
from factscope.records import CaseRecord, TraceRecord, as_cell_table

from case_records import case, scores
from trace_records import TOKENS, trace

LAYERS = (0, 2, 4)
TOKEN = 3  # the last subject token of the records
BEFORE = 0.1  # P(o*) before every edit


def fact(number: int) -> Fact:
    return Fact(subject="Space Needle", prompt="The {} is in", id=str(number))


def runs(
    effects: np.ndarray, success: np.ndarray
) -> tuple[list[TraceRecord], dict[int, list[CaseRecord]]]:
    """Traces and a sweep with these effects and rewrite scores, fact × layer."""
    traces = []
    for i, row in enumerate(effects):
        cells = np.zeros((len(TOKENS), 6))
        cells[TOKEN, list(LAYERS)] = row
        restored = {"mlp": as_cell_table((0.1 + cells).tolist())}
        traces.append(trace(fact=fact(i), restored=restored, severed={}, gradients={}))
    cases = {}
    for column, layer in enumerate(LAYERS):
        after = [BEFORE + x * (1 - BEFORE) for x in success[:, column].tolist()]
        cases[layer] = [
            case(i, fact=replace(fact(i), target="Rome"), after=scores(p), before=scores(BEFORE))
            for i, p in enumerate(after)
        ]
    return traces, cases


def random_values(seed: int, facts: int = 8) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.05, 0.9, (facts, len(LAYERS)))
