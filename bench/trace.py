"""How fast is a causal trace? The reference algorithm and the engine, in one process.

    python bench/trace.py --model smollm2-135m                        # a real prompt, on a CPU
    python bench/trace.py --shape gpt2-xl --device cuda --dtype float32 tf32 bfloat16
    python bench/trace.py --shape gpt2-xl --device cuda --dtype tf32 --facts 32 --no-reference
    python bench/trace.py --shape gpt2-xl --device cuda --dtype tf32 --like known_1000.json.gz
    python bench/trace.py --shape gpt-neox-20b --device cuda --dtype bfloat16 --no-reference

The reference runs one hooked forward pass per cell, one fact at a time, as the paper's own code
does (`factscope.tracing.reference`). Every cell costs it the same, so `--reference-cells N` times N
cells, spread evenly, and multiplies. Ours is the median of `--repeat` runs after a warm-up run.
A `--shape` is a model with the given dimensions and random weights: time does not depend on their
values. `--like FILE` takes the lengths and the subjects' places from a file of facts, as the
default model's tokenizer has them.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from factscope.facts import Fact
from factscope.lm.memory import Budget, parse_bytes
from factscope.lm.model import LM
from factscope.lm.tokens import encode_fact
from factscope.records import KINDS
from factscope.tracing.corruption import NoiseScale, default_noise_scale
from factscope.tracing.reference import ReferenceTrace
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import CleanAnswer, batches_by_length, trace_batch

from shapes import SHAPES, SUBJECT, Clock, Place, random_prompts, shaped

PROMPT = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of")


def places_of(facts: Path) -> list[Place]:
    """The lengths and subjects of a file of facts."""
    from factscope.data.readers import read_facts
    from factscope.lm.load import load

    lm = load(device="cpu")
    coded = [encode_fact(lm, fact) for fact in read_facts(facts).facts]
    return [(len(prompt), subject) for prompt, subject in coded]


def cells(
    slow_trace: ReferenceTrace, n_layers: int, wanted: int | None
) -> Iterator[tuple[int, int]]:
    everything = [(t, layer) for t in range(slow_trace.length) for layer in range(n_layers)]
    step = 1 if wanted is None else max(1, len(everything) // wanted)
    return islice(everything, step // 2, None, step)


def reference(
    lm: LM,
    answer: CleanAnswer,
    scale: NoiseScale,
    settings: Tracing,
    wanted: int | None,
    clock: Clock,
) -> dict[str, tuple[float, dict[tuple[int, int], float]]]:
    """Seconds for a whole table of each kind by the reference algorithm, and the cells it found."""
    slow_trace = ReferenceTrace(lm, answer, settings, scale)
    found: dict[str, tuple[float, dict[tuple[int, int], float]]] = {}
    for kind in KINDS:
        values: dict[tuple[int, int], float] = {}
        chosen = list(cells(slow_trace, lm.n_layers, wanted))

        def run(kind: str = kind, chosen: list = chosen, values: dict = values) -> None:
            for t, layer in chosen:
                values[t, layer] = slow_trace.restored(kind, t, layer)

        seconds = clock(run) * slow_trace.length * lm.n_layers / len(chosen)
        found[kind] = (seconds, values)
    return found


def median_time(
    lm: LM,
    answer: CleanAnswer,
    settings: Tracing,
    scale: NoiseScale,
    budget: Budget,
    repeat: int,
    clock: Clock,
) -> float:
    def run() -> None:
        trace_batch(lm, [answer], settings, scale, budget)

    return statistics.median(clock(run) for _ in range(repeat))


def compare(
    lm: LM, answer: CleanAnswer, scale: NoiseScale, args: argparse.Namespace, clock: Clock
) -> None:
    """One fact: reference, ours, ratio for each kind."""
    settings = Tracing(corruption=Corruption(samples=args.samples))
    budget = Budget.of(lm, args.memory)
    clean = torch.tensor([answer.prompt.ids], device=lm.device)
    answer = replace(answer, answer_ids=(int(lm.model(clean).logits[0, -1].argmax()),))
    slow = {} if args.no_reference else reference(
        lm, answer, scale, settings, args.reference_cells, clock
    )  # fmt: skip
    totals = [0.0, 0.0]
    for kind in KINDS:
        one = replace(settings, kinds=(kind,))
        record = trace_batch(lm, [answer], one, scale, budget)[0]
        ours = median_time(lm, answer, one, scale, budget, args.repeat, clock)
        if kind not in slow:
            print(f"| {kind} | | {ours:.3f} | | |")
            continue
        seconds, values = slow[kind]
        table = np.array(record.restored[kind])
        difference = max(abs(table[cell] / p - 1) for cell, p in values.items())
        totals = [totals[0] + seconds, totals[1] + ours]
        print(f"| {kind} | {seconds:.2f} | {ours:.3f} | {seconds / ours:.1f}× | {difference:.0e} |")
    if len(slow) == len(KINDS):
        together = median_time(lm, answer, settings, scale, budget, args.repeat, clock)
        print(f"| all three | {totals[0]:.2f} | {together:.3f} | {totals[0] / together:.1f}× | |")


def many(lm: LM, scale: NoiseScale, args: argparse.Namespace, clock: Clock) -> None:
    """Many facts in batches: facts a second for all three kinds together."""
    settings = Tracing(corruption=Corruption(samples=args.samples))
    budget = Budget.of(lm, args.memory)
    places: list[Place] = [(args.tokens, SUBJECT)] * args.facts
    if args.like:
        everything = places_of(args.like)
        places = everything[:: max(1, len(everything) // args.facts)][: args.facts]
    answers = random_prompts(lm, places)
    groups = list(batches_by_length(lm, answers, settings, budget))
    trace_batch(lm, groups[0], settings, scale, budget)

    def run() -> None:
        for group in groups:
            trace_batch(lm, group, settings, scale, budget)

    seconds = clock(run)
    tokens = statistics.mean(length for length, _ in places)
    print(
        f"\n{len(places)} facts of {tokens:.1f} tokens on average, in {len(groups)} batches, three "
        f"kinds: {seconds:.1f} s, {len(places) / seconds:.2f} facts a second"
    )


def bench(dtype: str, args: argparse.Namespace) -> None:
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    weights = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
    if args.shape:
        lm = shaped(args.shape, args.device, weights)
        [answer], scale = random_prompts(lm, [(args.tokens, SUBJECT)]), NoiseScale(sigma=0.02)
    else:
        from factscope.lm.load import load

        lm = load(args.model, device=args.device, dtype=dtype)
        prompt, subject = encode_fact(lm, PROMPT)
        scale = default_noise_scale(lm, Corruption(), [PROMPT])
        answer = CleanAnswer(
            fact=PROMPT,
            prompt=prompt,
            subject=subject,
            answer_ids=(0,),
            probability=0.0,
            known=True,
        )
    clock = Clock(device.type == "cuda")
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    print(f"\n**{lm.name}, {dtype}**, {len(answer.prompt)} tokens, {args.samples} samples\n")
    if not args.no_single:
        print("| kind | reference, s | factscope, s | ratio | largest relative difference |")
        print("|---|---|---|---|---|")
        compare(lm, answer, scale, args, clock)
    if args.facts:
        many(lm, scale, args, clock)
    if clock.cuda:
        peak, model = torch.cuda.max_memory_allocated(), sum(
            p.numel() * p.element_size() for p in lm.model.parameters()
        )  # fmt: skip
        print(f"\npeak memory {peak / 2**30:.1f} GiB, of which the model {model / 2**30:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast is a causal trace?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--facts", type=int, default=0, help="also trace this many in batches")
    parser.add_argument("--like", type=Path, help="lengths of those as in this file of facts")
    parser.add_argument("--no-single", action="store_true", help="leave out the single fact")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", type=parse_bytes)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--reference-cells", type=int, help="time this many cells and multiply")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    for dtype in args.dtype:
        bench(dtype, args)


if __name__ == "__main__":
    main()
