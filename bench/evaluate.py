"""How fast is an evaluation? The reference procedure and ours, in one process.

    python bench/evaluate.py --model smollm2-135m --cases 4 --length 0         # on a CPU
    python bench/evaluate.py --shape gpt2-xl --device cuda --dtype tf32 bfloat16 --cases 64

The reference does what the paper's code does, one case after the other: score the prompts with the
unedited model in one batch with all logits, generate its ten texts, edit (`editing.reference`),
change the weights, score and generate again, and restore the weights. Ours is `Evaluation`: all
cases in one batch, each row under its own edit. Both have the same 21 contexts and 20 steps without
early stop, a full case of CounterFact (1 + 2 + 10 + 10 prompts with two objects, 10 texts of 100
tokens), and both score the unedited model. Median of `--repeat` runs after a warm-up run. A
`--shape` has random weights and cases of made-up words.
"""

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch

from edit import SUBJECTS, prepared
from factscope.data.readers import everyday_cases
from factscope.editing.reference import reference_rome
from factscope.evaluation.protocols import Evaluation
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case, Fact
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.model import LM
from factscope.lm.tokens import continuation_ids, encode

from shapes import SHAPES, Clock

NEIGHBOURS = tuple(f"The B{i} iff el House is located in the city of" for i in range(10))
FILLER = "so it was said by all who came there on that day . "


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Full cases: real ones, or as long as CounterFact's are."""
    if args.model:
        return list(everyday_cases()[: args.cases])
    fact = Fact(subject=SUBJECTS, prompt="{} is located in the city of")
    return [
        Case(
            fact=replace(fact, id=str(i), target=f"Rome{i}"),
            true="Paris",
            paraphrases=tuple(FILLER + f"The E iff el Tower stands {w}" for w in ("in", "near")),
            neighbours=NEIGHBOURS,
            attributes=tuple(text.replace("B", "A") for text in NEIGHBOURS),
            generations=tuple(f"The E iff el Tower {w}" for w in ("is", "was near the") * 5),
        )
        for i in range(args.cases)
    ]


def reference(lm: LM, ready: Any, case: Case, scoring: ScoringOptions) -> None:
    """One case by the plain procedure."""
    plainly(lm, case, scoring)
    change = reference_rome(ready, case.fact).change
    weight = lm.mlp_weight(ready.layer)
    kept = weight.clone()
    with torch.no_grad():
        weight += change.to(weight)
        plainly(lm, case, scoring)
        weight.copy_(kept)


@torch.no_grad()
def plainly(lm: LM, case: Case, scoring: ScoringOptions) -> None:
    """The prompts in one padded batch with all logits, then the texts."""
    texts = [case.fact.text, *case.paraphrases, *case.neighbours, *case.attributes]
    rows: list[list[int]] = []
    for text in texts:
        prompt = encode(lm, text)
        for target in (case.fact.target or "", case.true or ""):
            rows.append([*prompt.ids, *continuation_ids(lm, prompt, text, target)])
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=lm.device)
    lm.model(ids, use_cache=False).logits.float().log_softmax(-1).sum().item()
    if scoring.length:
        coded = [encode(lm, text).ids for text in case.generations]
        draws = uniform_draws(list(map(str, range(len(coded)))), scoring.length, scoring.seed)
        sample_texts(lm, coded, draws, k=scoring.top_k, static=False)


def measured(args: argparse.Namespace, dtype: str, clock: Clock) -> str:
    """A row of the table."""
    lm, rome, _ = prepared(argparse.Namespace(**{**vars(args), "facts": 1}), dtype)
    cases, scoring = cases_of(args), ScoringOptions(length=args.length)
    evaluation = Evaluation(lm=lm, editor=rome, data="bench", method="rome", scoring=scoring)

    def ours() -> None:
        records = evaluation.single(cases, evaluation.score_unedited(cases))
        failed = [record.error for record in records if record.failed]
        assert not failed, failed[0]

    if args.warm_up:
        ours()
    fast = statistics.median(clock(ours) for _ in range(args.repeat)) / len(cases)
    slow = float("nan")
    if args.reference_cases:
        ready = rome.bind(lm, [cases[0].fact])
        if args.warm_up:
            reference(lm, ready, cases[0], scoring)
        some = [
            clock(lambda case=case: reference(lm, ready, case, scoring))
            for case in cases[: args.reference_cases]
        ]
        slow = statistics.mean(some)
    return (
        f"| {dtype} | {len(cases)} | {slow:.2f} | {fast:.3f} | {1 / fast:.2f} | {slow / fast:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", nargs="+", default=["float32"])
    parser.add_argument("--layer", type=int)
    parser.add_argument("--contexts", type=int, default=21)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cases", type=int, default=64)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--reference-cases", type=int, default=1)
    parser.add_argument("--no-warm-up", dest="warm_up", action="store_false")
    args = parser.parse_args()
    clock = Clock(cuda=args.device.startswith("cuda"))
    print("| dtype | cases | reference, s a case | ours, s a case | cases a second | times |")
    print("|---|---|---|---|---|---|")
    for dtype in args.dtype:
        print(measured(args, dtype, clock), flush=True)


if __name__ == "__main__":
    main()
