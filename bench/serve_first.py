"""Seconds until the page has its first cell: the default model, a prompt of ten tokens.

    python bench/serve_first.py [--threads 2] [--times 3]

The server is a process of its own; the model is loaded before the clock starts.
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
    """Seconds to the first cells, and to the first whole map, of a trace."""
    body = {**PROMPT, "corruption": {"samples": 10, "seed": seed}}
    begin, first, rows = time.perf_counter(), None, 0
    with httpx.stream("POST", f"{address}/api/locate", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            event = json.loads(line)
            if event["event"] == "cells":
                first = first or time.perf_counter() - begin
                rows += event["kind"] == "states"
                if rows == 10:
                    return first, time.perf_counter() - begin
    raise RuntimeError("the trace ended without a map")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    with server("--model", args.model, "--device", "cpu", threads=args.threads) as (address, _):
        found = [first_cell(address, seed) for seed in range(args.times)]
    first, whole = (statistics.median(times) for times in zip(*found, strict=True))
    print(f"first cells after {first:.2f} s, the states' map of one sample after {whole:.2f} s")
    print(f"(median of {args.times}, {args.threads} threads, the first request included)")


if __name__ == "__main__":
    main()
