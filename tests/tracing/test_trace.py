"""trace and trace_many: the same records for one fact or many, and when memory runs out.

find_known: the object comes before any other name in greedy text.
"""

import inspect
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

import factscope
from factscope.data.readers import everyday_facts
from factscope.errors import BadFact, BadModelFile, BadRecord, BadSetting
from factscope.facts import Fact
from factscope.lm.families import family_of
from factscope.lm.generate import generate_greedy
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.lm.tokens import encode
from factscope.records import TraceRecord, read_trace_records, write_records
from factscope.settings import build
from factscope.tracing import stream as stream_module
from factscope.tracing import trace as trace_module
from factscope.tracing.corruption import NoiseScale, default_noise_scale
from factscope.tracing.reference import ReferenceTrace
from factscope.tracing.settings import PRESETS, Corruption, Tracing
from factscope.tracing.stream import stream_trace
from factscope.tracing.trace import (
    CleanAnswer,
    clean_answers,
    find_known,
    text_before_target,
    trace,
    trace_many,
)

from families import tiny_model, tiny_text_lm
from tokenizers_ import tokenizer

QUICK = Tracing(corruption=Corruption(samples=2), window=2)
FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of"),
    Fact(subject="France", prompt="The capital of {} is"),
    Fact(subject="Rome", prompt="People who live in {}"),
    Fact(subject="Big Ben", prompt="{} is located in the city of", target="Nowhere"),
]


@pytest.fixture(scope="module")
def llama() -> LM:
    """A tiny model with a real tokenizer."""
    words = tokenizer("llama")
    model = tiny_model("llama", vocabulary=len(words))
    return LM(model=model, tokenizer=words, family=family_of(model), name="llama")


def by_fact(records: Iterable[TraceRecord]) -> dict[Fact, TraceRecord]:
    return {record.fact: record for record in records}


def assert_same(a: TraceRecord, b: TraceRecord) -> None:
    assert replace(a, clean=0.0, corrupted=0.0, corrupted_samples=(), restored={}) == replace(
        b, clean=0.0, corrupted=0.0, corrupted_samples=(), restored={}
    )
    for kind in a.restored:
        x, y = (np.array(r.restored[kind], dtype=float) for r in (a, b))
        np.testing.assert_allclose(x, y, rtol=1e-5)


def test_at_most_four_frames_between_trace_and_a_block(llama: LM) -> None:
    """A reader gets from `trace` to the model in a few steps."""
    root = str(Path(factscope.__file__).parent)
    start = inspect.unwrap(trace).__code__
    between: list[list[str]] = []

    def note(*_: object) -> None:
        frame: FrameType | None = sys._getframe()
        names = []
        while frame is not None and frame.f_code is not start:
            if frame.f_code.co_filename.startswith(root):
                names.append(frame.f_code.co_name)
            frame = frame.f_back
        assert frame is not None
        between.append(names)

    handle = llama.blocks[0].register_forward_pre_hook(note)
    try:
        trace(llama, FACTS[0], QUICK)
    finally:
        handle.remove()
    restored = [names for names in between if "restore" in names]
    assert restored
    assert max(map(len, between)) <= 4, between


def test_facts_traced_together_equal_facts_traced_alone(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Budget, "facts", lambda *args, **kwargs: 16)  # as on a GPU
    scale = default_noise_scale(llama, QUICK.corruption, FACTS)
    together = by_fact(trace_many(llama, FACTS, QUICK, scale=scale))
    for fact in FACTS[:3]:
        assert_same(together[fact], trace(llama, fact, QUICK, scale=scale))


def test_trace_many_records_an_unknown_fact_without_tables(llama: LM) -> None:
    fractions: list[float] = []
    records = by_fact(trace_many(llama, FACTS, QUICK, progress=fractions.append))
    assert sum(fractions) == pytest.approx(1)
    unknown = records[FACTS[3]]
    assert not unknown.known
    assert unknown.restored == {}
    assert all(records[fact].known for fact in FACTS[:3])
    assert not trace(llama, FACTS[3], QUICK).known  # trace traces it nevertheless
    assert trace(llama, FACTS[3], QUICK).restored


def test_a_fact_is_known_by_its_first_token_or_by_the_whole_word(llama: LM) -> None:
    answer = trace(llama, FACTS[0], QUICK).answer.strip()
    whole = replace(FACTS[0], target=answer or "x")
    longer = replace(FACTS[0], target=answer + "zzz")
    strict = replace(QUICK, known="whole-word")
    assert trace(llama, whole, strict).known
    assert not trace(llama, longer, strict).known


