r"""Cases that a model knows, to compare trace effects with edit success (Hase et al., 2023).

    python bench/localization.py --data counterfact.json.gz --out known.json --limit 200
    factscope stats --layers 0-28 --text wikipedia.txt.gz --tokens 200000 --out STATS
    factscope trace --facts known.json --kinds states --kinds mlp --out TRACES
    factscope sweep --data known.json --grid layer=0,2,4,6,8,11,14,17,20,23,26 --stats STATS \
        --out SWEEP
    factscope report SWEEP --traces TRACES

The first command writes those cases of a file whose true object begins with the model's most likely
next token after the prompt: only such facts can be traced.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from factscope.data.readers import read_cases
from factscope.io import write_atomic
from factscope.lm.load import load
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import clean_answers

BATCH = 64


def main() -> None:
    """Write the known cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200, help="known cases to write at most")
    args = parser.parse_args()
    lm, cases = load(args.model, device=args.device), read_cases(args.data).cases
    known: list[dict[str, object]] = []
    for i in range(0, len(cases), BATCH):
        part = [case for case in cases[i : i + BATCH] if case.true]
        facts = [replace(case.fact, target=case.true) for case in part]
        for case, answer in zip(part, clean_answers(lm, facts, Tracing()), strict=True):
            if answer.known:
                fact = case.fact
                known.append({
                    "id": fact.id, "subject": fact.subject, "prompt": fact.prompt,
                    "target_new": fact.target, "target_true": case.true,
                    "paraphrases": case.paraphrases, "neighbours": case.neighbours,
                })  # fmt: skip
        print(f"\r{len(known)} known of {i + len(part)} cases", end="", flush=True)
        if len(known) >= args.limit:
            break
    write_atomic(args.out, json.dumps(known[: args.limit], ensure_ascii=False) + "\n")
    print()


if __name__ == "__main__":
    main()
