"""What does each acceleration gain? Every part of `lm.accel` switched off in turn.

    python bench/ablate.py --shape gpt2-xl --device cuda --dtype float32 tf32 bfloat16

Prints, for each part and each workload that uses it, the seconds with everything on and with that
part off: medians of `--repeat` runs after three warm-up runs (one for the longer `edits` and
`evaluate`). A part stays in the code only if it gains at least 10 % somewhere. Workloads, on a
model with random weights:

    trace      one fact of 12 tokens, 10 samples, all three kinds
    replace    the same by token replacement
    traces     16 such facts by token replacement, in one batch
    edit       one ROME edit after others of its shape: 21 contexts, 20 steps, checks included
    lengths    the same for facts of various lengths, ten after ten others (median of one round)
    edits      32 ROME edits in one batch
    evaluate   8 CounterFact cases, texts of 100 tokens included
    mend       one MEND edit after others
"""

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from edit import LATER, learned, of_all_lengths, prepared
from evaluate import cases_of
from factscope.editing.settings import Mend
from factscope.evaluation.protocols import Evaluation
from factscope.evaluation.settings import ScoringOptions
from factscope.lm.accel import attention, decode, graphs, linear, matmul, run, search
from factscope.lm.accel.graphs import LengthBuckets
from factscope.lm.memory import Budget
from factscope.tracing.corruption import NoiseScale
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace_batch

from shapes import SHAPES, SUBJECT, Clock, random_prompts

Patch = tuple[Any, str, Any]


class Eager(graphs.CudaGraph):
    """A graph that is never captured."""

    def __init__(self, function: Callable[..., Any], **_: Any) -> None:
        super().__init__(function, pays=False)


PARTS: dict[str, tuple[list[Patch], tuple[str, ...]]] = {
    "fast linear layers": (
        [(linear, "fast_forwards", lambda part, split=True: {}),
         (search.ModelCache, "build", lambda cache, lm, blocks: {})],
        ("trace", "replace", "edit", "edits", "evaluate"),
    ),
    "splitting kernel": ([(matmul, "_fused", lambda device, columns: False)],
                         ("trace", "edit", "edits", "evaluate")),
    "padded head": ([(linear, "padded_linear", lambda weight, bias: None)],
                    ("trace", "replace", "traces")),
    "suffix attention": ([(attention, "has_kernels", lambda device: False)],
                         ("trace", "edit", "edits")),
    "captured steps": ([(search, "CudaGraph", Eager)], ("edit", "edits")),
    "captured passes": ([(graphs, "can_capture", lambda lm: False)], ("replace", "edit", "mend")),
    "model cache": (
        [(search, "_uses_cache", lambda objective: False), (run, "model_cache", lambda lm: None)],
        ("edit",),
    ),
    "length buckets": ([(LengthBuckets, "of", lambda lm, facts: LengthBuckets())], ("lengths",)),
    "static decoding": ([(decode, "on_gpu", lambda lm: False)], ("evaluate",)),
    "decode attention": ([(decode, "has_kernels", lambda device: False)], ("evaluate",)),
}  # fmt: skip
"""Part → what switches it off, and the workloads that use it."""


@contextmanager
def without(part: str) -> Iterator[None]:
    """Switch one part off."""
    with ExitStack() as stack:
        for where, name, value in PARTS[part][0]:
            stack.enter_context(patch.object(where, name, value))
        yield


def workloads(
    args: argparse.Namespace, dtype: str, clock: Clock
) -> tuple[Any, dict[str, Callable[[], float]]]:
    """The model, and workloads that return how long they took."""
    lm, rome, facts = prepared(argparse.Namespace(**{**vars(args), "facts": 32}), dtype)
    noise = Tracing(corruption=Corruption(samples=10))
    tokens = Tracing(corruption=Corruption(distribution="tokens"))
    answers = random_prompts(lm, [(12, SUBJECT)] * 16)
    cases = cases_of(argparse.Namespace(model=None, cases=8))
    evaluation = Evaluation(
        lm=lm, editor=rome, data="bench", method="rome", scoring=ScoringOptions(length=100)
    )
    mend = learned(lm, Mend)

    def trace(settings: Tracing, facts: int = 1) -> object:
        answered, scale = answers[:facts], NoiseScale(sigma=0.02)
        return trace_batch(lm, answered, settings, scale, Budget.of(lm, None))

    def median(function: Callable[[], object], warm_up: int = 3) -> float:
        for _ in range(warm_up):  # the third edit of a shape is the first that replays every pass
            function()
        return statistics.median(clock(function) for _ in range(args.repeat))

    def lengths() -> float:
        edits = [lambda fact=fact: rome.attempt(lm, [fact]) for fact in of_all_lengths(facts[0])]
        return statistics.median([clock(edit) for edit in edits][LATER:])

    return lm, {
        "trace": lambda: median(lambda: trace(noise)),
        "replace": lambda: median(lambda: trace(tokens)),
        "traces": lambda: median(lambda: trace(tokens, facts=16)),
        "edit": lambda: median(lambda: rome.attempt(lm, facts[:1])),
        "lengths": lengths,
        "edits": lambda: median(lambda: rome.attempt(lm, facts), warm_up=1),
        "evaluate": lambda: median(
            lambda: evaluation.single(cases, evaluation.score_unedited(cases)), warm_up=1
        ),
        "mend": lambda: median(lambda: mend.attempt(lm, facts[:1])),
    }


def empty_cache(lm: Any) -> None:
    """Drop fast layers and captured graphs, and give their memory back."""
    lm.cache.clear()
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="gpt2-xl")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", nargs="+", default=["float32", "tf32", "bfloat16"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    args = parser.parse_args()
    for name, value in {"model": None, "layer": None, "contexts": 21, "steps": 20}.items():
        setattr(args, name, value)
    clock = Clock(cuda=args.device.startswith("cuda"))
    print("| dtype | part | workload | on, s | off, s | gain |\n|---|---|---|---|---|---|")
    for dtype in args.dtype:
        lm, work = workloads(args, dtype, clock)
        on: dict[str, float] = {}
        for part in args.parts:
            for name in PARTS[part][1]:
                if name not in on:
                    empty_cache(lm)
                    on[name] = work[name]()
                empty_cache(lm)
                with without(part):
                    off = work[name]()
                gain = off / on[name] - 1
                print(
                    f"| {dtype} | {part} | {name} | {on[name]:.4f} | {off:.4f} | {gain:+.0%} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