def test_the_record_of_the_clean_run(llama: LM) -> None:
    record = trace(llama, FACTS[1], QUICK)
    ids = torch.tensor([encode(llama, FACTS[1].text).ids])
    p = llama.model(ids).logits[0, -1].softmax(-1)
    assert record.clean == pytest.approx(p.max().item(), rel=1e-5)
    assert record.answer_id == int(p.argmax())
    assert "France" in "".join(record.tokens[slice(*record.subject)])
    assert record.settings["window"] == 2
    assert record.settings["sigma"] > 0
    assert record.total_effect == record.clean - record.corrupted


def test_the_paper_preset_adds_noise_in_the_baseline_even_with_replace(llama: LM) -> None:
    paper = replace(
        PRESETS["paper"], corruption=replace(PRESETS["paper"].corruption, samples=2, replace=True)
    )
    added = replace(paper, corruption=replace(paper.corruption, replace=False))
    same = replace(paper, corruption=replace(paper.corruption, baseline="same"))
    found = trace(llama, FACTS[1], paper)
    assert found.corrupted == pytest.approx(trace(llama, FACTS[1], added).corrupted, rel=1e-5)
    right = trace(llama, FACTS[1], same)
    assert right.corrupted != pytest.approx(found.corrupted, rel=1e-3)
    assert found.restored["states"][0][0] == pytest.approx(right.corrupted, rel=1e-5)


