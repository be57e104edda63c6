"""The server's routes: event streams, edits per session, runs, invalid and forbidden requests."""

import io
import json
import os
import socket
import sys
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from factscope.analysis.attribution import compare_attribution
from factscope.analysis.metrics import Summary, summarize
from factscope.editing import edit as edit_module
from factscope.editing.edit import Edit
from factscope.editing.per_row import edited
from factscope.errors import BadSetting, ServerBusy
from factscope.evaluation.before_after import before_after
from factscope.facts import Case, Fact
from factscope.lm.model import LM
from factscope.records import CaseRecord, EditRecord, TraceRecord, write_records
from factscope.report.labels import metric_label
from factscope.serve import routes_runs
from factscope.serve.limits import ServerLimits
from factscope.serve.schemas import EDIT_SETTINGS, METHODS, TABLE_SETTINGS, TRACE_SETTINGS
from factscope.serve.security import HEADERS
from factscope.serve.sessions import ServerState, Sessions
from factscope.settings import settings_of
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace

from commands import Run, runner, saved_model
from served_records import case_record, endless_traces, write_evaluation
from serving import CITY, TOWER, running_server, serving_lm

FACT = {"prompt": CITY, "subject": TOWER}
TRACE = {**FACT, "settings": {"samples": 2, "window": 2}}
EDIT = {**FACT, "target": "Rome", "layer": 1, "without_statistics": True}
NEIGHBOURS = ["The Louvre is located in the city of", "The capital of France is"]
LIMITS = ServerLimits(max_jobs=6, max_jobs_per_session=3, max_edits=4, max_new_tokens=5)


@pytest.fixture(scope="module")
def lm() -> LM:
    return serving_lm()


