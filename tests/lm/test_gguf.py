"""Tokenizer checks: the reference of a GGUF file, missing merges, likelihood. No network."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from factscope.errors import BadModelFile
from factscope.lm import sources
from factscope.lm.check import MIN_REACHABLE, likelihood, reachable_tokens
from factscope.lm.gguf import SAMPLES, GgufTokenizer, read_fields
from factscope.lm.load import load
from factscope.lm.model import LM

from commands import saved_model
from ggufs import PRE_TOKENIZERS, write_gguf
from tokenizer_check import cases, keep_merges, rebuilt, shift_ids
from tokenizers_ import KINDS, TEXT, tokenizer

STYLES = [*sorted(PRE_TOKENIZERS), "llama", "gemma, hub"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FACTSCOPE_CACHE", str(folder))
    return folder


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def file(style: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", style)


# ---- the reference


def test_fields_are_those_that_the_gguf_package_reads(file: Path) -> None:
    wanted = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    found = read_fields(file)
    assert found
    for name, value in found.items():
        assert value == wanted[name], name


def test_the_reference_encodes_as_the_tokenizer_that_the_file_was_written_from(
    file: Path, style: str
) -> None:
    reference = GgufTokenizer.of(read_fields(file))
    for text in [*TEXT.splitlines(), *reference.samples]:
        wanted = tokenizer(style)(text, add_special_tokens=False)["input_ids"]
        assert reference.encode(text) == wanted, text


def test_a_gguf_has_the_tokens_of_its_vocabulary(file: Path, style: str) -> None:
    lm = load(file, device="cpu")
    for text in [*TEXT.splitlines(), *SAMPLES]:
        assert lm.tokenizer(text)["input_ids"] == tokenizer(style)(text)["input_ids"], text
        assert (
            lm.tokenizer.decode(lm.tokenizer(text, add_special_tokens=False)["input_ids"]) == text
        )


def test_an_unknown_pre_tokenizer_is_checked_in_words_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = load(write_gguf(tmp_path / "new.gguf", pre="brand-new"), device="cpu")
    assert "'brand-new' is not known, so only single words were checked" in caplog.text
    assert lm.tokenizer("The")["input_ids"] == tokenizer("gpt2")("The")["input_ids"]


# ---- wrong tokenizers

Damage = Callable[[dict[str, Any]], None]


def no_bos(content: dict[str, Any]) -> None:
    content["post_processor"] = None


def joined_digits(content: dict[str, Any]) -> None:
    """As transformers reads a file whose pre-tokenizer it does not know: as GPT-2."""
    content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False}
    content["pre_tokenizer"] |= {"trim_offsets": True, "use_regex": True}


def no_space_before(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}


WRONG: dict[str, tuple[str, Damage, str]] = {
    "missing merges": ("gpt2", keep_merges(0.5), "the file's vocabulary gives"),
    "missing merges, SentencePiece": ("gemma, hub", keep_merges(0.5), "the file's vocabulary"),
    "shifted ids": ("gpt2", shift_ids, r"the file's vocabulary gives \d+ '"),
    "shifted ids, SentencePiece": ("gemma, hub", shift_ids, "the file's vocabulary gives"),
    "no BOS": ("llama", no_bos, r"with special tokens as \d+ '▁The'.*rules give 1 '<s>'"),
    "digits": ("gpt2, smollm", joined_digits, "encodes '.*1969"),
    "no leading space": ("llama", no_space_before, "encodes 'The' as"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_tokenizer_is_refused(
    case: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever version of transformers reads the file."""
    style, damage, words = WRONG[case]
    style, _, pre = style.partition(", ") if "smollm" in style else (style, "", None)
    path, right = write_gguf(tmp_path / "tiny.gguf", style, pre=pre), sources._tokenizer
    monkeypatch.setattr(sources, "_tokenizer", lambda *args: rebuilt(right(*args), damage))
    with pytest.raises(BadModelFile, match=rf"tiny\.gguf.*{words}.*--no-check-model"):
        load(path, device="cpu")
    assert not list((cache / "models").iterdir())  # nothing half-written
    assert load(path, device="cpu", check=False).n_layers == 2


def test_another_models_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_tokenizer", lambda *args: tokenizer("llama"))
    with pytest.raises(BadModelFile, match="the file's vocabulary gives"):
        load(write_gguf(tmp_path / "tiny.gguf", "gpt2"), device="cpu")


def test_a_wrong_eos_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> Any:
        changed = right(*args)
        changed.eos_token = "<unk>"
        return changed

    right = sources._tokenizer
    monkeypatch.setattr(sources, "_tokenizer", wrong)
    with pytest.raises(BadModelFile, match="EOS token 0, the file has 2"):
        load(write_gguf(tmp_path / "tiny.gguf", "llama"), device="cpu")


def test_a_converted_model_is_checked_again_when_it_is_loaded(tmp_path: Path, cache: Path) -> None:
    """Another version of the tokenizers package can read the saved tokenizer differently."""
    path = write_gguf(tmp_path / "tiny.gguf")
    load(path, device="cpu")
    [saved] = (cache / "models").glob("*/tokenizer.json")
    content = json.loads(saved.read_text())
    keep_merges(0.5)(content)
    saved.write_text(json.dumps(content))
    with pytest.raises(BadModelFile, match="the file's vocabulary gives"):
        load(path, device="cpu")


# ---- models that are no GGUF files


@pytest.mark.parametrize("style", KINDS)
def test_missing_merges_are_noticed_without_the_file(style: str) -> None:
    right = tokenizer(style)
    assert reachable_tokens(right) == 1
    half = reachable_tokens(rebuilt(right, keep_merges(0.5)))
    assert half is not None
    assert half < 0.55
    most = reachable_tokens(rebuilt(right, keep_merges(0.9)))
    assert most is not None
    assert most > MIN_REACHABLE


def test_a_folder_with_half_of_the_merges_is_refused(tmp_path: Path) -> None:
    folder = saved_model(tmp_path / "model")
    load(str(folder), device="cpu")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    keep_merges(0.5)(content)
    content["model"]["ignore_merges"] = True  # hides it for words of the vocabulary
    file.write_text(json.dumps(content))
    with pytest.raises(BadModelFile, match=r"lead to only 50 % of its vocabulary.*--no-check-mo"):
        load(str(folder), device="cpu")
    changed = load(str(folder), device="cpu", check=False)
    reachable_tokens(changed.tokenizer)
    assert changed.tokenizer.backend_tokenizer.model.ignore_merges


def test_only_bpe_tokenizers_have_merges() -> None:
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    )
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    suffix = models.BPE({"a": 0, "a</w>": 1, "aa</w>": 2}, [("a", "a</w>")])
    suffix.end_of_word_suffix = "</w>"
    ends = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(suffix))
    assert [reachable_tokens(x) for x in (words, letters, ends)] == [None] * 3


@pytest.mark.model
def test_the_merges_of_the_default_model_lead_to_its_vocabulary(default_model: LM) -> None:
    assert reachable_tokens(default_model.tokenizer) == 1


# ---- likelihood


@pytest.mark.model
def test_the_likelihood_of_english_tells_wrong_tokens(default_model: LM) -> None:
    wanted = {"its own": True, "ids shifted by one": False, "0% of the merges": False}
    for name, changed in cases(default_model, []):
        if name in wanted:
            found = likelihood(changed)
            assert found.trained, name
            assert found.plausible == wanted.pop(name), name
        if name == "its own, random weights":
            assert not likelihood(changed).trained
    assert not wanted
    other = replace(default_model, tokenizer=tokenizer("qwen"))
    assert not likelihood(other).plausible
