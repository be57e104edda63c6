"""The scripts in examples/ run on a tiny random model."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from factscope.editing.settings import ValueSearch
from factscope.tracing.settings import Corruption, Tracing

from families import LAYERS, tiny_model
from tokenizers_ import tokenizer

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    words = tokenizer("llama")
    words.save_pretrained(folder)
    tiny_model("llama", vocabulary=len(words)).save_pretrained(folder)
    return str(folder)


def example(name: str) -> ModuleType:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert lengths
    assert all(length <= 40 for length in lengths.values()), lengths


def test_trace_one_fact(model: str, tmp_path: Path):
    record = example("trace_one_fact").main(model, str(tmp_path / "trace.png"), samples=2)
    assert set(record.restored) == {"states", "mlp", "attn"}
    assert len(record.corrupted_samples) == 2
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


def test_average_effects(model: str, tmp_path: Path):
    facts = tmp_path / "facts.jsonl"
    # Without targets, because a random model answers none correctly.
    lines = [{"subject": name, "prompt": "{} is in"} for name in ("Rome", "Oslo", "Lima")]
    facts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = Tracing(corruption=Corruption(samples=2))
    out = tmp_path / "out"
    effects = example("average_effects").main(str(facts), model, str(out), settings=settings)
    assert effects["states"].facts == 3
    assert effects["states"].layers == LAYERS
    written = {path.name for path in out.iterdir()}
    assert written == {"records.jsonl", "heatmaps.png", "lines.png"}


def test_compare_corruptions(model: str, tmp_path: Path):
    records = example("compare_corruptions").main(model, str(tmp_path), samples=2)
    added, replaced = records["added"], records["replaced"]
    assert added.clean == replaced.clean
    assert added.corrupted_samples != replaced.corrupted_samples
    assert {path.name for path in tmp_path.iterdir()} == {"added.png", "replaced.png"}


def test_edit_one_fact(model: str, tmp_path: Path):
    # Settings with which a random model can be edited without breaking it.
    mild = {"token": "last", "prefix_lengths": (), "second_moment": "identity"}
    mild |= {"search": ValueSearch(steps=5, lr=0.05)}
    record = example("edit_one_fact").main(model, str(tmp_path), **mild)
    assert record.fact.target == "Rome"
    assert [scores.kind for scores in record.prompts] == ["prompt", "paraphrase", "neighbour"]
    assert {path.name for path in tmp_path.iterdir()} == {"rome.edit", "before-after.png"}
