"""How fast is an edit? ROME by the reference procedure and by factscope, and MEND and KE.

    python bench/edit.py --model smollm2-135m                       # a real fact, on a CPU
    python bench/edit.py --shape gpt2-xl --device cuda --dtype float32 tf32 bfloat16
    python bench/edit.py --shape gpt2-xl --device cuda --dtype tf32 --facts 64 --no-reference

The reference edits one fact at a time; every step is a forward pass of the whole model over all
contexts with all logits (`editing.reference`), as in the paper's code. Both use the same 21
contexts and 20 steps without early stop. Ours is the whole call that a user makes: the unedited
run, the search, the closed form and the checks. Prefixes and the factor of the second moment are
computed beforehand on both sides, as in the paper's code.

On a GPU the first edit captures CUDA graphs and later edits replay them if their shape is known.
Both are timed: the first edit as the median of `--repeat` runs with an empty cache after one warm-
up run; a later edit as the median over `LATER` facts of various lengths, each edited once, after
`LATER` others. The reference edits the same facts. A `--shape` has random weights: time does not
depend on their values.

A second table compares other editors with a later ROME edit, checks included. Their networks are
untrained but have the published sizes.
"""

import argparse
import gc
import math
import random
import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from factscope.editing.editor import Editor
from factscope.editing.hypernet.model import HypernetWeights, network_for, target_modules
from factscope.editing.hypernet.settings import KeConfig, MendConfig
from factscope.editing.reference import reference_rome
from factscope.editing.settings import HypernetEditor, Ke, Mend, Rome, editor
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.stats.second_moment import SecondMoment

from shapes import SHAPES, Clock, shaped

SUBJECTS = "The E iff el Tower"
"""Five tokens, as GPT-2 has them."""
LATER = 10
"""How many facts of various lengths are edited before the timed ones, and how many are timed."""
LAYER = {"gpt2": 5, "gpt2-xl": 17, "gpt-j-6b": 5, "gpt-neox-20b": 15}


class Words:
    """A tokenizer for random weights: every run of letters or signs is a token."""

    is_fast = True
    bos_token_id = eos_token_id = 0
    eos_token = ""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __call__(self, text: str, **how: Any) -> dict[str, list[Any]]:
        found = list(re.finditer(r"\s?[\w']+|\s?[^\w\s]+", text))
        ids = [sum(map(ord, m.group())) * 7919 % self.vocabulary for m in found]
        return {"input_ids": ids, "offset_mapping": [m.span() for m in found]}

    def decode(self, ids: list[int], **how: Any) -> str:
        return " ".join(map(str, ids))


def prepared(args: argparse.Namespace, dtype: str) -> tuple[LM, Rome, list[Fact]]:
    """The model, the method with everything resolved, and the facts."""
    gc.collect()  # frees the previous model and its graphs
    if args.model:
        from factscope.lm.load import load

        lm = load(args.model, device=args.device, dtype=dtype)
        first = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of")
    else:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        kind = {"bfloat16": torch.bfloat16}.get(dtype, torch.float32)
        lm = shaped(args.shape, args.device, kind)
        lm = replace(lm, tokenizer=Words(lm.embed.weight.shape[0]))
        first = Fact(subject=SUBJECTS, prompt="{} is located in the city of")
    facts = [replace(first, target="Rome")]
    facts += [replace(facts[0], target=f"Rome{i}") for i in range(1, args.facts)]
    layer = args.layer if args.layer is not None else LAYER.get(args.shape, 5)
    plan = Rome(layer=layer, prefixes=prefixes(lm, args.contexts))
    steps = replace(plan.search, steps=args.steps, stop_loss=-1e9, clamp=math.inf, weight_decay=0.0)
    return lm, replace(plan, search=steps, second_moment=moment(lm, layer)), facts


def of_all_lengths(fact: Fact) -> list[Fact]:
    """Facts with subjects of 2 to 6 words, prompts of 2 to 9 and new objects of 1 or 2."""
    draw = random.Random(0)

    def words(least: int, most: int) -> str:
        letters = ["".join(draw.choices("abcdefgh", k=5)) for _ in range(draw.randint(least, most))]
        return " ".join(letters)

    return [
        replace(fact, subject=words(2, 6), prompt="{} " + words(2, 9), target=words(1, 2))
        for _ in range(2 * LATER)
    ]


