"""Time until the page gets the cells of a trace: default model, prompt of ten tokens.

    python bench/serve_first.py [--threads 2] [--times 3]

The server runs in a separate process; its start (the model, the examples) is not timed.
"""

import argparse
import json
import os
import statistics
import time
from typing import Any

import httpx

from serve_process import server

PROMPT = {"prompt": "The Eiffel Tower is located in the city of", "subject": "The Eiffel Tower"}
MILESTONES = ("first cells", "subject rows of all maps", "all cells")


def milestones(address: str, seed: int) -> dict[str, float]:
    """Seconds until each of `MILESTONES`; the maps are first computed with one noise sample."""
    body = {**PROMPT, "settings": {"samples": 10, "seed": seed}}
    start = time.perf_counter()
    times: dict[str, float] = {}
    missing: set[tuple[str, int]] = set()
    subject: set[tuple[str, int]] = set()

    def reach(name: str) -> None:
        times.setdefault(name, time.perf_counter() - start)

    with httpx.stream("POST", f"{address}/api/traces", json=body, timeout=600) as response:
        for line in response.iter_lines():
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "baseline":
                kinds = ("states", "mlp", "attn")
                missing = {(kind, i) for kind in kinds for i in range(len(event["labels"]))}
                subject = {(kind, i) for kind in kinds for i in range(*event["subject"])}
            if event["event"] == "cells":
                reach("first cells")
                missing -= {(event["kind"], token) for token in event["tokens"]}
                if not missing & subject:
                    reach("subject rows of all maps")
                if not missing:
                    reach("all cells")
                    break  # further noise samples only refine them
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with server("--model", args.model, "--device", "cpu", threads=args.threads) as (address, _):
        httpx.get(f"{address}/api/examples", timeout=600)
        found = [milestones(address, seed) for seed in range(args.times)]
    for name in MILESTONES:
        print(f"{name}: {statistics.median(times[name] for times in found):.2f} s")
    print(f"(median of {args.times} requests, the first included; {args.threads} threads)")


if __name__ == "__main__":
    main()