@pytest.fixture(scope="module")
def address(lm: LM, runs: Path) -> Iterator[tuple[str, ServerState]]:
    with running_server(lm, runs=runs, limits=LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def runs(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two evaluations, a run of traces, damaged runs, and a file."""
    folder = tmp_path_factory.mktemp("runs")
    write_evaluation(folder / "rome", "rome", -0.1)
    write_evaluation(folder / "ft", "ft", 2.0)
    (folder / "traces").mkdir()
    (folder / "traces" / "spec.toml").write_text('command = "trace"\nmodel = "tiny"\n')
    fact = Fact(subject=TOWER, prompt="{} is located in the city of")
    record = trace(lm, fact, Tracing(corruption=Corruption(samples=2)))
    write_records(folder / "traces" / "records.jsonl", [record])
    torn = folder / "torn"
    write_evaluation(torn, "rome", -0.1)
    with (torn / "records.jsonl").open("a") as file:
        file.write('{"kind": "case", "fa')  # of a process that was killed, or still writes
    surrogate = folder / "surrogate"
    write_evaluation(surrogate, "rome", -0.1)
    text = (surrogate / "records.jsonl").read_text()
    (surrogate / "records.jsonl").write_text(text.replace("It is in", "\\ud800"))
    os.mkdir(os.fsencode(folder) + b"/latin-\xe9")
    spec = os.fsencode(folder) + b"/latin-\xe9/spec.toml"
    with open(spec, "w", encoding="utf-8") as file:
        file.write('command = "evaluate"\n')
    (folder / "broken").mkdir()
    (folder / "broken" / "spec.toml").write_text("command = ")
    (folder / "note.txt").write_text("secret")
    (folder.parent / "outside").mkdir(exist_ok=True)
    (folder.parent / "outside" / "spec.toml").write_text('command = "evaluate"\n')
    return folder


@pytest.fixture
def client(address: tuple[str, ServerState]) -> Iterator[httpx.Client]:
    """A client with a session of its own."""
    with httpx.Client(base_url=address[0], timeout=60) as client:
        client.get("/")
        yield client


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def check_error(response: httpx.Response, status: int, *parts: str) -> dict[str, Any]:
    """Check status and parts of the message."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    for part in parts:
        assert part in error["message"]
    return error


# ---- traces


def test_the_stream_of_a_trace_ends_with_the_record_of_trace(client: httpx.Client, lm: LM) -> None:
    found = events(client, "/api/traces", TRACE)
    kinds = [event["event"] for event in found]
    assert kinds[0] == "queued"
    assert kinds.index("baseline") < kinds.index("cells") < kinds.index("record")
    assert kinds[-1] == "record"
    settings = Tracing(corruption=Corruption(samples=2), window=2)
    whole = trace(lm, Fact(subject=TOWER, prompt="{} is located in the city of"), settings)
    for kind, grid in whole.restored.items():
        mine = np.array(found[-1]["tables"]["restored"][kind], dtype=float)
        np.testing.assert_allclose(mine, np.array(grid, dtype=float), rtol=1e-5)
    assert found[-1]["corrupted"] == pytest.approx(whole.corrupted)


def test_a_cached_trace_is_returned_at_once_and_gains_tables(client: httpx.Client) -> None:
    body = {**FACT, "settings": {"samples": 2, "window": 1}}
    first = events(client, "/api/traces", body)[-1]
    again = events(client, "/api/traces", body)
    assert [event["event"] for event in again] == ["record"]
    assert again[0] == first
    text = events(client, "/api/traces", {**FACT, "settings": {"samples": "2", "window": "1"}})
    assert text == again
    more = events(
        client, "/api/traces", {**body, "tables": ["states severed mlp", "gradients mlp"]}
    )
    assert set(more[-1]["tables"]["restored"]) == {"states", "mlp", "attn"}
    assert set(more[-1]["tables"]["severed"]) == {"mlp"}
    assert set(more[-1]["tables"]["gradients"]) == {"mlp"}
    assert {e["table"] for e in more if e["event"] == "cells"} == {"severed", "gradients"}


def test_a_trace_can_be_downloaded(client: httpx.Client) -> None:
    name = events(client, "/api/traces", TRACE)[-1]["name"]
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
    check_error(client.get(f"/api/traces/{name}/passwd"), 404, "record.json")
    check_error(client.get("/api/traces/nothing/record.json"), 404, "trace the fact again")


def test_traces_that_show_nothing_have_warnings(client: httpx.Client, lm: LM) -> None:
    found = events(client, "/api/traces", {**FACT, "settings": {"samples": 1, "noise": "0"}})
    baseline = next(event for event in found if event["event"] == "baseline")
    assert baseline["warnings"] == found[-1]["warnings"]
    unknown, empty = found[-1]["warnings"]  # random weights know nothing
    assert "names no object" in unknown
    assert "noise level is 0" in empty


def test_the_strongest_cell_of_the_subject_is_found(client: httpx.Client) -> None:
    found = events(client, "/api/traces", TRACE)[-1]
    start, stop = found["subject"]
    rows = found["tables"]["restored"]["mlp"]
    cells = {(t, n): p for t in range(start, stop) for n, p in enumerate(rows[t])}
    token, layer = max(cells, key=lambda cell: cells[cell])
    assert found["strongest"]["mlp"] == {
        "token": token, "layer": layer,
        "effect": pytest.approx(cells[token, layer] - found["corrupted"]),
    }  # fmt: skip


def test_the_subjects_rows_come_first(client: httpx.Client) -> None:
    found = events(client, "/api/traces", {**TRACE, "settings": {"samples": 2, "seed": 5}})
    start, stop = found[-1]["subject"]
    rows = {(kind, token) for kind in ("states", "mlp", "attn") for token in range(start, stop)}
    cells = [event for event in found if event["event"] == "cells" and event["samples"] == 1]
    first = {(event["kind"], *event["tokens"]) for event in cells[: len(rows)]}
    assert first == rows


def test_another_answer_is_traced(client: httpx.Client, lm: LM) -> None:
    found = events(client, "/api/traces", {**TRACE, "answer": " Rome "})[-1]
    settings = Tracing(corruption=Corruption(samples=2), window=2)
    fact = Fact(subject=TOWER, prompt="{} is located in the city of")
    wanted = trace(lm, fact, settings, answer="Rome")
    assert found["answer"] == "Rome"
    assert (found["clean"], found["corrupted"]) == pytest.approx((wanted.clean, wanted.corrupted))
    assert found["name"] != events(client, "/api/traces", TRACE)[-1]["name"]
    assert events(client, "/api/traces", {**TRACE, "answer": ""})[-1]["answer"] != "Rome"
    long = events(client, "/api/traces", {**TRACE, "answer": "a b " * 20})[-1]
    assert "at most 48" in long["error"]["message"]


def test_the_logit_lens(client: httpx.Client, lm: LM) -> None:
    body = {**TRACE, "settings": {"samples": 2, "window": 3}}
    first = events(client, "/api/traces", body)[-1]
    assert first["tables"]["lens"] == {}
    more = events(client, "/api/traces", {**body, "tables": ["lens clean", "lens corrupted"]})
    assert not [event for event in more if event["event"] == "cells"]
    found = more[-1]
    assert found["name"] == first["name"]
    assert found["tables"]["restored"] == first["tables"]["restored"]
    settings = Tracing(corruption=Corruption(samples=2), window=3, lens=True)
    wanted = trace(lm, Fact(subject=TOWER, prompt="{} is located in the city of"), settings).lens
    for run, lens in found["tables"]["lens"].items():
        mine, theirs = (np.array(x, dtype=float) for x in (lens["answer"], wanted[run].answer))
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)
    top = found["tables"]["lens"]["clean"]["top"][-1][-1]  # what the model itself predicts
    assert top[0] == {"token": found["answer"], "p": pytest.approx(found["clean"])}
    assert len(top) == 5
    again = events(client, "/api/traces", {**body, "tables": ["lens clean"]})
    assert again == [found]


def numbers(table: Any) -> np.ndarray:
    return np.array(table, dtype=float)


TOWER_FACT = Fact(subject=TOWER, prompt="{} is located in the city of")


@pytest.mark.parametrize(
    ("metric", "direction", "sign"),
    [("kl", "restore", -1), ("rank", "corrupt", 1), ("logit-difference", "corrupt", -1)],
)
def test_metrics_and_directions(
    client: httpx.Client, lm: LM, metric: Any, direction: Any, sign: int
) -> None:
    settings = {"samples": 2, "window": 2, "metric": metric, "direction": direction}
    found = events(client, "/api/traces", {**FACT, "settings": settings, "foil": " Rome "})[-1]
    foil = "Rome" if metric == "logit-difference" else None
    wanted = trace(
        lm, TOWER_FACT,
        Tracing(corruption=Corruption(samples=2), window=2, metric=metric, direction=direction),
        foil=foil,
    )  # fmt: skip
    for kind, table in wanted.restored.items():
        mine = numbers(found["tables"]["restored"][kind])
        np.testing.assert_allclose(mine, numbers(table), rtol=1e-4, atol=1e-6)
    assert (found["metric"], found["direction"], found["sign"]) == (metric, direction, sign)
    assert found["metric_label"] == metric_label(wanted)
    values = (found["clean_value"], found["corrupted_value"], found["base_value"])
    expected = (wanted.clean_value, wanted.corrupted_value, wanted.base_value)
    assert values == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_heads_are_restored_at_one_token_at_a_time(client: httpx.Client, lm: LM) -> None:
    body = {**FACT, "settings": {"samples": 2, "seed": 3}}
    wanted = trace(lm, TOWER_FACT, Tracing(corruption=Corruption(samples=2, seed=3), heads=True))
    last, start = len(wanted.tokens) - 1, wanted.subject[0]
    name = events(client, "/api/traces", body)[-1]["name"]
    heads = {**body, "tables": ["heads"]}
    found = events(client, "/api/traces", heads)
    assert {(e["table"], *e["tokens"]) for e in found if e["event"] == "cells"} == {("heads", last)}
    assert list(found[-1]["tables"]["heads"]) == [str(last)]
    more = events(client, "/api/traces", {**heads, "token": start})[-1]
    assert more["name"] == name
    assert set(more["tables"]["restored"]) == {"states", "mlp", "attn"}
    for token in (start, last):  # both are stored
        mine, expected = more["tables"]["heads"][str(token)], numbers(wanted.heads)[:, token]
        np.testing.assert_allclose(numbers(mine), expected, rtol=1e-4)
    assert events(client, "/api/traces", heads) == [more]  # from the cache
    record = TraceRecord.from_json(client.get(f"/api/traces/{name}/record.json").text)
    assert [i for i, row in enumerate(record.heads[0]) if row[0] is not None] == [start, last]
    assert client.get(f"/api/traces/{name}/heads.svg").content.startswith(b"<?xml")
    beyond = events(client, "/api/traces", {**heads, "token": 40})[-1]
    assert f"token is 40; the prompt has the tokens 0 to {last}" in beyond["error"]["message"]


def test_attention_knockout(client: httpx.Client, lm: LM) -> None:
    body = {**FACT, "settings": {"samples": 2, "seed": 4}, "tables": ["knockout"]}
    assert events(client, "/api/traces", body)[-1]["tables"]["knockout"]["window"] == 9
    body["settings"] |= {"knockout-window": 1}
    found = events(client, "/api/traces", body)[-1]["tables"]["knockout"]
    settings = Tracing(corruption=Corruption(samples=2), knockout=True, knockout_window=1)
    wanted = trace(lm, TOWER_FACT, settings)
    assert found["window"] == 1
    for group, values in wanted.knockout.items():
        assert found["values"][group] == pytest.approx(values, rel=1e-4)
        relative = [x / wanted.clean - 1 for x in values]
        assert found["changes"][group] == pytest.approx(relative, rel=1e-3, abs=1e-5)
    assert found["names"]["relation"] == "relation tokens"
    again = events(client, "/api/traces", body)
    assert [event["event"] for event in again] == ["record"]


def test_attribution_is_compared_with_the_measured_cells(client: httpx.Client, lm: LM) -> None:
    body = {**FACT, "settings": {"samples": 2, "seed": 6, "window": 1}}
    assert events(client, "/api/traces", body)[-1]["agreement"] == {}
    body["tables"] = ["states", "attribution states", "attribution mlp"]
    corruption = Corruption(samples=2, seed=6)
    for method, name in (("atp", "AtP"), ("atp-star", "AtP*")):
        body["settings"] |= {"attribution": method}
        found = events(client, "/api/traces", body)
        assert not [event for event in found if event["event"] == "cells"]  # they are stored
        settings: Any = {"corruption": corruption, "window": 1, "attribution": method}
        wanted = trace(lm, TOWER_FACT, Tracing(**settings))
        estimates = found[-1]["tables"]["attribution"]
        for kind in ("states", "mlp"):
            expected = numbers(wanted.attribution[kind])
            np.testing.assert_allclose(numbers(estimates[kind]), expected, rtol=1e-3, atol=1e-7)
        [graded, *_] = compare_attribution([wanted])
        agreement = found[-1]["agreement"]["states"]
        assert agreement["method"] == name
        assert agreement["pearson"] == pytest.approx(graded.pearson.mean, abs=1e-3)
        assert agreement["missed"] == round(10 * graded.missed.mean)
        assert (agreement["top"], agreement["cells"]) == (10, graded.cells)
    body["settings"] |= {"metric": "rank"}
    check_error(client.post("/api/traces", json=body), 422, "metric is 'rank'", "logit-difference")


def test_a_trace_is_downloaded_with_normalised_values(client: httpx.Client) -> None:
    name = events(client, "/api/traces", TRACE)[-1]["name"]
    address = f"/api/traces/{name}/page.html"
    assert "0 is the corrupted run, 1 the clean run" not in client.get(address).text
    normalised = {"normalise": True}
    assert "0 is the corrupted run, 1 the clean run" in client.get(address, params=normalised).text
    raw = client.get(f"/api/traces/{name}/record.json", params=normalised).text
    assert TraceRecord.from_json(raw).metric == "probability"


TOKENS = {
    "prompt": "The Louvre is located in the city of", "subject": "The Louvre",
    "settings": {"distribution": "tokens", "window": 2},
}  # fmt: skip


def test_the_subject_can_be_replaced(client: httpx.Client, lm: LM) -> None:
    found = events(client, "/api/traces", {**TOKENS, "replacement": " Big Ben "})[-1]
    prompt = "{} is located in the city of"
    fact = Fact(subject="The Louvre", prompt=prompt, replacement="Big Ben")
    wanted = trace(lm, fact, Tracing(corruption=Corruption(distribution="tokens"), window=2))
    assert (found["replacement"], found["samples"]) == ("Big Ben", 1)
    assert found["corrupted"] == pytest.approx(wanted.corrupted)
    for kind, table in wanted.restored.items():
        mine = np.array(found["tables"]["restored"][kind], dtype=float)
        np.testing.assert_allclose(mine, np.array(table, dtype=float), rtol=1e-5)
    long = events(client, "/api/traces", {**TOKENS, "replacement": "The Museum of Modern Art"})[-1]
    assert long["error"]["kind"] == "BadFact"
    assert long["error"]["message"].count("subject tokens)") == 2  # both tokenizations


def test_a_replacement_is_suggested(client: httpx.Client, lm: LM) -> None:
    """A subject of the same relation with another object and as many tokens."""
    assert events(client, "/api/traces", TOKENS)[-1]["replacement"] == "Big Ben"
    assert events(client, "/api/traces", TRACE)[-1]["replacement"] is None  # noise
    unknown = {**TOKENS, "prompt": "Zorblax is a kind of", "subject": "Zorblax"}
    message = events(client, "/api/traces", unknown)[-1]["error"]["message"]
    assert "give a replacement, or" in message  # without the command line's flag


def test_a_trace_of_the_edited_model(client: httpx.Client, lm: LM, tmp_path: Path) -> None:
    id = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    unedited = events(client, "/api/traces", TRACE)[-1]
    found = events(client, "/api/traces", {**TRACE, "edits": [id]})[-1]
    assert found["name"] != unedited["name"]
    (tmp_path / "edit").write_bytes(client.get(f"/api/edits/{id}/edit.safetensors").content)
    fact = Fact(subject=TOWER, prompt="{} is located in the city of")
    with edited(lm, [Edit.load(tmp_path / "edit")]):
        wanted = trace(lm, fact, Tracing(corruption=Corruption(samples=2), window=2))
    assert (found["clean"], found["corrupted"]) == pytest.approx((wanted.clean, wanted.corrupted))
    assert found["clean"] != pytest.approx(unedited["clean"])
    for kind, table in wanted.restored.items():
        mine = np.array(found["tables"]["restored"][kind], dtype=float)
        np.testing.assert_allclose(mine, np.array(table, dtype=float), rtol=1e-5)
    check_error(client.post("/api/traces", json={**TRACE, "edits": ["99"]}), 404, "no edit '99'")


def test_tokens_and_next_tokens_of_a_prompt(client: httpx.Client, lm: LM) -> None:
    from factscope.lm.generate import top_next_tokens

    found = client.post("/api/next-tokens", json={"prompt": CITY}).json()
    assert "".join(CITY[t["start"] : t["stop"]] for t in found["tokens"]) == CITY
    assert [t["p"] for t in found["next"]] == [p for _, p in top_next_tokens(lm, CITY, 5)]
    long = {"prompt": TOWER + " a b" * 22}
    check_error(client.post("/api/next-tokens", json=long), 422, "at most 48")


def test_examples_are_facts_that_the_model_knows(
    client: httpx.Client, lm: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from factscope.data.readers import everyday_facts
    from factscope.serve import examples
    from factscope.tracing.trace import clean_answers

    found = client.get("/api/examples").json()["examples"]
    assert len(found) == 8
    assert not any(example["known"] for example in found)  # random weights know no fact
    right = ["The Louvre", "France", "Italy", "Mount Everest"]

    def answers(lm: LM, facts: Any, settings: Tracing) -> list[Any]:
        found = clean_answers(lm, facts, settings)
        return [replace(a, known=a.fact.subject in right, probability=0.5) for a in found]

    monkeypatch.setattr(examples, "clean_answers", answers)
    known = examples.find_examples(lm)
    assert [example["subject"] for example in known] == right
    assert all(example["known"] and example["p"] == 0.5 for example in known)
    assert {fact.subject for fact in everyday_facts()} > set(right)


def test_the_shipped_trace_is_served_for_its_model_only(lm: LM) -> None:
    from factscope.lm.load import load
    from factscope.serve.examples import first_trace
    from factscope.serve.schemas import default_tracing
    from factscope.tracing.trace import clean_answers

    settings = default_tracing(ServerLimits())
    assert first_trace(lm, settings) is None
    default = load("smollm2-135m")
    assert first_trace(default, replace(settings, window=3)) is None
    shipped = first_trace(default, settings)
    assert shipped is not None, "run docs/tools/first_trace.py"
    assert shipped.fact.text == CITY
    [answer] = clean_answers(default, [shipped.fact], settings)
    assert shipped.clean == pytest.approx(answer.probability, rel=1e-4)
    state = ServerState(lm=default)
    name = state.traces.name(Fact.from_text(CITY, TOWER, 1), settings)
    assert state.traces.get(name) == shipped
    for number in range(ServerLimits().max_traces + 1):
        state.traces.store(str(number), shipped)
    assert state.traces.get(name) == shipped
    state.queue.close()


# ---- edits


def test_an_edit_belongs_to_its_session(
    address: tuple[str, ServerState], client: httpx.Client
) -> None:
    created = events(client, "/api/edits", EDIT)[-1]["edit"]
    assert (created["text"], created["new"]) == (CITY, "Rome")
    assert client.get("/api/edits").json()["edits"] == [created]
    with httpx.Client(base_url=address[0]) as other:
        assert other.get("/api/edits").json() == {"edits": []}
        check_error(other.get(f"/api/edits/{created['id']}/record.json"), 404, "you have no edit")
        check_error(other.post("/api/predict", json={"edits": [created["id"]]}), 404)
        check_error(other.delete(f"/api/edits/{created['id']}"), 404)
    assert client.delete(f"/api/edits/{created['id']}").status_code == 200
    assert client.get("/api/edits").json() == {"edits": []}


def test_neighbours_of_the_same_relation_are_suggested(client: httpx.Client) -> None:
    found = client.post("/api/suggestions", json=FACT).json()
    # Subjects with the same object (Paris) come first, as in CounterFact.
    assert found["neighbours"][:2] == [
        "The Louvre is located in the city of",
        "The Musée d'Orsay is located in the city of",
    ]
    assert f"{TOWER} can be found in the city of" in found["paraphrases"]
    assert all(TOWER in text for text in found["generations"])
    other = client.post("/api/suggestions", json={"prompt": "My cat likes", "subject": "My cat"})
    assert len(set(other.json()["neighbours"])) == 6


def test_changed_neighbours_are_marked_and_count_in_the_verdict(client: httpx.Client) -> None:
    body = {**EDIT, "neighbours": NEIGHBOURS, "generations": [CITY, "People visit"]}
    created = events(client, "/api/edits", body)[-1]["edit"]
    changed = [p["changed"] for p in created["prompts"] if p["kind"] == "neighbour"]
    assert changed == [
        p["before"]["top"] != p["after"]["top"]
        for p in created["prompts"]
        if p["kind"] == "neighbour"
    ]
    assert [g["text"] for g in created["generations"]] == body["generations"]
    damaged = any("unrelated prompts" in complaint for complaint in created["complaints"])
    assert damaged == (sum(changed) > 0.25 * len(changed))
    assert created["verdict"].endswith("damaged others") == bool(created["complaints"])


def test_the_progress_of_an_edit_goes_on_until_its_end(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while texts are generated: the page computes the time left from it."""
    monkeypatch.setattr("factscope.serve.jobs.PROGRESS_INTERVAL", -1.0)
    found = events(client, "/api/edits", {**EDIT, "generations": [CITY, "The Louvre is"]})
    fractions = [event["fraction"] for event in found if event["event"] == "progress"]
    assert fractions == sorted(fractions)
    assert max(b - a for a, b in pairwise(fractions)) < 0.1
    assert 0.9 < fractions[-1] <= 1


def test_no_weight_is_written(client: httpx.Client, lm: LM) -> None:
    before = {name: weight.clone() for name, weight in lm.model.named_parameters()}
    created = events(client, "/api/edits", EDIT)[-1]["edit"]
    events(
        client, "/api/predict", {"prompts": [CITY], "edits": [created["id"]], "max_new_tokens": 3}
    )
    for name, weight in lm.model.named_parameters():
        assert torch.equal(weight, before[name])
    assert not any(m._forward_hooks for m in lm.model.modules())


def test_edits_commute_and_predictions_are_those_of_the_edited_model(
    address: tuple[str, ServerState], client: httpx.Client, lm: LM
) -> None:
    one = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    two = events(client, "/api/edits", {**EDIT, "target": "London", "layer": 0})[-1]["edit"]["id"]

    def facts(*on: str) -> list[dict[str, Any]]:
        found = events(
            client, "/api/predict", {"prompts": [CITY], "edits": list(on), "max_new_tokens": 2}
        )
        return next(event["facts"] for event in found if event["event"] == "facts")

    none, both, swapped = facts(), facts(one, two), facts(two, one)
    for a, b in zip(both, swapped, strict=True):
        assert a["after"]["new"] == pytest.approx(b["after"]["new"], rel=1e-4)
    assert all(fact["before"] == fact["after"] for fact in none)
    only = facts(one)[0]["after"]["new"]
    [created] = address[1].sessions.select(client.cookies["factscope"], [one])
    case = Case(fact=created.edit.facts[0])
    wanted = before_after(lm, created.edit, case, generation_tokens=0).fact_prompt.after.new
    assert only == pytest.approx(wanted, rel=1e-5)


def test_predictions_before_and_after(client: httpx.Client, lm: LM) -> None:
    created = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    found = events(
        client, "/api/predict", {"prompts": [CITY], "edits": [created], "max_new_tokens": 3}
    )
    [answer] = [event for event in found if event["event"] == "prediction"]
    assert len(answer["before"]["top_tokens"]) == 5
    assert answer["text"] == CITY
    probabilities = [one["p"] for one in answer["after"]["top_tokens"]]
    assert probabilities == sorted(probabilities, reverse=True)


def test_an_edit_can_be_downloaded(client: httpx.Client, lm: LM, tmp_path: Path) -> None:
    one = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    two = events(client, "/api/edits", {**EDIT, "target": "London"})[-1]["edit"]["id"]
    (tmp_path / "one").write_bytes(client.get(f"/api/edits/{one}/edit.safetensors").content)
    (tmp_path / "both").write_bytes(client.get(f"/api/edits/{one},{two}/edit.safetensors").content)
    assert [fact.target for fact in Edit.load(tmp_path / "one").facts] == ["Rome"]
    assert [fact.target for fact in Edit.load(tmp_path / "both").facts] == ["Rome", "London"]
    record = EditRecord.from_json(client.get(f"/api/edits/{one}/record.json").text)
    assert record.fact_prompt.new == "Rome"
    assert client.get(f"/api/edits/{one}/figure.png").content.startswith(b"\x89PNG")
    assert "Rome" in client.get(f"/api/edits/{one}/page.html").text
    check_error(client.get(f"/api/edits/{one},{two}/figure.png"), 404, "single edits only")
    check_error(client.get(f"/api/edits/{one}/..%2f..%2fetc"), 404)


def test_an_adapter_gives_the_logits_of_the_edit(
    address: tuple[str, ServerState], client: httpx.Client, lm: LM, tmp_path: Path
) -> None:
    from peft import PeftModel

    created = events(client, "/api/edits", EDIT)[-1]["edit"]["id"]
    sessions, session = address[1].sessions, client.cookies["factscope"]
    [stored] = sessions.select(session, [created])
    # So small that it passes its checks.
    id = sessions.store(session, 0.1 * stored.edit, stored.record, stored.request).id
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


def test_an_edit_that_fails_its_checks_is_shown_and_not_exported(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = partial(edit_module.CheckLimits, update_norm=1e-3)
    monkeypatch.setattr(edit_module, "CheckLimits", strict)
    created = events(client, "/api/edits", EDIT)[-1]["edit"]
    assert "update norm" in created["complaints"][0]
    check_error(client.get(f"/api/edits/{created['id']}/adapter.zip"), 422, "fails its checks")


def test_the_least_recently_used_session_is_dropped() -> None:
    sessions = Sessions(ServerLimits(max_sessions=2, max_edits=1))
    fact = Fact(subject=TOWER, prompt="{} is in", target="Rome")
    edit = Edit(changes={}, model="m", fingerprint="f", method="rome", facts=(fact,))
    record = EditRecord(
        fact=fact, true=None, model="m", method="rome", changed_weights=(), prompts=()
    )
    for name in ("a", "b", "c"):
        sessions.store(name, edit, record, {})
    assert [len(sessions.edits(name)) for name in ("a", "b", "c")] == [0, 1, 1]


def test_too_many_edits(client: httpx.Client) -> None:
    for _ in range(LIMITS.max_edits):
        events(client, "/api/edits", EDIT)
    check_error(client.post("/api/edits", json=EDIT), 422, "remove one")


# ---- settings


def test_settings_of_the_forms_are_those_of_the_dataclasses(client: httpx.Client) -> None:
    about = client.get("/api/about").json()
    settings = {setting["name"]: setting for setting in about["trace_settings"]}
    assert list(settings) == list(TRACE_SETTINGS)
    assert settings["metric"]["help"] == settings_of(Tracing)["metric"].help
    assert settings["direction"]["choices"] == ["restore", "corrupt"]
    assert [setting["name"] for setting in about["table_settings"]] == list(TABLE_SETTINGS)
    assert settings["distribution"]["choices"] == ["gaussian", "uniform", "embedding", "tokens"]
    assert settings["noise"]["default"] == "3s"
    assert settings["replace"] == {
        "name": "replace", "control": "checkbox", "default": False, "choices": [], "min": None,
        "step": "any", "help": settings_of(Tracing)["replace"].help,
    }  # fmt: skip
    assert (settings["window"]["control"], settings["window"]["min"]) == ("number", 1)
    assert list(about["methods"]) == list(METHODS)
    for method in about["methods"].values():
        assert [setting["name"] for setting in method["settings"]] == list(EDIT_SETTINGS)


@pytest.mark.parametrize("method", METHODS)
def test_all_methods_edit(client: httpx.Client, method: str) -> None:
    # With the paper's weight decay, r-ROME does not converge on the random weights.
    body = {**EDIT, "method": method, "settings": {"weight-decay": 0}}
    if method == "memit":
        body |= {"layer": None, "layers": [0, 1]}
    created = events(client, "/api/edits", body)[-1]["edit"]
    assert created["method"] == method
    assert len(created["changed_weights"]) == (2 if method == "memit" else 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "memit"}, "give memit layers"),
        ({"method": "memit", "layer": None, "layers": [1, 0]}, "layers is 1 to 0"),
        ({"method": "memit", "layer": None, "layers": [0, 99]}, "layers is 0 to 99"),
        ({"layers": [0, 1]}, "give rome one layer"),
    ],
)
def test_invalid_layers(client: httpx.Client, change: dict[str, Any], message: str) -> None:
    check_error(client.post("/api/edits", json={**EDIT, **change}), 422, message)


def test_settings_reach_the_editor(client: httpx.Client) -> None:
    body = {**EDIT, "settings": {"token": "subject-first", "kl-weight": "0.5"}}
    created = events(client, "/api/edits", body)[-1]["edit"]
    record = EditRecord.from_json(client.get(f"/api/edits/{created['id']}/record.json").text)
    assert record.settings["token"] == "subject-first"
    assert record.settings["search"]["kl_weight"] == 0.5
    assert created["request"]["settings"] == body["settings"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"token": "middle"}, "token is 'middle'; choose from"),
        ({"kl-weight": "-inf"}, "give a number"),
        ({"kl-weight": True}, "give a number"),
        ({"stats": "/etc/passwd"}, "stats"),
        ({"prefixes": "/etc/passwd"}, "prefixes"),
        ({"steps": 10**9}, "steps"),
    ],
)
def test_invalid_settings_of_edits(
    client: httpx.Client, settings: dict[str, Any], message: str
) -> None:
    check_error(client.post("/api/edits", json={**EDIT, "settings": settings}), 422, message)


# ---- runs


def test_runs_are_listed_and_compared(client: httpx.Client) -> None:
    listed = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    assert set(listed) == {"rome", "ft", "traces", "broken", "torn", "surrogate", "latin-\\xe9"}
    assert "error" in listed["broken"]
    found = client.get("/api/tables", params={"run": ["rome", "ft"]}).json()
    assert found["command"] == "evaluate"
    rows = [row[0]["text"] for row in found["tables"][2]["rows"]]
    assert {"ROME", "FT"} <= {row.split(",")[0] for row in rows}
    for figure in found["figures"]:
        answer = client.get(f"/api/figures/{figure}.svg", params={"run": ["rome", "ft"]})
        assert answer.status_code == 200
        assert b"<svg" in answer.content
    cases = client.get("/api/cases", params={"run": ["rome", "ft"]}).json()["cases"]
    assert [case["id"] for case in cases] == ["7"]
    [samples] = client.get("/api/samples", params={"run": ["rome", "ft"], "case": "7"}).json()[
        "samples"
    ]
    assert set(samples["rows"][0]) == {"before", "ROME", "FT"}


def test_averages_of_a_run_of_traces(client: httpx.Client) -> None:
    found = client.get("/api/tables", params={"run": "traces"}).json()
    assert (found["command"], found["figures"]) == ("trace", ["heatmaps", "lines"])
    assert [len(table["rows"]) > 0 for table in found["tables"]] == [True, True]
    for figure in found["figures"]:
        response = client.get(f"/api/figures/{figure}.svg", params={"run": "traces"})
        assert b"<svg" in response.content
    mixed = {"run": ["traces", "rome"]}
    check_error(client.get("/api/tables", params=mixed), 422, "runs of several commands")


def test_two_runs_side_by_side(client: httpx.Client) -> None:
    both = {"run": ["rome", "ft"]}
    pair, settings, joint, *_ = client.get("/api/tables", params=both).json()["tables"]
    names = [column["name"] for column in pair["columns"]]
    assert names == ["metric", "rome", "ft", "difference", "cases"]
    cells = {row[0]["text"]: [cell["text"] for cell in row[1:]] for row in pair["rows"]}
    assert cells["ES"] == ["100.0", "0.0", "-100.0", "1"]
    [row] = settings["rows"]
    assert [cell["text"] for cell in row] == ["method", "rome", "ft"]
    definitions = {row[0]["text"]: row[0]["help"] for row in pair["rows"]}
    assert definitions["ES"].startswith("Efficacy score")
    assert joint["columns"][0]["name"] == "editor"
    csv = client.get("/api/tables/0.csv", params=both).text.splitlines()
    assert csv[0] == "metric,rome,rome ±,ft,ft ±,difference,difference ±,cases"
    assert r"\begin{tabular}" in client.get("/api/tables/0.tex", params=both).text
    again = client.get("/api/tables", params={"run": ["rome", "rome"]}).json()["tables"]
    assert again == client.get("/api/tables", params={"run": "rome"}).json()["tables"]


def test_settings_that_differ_between_runs(tmp_path: Path) -> None:
    for name, more in (("a", 'facts = "/home/me/a.json"'), ("b", ""), ("c", "")):
        (tmp_path / name).mkdir()
        spec = f'command = "trace"\nsha256 = "{name}"\n{more}\n[noise]\nmax_level = {len(more)}\n'
        (tmp_path / name / "spec.toml").write_text(spec)
    library = routes_runs.RunLibrary(tmp_path)
    _, [table] = routes_runs.tables_of(library, ["a", "b"])
    assert table.rows == (("facts", "a.json", "–"), ("noise max level", "25", "0"))
    assert routes_runs.tables_of(library, ["b", "c"]) == ("trace", [])
    with pytest.raises(BadSetting, match="give one or two"):
        routes_runs.tables_of(library, ["a", "b", "c"])


def test_figures_side_by_side_have_the_same_scales(runs: Path) -> None:
    from factscope.report.figures import distributions_figure
    from factscope.report.style import share_scales

    library = routes_runs.RunLibrary(runs)

    def limits(figure: Any) -> dict[str, tuple[float, float]]:
        return {ax.get_title(): ax.get_ylim() for ax in figure.axes if ax.get_title()}

    rome, ft = (distributions_figure(library.cases([name])) for name in ("rome", "ft"))
    before, other = limits(rome), limits(ft)
    share_scales(rome, ft)
    assert before != other
    assert limits(rome) == {
        title: (min(low, other[title][0]), max(high, other[title][1]))
        for title, (low, high) in before.items()
    }
    files = [
        routes_runs.draw_figure(library, ["rome"], "distributions.svg", beside)
        for beside in ([], ["ft"])
    ]
    assert files[0] != files[1]


def test_damaged_runs_do_not_stop_the_others(client: httpx.Client) -> None:
    """A torn last line, a name that is not UTF-8, and a lone surrogate in a record."""
    found = client.get("/api/tables", params={"run": ["torn", "rome"]})
    assert found.status_code == 200, found.text
    name = "latin-\\xe9"
    assert name in {run["name"] for run in client.get("/api/runs").json()["runs"]}
    check_error(client.get("/api/tables", params={"run": name}), 422, "no records yet")
    for path in ("tables", "cases", "samples", "figures/distributions.svg"):
        answer = client.get(f"/api/{path}", params={"run": "surrogate", "case": "7"})
        check_error(answer, 422, "surrogate")


def test_errors_do_not_name_folders_of_the_server(client: httpx.Client, runs: Path) -> None:
    listed = {run["name"]: run for run in client.get("/api/runs").json()["runs"]}
    messages = [listed["broken"]["error"]]
    for name in ("broken", "surrogate"):
        answer = client.get("/api/tables", params={"run": name})
        messages.append(check_error(answer, 422)["message"])
    for message in messages:
        assert str(runs.parent) not in message
        assert "spec.toml" in message or "records.jsonl" in message


def test_tables_and_figures_as_files(client: httpx.Client) -> None:
    both = {"run": ["rome", "ft"]}
    csv = client.get("/api/tables/2.csv", params=both)
    assert csv.text.startswith("editor,cases,failed,S ↑")
    assert csv.headers["content-disposition"] == 'attachment; filename="table-2.csv"'
    assert r"\begin{tabular}" in client.get("/api/tables/2.tex", params=both).text
    png = client.get("/api/figures/distributions.png", params=both)
    assert png.headers["content-type"] == "image/png"
    assert png.content.startswith(b"\x89PNG")
    columns = client.get("/api/tables", params=both).json()["tables"][2]["columns"]
    help_texts = {column["name"]: column["help"] for column in columns}
    assert help_texts["ES ↑"].startswith("Efficacy score")
    assert help_texts["editor"] is None
    for file in ("9.csv", "0.exe", "x.csv", "-1.csv"):
        check_error(client.get(f"/api/tables/{file}", params=both), 404, "no table")


def test_single_facts_of_a_run_of_traces(client: httpx.Client) -> None:
    [fact] = client.get("/api/facts", params={"run": "traces"}).json()["facts"]
    assert (fact["number"], fact["text"]) == (0, CITY)
    assert fact["warnings"]
    svg = client.get("/api/figures/fact-0.svg", params={"run": "traces"})
    assert b"<svg" in svg.content
    check_error(client.get("/api/figures/fact-1.svg", params={"run": "traces"}), 404)
    check_error(client.get("/api/facts", params={"run": "rome"}), 422, "a run of evaluate")


def test_a_figure_is_drawn_once(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    draw = routes_runs.draw_figure

    def counting(runs: Any, names: Any, file: str, beside: Any) -> bytes:
        drawn.append(file)
        return draw(runs, names, file, beside)

    monkeypatch.setattr(routes_runs, "draw_figure", counting)
    first = client.get("/api/figures/lines.pdf", params={"run": "traces"})
    again = client.get("/api/figures/lines.pdf", params={"run": "traces"})
    assert first.content == again.content
    assert drawn == ["lines.pdf"]


def test_waiting_figures_do_not_delay_other_requests(
    address: tuple[str, ServerState], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, started = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> bytes:
        started.set()
        assert release.wait(60)
        return b"<svg/>"

    monkeypatch.setattr(routes_runs, "draw_figure", slow)
    limit = LIMITS.max_reports

    def figure(number: int) -> int:
        url = f"{address[0]}/api/figures/fact-{number + 1000}.svg"
        return httpx.get(url, params={"run": "traces"}, timeout=60).status_code

    with ThreadPoolExecutor(60) as pool:
        waiting = [pool.submit(figure, number) for number in range(60)]
        assert started.wait(10)
        wait_for(lambda: sum(one.done() for one in waiting) == 60 - limit)  # refused
        assert client.get("/api/edits").status_code == 200
        assert client.post("/api/suggestions", json=FACT).status_code == 200
        assert events(client, "/api/predict", {})[-1]["event"] == "done"
        release.set()
    assert Counter(one.result() for one in waiting) == {200: limit, 503: 60 - limit}


def test_summaries_are_cached_until_the_records_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rome").mkdir()
    (tmp_path / "rome" / "spec.toml").write_text('command = "evaluate"\n')
    file, record = tmp_path / "rome" / "records.jsonl", case_record("rome", 0.1)
    file.write_text(json.dumps(record) + "\n")
    counted: list[int] = []

    def counting(records: list[CaseRecord]) -> list[Summary]:
        counted.append(len(records))
        return summarize(records)

    monkeypatch.setattr(routes_runs, "summarize", counting)
    runs = routes_runs.RunLibrary(tmp_path)
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
@pytest.mark.parametrize(
    "path", ["tables", "tables/0.csv", "figures/distributions.svg", "cases", "samples"]
)
def test_a_run_name_is_never_used_as_a_path(client: httpx.Client, name: str, path: str) -> None:
    check_error(
        client.get(f"/api/{path}", params={"run": name, "case": "7"}), 404, "there is no run"
    )


def test_runs_that_cannot_be_shown(client: httpx.Client) -> None:
    check_error(client.get("/api/tables", params={"run": "broken"}), 422, "cannot be read")
    check_error(client.get("/api/tables"), 422, "run")
    check_error(client.get("/api/samples", params={"run": "rome", "case": "9"}), 422, "no texts")
    check_error(client.get("/api/figures/nothing", params={"run": "rome"}), 404)


# ---- invalid and forbidden requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"subject": ""}, "the subject"),
        ({"subject": "Big Ben"}, "did you mean"),
        ({"prompt": "x" * 700}, "at most 600"),
        ({"prompt": "x" * 5000}, "4000"),
        ({"prompt": "The {} is"}, "must have one"),
        ({"settings": {"samples": 11}}, "at most 10"),
        ({"settings": {"samples": 0}}, "samples is 0; give 1 or more"),
        ({"settings": {"noise": -1}}, "noise is -1.0; give 0 or more"),
        ({"settings": {"noise": "3x"}}, "write 3s for three σ"),
        ({"settings": {"colour": "red"}}, "colour"),
        ({"settings": {"distribution": "<b>"}}, "gaussian"),
        ({"settings": {"window": 0}}, "window"),
        ({"settings": {"window": 1.5}}, "window"),
        ({"tables": ["<script>"]}, "choose from"),
        ({"tables": []}, "choose from"),
        ({"occurrence": 3}, "occurrence is 3, but the subject"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_invalid_traces(client: httpx.Client, change: dict[str, Any], message: str) -> None:
    body = {**TRACE, **change}
    if "The {} is" in str(change):
        body["subject"] = "The"
    check_error(client.post("/api/traces", json=body), 422, message)


def test_messages_are_those_of_the_command_line(client: httpx.Client) -> None:
    from factscope.errors import SubjectNotFound

    error = check_error(client.post("/api/traces", json={**TRACE, "subject": "Big Ben"}), 422)
    with pytest.raises(SubjectNotFound) as raised:
        Fact.from_text(CITY, "Big Ben")
    assert error == {"kind": "SubjectNotFound", "message": str(raised.value)}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800", '
     b'"subject": "\\ud800"}', b"[" * 20_000,
     b'{"prompt": "a b", "subject": "a", "settings": {"noise": NaN}}',
     b'{"prompt": "a b", "subject": "a", "settings": {"noise": 1e999, "seed": 1e400}}',
     b'{"prompt": "a b", "subject": "a", "settings": {"window": 99999999999999999999999999}}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/api/traces", "/api/edits", "/api/predict"])
def test_malformed_bodies(client: httpx.Client, path: str, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = client.post(path, content=body, headers=headers)
    assert answer.status_code in (400, 422), answer.text
    assert answer.json()["error"]["message"]


def test_control_characters_and_markup_are_text(client: httpx.Client) -> None:
    text = "<img src=x onerror=alert(1)>\x00\x1b[31m\u202e is in the city of"
    found = events(client, "/api/traces", {**TRACE, "prompt": text, "subject": "<img src=x"})
    assert found[-1]["event"] == "record"
    labels = "".join(found[-1]["labels"])
    assert "\x00" not in labels
    assert "\x1b" not in labels
    page = client.get(f"/api/traces/{found[-1]['name']}/page.html").text
    assert "<img src=x" not in page


def test_a_prompt_with_too_many_tokens(client: httpx.Client) -> None:
    body = {**TRACE, "prompt": TOWER + " a b" * 22}
    found = events(client, "/api/traces", body)
    assert found[-1]["error"]["kind"] == "PromptTooLong"
    assert "at most 48" in found[-1]["error"]["message"]


def test_bodies_that_are_too_large(client: httpx.Client) -> None:
    check_error(client.post("/api/traces", content=b"x" * 40_000), 413, "32768")

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    check_error(client.post("/api/traces", content=endless()), 413, "32768")


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
def test_requests_from_other_sites(
    client: httpx.Client, headers: dict[str, str], status: int
) -> None:
    responses = [
        client.get("/api/about", headers=headers),
        client.post("/api/predict", json={}, headers=headers),
    ]
    for answer in responses:
        assert answer.status_code == status
        if status == 403:
            assert answer.json()["error"]["kind"] == "ForbiddenOrigin"


def test_only_the_pages_own_scripts_can_run(client: httpx.Client) -> None:
    answer = client.get("/")
    for name, value in HEADERS.items():
        assert answer.headers[name] == value
    assert "unsafe" not in HEADERS["content-security-policy"]
    for path in ("main.js", "app.css", "page.css", "icon.svg"):
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
    check_error(client.get(path), 404)


# ---- the queue


def wait_for(condition: Any, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def other_trace(number: int) -> dict[str, Any]:
    return {**FACT, "settings": {"samples": 2, "window": 2, "seed": number + 100}}


def test_a_disconnect_cancels_the_job(
    address: tuple[str, ServerState], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, queue = endless_traces(monkeypatch), address[1].queue
    with client.stream("POST", "/api/traces", json=other_trace(1)):
        assert started.wait(10)
        assert len(queue) == 1
    wait_for(lambda: len(queue) == 0)


def test_queue_positions_and_a_full_queue(
    address: tuple[str, ServerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, queue = endless_traces(monkeypatch), address[1].queue
    clients = [httpx.Client(base_url=address[0], timeout=120) for _ in range(LIMITS.max_jobs + 1)]
    for one in clients:
        one.get("/")
    open_streams = []
    for number, one in enumerate(clients[:-1]):
        request = one.build_request("POST", "/api/traces", json=other_trace(number))
        answer = one.send(request, stream=True)
        lines = answer.iter_lines()
        assert json.loads(next(lines)) == {"event": "queued", "position": number}
        open_streams.append((answer, lines))
    assert started.wait(10)
    answer = clients[-1].post("/api/traces", json=other_trace(99))
    check_error(answer, 503, "try again")
    assert answer.headers["retry-after"]
    open_streams[0][0].close()  # the running job is cancelled; the others move up
    moved = [json.loads(line) for _, line in zip(range(1), open_streams[2][1], strict=False)]
    assert moved == [{"event": "queued", "position": 1}]
    for stream, _ in open_streams[1:]:
        stream.close()
    wait_for(lambda: len(queue) == 0)
    for one in clients:
        one.close()


def test_one_session_cannot_fill_the_queue(
    address: tuple[str, ServerState], client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless_traces(monkeypatch)
    streams = []
    for number in range(LIMITS.max_jobs_per_session):
        request = client.build_request("POST", "/api/traces", json=other_trace(number))
        streams.append(client.send(request, stream=True))
    check_error(client.post("/api/traces", json=other_trace(9)), 503, "of your jobs")
    for stream in streams:
        stream.close()
    wait_for(lambda: len(address[1].queue) == 0)


def test_after_a_failed_job_the_next_one_runs(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **more: Any) -> Any:
        raise ValueError("a secret path")

    with monkeypatch.context() as patch:
        patch.setattr("factscope.serve.routes_trace.stream_trace", broken)
        found = events(client, "/api/traces", other_trace(5))
    assert found[-1] == {
        "event": "error",
        "error": {
            "kind": "ServerError",
            "message": "internal error; see the server's log",
        },
    }
    assert events(client, "/api/traces", other_trace(5))[-1]["event"] == "record"


def test_a_cancelled_job_stops_before_the_next_forward_pass(lm: LM) -> None:
    import asyncio

    from factscope.lm.generate import generate_greedy

    state = ServerState(lm=lm)

    async def go() -> None:
        passes = 0

        def work(job: Any) -> None:
            nonlocal passes
            for _ in range(10_000):
                generate_greedy(lm, [CITY], 5)
                passes += 1

        job = state.queue.submit("a", work)
        await asyncio.sleep(0.2)
        state.queue.cancel(job)
        while (await asyncio.wait_for(job.events.get(), 120)) is not None:
            pass
        assert passes < 10_000
        for _ in range(state.limits.max_jobs_per_session):
            state.queue.submit("a", lambda job: time.sleep(0.1))
        with pytest.raises(ServerBusy):
            state.queue.submit("a", lambda job: None)

    asyncio.run(go())
    state.queue.close()


# ---- from the command line


@pytest.fixture
def factscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def test_the_command_prints_the_address(
    factscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import uvicorn

    seen: list[Any] = []

    def serve(self: Any, sockets: list[Any]) -> None:
        seen.append(sockets[0].getsockname())

    monkeypatch.setattr(uvicorn.Server, "run", serve)
    saved_model(tmp_path / "tiny")
    result = factscope("serve", "-m", "tiny", "--port", 0, "--runs", ".", "--device", "cpu")
    assert result.code == 0
    [(host, port)] = seen
    assert host == "127.0.0.1"
    assert f"http://127.0.0.1:{port}/" in result.out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = factscope("serve", "-m", "tiny", "--port", taken.getsockname()[1])
    assert result.code == 2
    assert "choose another --host or --port" in result.err


def test_errors_on_the_command_line(factscope: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give a folder of runs" in factscope("serve", "--runs", "nowhere").err
    monkeypatch.setitem(sys.modules, "factscope.serve.app", None)
    for name in [name for name in sys.modules if name.startswith("uvicorn")]:
        monkeypatch.setitem(sys.modules, name, None)
    result = factscope("serve")
    assert result.code == 2
    assert "factscope[serve]" in result.err


# ---- functions of other packages


def test_layers_with_statistics(lm: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from factscope.stats.second_moment import (
        SecondMoment,
        cached_path,
        layers_with_second_moments,
        save_second_moment,
    )

    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path))
    assert layers_with_second_moments(lm) == []
    width = lm.mlp_weight(1).shape[1]
    moment = SecondMoment(
        matrix=torch.eye(width), tokens=9, model=lm.name, layer=1, fingerprint=lm.fingerprint,
        corpus="none",
    )  # fmt: skip
    save_second_moment(moment, cached_path(lm, 1))
    assert layers_with_second_moments(lm) == [1]


def test_the_next_tokens_are_those_of_the_model(lm: LM) -> None:
    from factscope.lm.generate import generate_greedy, top_next_tokens
    from factscope.lm.tokens import encode

    found = top_next_tokens(lm, CITY, 3)
    logits = lm.model(torch.tensor([encode(lm, CITY).ids])).logits[0, -1]
    wanted = logits.float().softmax(-1).topk(3).values.tolist()
    assert [p for _, p in found] == pytest.approx(wanted)
    assert found[0][0] == generate_greedy(lm, [CITY], 1)[0]