def test_out_of_memory_is_retried_in_halves(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = trace_module.restore, []

    def fails_for_several_facts(lm, run, segments, *args, **kwargs):
        sizes.append(len({segment.fact for segment in segments}))
        if sizes[-1] > 1:
            raise torch.OutOfMemoryError("too large")
        return real(lm, run, segments, *args, **kwargs)

    monkeypatch.setattr(trace_module, "restore", fails_for_several_facts)
    monkeypatch.setattr(Budget, "facts", lambda *args, **kwargs: 16)
    monkeypatch.setattr(CleanAnswer, "restorable", 1)
    records = list(trace_many(llama, FACTS[:3], QUICK))
    assert len(records) == 3
    assert sizes[0] == 3
    assert max(sizes[1:]) < 3


def test_progress_after_a_retry_adds_up_to_one(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = trace_module.restore, []

    def fails_once(lm, run, segments, cells, metric, sizes, progress, **kwargs):
        calls.append(sizes)
        if len(calls) == 1:
            progress(0.5)
            raise torch.OutOfMemoryError("too large")
        return real(lm, run, segments, cells, metric, sizes, progress, **kwargs)

    monkeypatch.setattr(trace_module, "restore", fails_once)
    fractions: list[float] = []
    trace(llama, FACTS[0], QUICK, progress=fractions.append)
    assert sum(fractions) == pytest.approx(1)
    assert min(fractions) >= 0
    assert calls[1].call < calls[0].call


def test_a_memory_limit_below_the_minimum_is_refused_and_the_minimum_works(llama: LM) -> None:
    message = r"max_memory is 0\.00390625 MiB, but .* needs \d+ MiB"
    with pytest.raises(BadSetting, match=message) as refused:
        trace(llama, FACTS[0], QUICK, memory=2**12)
    needed = re.search(r"needs (\d+) MiB", str(refused.value))
    assert needed is not None
    tight = trace(llama, FACTS[0], QUICK, memory=int(needed[1]) * 2**20)
    free = trace(llama, FACTS[0], QUICK, memory=2**30)
    for kind, table in free.restored.items():
        np.testing.assert_allclose(np.array(tight.restored[kind]), np.array(table), rtol=1e-5)


def test_other_errors_are_not_retried(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr(trace_module, "restore", broken)
    with pytest.raises(RuntimeError, match="something else"):
        trace(llama, FACTS[0], QUICK)


def test_progress_adds_up_to_one(llama: LM) -> None:
    fractions: list[float] = []
    settings = replace(QUICK, sever=("mlp",), sever_tokens="last-subject")
    trace(llama, FACTS[0], settings, progress=fractions.append)
    assert sum(fractions) == pytest.approx(1)
    assert min(fractions) >= 0


def test_a_model_dispatched_by_accelerate_is_traced_the_same(llama: LM) -> None:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = tiny_model("llama", vocabulary=len(llama.tokenizer))
    for part in model.modules():
        if not list(part.children()):
            add_hook_to_module(part, AlignDevicesHook(execution_device="cpu"))
    for block in model.model.layers:
        add_hook_to_module(block, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    lm = LM(model=model, tokenizer=llama.tokenizer, family=llama.family, name="llama")
    assert_same(trace(lm, FACTS[0], QUICK), trace(llama, FACTS[0], QUICK))


def test_records_are_written_and_read(llama: LM, tmp_path: Path) -> None:
    settings = replace(QUICK, sever=("attn",), sever_tokens="last-subject", kinds=("states",))
    record = trace(llama, FACTS[0], settings)
    path = tmp_path / "deep" / "records.jsonl"
    write_records(path, [record, record])
    assert list(read_trace_records(path)) == [
        replace(record, settings=found.settings) for found in read_trace_records(path)
    ]
    assert next(iter(read_trace_records(path))).settings["corruption"]["samples"] == 2
    path.write_text(record.to_json() + "\n{}\n")
    with pytest.raises(BadRecord, match="line 2"):
        list(read_trace_records(path))


def test_a_resumed_run_equals_an_uninterrupted_one(llama: LM) -> None:
    facts = [*FACTS, *everyday_facts()[:6]]
    uninterrupted = list(trace_many(llama, facts, QUICK))
    for cut in (0, 1, 5, len(facts)):
        first, fractions = uninterrupted[:cut], []
        finished = {record.fact for record in first}
        rest = list(trace_many(llama, facts, QUICK, finished=finished, progress=fractions.append))
        assert first + rest == uninterrupted
        assert sum(fractions) == pytest.approx(1)


@pytest.mark.parametrize(
    ("alignment", "window", "expected"),
    [
        ("paper-text", 10, (16, 26)),  # l-4 … l+5
        ("paper-code", 10, (15, 25)),  # l-5 … l+4
        ("paper-code", 5, (18, 23)),
        ("paper-text", 1, (20, 21)),
    ],
)
def test_windows_as_in_the_papers_text_and_in_its_code(
    alignment, window: int, expected: tuple[int, int]
) -> None:
    settings = Tracing(window_alignment=alignment, window=window)
    assert settings.window_around(20, 48) == expected
    assert settings.window_around(0, 48)[0] == 0
    assert settings.window_around(47, 48)[1] == 48


@pytest.mark.parametrize(
    "fields",
    [
        {"kinds": ("state",)},
        {"window": 0},
        {"sever": ("states",)},
        {"kinds": ("",)},
        {"sever": ("mlp",), "sever_draws": "two", "freeze_at": "all"},
    ],
)
def test_bad_settings_are_refused(fields: dict) -> None:
    with pytest.raises((BadSetting, TypeCheckError)):  # the latter where types are checked
        Tracing(**fields)


def test_a_bad_flag_names_the_choices() -> None:
    with pytest.raises(BadSetting, match=r"--kinds is 'state'; choose from states, mlp, attn"):
        build(Tracing(), {"kinds": "state"})


@pytest.mark.parametrize("level", [1e39, 1e7, math.nan, math.inf])
def test_absurd_noise_is_refused(level: float) -> None:
    with pytest.raises(BadSetting, match="level is"):
        Corruption(level=level)


def test_nan_in_the_clean_run_names_the_model() -> None:
    lm = tiny_text_lm("gpt2", spread=0.2)
    lm.mlp_weight(0).fill_(math.nan)
    for run in (lambda: trace(lm, FACTS[0], QUICK), lambda: generate_greedy(lm, ["Rome"], 2)):
        with pytest.raises(BadModelFile, match="tiny gpt2 predicts NaN"):
            run()


def test_nan_in_the_corrupted_run_names_the_noise(llama: LM) -> None:
    scale = NoiseScale(sigma=1e39)
    for run in (trace, lambda *words, scale: list(stream_trace(*words, scale=scale))):
        with pytest.raises(BadSetting, match=r"NaN in the corrupted run of .* noise level is 3s"):
            run(llama, FACTS[0], QUICK, scale=scale)


def test_nan_in_a_restored_run_is_not_recorded_as_unmeasured(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(lm, run, segments, cells, *args, **kwargs):
        return torch.full((len(segments), len(cells)), torch.nan)

    for module in (trace_module, stream_module):
        monkeypatch.setattr(module, "restore", broken)
    for run in (trace, lambda *words: list(stream_trace(*words))):
        with pytest.raises(BadSetting, match="NaN in a restored run"):
            run(llama, FACTS[0], QUICK)


def test_a_given_answer_is_traced(llama: LM) -> None:
    """Its probability is the product over its tokens."""
    record = trace(llama, FACTS[0], QUICK, answer="Paris, France")
    ids = encode(llama, FACTS[0].text + " Paris, France").ids
    n = len(encode(llama, FACTS[0].text))
    assert len(ids) > n + 1
    p = llama.model(torch.tensor([ids])).logits[0].softmax(-1)
    wanted = math.prod(p[i - 1, ids[i]].item() for i in range(n, len(ids)))
    assert record.clean == pytest.approx(wanted, rel=1e-4, abs=0)
    assert (record.answer, record.answer_id, record.known) == (" Paris, France", ids[n], True)
    assert record.restored["states"][-1][-1] != pytest.approx(record.clean, rel=1e-3, abs=0)
    assert not trace(llama, FACTS[3], QUICK, answer="Paris").known
    with pytest.raises(BadFact, match="answer is ' '"):
        trace(llama, FACTS[0], QUICK, answer=" ")


@pytest.mark.model
def test_the_default_model_equals_the_reference(default_model: LM) -> None:
    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Paris")
    settings = Tracing(corruption=Corruption(samples=1))
    record = trace(default_model, fact, settings)
    assert record.known
    assert record.answer == " Paris"
    assert record.clean == pytest.approx(0.70, abs=0.02)
    assert record.corrupted < 0.2
    scale = default_noise_scale(default_model, settings.corruption, [fact])
    [answer] = clean_answers(default_model, [fact], settings)
    slow = ReferenceTrace(default_model, answer, settings, scale)
    assert record.corrupted == pytest.approx(slow.corrupted, rel=1e-4)
    for kind, t, layer in [("states", 2, 3), ("mlp", 2, 2), ("attn", 9, 18), ("states", 9, 25)]:
        found = record.restored[kind][t][layer]
        assert found == pytest.approx(slow.restored(kind, t, layer), rel=1e-4)


@pytest.mark.model
def test_the_default_model_knows_most_of_the_packages_facts(default_model: LM) -> None:
    answers = clean_answers(default_model, everyday_facts(), Tracing())
    assert sum(answer.known for answer in answers) / len(answers) > 0.5


# ---- find_known

GENERATED = [
    ("Paris", " Paris, France", " "),
    ("Paris", " the city of Paris.", " the city of "),
    ("Paris", "Paris", ""),
    ("Paris", " London, not Paris", None),  # another name first
    ("Paris", " the Seine, in Paris", None),
    ("Paris", " the Parisian suburbs", None),  # within a longer word
    ("Paris", " a Parisian street in Paris", None),
    ("Paris", " cosmoParis and Paris", " cosmoParis and "),  # not at the start of a word
    ("Paris", " paris", None),
    ("Paris", " nothing of the kind", None),
    ("Paris", "", None),
    ("Paris", " 2024 and Paris", " 2024 and "),  # a number is no name
    ("Paris", ' the "Île" in Paris', None),  # capitals beyond ASCII
    ("Paris", " Ödön of Paris", None),
    ("Paris", " Ω and Paris", None),
    ("Paris", " été à Paris", " été à "),
    ("東京", " 日本の 東京", " 日本の "),  # letters without case
    (" Paris ", " Paris", " "),
    ("C++", " C++ and Java", " "),
    ("New York", " the New York Times", " the "),
    ("New York", " New Orleans", None),
    ("basketball", " the sport of basketball", " the sport of "),
]


@pytest.mark.parametrize(("target", "text", "expected"), GENERATED)
def test_the_text_before_the_target(target: str, text: str, expected: str | None) -> None:
    assert text_before_target(target, text) == expected


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return tiny_text_lm("gpt2", spread=0.2)


def test_find_known_extends_the_prompt_up_to_the_object(
    gpt2: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        "The Eiffel Tower is": " in the city of Paris.",
        "The Space Needle is": " in Portland, not Seattle.",
        "The Colosseum is in": " Rome, of course",
        "The Nile is": " a set {} of Egypt",
    }
    calls: list[tuple[list[str], int]] = []

    def generate(lm: LM, texts: Sequence[str], tokens: int) -> list[str]:
        calls.append((list(texts), tokens))
        return [answers[text] for text in texts]

    monkeypatch.setattr(trace_module, "generate_greedy", generate)
    facts = [
        Fact(subject="The Eiffel Tower", prompt="{} is", target="Paris", id="a", relation="P1"),
        Fact(subject="Space Needle", prompt="The {} is", target="Seattle"),
        Fact(subject="Colosseum", prompt="The {} is in", target="Rome"),
        Fact(subject="Nile", prompt="The {} is", target="Egypt"),
    ]
    fractions: list[float] = []
    found = list(find_known(gpt2, facts, max_new_tokens=7, batch_size=3, progress=fractions.append))
    assert found == [
        (
            Fact(
                subject="The Eiffel Tower",
                prompt="{} is in the city of",
                target="Paris",
                id="a",
                relation="P1",
            ),
            " in the city of Paris.",
        ),
        (facts[2], " Rome, of course"),
    ]
    assert [tokens for _, tokens in calls] == [7, 7]
    assert [len(texts) for texts, _ in calls] == [3, 1]
    assert fractions == [3 / 4, 1 / 4]


def test_find_known_needs_targets(gpt2: LM) -> None:
    with pytest.raises(BadFact, match=r"Oslo.*target"):
        list(find_known(gpt2, [Fact(subject="Oslo", prompt="{} is")]))
