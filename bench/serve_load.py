"""Load test: many clients at once. Counts responses and errors; memory must not grow.

    python bench/serve_load.py [--clients 50] [--idle 300] [--seconds 60] [--model smollm2-135m]
                               [--json] [--at-most SECONDS]

Each client performs random actions one after another: open the page, trace, disconnect during a
trace, edit, predict, send an invalid request. Idle connections of the same address are open
meanwhile, and opened again if the server closes them; half of them send a part of a request. The
server runs in a separate process. With --at-most, the test continues until every kind of response
was seen, or until that time.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx

from serve_process import resident_mib, server

FACT = {"prompt": "The Eiffel Tower is located in the city of", "subject": "The Eiffel Tower"}
BUSY = 503
KINDS = {"read", "trace", "disconnect", "edit", "predict", "invalid", "busy"}
"""The kinds of responses that are counted."""
INVALID = (b"{", b"[]", b'{"prompt": 1}', b'{"prompt": "a", "subject": "\\ud800"}', b"x" * 50_000)


@dataclass
class Tally:
    """Responses of all clients."""

    responses: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    idle: int = 0  # connections opened by `stay_idle`
    finished: bool = False  # if set, clients stop after their current action

    def add(self, action: str, status: int, *expected: int) -> None:
        if status == BUSY:
            self.responses["busy"] += 1
        elif status in expected:
            self.responses[action] += 1
        else:
            self.errors.append(f"{action}: status {status}")


class Client:
    """One of the clients."""

    def __init__(self, client: httpx.AsyncClient, tally: Tally, number: int) -> None:
        self.client, self.tally, self.random = client, tally, random.Random(number)
        self.number = number

    async def run(self) -> None:
        """Act until the test is finished; then disconnect."""
        actions: list[Callable[[], Awaitable[None]]] = [
            self.edit, self.predict, self.trace, self.trace, self.disconnect, self.page,
            self.invalid,
        ]  # fmt: skip
        # The clients start one after another, so that every action finds a place in the queue.
        await asyncio.sleep(0.02 * self.number)
        action = actions[self.number % len(actions)]
        while not self.tally.finished:
            start = time.monotonic()
            try:
                await action()
            except httpx.HTTPError as error:
                self.tally.errors.append(f"{type(error).__name__}: {error}")
            self.tally.waits.append(time.monotonic() - start)
            await asyncio.sleep(self.random.random() * 0.2)
            action = self.random.choice(actions)

    async def page(self) -> None:
        for path in ("/", "/static/main.js", "/api/about", "/api/edits"):
            self.tally.add("read", (await self.client.get(path)).status_code, 200)

    def settings(self) -> dict[str, int]:
        return {"samples": 1, "seed": self.random.randrange(2**31)}

    async def trace(self) -> None:
        body = {**FACT, "settings": self.settings(), "tables": ["mlp"]}
        await self._stream("trace", "/api/traces", body)

    async def disconnect(self) -> None:
        """Disconnect during a trace."""
        body = {**FACT, "settings": self.settings()}
        async with self.client.stream("POST", "/api/traces", json=body) as response:
            self.tally.add("disconnect", response.status_code, 200)
            if response.status_code == 200:
                await anext(response.aiter_lines())

    async def edit(self) -> None:
        body = {**FACT, "target": self.random.choice(["Rome", "Berlin", "Madrid"])}
        edits = (await self.client.get("/api/edits")).json()["edits"]
        if len(edits) > 3:
            await self.client.delete(f"/api/edits/{edits[0]['id']}")
        more = {"layer": 1, "without_statistics": True}
        await self._stream("edit", "/api/edits", {**body, **more})

    async def predict(self) -> None:
        edits = (await self.client.get("/api/edits")).json()["edits"]
        body = {"prompts": [FACT["prompt"]], "edits": [e["id"] for e in edits], "max_new_tokens": 5}
        await self._stream("predict", "/api/predict", body)

    async def invalid(self) -> None:
        headers = {"content-type": "application/json"}
        body = self.random.choice(INVALID)
        response = await self.client.post("/api/traces", content=body, headers=headers)
        self.tally.add("invalid", response.status_code, 400, 413, 422)

    async def _stream(self, action: str, path: str, body: dict) -> None:
        response = await self.client.post(path, json=body)
        self.tally.add(action, response.status_code, 200)
        if response.status_code == 200:
            last = json.loads(response.text.splitlines()[-1])
            if last["event"] == "error" and last["error"]["kind"] == "ServerError":
                self.tally.errors.append(f"{action}: {last['error']['message']}")


async def stay_idle(address: str, tally: Tally, number: int) -> None:
    """Hold a connection open until the test is finished, again and again."""
    host, _, port = address.removeprefix("http://").rpartition(":")
    await asyncio.sleep(0.01 * number)
    while not tally.finished:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError as error:
            tally.errors.append(f"idle connection: {error}")
            await asyncio.sleep(1)
            continue
        tally.idle += 1
        with contextlib.suppress(ConnectionError):  # the server closes it
            if number % 2:
                writer.write(b"GET /api/queue HTTP/1.1\r\n")
            await reader.read()
        writer.close()
        await asyncio.sleep(1)


async def load_test(
    address: str, pid: int, count: int, idle: int, seconds: float, at_most: float
) -> dict:
    tally = Tally()
    # verify=False: reading the certificates for each client takes longer than the requests.
    clients = [httpx.AsyncClient(base_url=address, timeout=600, verify=False) for _ in range(count)]
    memory: list[float] = []

    start = time.monotonic()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(Client(c, tally, i).run()) for i, c in enumerate(clients)]
        tasks += [group.create_task(stay_idle(address, tally, i)) for i in range(idle)]
        while (passed := time.monotonic() - start) < seconds or (
            passed < at_most and KINDS - tally.responses.keys()
        ):
            memory.append(resident_mib(pid))
            await asyncio.sleep(seconds / 60)
        tally.finished = True  # a task can lose its cancellation: then it ends after its action
        for task in tasks:
            task.cancel()
    for client in clients:
        await client.aclose()
    waits = sorted(tally.waits)
    half = len(memory) // 2
    return {
        "clients": count,
        "idle_connections": idle,
        "idle_connections_opened": tally.idle,
        "seconds": round(passed, 1),
        "responses": dict(tally.responses),
        "errors": len(tally.errors),
        "first_errors": tally.errors[:5],
        "median_wait_s": round(waits[len(waits) // 2], 3),
        "max_wait_s": round(waits[-1], 3),
        "memory_mib": {
            "first": round(memory[0]),
            "max_first_half": round(max(memory[:half])),
            "max_second_half": round(max(memory[half:])),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--idle", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--at-most", type=float, default=0)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with server("--model", args.model, "--device", "cpu") as (address, pid):
        found = asyncio.run(
            load_test(address, pid, args.clients, args.idle, args.seconds, args.at_most)
        )
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
