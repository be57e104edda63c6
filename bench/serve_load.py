"""Fifty visitors at once: everyone is answered or politely refused, and memory stays flat.

    python bench/serve_load.py [--clients 50] [--seconds 60] [--model smollm2-135m] [--json]

Each visitor does one thing after another, drawn at random: open the page, trace (and often leave
in the middle), edit, ask, send nonsense, read its edits. The server is a process of its own.
"""

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from serve_process import resident, server

FACT = {"prompt": "The Eiffel Tower is located in the city of", "subject": "The Eiffel Tower"}
REFUSED = 503
NONSENSE = (b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "a", "subject": "\\ud800"}', b"x" * 50_000)


@dataclass
class Tally:
    """What came of all requests."""

    answers: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def add(self, what: str, status: int, wanted: tuple[int, ...]) -> None:
        if status == REFUSED:
            self.answers["refused"] += 1
        elif status in wanted:
            self.answers[what] += 1
        else:
            self.errors.append(f"{what}: status {status}")


class Visitor:
    """One of many."""

    def __init__(self, client: httpx.AsyncClient, tally: Tally, number: int) -> None:
        self.client, self.tally, self.random = client, tally, random.Random(number)

    async def live(self, until: float) -> None:
        """One thing after another; when the time is up, everyone leaves."""
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._go_on(until)
        except TimeoutError:
            self.tally.answers["left at the end"] += 1

    async def _go_on(self, until: float) -> None:
        actions: list[Callable[[], Awaitable[None]]] = [
            self.page, self.trace, self.trace, self.leave, self.edit, self.ask, self.nonsense,
        ]  # fmt: skip
        while time.monotonic() < until:
            begin = time.monotonic()
            try:
                await self.random.choice(actions)()
            except httpx.HTTPError as error:
                self.tally.errors.append(f"{type(error).__name__}: {error}")
            self.tally.waits.append(time.monotonic() - begin)
            await asyncio.sleep(self.random.random() * 0.2)

    async def page(self) -> None:
        for path in ("/", "/static/main.js", "/api/about", "/api/edits"):
            self.tally.add("read", (await self.client.get(path)).status_code, (200,))

    def corruption(self) -> dict[str, int]:
        return {"samples": 1, "seed": self.random.randrange(2**31)}

    async def trace(self) -> None:
        body = {**FACT, "corruption": self.corruption(), "tables": ["mlp"]}
        await self._stream("traced", "/api/locate", body)

    async def leave(self) -> None:
        """Leave a trace in the middle."""
        body = {**FACT, "corruption": self.corruption()}
        async with self.client.stream("POST", "/api/locate", json=body) as answer:
            self.tally.add("left", answer.status_code, (200,))
            if answer.status_code == 200:
                await asyncio.wait_for(anext(answer.aiter_lines()), 600)

    async def edit(self) -> None:
        body = {**FACT, "target": self.random.choice(["Rome", "Berlin", "Madrid"])}
        there = (await self.client.get("/api/edits")).json()["edits"]
        if len(there) > 3:
            await self.client.delete(f"/api/edits/{there[0]['id']}")
        more = {"layer": 1, "without_statistics": True}
        await self._stream("edited", "/api/edits", {**body, **more})

    async def ask(self) -> None:
        there = (await self.client.get("/api/edits")).json()["edits"]
        body = {"prompts": [FACT["prompt"]], "edits": [e["id"] for e in there], "tokens": 5}
        await self._stream("asked", "/api/ask", body)

    async def nonsense(self) -> None:
        headers = {"content-type": "application/json"}
        body = self.random.choice(NONSENSE)
        answer = await self.client.post("/api/locate", content=body, headers=headers)
        self.tally.add("nonsense", answer.status_code, (400, 413, 422))

    async def _stream(self, what: str, path: str, body: dict) -> None:
        answer = await self.client.post(path, json=body)
        self.tally.add(what, answer.status_code, (200,))
        if answer.status_code == 200:
            last = json.loads(answer.text.splitlines()[-1])
            if last["event"] == "error" and last["error"]["kind"] == "ServerError":
                self.tally.errors.append(f"{what}: {last['error']['message']}")


async def crowd(address: str, pid: int, clients: int, seconds: float) -> dict:
    tally = Tally()
    until = time.monotonic() + seconds
    visitors = [httpx.AsyncClient(base_url=address, timeout=600) for _ in range(clients)]
    memory: list[float] = []

    async def watch() -> None:
        while time.monotonic() < until:
            memory.append(resident(pid))
            await asyncio.sleep(seconds / 60)

    await asyncio.gather(
        watch(), *(Visitor(v, tally, i).live(until) for i, v in enumerate(visitors))
    )
    for visitor in visitors:
        await visitor.aclose()
    waits = sorted(tally.waits)
    half = len(memory) // 2
    return {
        "clients": clients,
        "seconds": seconds,
        "answers": dict(tally.answers),
        "errors": len(tally.errors),
        "first_errors": tally.errors[:5],
        "median_wait_s": round(waits[len(waits) // 2], 3),
        "longest_wait_s": round(waits[-1], 3),
        "memory_mib": {
            "first": round(memory[0]),
            "highest of the first half": round(max(memory[:half])),
            "highest of the second half": round(max(memory[half:])),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with server("--model", args.model, "--device", "cpu") as (address, pid):
        found = asyncio.run(crowd(address, pid, args.clients, args.seconds))
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
