"""Time until the page gets the first cells of a trace: default model, prompt of ten tokens.

    python bench/serve_first.py [--threads 2] [--times 3]

The server runs in a separate process; loading the model is not timed.
"""

import argparse
import json
import os
import statistics
import time

import httpx

from serve_process import server

PROMPT = {"prompt": "The Eiffel Tower is located in the city of", "subject": "The Eiffel Tower"}


def first_cell(address: str, seed: int) -> tuple[float, float]:
    """Seconds to the first cells and to the first complete heat map of a trace."""
    body = {**PROMPT, "settings": {"samples": 10, "seed": seed}}
    start, first, rows = time.perf_counter(), None, 0
    with httpx.stream("POST", f"{address}/api/traces", json=body, timeout=600) as response:
        for line in response.iter_lines():
            event = json.loads(line)
            if event["event"] == "cells":
                first = first or time.perf_counter() - start
                rows += event["kind"] == "states"
                if rows == 10:
                    return first, time.perf_counter() - start
    raise RuntimeError("the trace ended without a complete heat map")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with server("--model", args.model, "--device", "cpu", threads=args.threads) as (address, _):
        found = [first_cell(address, seed) for seed in range(args.times)]
    first, complete = (statistics.median(times) for times in zip(*found, strict=True))
    print(f"first cells after {first:.2f} s, heat map of states after {complete:.2f} s (1 sample)")
    print(f"(median of {args.times} requests, the first included; {args.threads} threads)")


if __name__ == "__main__":
    main()
