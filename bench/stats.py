"""How much does collecting second moments cost? Tokens per second, against a bare forward pass.

    python bench/stats.py --model smollm2-135m                        # on a CPU
    python bench/stats.py --shape gpt2-xl --device cuda --dtype float32 tf32 bfloat16

The bare pass reads the same sequences and stops at the same layer, but keeps nothing. Each
number is the median of `--repeat` runs after a warm-up run. A `--shape` is a model with the given
dimensions and random weights: time does not depend on their values.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch

from factscope.lm.model import LM
from factscope.stats.covariance import collect, length_batches, run_to_layer
from factscope.stats.settings import StatsSettings

from shapes import SHAPES, Clock, shaped


def median(function: Callable[[], object], repeat: int, clock: Clock) -> float:
    """The median of the seconds of some calls, after one to warm up."""
    return statistics.median([clock(function) for _ in range(repeat + 1)][1:])


@torch.no_grad()
def bare(lm: LM, sequences: Sequence[Sequence[int]], top: int, batch_size: int | None) -> None:
    """The forward pass alone, as far as that layer."""
    for batch in length_batches(lm, sequences, batch_size):
        ids = torch.tensor(batch, device=lm.device)
        run_to_layer(lm, ids, [top], lambda *_: None)


def bench(dtype: str, args: argparse.Namespace) -> None:
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    if args.shape:
        weights = torch.float32 if dtype == "tf32" else getattr(torch, dtype)
        lm = shaped(args.shape, args.device, weights)
    else:
        from factscope.lm.load import load

        lm = load(args.model, device=args.device, dtype=dtype)
    clock = Clock(lm.device.type == "cuda")
    top = min(args.layer, lm.n_layers - 1)
    made = torch.Generator().manual_seed(0)
    count = -(-args.tokens // args.seq_length)
    vocabulary = lm.embed.weight.shape[0]
    sequences = torch.randint(vocabulary, (count, args.seq_length), generator=made).tolist()
    tokens = count * args.seq_length
    settings = StatsSettings(tokens=tokens, batch_size=args.batch_size)
    alone = tokens / median(lambda: bare(lm, sequences, top, args.batch_size), args.repeat, clock)
    print(f"\n**{lm.name}, {dtype}**, {tokens:,} tokens in sequences of {args.seq_length}\n")
    print("| what | layers | tokens a second | of a bare pass |")
    print("|---|---|---|---|")
    print(f"| bare pass | to {top} | {alone:,.0f} | 1 |")
    for layers in ([top], list(range(max(0, top - 4), top + 1))):

        def run(layers: list[int] = layers) -> None:
            collect(lm, layers, sequences, settings)

        rate = tokens / median(run, args.repeat, clock)
        names = ", ".join(map(str, layers))
        print(f"| second moments | {names} | {rate:,.0f} | {rate / alone:.2f} |")
    if clock.cuda:
        print(f"\npeak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="How much does collecting second moments cost?")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--layer", type=int, default=17, help="the highest layer")
    parser.add_argument("--tokens", type=int, help="8,192 on a CPU, 262,144 elsewhere")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    args.tokens = args.tokens or (8192 if args.device == "cpu" else 262_144)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads")
    for dtype in args.dtype:
        bench(dtype, args)


if __name__ == "__main__":
    main()
