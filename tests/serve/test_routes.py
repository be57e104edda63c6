"""The server: streams, edits of one visitor alone, runs, and everything that must be refused."""

import io
import json
import socket
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from factscope.analysis.metrics import Summary, summaries
from factscope.editing.edit import Edit
from factscope.editing.per_row import edited
from factscope.errors import ServerBusy
from factscope.evaluation.before_after import before_after
from factscope.facts import Case, Fact
from factscope.lm.model import LM
from factscope.records import CaseRecord, EditRecord, TraceRecord
from factscope.serve import routes_runs as compare
from factscope.serve.schemas import ServerLimits
from factscope.serve.security import HEADERS
from factscope.serve.sessions import ServerState, Sessions
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace

from commands import Run, runner, saved_model
from served_records import case_record, slow
from serving import CITY, TOWER, listening, worded

FACT = {"prompt": CITY, "subject": TOWER}
QUICK = {**FACT, "corruption": {"samples": 2}, "window": 2}
EDIT = {**FACT, "target": "Rome", "layer": 1, "without_statistics": True}
LIMITS = ServerLimits(waiting=6, each=3, edits=4, written=5)


@pytest.fixture(scope="module")
def lm() -> LM:
    return worded()


@pytest.fixture(scope="module")
def address(lm: LM, runs: Path) -> Iterator[tuple[str, ServerState]]:
    with listening(lm, runs=runs, limits=LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two evaluations, a run that cannot be read, and a file."""
    folder = tmp_path_factory.mktemp("runs")
    for method, new in (("rome", -0.1), ("ft", 2.0)):
        path = folder / method
        path.mkdir()
        spec = f'command = "evaluate"\nmodel = "tiny"\nmethod = "{method}"\ndata = "counterfact"\n'
        (path / "spec.toml").write_text(spec)
        (path / "records.jsonl").write_text(json.dumps(case_record(method, new)) + "\n")
    (folder / "broken").mkdir()
    (folder / "broken" / "spec.toml").write_text("command = ")
    (folder / "note.txt").write_text("secret")
    (folder.parent / "outside").mkdir(exist_ok=True)
    (folder.parent / "outside" / "spec.toml").write_text('command = "evaluate"\n')
    return folder


@pytest.fixture
def client(address: tuple[str, ServerState]) -> Iterator[httpx.Client]:
    """A visitor."""
    with httpx.Client(base_url=address[0], timeout=60) as visitor:
        visitor.get("/")
        yield visitor


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def refused(answer: httpx.Response, status: int, *words: str) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    for word in words:
        assert word in error["message"]
    return error


# ---- locate


def test_a_trace_comes_in_pieces_and_ends_as_the_trace(client: httpx.Client, lm: LM) -> None:
    found = events(client, "/api/locate", QUICK)
    kinds = [event["event"] for event in found]
    assert kinds[0] == "place"
    assert kinds.index("runs") < kinds.index("cells") < kinds.index("record")
    assert kinds[-1] == "record"
    settings = Tracing(corruption=Corruption(samples=2), window=2)
    whole = trace(lm, Fact(subject=TOWER, prompt="{} is located in the city of"), settings)
    for kind, grid in whole.restored.items():
        mine = np.array(found[-1]["tables"]["restored"][kind], dtype=float)
        np.testing.assert_allclose(mine, np.array(grid, dtype=float), rtol=1e-5)
    assert found[-1]["corrupted"] == pytest.approx(whole.corrupted)


def test_a_trace_that_is_known_is_answered_at_once_and_grows(client: httpx.Client) -> None:
    body = {**QUICK, "window": 1}
    first = events(client, "/api/locate", body)[-1]
    again = events(client, "/api/locate", body)
    assert [event["event"] for event in again] == ["record"]
    assert again[0] == first
    more = events(
        client, "/api/locate", {**body, "tables": ["states severed mlp", "gradients mlp"]}
    )
    assert set(more[-1]["tables"]["restored"]) == {"states", "mlp", "attn"}
    assert set(more[-1]["tables"]["severed"]) == {"mlp"}
    assert set(more[-1]["tables"]["gradients"]) == {"mlp"}
    assert {e["table"] for e in more if e["event"] == "cells"} == {"severed", "gradients"}


def test_a_trace_can_be_taken_away(client: httpx.Client) -> None:
    name = events(client, "/api/locate", QUICK)[-1]["name"]
    record = TraceRecord.from_json(client.get(f"/api/traces/{name}/record.json").text)
    assert record.fact.text == CITY
    for file, head in (
        ("figure.png", b"\x89PNG"),
        ("figure.svg", b"<?xml"),
        ("figure.pdf", b"%PDF"),
    ):
        answer = client.get(f"/api/traces/{name}/{file}")
        assert answer.content.startswith(head)
        assert answer.headers["content-disposition"].startswith("attachment")
    assert "Eiffel" in client.get(f"/api/traces/{name}/page.html").text
    refused(client.get(f"/api/traces/{name}/passwd"), 404, "record.json")
    refused(client.get("/api/traces/nothing/record.json"), 404, "trace it again")


# ---- edits


def test_an_edit_is_its_visitors_alone(
    address: tuple[str, ServerState], client: httpx.Client
) -> None:
    made = events(client, "/api/edits", EDIT)[-1]["edit"]
    assert (made["text"], made["new"]) == (CITY, "Rome")
    assert client.get("/api/edits").json()["edits"] == [made]
    with httpx.Client(base_url=address[0]) as other:
        assert other.get("/api/edits").json() == {"edits": []}
        refused(other.get(f"/api/edits/{made['id']}/record.json"), 404, "you have no edit")
        refused(other.post("/api/ask", json={"edits": [made["id"]]}), 404)
        refused(other.delete(f"/api/edits/{made['id']}"), 404)
    assert client.delete(f"/api/edits/{made['id']}").status_code == 200
    assert client.get("/api/edits").json() == {"edits": []}


def test_no_weight_is_written(client: httpx.Client, lm: LM) -> None:
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    made = events(client, "/api/edits", EDIT)[-1]["edit"]
    events(client, "/api/ask", {"prompts": [CITY], "edits": [made["id"]], "tokens": 3})
    for name, weight in lm.model.named_parameters():
        assert torch.equal(weight, before[name])
    assert not any(m._forward_hooks for m in lm.model.modules())


def test_switches_commute_and_asking_is_the_edited_model(
    address: tuple[str, ServerState], client: httpx.Client, lm: LM
) -> None:
    one = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    two = events(client, "/api/edits", {**EDIT, "target": "London", "layer": 0})[-1]["edit"]["id"]

    def facts(*on: str) -> list[dict[str, Any]]:
        found = events(client, "/api/ask", {"prompts": [CITY], "edits": list(on), "tokens": 2})
        return next(event["facts"] for event in found if event["event"] == "facts")

    none, both, turned = facts(), facts(one, two), facts(two, one)
    for a, b in zip(both, turned, strict=True):
        assert a["after"]["new"] == pytest.approx(b["after"]["new"], rel=1e-4)
    assert all(fact["before"] == fact["after"] for fact in none)
    only = facts(one)[0]["after"]["new"]
    visitor = client.cookies["factscope"]
    [made] = address[1].visitors.chosen(visitor, [one])
    case = Case(fact=made.edit.facts[0])
    wanted = before_after(lm, made.edit, case, generation_tokens=0).own.after.new
    assert only == pytest.approx(wanted, rel=1e-5)


def test_what_is_asked_is_told_before_and_after(client: httpx.Client, lm: LM) -> None:
    made = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    found = events(client, "/api/ask", {"prompts": [CITY], "edits": [made], "tokens": 3})
    [answer] = [event for event in found if event["event"] == "answer"]
    assert len(answer["before"]["likeliest"]) == 5
    assert answer["text"] == CITY
    probabilities = [one["p"] for one in answer["after"]["likeliest"]]
    assert probabilities == sorted(probabilities, reverse=True)


def test_an_edit_can_be_taken_away(client: httpx.Client, lm: LM, tmp_path: Path) -> None:
    one = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    two = events(client, "/api/edits", {**EDIT, "target": "London"})[-1]["edit"]["id"]
    (tmp_path / "one").write_bytes(client.get(f"/api/edits/{one}/edit.safetensors").content)
    (tmp_path / "both").write_bytes(client.get(f"/api/edits/{one},{two}/edit.safetensors").content)
    assert [fact.target for fact in Edit.load(tmp_path / "one").facts] == ["Rome"]
    assert [fact.target for fact in Edit.load(tmp_path / "both").facts] == ["Rome", "London"]
    record = EditRecord.from_json(client.get(f"/api/edits/{one}/record.json").text)
    assert record.own.new == "Rome"
    assert client.get(f"/api/edits/{one}/figure.png").content.startswith(b"\x89PNG")
    assert "Rome" in client.get(f"/api/edits/{one}/page.html").text
    refused(client.get(f"/api/edits/{one},{two}/figure.png"), 404, "of one edit")
    refused(client.get(f"/api/edits/{one}/..%2f..%2fetc"), 404)


def test_an_adapter_says_what_the_edit_says(client: httpx.Client, lm: LM, tmp_path: Path) -> None:
    from peft import PeftModel

    id = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    answer = client.get(f"/api/edits/{id}/adapter.zip")
    assert answer.status_code == 200, answer.text
    zipfile.ZipFile(io.BytesIO(answer.content)).extractall(tmp_path)
    edit_file = tmp_path / "e.edit"
    edit_file.write_bytes(client.get(f"/api/edits/{id}/edit.safetensors").content)
    ids = torch.tensor([[5, 6, 7, 8]])
    with edited(lm, [Edit.load(edit_file)]):
        wanted = lm.model(ids).logits
    import copy

    adapted = PeftModel.from_pretrained(copy.deepcopy(lm.model), tmp_path / "adapter")
    torch.testing.assert_close(adapted(ids).logits, wanted, rtol=1e-4, atol=1e-4)


def test_an_edit_beyond_the_guard_rails_is_shown_and_not_exported(client: httpx.Client) -> None:
    made = events(client, "/api/edits", {**EDIT, "layer": 0})[-1]["edit"]
    assert "update norm" in made["complaints"][0]
    refused(client.get(f"/api/edits/{made['id']}/adapter.zip"), 422, "beyond the guard rails")


def test_edits_are_bounded_and_the_first_visitor_is_forgotten() -> None:
    visitors = Sessions(ServerLimits(visitors=2, edits=1))
    fact = Fact(subject=TOWER, prompt="{} is in", target="Rome")
    edit = Edit(changes={}, model="m", fingerprint="f", method="rome", facts=(fact,))
    record = EditRecord(
        fact=fact, true=None, model="m", method="rome", changed_weights=(), prompts=()
    )
    for name in ("a", "b", "c"):
        visitors.keep(name, edit, record, {})
    assert [len(visitors.edits(name)) for name in ("a", "b", "c")] == [0, 1, 1]


def test_one_edit_too_many_is_refused(client: httpx.Client) -> None:
    for _ in range(LIMITS.edits):
        events(client, "/api/edits", EDIT)
    refused(client.post("/api/edits", json=EDIT), 422, "remove one")


# ---- runs


def test_runs_are_listed_and_compared(client: httpx.Client) -> None:
    listed = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(listed) == {"rome", "ft", "broken"}
    assert "error" in listed["broken"]
    found = client.get("/api/tables", params={"run": ["rome", "ft"]}).json()
    assert found["command"] == "evaluate"
    rows = [row[0]["text"] for row in found["tables"][0]["rows"]]
    assert {"ROME", "FT"} <= {row.split(",")[0] for row in rows}
    for figure in found["figures"]:
        answer = client.get(f"/api/figure/{figure}", params={"run": ["rome", "ft"]})
        assert answer.status_code == 200
        assert b"<svg" in answer.content
    cases = client.get("/api/cases", params={"run": ["rome", "ft"]}).json()["cases"]
    assert [case["id"] for case in cases] == ["7"]
    [samples] = client.get("/api/samples", params={"run": ["rome", "ft"], "case": "7"}).json()[
        "samples"
    ]
    assert set(samples["rows"][0]) == {"before", "ROME", "FT"}


def test_a_run_is_summed_up_once_until_its_records_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rome").mkdir()
    (tmp_path / "rome" / "spec.toml").write_text('command = "evaluate"\n')
    file, record = tmp_path / "rome" / "records.jsonl", case_record("rome", 0.1)
    file.write_text(json.dumps(record) + "\n")
    counted: list[int] = []

    def counting(records: list[CaseRecord]) -> list[Summary]:
        counted.append(len(records))
        return summaries(records)

    monkeypatch.setattr(compare, "summaries", counting)
    runs = compare.RunLibrary(tmp_path, threading.Lock())
    assert runs.summaries(["rome"]) == runs.summaries(["rome"])
    another = {**record, "fact": {**record["fact"], "id": "8"}}
    file.write_text(json.dumps(record) + "\n" + json.dumps(another) + "\n")
    assert {row.cases for row in runs.summaries(["rome"])} == {2}
    assert counted == [1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "..",
        "/etc",
        "rome/../../outside",
        "rome/records.jsonl",
        "",
        "broken\x00",
        "%2e",
    ],
)
@pytest.mark.parametrize("path", ["tables", "figure/spread", "cases", "samples"])
def test_a_run_is_named_never_pathed(client: httpx.Client, name: str, path: str) -> None:
    refused(client.get(f"/api/{path}", params={"run": name, "case": "7"}), 404, "there is no run")


def test_runs_that_cannot_be_shown(client: httpx.Client) -> None:
    refused(client.get("/api/tables", params={"run": "broken"}), 422, "cannot be read")
    refused(client.get("/api/tables"), 422, "run")
    refused(client.get("/api/samples", params={"run": "rome", "case": "9"}), 422, "no texts")
    refused(client.get("/api/figure/nothing", params={"run": "rome"}), 404)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"subject": ""}, "the subject"),
        ({"subject": "Big Ben"}, "did you mean"),
        ({"prompt": "x" * 700}, "at most 600"),
        ({"prompt": "x" * 5000}, "4000"),
        ({"prompt": "The {} is"}, "must have one"),
        ({"corruption": {"samples": 11}}, "at most 10"),
        ({"corruption": {"samples": 0}}, "at least 1"),
        ({"corruption": {"level": -1}}, "noise level"),
        ({"corruption": {"colour": "red"}}, "colour"),
        ({"corruption": {"distribution": "<b>"}}, "gaussian"),
        ({"window": 0}, "window"),
        ({"window": 1.5}, "window"),
        ({"tables": ["<script>"]}, "not known"),
        ({"tables": []}, "not known"),
        ({"occurrence": 3}, "does not exist"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_traced(client: httpx.Client, change: dict[str, Any], words: str) -> None:
    body = {**QUICK, **change}
    if "The {} is" in str(change):
        body["subject"] = "The"
    refused(client.post("/api/locate", json=body), 422, words)


def test_the_words_are_those_of_the_command_line(client: httpx.Client) -> None:
    from factscope.errors import SubjectNotFound

    error = refused(client.post("/api/locate", json={**QUICK, "subject": "Big Ben"}), 422)
    with pytest.raises(SubjectNotFound) as raised:
        Fact.from_text(CITY, "Big Ben")
    assert error == {"kind": "SubjectNotFound", "message": str(raised.value)}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800", '
     b'"subject": "\\ud800"}', b"[" * 20_000,
     b'{"prompt": "a b", "subject": "a", "corruption": {"level": NaN}}',
     b'{"prompt": "a b", "subject": "a", "corruption": {"level": 1e999, "seed": 1e400}}',
     b'{"prompt": "a b", "subject": "a", "window": 99999999999999999999999999}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/api/locate", "/api/edits", "/api/ask"])
def test_malformed_bodies(client: httpx.Client, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]


def test_control_characters_and_markup_are_text(client: httpx.Client) -> None:
    text = "<img src=x onerror=alert(1)>\x00\x1b[31m\u202e is in the city of"
    found = events(client, "/api/locate", {**QUICK, "prompt": text, "subject": "<img src=x"})
    assert found[-1]["event"] == "record"
    labels = "".join(found[-1]["labels"])
    assert "\x00" not in labels
    assert "\x1b" not in labels
    page = client.get(f"/api/traces/{found[-1]['name']}/page.html").text
    assert "<img src=x" not in page


def test_a_prompt_of_too_many_tokens(client: httpx.Client) -> None:
    body = {**QUICK, "prompt": TOWER + " a b" * 22}
    found = events(client, "/api/locate", body)
    assert found[-1]["error"]["kind"] == "PromptTooLong"
    assert "at most 48" in found[-1]["error"]["message"]


def test_large_and_endless_bodies(client: httpx.Client) -> None:
    refused(client.post("/api/locate", content=b"x" * 40_000), 413, "32768")

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    refused(client.post("/api/locate", content=endless()), 413, "32768")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "evil.example:80"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": "localhost.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "LOCALHOST:1234"}, 200),
        ({"host": "127.0.0.1:9"}, 200),
        ({"host": "[::1]:9"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "same-origin"}, 200),
    ],
)
def test_requests_of_other_sites(
    client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    answers = [
        client.get("/api/about", headers=headers),
        client.post("/api/ask", json={}, headers=headers),
    ]
    for answer in answers:
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["kind"] == "ForbiddenOrigin"


def test_the_page_lets_nothing_run_but_its_own_files(client: httpx.Client) -> None:
    answer = client.get("/")
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "unsafe" not in HEADERS["content-security-policy"]
    for path in ("main.js", "serve.css", "page.css", "icon.svg"):
        assert client.get(f"/static/{path}").status_code == 200
        assert f"/static/{path}" in answer.text or path == "main.js"
    static = Path(__file__).parents[2] / "src" / "factscope" / "serve" / "static"
    for script in static.glob("*.js"):
        text = script.read_text("utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in text, script


@pytest.mark.parametrize(
    "path",
    ["/static/..%2fapp.py", "/static/../app.py", "/static/%2e%2e/app.py", "/static/index.html",
     "/static/", "/nothing", "/api/nothing", "/static/main.js%00"],
)  # fmt: skip
def test_unknown_paths(client: httpx.Client, path: str) -> None:
    refused(client.get(path), 404)


# ---- the queue


def wait_for(condition: Any, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def other_trace(number: int) -> dict[str, Any]:
    return {**QUICK, "corruption": {"samples": 2, "seed": number + 100}}


def test_who_leaves_stops_the_work(
    address: tuple[str, ServerState], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, queue = slow(address[1], monkeypatch), address[1].queue
    with client.stream("POST", "/api/locate", json=other_trace(1)):
        assert begun.wait(10)
        assert len(queue) == 1
    wait_for(lambda: len(queue) == 0)


def test_places_in_the_queue_and_a_polite_refusal(
    address: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, queue = slow(address[1], monkeypatch), address[1].queue
    clients = [httpx.Client(base_url=address[0], timeout=120) for _ in range(LIMITS.waiting + 1)]
    for one in clients:
        one.get("/")
    open_streams = []
    for number, one in enumerate(clients[:-1]):
        request = one.build_request("POST", "/api/locate", json=other_trace(number))
        answer = one.send(request, stream=True)
        lines = answer.iter_lines()
        assert json.loads(next(lines)) == {"event": "place", "place": number}
        open_streams.append((answer, lines))
    assert begun.wait(10)
    answer = clients[-1].post("/api/locate", json=other_trace(99))
    refused(answer, 503, "try again")
    assert answer.headers["retry-after"]
    open_streams[0][0].close()  # who is at work leaves; the others move up
    moved = [json.loads(line) for _, line in zip(range(1), open_streams[2][1], strict=False)]
    assert moved == [{"event": "place", "place": 1}]
    for stream, _ in open_streams[1:]:
        stream.close()
    wait_for(lambda: len(queue) == 0)
    for one in clients:
        one.close()


def test_one_visitor_cannot_fill_the_queue(
    address: tuple[str, ServerState], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow(address[1], monkeypatch)
    streams = []
    for number in range(LIMITS.each):
        request = client.build_request("POST", "/api/locate", json=other_trace(number))
        streams.append(client.send(request, stream=True))
    refused(client.post("/api/locate", json=other_trace(9)), 503, "of your jobs")
    for stream in streams:
        stream.close()
    wait_for(lambda: len(address[1].queue) == 0)


def test_a_job_that_fails_says_so_and_the_next_goes_on(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise ValueError("a secret path")

    with monkeypatch.context() as patch:
        patch.setattr("factscope.serve.routes_trace.stream_trace", broken)
        found = events(client, "/api/locate", other_trace(5))
    assert found[-1] == {
        "event": "error",
        "error": {
            "kind": "ServerError",
            "message": "the server failed at this; its log says why",
        },
    }
    assert events(client, "/api/locate", other_trace(5))[-1]["event"] == "record"


def test_generation_stops_when_it_is_called_off(lm: LM) -> None:
    """Between two forward passes, whatever the work is."""
    import asyncio

    from factscope.lm.generate import generate_greedy

    served = ServerState(lm=lm)

    async def go() -> None:
        passes = 0

        def work(job: Any) -> None:
            nonlocal passes
            for _ in range(10_000):
                generate_greedy(lm, [CITY], 5)
                passes += 1

        job = served.queue.submit("a", work)
        await asyncio.sleep(0.2)
        served.queue.cancel(job)
        while (await asyncio.wait_for(job.events.get(), 120)) is not None:
            pass
        assert passes < 10_000
        for _ in range(served.limits.each):
            served.queue.submit("a", lambda job: time.sleep(0.1))
        with pytest.raises(ServerBusy):
            served.queue.submit("a", lambda job: None)

    asyncio.run(go())
    served.queue.close()


# ---- from the command line


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def test_the_command_says_where_the_page_is(
    factscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    seen: list[Any] = []

    def serve(self: Any, sockets: list[Any]) -> None:
        seen.append(sockets[0].getsockname())

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    saved_model(tmp_path / "tiny")
    words = ("-m", "tiny", "--port", 0, "--runs", ".", "--device", "cpu")
    result = factscope("serve", *words)
    assert result.code == 0
    [(host, port)] = seen
    assert host == "127.0.0.1"
    assert f"http://127.0.0.1:{port}/" in result.out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = factscope("serve", *words[:2], "--port", taken.getsockname()[1])
    assert result.code == 2
    assert "choose another --host or --port" in result.err


def test_mistakes_on_the_command_line(factscope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "there is no folder" in factscope("serve", "--runs", "nowhere").err
    monkeypatch.setitem(sys.modules, "factscope.serve.app", None)
    for name in [name for name in sys.modules if name.startswith("uvicorn")]:
        monkeypatch.setitem(sys.modules, name, None)
    result = factscope("serve")
    assert result.code == 2
    assert "factscope[serve]" in result.err


# ---- what the page knows


def test_layers_with_statistics(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from factscope.stats.second_moment import (
        SecondMoment,
        cached_path,
        layers_with_moments,
        save_moment,
    )

    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path))
    assert layers_with_moments(lm) == []
    width = lm.mlp_weight(1).shape[1]
    moment = SecondMoment(
        matrix=torch.eye(width), tokens=9, model=lm.name, layer=1, fingerprint=lm.fingerprint,
        corpus="none",
    )  # fmt: skip
    save_moment(moment, cached_path(lm, 1))
    assert layers_with_moments(lm) == [1]


def test_the_next_tokens_are_those_of_the_model(lm: LM) -> None:
    from factscope.lm.generate import generate_greedy, top_next_tokens
    from factscope.lm.tokens import encode

    found = top_next_tokens(lm, CITY, 3)
    logits = lm.model(torch.tensor([encode(lm, CITY).ids])).logits[0, -1]
    wanted = logits.float().softmax(-1).topk(3).values.tolist()
    assert [p for _, p in found] == pytest.approx(wanted)
    assert found[0][0] == generate_greedy(lm, [CITY], 1)[0]