def prefixes(lm: LM, contexts: int) -> tuple[str, ...]:
    """Half of 5 words, half of 10, as in the paper, each with a full stop."""
    half = (contexts - 1) // 2
    return tuple(" ".join(["so"] * (5 if i < half else 10)) + ". " for i in range(contexts - 1))


def moment(lm: LM, layer: int) -> SecondMoment:
    """An identity C of the right size: its values do not matter here."""
    width = lm.mlp_weight(layer).shape[1]
    made = SecondMoment(
        matrix=torch.eye(width, device=lm.device), layer=layer, tokens=width, corpus="none",
        model=lm.name, fingerprint=lm.fingerprint,
    )  # fmt: skip
    made.solve(torch.ones(1, width, device=lm.device), ridge=1e-3)
    return made


def median(clock: Clock, function: Any, repeat: int) -> float:
    function()
    return statistics.median(clock(function) for _ in range(repeat))


def measured(args: argparse.Namespace, dtype: str, clock: Clock) -> str:
    """A row of the table."""
    lm, rome, facts = prepared(args, dtype)

    def afresh() -> None:
        lm.cache.clear()
        rome.each(lm, facts)

    first = median(clock, afresh, args.repeat) / len(facts)
    ready = rome.bind(lm, facts)
    slow = gap = math.nan
    if len(facts) > 1 or args.model:
        written = facts[:1] * args.repeat
        later = median(clock, lambda: rome.each(lm, facts), args.repeat) / len(facts)
    else:
        others = of_all_lengths(facts[0])
        times = [clock(lambda fact=fact: rome.each(lm, [fact])) for fact in others]
        written, later = others[LATER:], statistics.median(times[LATER:])
    if not args.no_reference:
        wanted = reference_rome(ready, facts[0]).change.cpu()
        (found,) = rome(lm, facts[:1]).changes.values()
        gap = ((found.matrix() - wanted).norm() / wanted.norm()).item()
        slow = statistics.median(
            clock(lambda fact=fact: reference_rome(ready, fact)) for fact in written
        )
    return (
        f"| {dtype} | {len(facts)} | {slow:.3f} | {first:.3f} | {slow / first:.1f} | "
        f"{later:.3f} | {slow / later:.1f} | {1 / later:.1f} | {gap:.1e} |"
    )


WARM = 4
"""Edits before timing, until everything that recurs is captured."""

CONFIGS: dict[type[HypernetEditor], MendConfig | KeConfig] = {
    Mend: MendConfig(rank=1920),
    Ke: KeConfig(),
}
"""The published networks."""


def learned(lm: LM, kind: type[HypernetEditor]) -> HypernetEditor:
    """The editor with an untrained network."""
    network = network_for(lm, target_modules(lm), CONFIGS[kind])
    return kind(
        weights=HypernetWeights(
            network=network, model=lm.name, fingerprint=lm.fingerprint, training={}, sha256="none"
        )
    )


LEARNED: dict[str, type[HypernetEditor]] = {"mend": Mend, "ke": Ke}


def compared(args: argparse.Namespace, dtype: str, clock: Clock) -> Iterator[str]:
    """The rows of the second table."""
    lm, rome, facts = prepared(args, dtype)

    def seconds(made: Editor) -> float:
        # With random weights an edit may fail, which takes as long.
        for _ in range(WARM if lm.device.type == "cuda" else 0):
            made.attempt(lm, facts)
        return median(clock, lambda: made.attempt(lm, facts), args.repeat) / len(facts)

    whole = seconds(rome)
    yield f"| {dtype} | rome | {len(facts)} | {whole:.4f} | 1 |"
    for name in args.beside:
        other = learned(lm, LEARNED[name]) if name in LEARNED else editor(name).resolve(lm)
        own = seconds(other)
        yield f"| {dtype} | {name} | {len(facts)} | {own:.4f} | {own / whole:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--layer", type=int)
    parser.add_argument("--contexts", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--facts", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--beside", nargs="*", default=["mend", "ke"], metavar="METHOD")
    args = parser.parse_args()
    clock = Clock(cuda=args.device.startswith("cuda"))
    columns = (
        "dtype", "facts", "reference, s per fact", "first edit", "ratio",
        "later edit", "ratio", "edits per second", "difference of ΔW",
    )  # fmt: skip
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for dtype in args.dtype:
        print(measured(args, dtype, clock), flush=True)
    columns = ("dtype", "method", "facts", "s per edit", "fraction of ROME")
    print("\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))
    for dtype in args.dtype:
        for row in compared(args, dtype, clock):
            print(row, flush=True)


if __name__ == "__main__":
    main()
