"""How fast is a causal trace? The reference algorithm and the engine, in one process.

    python bench/trace.py --model smollm2-135m                        # a real prompt, on a CPU
    python bench/trace.py --shape gpt2-xl --device cuda --dtype float32 tf32 bfloat16
    python bench/trace.py --shape gpt2-xl --device cuda --dtype tf32 --facts 32 --no-reference
    python bench/trace.py --shape gpt2-xl --device cuda --dtype tf32 --like known_1000.json.gz
    python bench/trace.py --shape gpt-neox-20b --device cuda --dtype bfloat16 --no-reference
    python bench/trace.py --shape gpt2-xl --device cuda --dtype tf32 --replace --heads --facts 32 \\
        --no-reference                                                # token replacement

The reference runs one hooked forward pass per cell, one fact at a time, as the paper's own code
does (`factscope.tracing.reference`). Every cell costs it the same, so `--reference-cells N` times N
cells, spread evenly, and multiplies. Ours is the median of `--repeat` runs after a warm-up run.
A `--shape` is a model with the given dimensions and random weights: time does not depend on their
values. `--like FILE` takes the lengths and the subjects' places from a file of facts, as the
default model's tokenizer has them.

`--replace` corrupts by token replacement instead of noise: one sample. `--heads` also restores
every head. "of peak" is the arithmetic of the cells (the products of the blocks and the attention
over the tokens from the cell's own on, and the logits) per second, as a fraction of the rate of one
large matrix product of the same dtype in this process. In TF32 and float32 the engine multiplies on
half-precision tensor cores, which are faster than that.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence
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
from factscope.tracing.trace import CleanAnswer, TraceBatch, batches_by_length, trace_batch

from shapes import SHAPES, SUBJECT, Clock, Place, random_prompts, replaced, shaped

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


def cell_flops(
    lm: LM, answers: Sequence[CleanAnswer], settings: Tracing, scale: NoiseScale
) -> float:
    """The arithmetic of all cells of these facts, two operations per multiplication."""
    block = sum(p.numel() for p in lm.blocks[0].parameters() if p.dim() == 2)
    total = 0
    for answer in answers:
        batch = TraceBatch(
            lm=lm, answers=[answer], settings=settings, scale=scale, budget=Budget(2**30)
        )
        for name, cells in batch.tables.items():
            layers = sum(lm.n_layers - cell.entry for cell in cells)
            for token in batch.tokens(answer, name)[1]:
                rest = range(token, len(answer.ids))
                attention = sum(2 * lm.width * (position + 1) for position in rest)
                total += layers * (block * len(rest) + attention)
                total += len(cells) * lm.embed.weight.numel()
    return 2.0 * total * settings.corruption.samples


def peak_flops(lm: LM, clock: Clock) -> float:
    """The rate of one large matrix product of the model's dtype."""
    n, repeats = (8192, 20) if clock.cuda else (1024, 5)
    x = torch.randn(n, n, device=lm.device).to(lm.dtype)
    rates = []
    for _ in range(4):  # the first is the warm-up
        seconds = clock(lambda: [x @ x for _ in range(repeats)])
        rates.append(2.0 * n**3 * repeats / seconds)
    return max(rates[1:])


def compare(
    lm: LM,
    answer: CleanAnswer,
    settings: Tracing,
    scale: NoiseScale,
    args: argparse.Namespace,
    clock: Clock,
    peak: float,
) -> None:
    """One fact: reference, ours, ratio for each kind."""
    budget = Budget.of(lm, args.memory)
    clean = torch.tensor([answer.prompt.ids], device=lm.device)
    answer = replace(answer, answer_ids=(int(lm.model(clean).logits[0, -1].argmax()),))
    slow = {} if args.no_reference else reference(
        lm, answer, scale, settings, args.reference_cells, clock
    )  # fmt: skip

    def line(name: str, own: Tracing, slow_seconds: float | None, difference: str = "") -> None:
        seconds = median_time(lm, answer, own, scale, budget, args.repeat, clock)
        fraction = cell_flops(lm, [answer], own, scale) / seconds / peak
        before = "" if slow_seconds is None else f"{slow_seconds:.2f}"
        ratio = "" if slow_seconds is None else f"{slow_seconds / seconds:.1f}×"
        print(f"| {name} | {before} | {seconds:.3f} | {ratio} | {difference} | {fraction:.0%} |")

    for kind in KINDS:
        one = replace(settings, kinds=(kind,))
        record = trace_batch(lm, [answer], one, scale, budget)[0]
        if kind not in slow:
            line(kind, one, None)
            continue
        seconds, values = slow[kind]
        table = np.array(record.restored[kind])
        difference = max(abs(table[cell] / p - 1) for cell, p in values.items())
        line(kind, one, seconds, f"{difference:.0e}")
    trace_batch(lm, [answer], settings, scale, budget)
    line("all three", settings, sum(seconds for seconds, _ in slow.values()) if slow else None)
    if args.heads:
        heads = replace(settings, kinds=(), heads=True)
        trace_batch(lm, [answer], heads, scale, budget)
        line(f"{lm.n_heads} heads of {lm.n_layers} layers", heads, None)


def many(
    lm: LM,
    settings: Tracing,
    scale: NoiseScale,
    args: argparse.Namespace,
    clock: Clock,
    peak: float,
) -> None:
    """Many facts in batches: facts a second for all three kinds together."""
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
    fraction = cell_flops(lm, answers, settings, scale) / seconds / peak
    print(
        f"\n{len(places)} facts of {tokens:.1f} tokens on average, in {len(groups)} batches, three "
        f"kinds: {seconds:.1f} s, {len(places) / seconds:.2f} facts a second, "
        f"{fraction:.0%} of peak"
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
            replaced=replaced(lm, prompt.ids, subject),
        )
    corruption = Corruption(samples=args.samples)
    if args.replace:
        corruption = Corruption(distribution="tokens")
    settings = Tracing(corruption=corruption)
    clock = Clock(device.type == "cuda")
    peak = peak_flops(lm, clock)
    if clock.cuda:
        torch.cuda.reset_peak_memory_stats()
    how = "token replacement" if args.replace else f"{args.samples} samples"
    print(f"\n**{lm.name}, {dtype}**, {len(answer.prompt)} tokens, {how}")
    print(f"peak of a matrix product: {peak / 1e12:.3g} TFLOPS\n")
    if not args.no_single:
        print("| kind | reference, s | factscope, s | ratio | largest difference | of peak |")
        print("|---|---|---|---|---|---|")
        compare(lm, answer, settings, scale, args, clock, peak)
    if args.facts:
        many(lm, settings, scale, args, clock, peak)
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
    parser.add_argument("--replace", action="store_true", help="token replacement, not noise")
    parser.add_argument("--heads", action="store_true", help="also restore every head")
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
