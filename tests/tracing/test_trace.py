"""trace and trace_many: facts in, records out, whatever is batched with what."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from factscope.data.readers import everyday
from factscope.errors import BadRecord, BadRunFolder, BadSetting
from factscope.facts import Fact
from factscope.lm.families import family_of
from factscope.lm.memory import Budget, parse_bytes
from factscope.lm.model import LM
from factscope.lm.tokens import encode
from factscope.records import TraceRecord, read_records, write_records
from factscope.runs.folder import RunFolder
from factscope.tracing import trace as module
from factscope.tracing.reference import ReferenceTrace
from factscope.tracing.settings import PRESETS, Corruption, Tracing, window_around
from factscope.tracing.trace import CleanAnswer, clean_answers, trace, trace_many

from families import tiny_model
from tokenizers_ import tokenizer

QUICK = Tracing(corruption=Corruption(samples=2), window=2)
FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of"),
    Fact(subject="France", prompt="The capital of {} is"),
    Fact(subject="Rome", prompt="People who live in {}"),
    Fact(subject="Big Ben", prompt="{} is located in the city of", target="Nowhere"),
]


@pytest.fixture(scope="module")
def worded() -> LM:
    """A tiny model with a real tokenizer."""
    words = tokenizer("llama")
    model = tiny_model("llama", vocabulary=len(words))
    return LM(model=model, tokenizer=words, family=family_of(model), name="worded")


def by_fact(records) -> dict[Fact, TraceRecord]:
    return {record.fact: record for record in records}


def same(a: TraceRecord, b: TraceRecord) -> None:
    assert replace(a, clean=0.0, corrupted=0.0, corrupted_samples=(), restored={}) == replace(
        b, clean=0.0, corrupted=0.0, corrupted_samples=(), restored={}
    )
    for kind in a.restored:
        x, y = (np.array(r.restored[kind], dtype=float) for r in (a, b))
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_many_at_once_are_as_one_by_one(worded: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budget, "facts", lambda *args, **kwargs: 16)  # as on a GPU
    scale = module.default_scale(worded, QUICK.corruption, FACTS)
    together = by_fact(trace_many(worded, FACTS, QUICK, scale=scale))
    for fact in FACTS[:3]:
        same(together[fact], trace(worded, fact, QUICK, scale=scale))


def test_an_unknown_fact_is_recorded_without_a_trace(worded: LM) -> None:
    heard: list[int] = []
    records = by_fact(trace_many(worded, FACTS, QUICK, progress=heard.append))
    assert sum(heard) == len(FACTS)
    unknown = records[FACTS[3]]
    assert not unknown.known
    assert unknown.restored == {}
    assert all(records[fact].known for fact in FACTS[:3])
    assert not trace(worded, FACTS[3], QUICK).known  # asked for alone it is traced all the same
    assert trace(worded, FACTS[3], QUICK).restored


def test_the_target_may_be_the_answers_first_token_or_must_be_all_of_it(worded: LM) -> None:
    bare = trace(worded, FACTS[0], QUICK)
    whole = replace(FACTS[0], target=bare.answer.strip() or "x")
    longer = replace(FACTS[0], target=bare.answer.strip() + "zzz")
    strict = replace(QUICK, known="whole_word")
    assert trace(worded, whole, strict).known
    assert not trace(worded, longer, strict).known


def test_records_hold_what_the_runs_gave(worded: LM) -> None:
    record = trace(worded, FACTS[1], QUICK)
    ids = torch.tensor([encode(worded, FACTS[1].text).ids])
    p = worded.model(ids).logits[0, -1].softmax(-1)
    assert record.clean == pytest.approx(p.max().item(), rel=1e-5)
    assert record.answer_id == int(p.argmax())
    assert "France" in "".join(record.tokens[slice(*record.subject)])
    assert record.settings["window"] == 2
    assert record.settings["sigma"] > 0
    assert record.total_effect == record.clean - record.corrupted


def test_the_papers_oversight_with_replaced_embeddings(worded: LM) -> None:
    """Its corrupted score is that of added noise, whatever was replaced in the traces."""
    paper = replace(
        PRESETS["paper"], corruption=replace(PRESETS["paper"].corruption, samples=2, replace=True)
    )
    added = replace(paper, corruption=replace(paper.corruption, replace=False))
    same_run = replace(paper, corruption=replace(paper.corruption, baseline="same"))
    found = trace(worded, FACTS[1], paper)
    assert found.corrupted == pytest.approx(trace(worded, FACTS[1], added).corrupted, rel=1e-5)
    right = trace(worded, FACTS[1], same_run)
    assert right.corrupted != pytest.approx(found.corrupted, rel=1e-3)
    assert found.restored["states"][0][0] == pytest.approx(right.corrupted, rel=1e-5)


def test_out_of_memory_is_tried_again_in_halves(
    worded: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = module.trace_batch, []

    def once_too_large(lm, questions, settings, scale, budget, done):
        sizes.append(len(questions))
        if len(questions) > 1:
            raise torch.OutOfMemoryError("too large")
        return real(lm, questions, settings, scale, budget, done)

    monkeypatch.setattr(module, "trace_batch", once_too_large)
    monkeypatch.setattr(Budget, "facts", lambda *args, **kwargs: 16)
    monkeypatch.setattr(CleanAnswer, "restorable", 1)
    records = list(trace_many(worded, FACTS[:3], QUICK))
    assert len(records) == 3
    assert sizes[0] == 3
    assert max(sizes[1:]) < 3


def test_other_errors_are_not_taken_for_lack_of_memory(
    worded: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr(module, "trace_batch", broken)
    with pytest.raises(RuntimeError, match="something else"):
        trace(worded, FACTS[0], QUICK)


def test_progress_within_a_trace_adds_up_to_one(worded: LM) -> None:
    shares: list[float] = []
    settings = replace(QUICK, sever=("mlp",), sever_rows="last_subject")
    trace(worded, FACTS[0], settings, progress=shares.append)
    assert sum(shares) == pytest.approx(1)
    assert min(shares) >= 0


def test_a_model_held_by_accelerate_is_traced_the_same(worded: LM) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    held = tiny_model("llama", vocabulary=len(worded.tokenizer))
    for part in held.modules():
        if not list(part.children()):
            add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    for block in held.model.layers:
        add_hook_to_module(block, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    lm = LM(model=held, tokenizer=worded.tokenizer, family=worded.family, name="worded")
    same(trace(lm, FACTS[0], QUICK), trace(worded, FACTS[0], QUICK))


def test_records_go_to_disk_and_back(worded: LM, tmp_path) -> None:
    settings = replace(QUICK, sever=("attn",), sever_rows="last_subject", kinds=("states",))
    record = trace(worded, FACTS[0], settings)
    path = tmp_path / "deep" / "records.jsonl"
    write_records(path, [record, record])
    assert list(read_records(path)) == [
        replace(record, settings=found.settings) for found in read_records(path)
    ]
    assert next(iter(read_records(path))).settings["corruption"]["samples"] == 2
    path.write_text(record.to_json() + "\n{}\n")
    with pytest.raises(BadRecord, match="line 2"):
        list(read_records(path))


def test_a_run_broken_off_and_taken_up_equals_an_unbroken_one(worded: LM) -> None:
    facts = [*FACTS, *everyday()[:6]]
    unbroken = list(trace_many(worded, facts, QUICK))
    for cut in (0, 1, 5, len(facts)):
        first = unbroken[:cut]
        rest = list(trace_many(worded, facts, QUICK, finished={r.fact for r in first}))
        assert first + rest == unbroken


def test_a_run_is_tied_to_its_spec_and_to_the_weights(tmp_path) -> None:
    spec, info = {"model": "m", "limit": None}, {"model_fingerprint": "abc"}
    RunFolder.begin(tmp_path / "run", spec, info)
    RunFolder.begin(tmp_path / "run", spec, info)
    with pytest.raises(BadRunFolder, match="other weights"):
        RunFolder.begin(tmp_path / "run", spec, {"model_fingerprint": "def"})
    with pytest.raises(BadRunFolder, match="limit = 3"):
        RunFolder.begin(tmp_path / "run", {"model": "m", "limit": 3}, info)


def test_a_run_killed_at_its_very_beginning_begins_again(tmp_path) -> None:
    (tmp_path / "info.json").write_text("{}")
    (tmp_path / "spec.toml.partial").write_text("mod")
    RunFolder.begin(tmp_path, {"model": "m"}, {})
    assert RunFolder.open(tmp_path).records() == []


@pytest.mark.parametrize(
    ("alignment", "window", "wanted"),
    [
        ("text", 10, (16, 26)),  # l-4 … l+5
        ("code", 10, (15, 25)),  # l-5 … l+4
        ("code", 5, (18, 23)),
        ("text", 1, (20, 21)),
    ],
)
def test_windows_as_the_paper_says_and_as_its_code_does(
    alignment, window: int, wanted: tuple[int, int]
) -> None:
    settings = Tracing(alignment=alignment, window=window)
    assert window_around(settings, 20, 48) == wanted
    assert window_around(settings, 0, 48)[0] == 0
    assert window_around(settings, 47, 48)[1] == 48


@pytest.mark.parametrize(
    "fields", [{"kinds": ("state",)}, {"window": 0}, {"sever": ("states",)}, {"kinds": ("",)}]
)
def test_settings_that_do_not_exist(fields: dict) -> None:
    with pytest.raises(BadSetting):
        Tracing(**fields)


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("500M", 500 * 2**20), ("1.5 kb", 1536), ("77", 77)]
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "lots", "0"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadSetting, match="4GiB"):
        parse_bytes(text)


def test_public_names_exist() -> None:
    import factscope

    assert {n for names in factscope._HOMES.values() for n in names} == set(factscope.__all__)
    for name in factscope.__all__:
        assert getattr(factscope, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        factscope.__getattr__("nothing")


def test_the_packages_own_facts() -> None:
    facts = everyday()
    assert len(facts) >= 60
    assert len({fact.id for fact in facts}) == len(facts)
    assert all(fact.target for fact in facts)


@pytest.mark.model
def test_the_default_model_end_to_end(default_model: LM) -> None:
    """The real thing: the engine against the slow twin on cells all over the table."""
    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Paris")
    settings = Tracing(corruption=Corruption(samples=1))
    record = trace(default_model, fact, settings)
    assert record.known
    assert record.answer == " Paris"
    assert record.clean == pytest.approx(0.70, abs=0.02)
    assert record.corrupted < 0.2
    scale = module.default_scale(default_model, settings.corruption, [fact])
    [question] = clean_answers(default_model, [fact], settings)
    slow = ReferenceTrace.of(default_model, question, settings, scale)
    assert record.corrupted == pytest.approx(slow.corrupted, rel=1e-4)
    for kind, t, layer in [("states", 2, 3), ("mlp", 2, 2), ("attn", 9, 18), ("states", 9, 25)]:
        found = record.restored[kind][t][layer]
        assert found == pytest.approx(slow.restored(kind, t, layer), rel=1e-4)


@pytest.mark.model
def test_the_default_model_knows_most_of_the_packages_facts(default_model: LM) -> None:
    asked = clean_answers(default_model, everyday(), Tracing())
    assert sum(q.known for q in asked) / len(asked) > 0.5
