"""Exports: peft and transformers load them and compute what the edited model computes."""

import json
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import factscope
from factscope.editing.edit import Change, Dense, Edit, EditChecks, LowRank, applied_edits
from factscope.editing.export import energy_kept, export_checkpoint, export_peft
from factscope.errors import BadEdit, BadSetting, UnsafeEdit
from factscope.lm.load import from_model
from factscope.lm.model import LM
from factscope.lm.sources import DEFAULT_MODEL

from editing_facts import text_lm
from edits import (
    BIASED,
    IDS,
    assert_same,
    attention,
    dense,
    edit_of,
    logits,
    low_rank,
    mlp,
    some_edits,
    state_of,
)
from families import tiny, tiny_model
from tokenizers_ import FAMILIES as TOKENIZERS
from tokenizers_ import tokenizer

UNSAFE = EditChecks(
    division_factor=0.5, update_norm=9.0, perplexity_before=9.0, perplexity_after=9.0
)


def weights_edit(lm: LM) -> Edit:
    """Several layers and ranks, dense and low rank, MLP outputs and attention inputs."""
    return edit_of(
        lm,
        {
            mlp(lm, 0): low_rank(lm, mlp(lm, 0), 1),
            mlp(lm, 2): low_rank(lm, mlp(lm, 2), 3, seed=1),
            mlp(lm, 1): dense(lm, mlp(lm, 1), seed=2),
            **{name: low_rank(lm, name, 2, seed=3) for name in attention(lm, 1)},
            attention(lm, 2)[0]: dense(lm, attention(lm, 2)[0], seed=4),
        },
    )


@torch.no_grad()
def peft_logits(lm: LM, folder: Path, *, merge: bool = False) -> Tensor:
    """The logits of a fresh model with the adapter; a warning of peft is an error."""
    base = tiny_model(lm.name.removeprefix("tiny ")).to(lm.dtype)
    model: Any = peft.PeftModel.from_pretrained(base, str(folder))
    model.eval()
    if merge:
        model = model.merge_and_unload()
    return model(IDS).logits


def applied_logits(lm: LM, edits: Sequence[Edit]) -> Tensor:
    if not edits:
        return logits(lm)
    with edits[0].applied(lm):
        return applied_logits(lm, edits[1:])


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-4


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return tiny("gpt2")


@pytest.fixture(scope="module")
def llama() -> LM:
    return tiny("llama")


# ---- peft


def test_peft_computes_the_same_logits(lm: LM, tmp_path: Path) -> None:
    edit, before = weights_edit(lm), state_of(lm)
    export_peft(edit, lm, tmp_path / "adapter")
    assert_same(state_of(lm), before)
    wanted = applied_logits(lm, [edit])
    assert_close(peft_logits(lm, tmp_path / "adapter"), wanted)
    assert_close(peft_logits(lm, tmp_path / "adapter", merge=True), wanted)


@pytest.mark.parametrize("family", BIASED)
def test_adapters_with_biases(family: str, tmp_path: Path) -> None:
    lm = tiny(family)
    both, bias = mlp(lm, 0, "bias"), mlp(lm, 1, "bias")
    changes: dict[str, Change] = {
        both: dense(lm, both),
        mlp(lm, 0): low_rank(lm, mlp(lm, 0), 2),
        bias: dense(lm, bias, seed=1),
        mlp(lm, 2): low_rank(lm, mlp(lm, 2), 2, seed=2),
    }
    edit = edit_of(lm, changes)
    export_peft(edit, lm, tmp_path / "adapter")
    wanted = applied_logits(lm, [edit])
    assert_close(peft_logits(lm, tmp_path / "adapter"), wanted)
    assert_close(peft_logits(lm, tmp_path / "adapter", merge=True), wanted)


def test_a_bias_change_next_to_a_layer_without_bias(tmp_path: Path) -> None:
    """Qwen 2 has biases in its attention only; peft rightly warns that it cannot merge."""
    lm = tiny("qwen2")
    bias = attention(lm, 1)[0].replace("weight", "bias")
    edit = edit_of(lm, {bias: dense(lm, bias), mlp(lm, 1): low_rank(lm, mlp(lm, 1), 2)})
    export_peft(edit, lm, tmp_path / "adapter")
    with pytest.warns(match="has no bias"):
        found = peft_logits(lm, tmp_path / "adapter")
    assert_close(found, applied_logits(lm, [edit]))


def test_only_edited_layers_get_adapters(lm: LM, tmp_path: Path) -> None:
    edit = edit_of(lm, {mlp(lm, 1): low_rank(lm, mlp(lm, 1), 2)})
    export_peft(edit, lm, tmp_path / "adapter")
    base = tiny_model(lm.name.removeprefix("tiny "))
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    touched = {n.split(".lora_")[0] for n, _ in model.named_parameters() if ".lora_" in n}
    assert touched == {f"base_model.model.{lm.name_of(lm.mlp_out(1))}"}


def test_full_module_names_match_no_other_layer(tmp_path: Path) -> None:
    """With many targets peft looks for shorter module names, which could match other layers."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "gpt2", vocab_size=100, n_embd=8, n_layer=12, n_head=2, n_positions=16
    )
    torch.manual_seed(1)  # with some seeds so small a model amplifies rounding errors a hundredfold
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    twin = AutoModelForCausalLM.from_config(config).eval()
    twin.load_state_dict(model.state_dict())
    lm = replace(tiny("gpt2"), model=model)
    names = [mlp(lm, layer) for layer in (1, 10)]
    names += [attention(lm, layer)[0] for layer in range(12) if layer != 11]
    names += [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in range(1, 12)]
    changes = {n: low_rank(lm, n, i % 4 + 1, seed=i, size=1.0) for i, n in enumerate(names)}
    edit = edit_of(lm, dict(changes))
    export_peft(edit, lm, tmp_path / "adapter")
    peft_model = peft.PeftModel.from_pretrained(twin, str(tmp_path / "adapter"))
    with torch.no_grad():
        found = peft_model(IDS).logits
    assert_close(found, applied_logits(lm, [edit]))
    touched = {n.split(".lora_")[0] for n, _ in peft_model.named_parameters() if ".lora_" in n}
    assert touched == {f"base_model.model.{n.removesuffix('.weight')}" for n in names}


@pytest.mark.parametrize(
    ("family", "bias"),
    [("gpt2", False), ("gpt2", True), ("llama", False), ("bloom", False), ("bloom", True)],
)
def test_the_files_match_those_that_peft_writes(family: str, bias: bool, tmp_path: Path) -> None:
    lm = tiny(family)
    first, second = mlp(lm, 0), mlp(lm, 2)
    changes: dict[str, Change] = {
        first: low_rank(lm, first, 2),
        second: low_rank(lm, second, 4),
    }
    if bias:
        changes[mlp(lm, 0, "bias")] = dense(lm, mlp(lm, 0, "bias"))
    export_peft(edit_of(lm, changes), lm, tmp_path / "ours")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=4,
        target_modules=[first.removesuffix(".weight"), second.removesuffix(".weight")],
        fan_in_fan_out=lm.family.transposed,
        lora_bias=bias,
    )
    theirs = peft.get_peft_model(tiny_model(family), config)
    with warnings.catch_warnings():
        # peft mistakes its own bias for a shard of a matrix.
        warnings.filterwarnings("ignore", message=".*have invalid shape", category=UserWarning)
        theirs.save_pretrained(str(tmp_path / "theirs"))
    ours, wanted = (
        {name: tuple(x.shape) for name, x in load_file(tmp_path / who / FILE).items()}
        for who in ("ours", "theirs")
    )
    assert ours == wanted
    written, saved = config_of(tmp_path / "ours"), config_of(tmp_path / "theirs")
    assert written.pop("base_model_name_or_path") == lm.name
    assert sorted(written.pop("target_modules")) == sorted(saved["target_modules"])
    assert written == {key: saved[key] for key in written}


FILE = "adapter_model.safetensors"


def test_the_base_of_an_adapter_is_a_hub_id(llama: LM, tmp_path: Path) -> None:
    """Other tools do not know factscope's short names."""
    lm = replace(llama, name=DEFAULT_MODEL)
    export_peft(edit_of(lm, {mlp(lm, 0): low_rank(lm, mlp(lm, 0), 1)}), lm, tmp_path / "adapter")
    base = config_of(tmp_path / "adapter")["base_model_name_or_path"]
    assert base == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_a_dense_change_is_factored_along_its_shorter_side(llama: LM, tmp_path: Path) -> None:
    wide, tall = mlp(llama, 0), "model.layers.1.mlp.up_proj.weight"  # (32, 64) and (64, 32)
    changes: dict[str, Change] = {name: dense(llama, name) for name in (wide, tall)}
    edit = edit_of(llama, changes)
    export_peft(edit, llama, tmp_path / "adapter")
    assert config_of(tmp_path / "adapter")["r"] == 32
    assert config_of(tmp_path / "adapter")["rank_pattern"] == {}
    tensors = load_file(tmp_path / "adapter" / FILE)
    for name in (wide, tall):
        key = f"base_model.model.{name.removesuffix('.weight')}"
        B, A = tensors[f"{key}.lora_B.weight"], tensors[f"{key}.lora_A.weight"]
        assert torch.equal(B @ A, changes[name].matrix())
    assert_close(peft_logits(llama, tmp_path / "adapter"), applied_logits(llama, [edit]))


@pytest.mark.parametrize("kind", ["dense", "low rank"])
def test_rank_keeps_the_largest_singular_values(llama: LM, kind: str, tmp_path: Path) -> None:
    name = mlp(llama, 0)
    U, V = (torch.linalg.qr(torch.randn(n, 3))[0] for n in (32, 64))
    sizes = torch.tensor([5.0, 2.0, 1.0])
    change = LowRank(U * sizes, V.T)
    whole = change if kind == "low rank" else Dense(change.matrix())
    edit = edit_of(llama, {name: whole})
    export_peft(edit, llama, tmp_path / "adapter", rank=2)
    tensors = load_file(tmp_path / "adapter" / FILE)
    B, A = (next(x for n, x in tensors.items() if f"lora_{part}" in n) for part in "BA")
    assert B.shape[1] == A.shape[0] == 2
    torch.testing.assert_close(B @ A, (U[:, :2] * sizes[:2]) @ V[:, :2].T, atol=1e-5, rtol=1e-5)
    cut = edit_of(llama, {name: LowRank(B, A)})
    assert_close(peft_logits(llama, tmp_path / "adapter"), applied_logits(llama, [cut]))


def test_sums_of_unequal_ranks_are_padded_to_one_rank(gpt2: LM, tmp_path: Path) -> None:
    """A program that reads only r and lora_alpha computes the same."""
    first = edit_of(gpt2, {mlp(gpt2, i): low_rank(gpt2, mlp(gpt2, i), 2) for i in (0, 1)})
    second = edit_of(gpt2, {mlp(gpt2, i): low_rank(gpt2, mlp(gpt2, i), 1, seed=i) for i in (1, 2)})
    export_peft(first + second, gpt2, tmp_path / "adapter", force=True)
    config, tensors = config_of(tmp_path / "adapter"), load_file(tmp_path / "adapter" / FILE)
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (3, {}, {})
    for name, change in (first + second).changes.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        B, A = tensors[f"{key}.lora_B.weight"], tensors[f"{key}.lora_A.weight"]
        assert B.shape[1] == A.shape[0] == config["r"]
        torch.testing.assert_close(config["lora_alpha"] / config["r"] * B @ A, change.matrix())


def test_the_energy_that_a_rank_keeps(
    llama: LM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    U, V = (torch.linalg.qr(torch.randn(n, 2))[0] for n in (32, 64))
    change = Dense(U * torch.tensor([2.0, 1.0]) @ V.T)  # energy 4 + 1
    edit = edit_of(llama, {mlp(llama, 0): change, mlp(llama, 1): low_rank(llama, mlp(llama, 1), 1)})
    assert export_peft(edit, llama, tmp_path / "whole") is edit
    assert caplog.text == ""
    exported = export_peft(edit, llama, tmp_path / "adapter", rank=1)
    overall, weights = energy_kept(edit, exported)
    assert weights == pytest.approx({mlp(llama, 0): 0.8, mlp(llama, 1): 1.0})
    other = edit.changes[mlp(llama, 1)].norm() ** 2
    assert overall == pytest.approx((4 + other) / (5 + other))
    assert f"rank 1 keeps {100 * overall:.1f} % of the edit's energy" in caplog.text
    cut = edit_of(llama, dict(exported.changes))
    assert_close(peft_logits(llama, tmp_path / "adapter"), applied_logits(llama, [cut]))


def test_a_rank_larger_than_the_edit_changes_nothing(llama: LM, tmp_path: Path) -> None:
    edit = weights_edit(llama)
    export_peft(edit, llama, tmp_path / "adapter", rank=100)
    assert_close(peft_logits(llama, tmp_path / "adapter"), applied_logits(llama, [edit]))
    with pytest.raises(BadSetting, match="rank is 0"):
        export_peft(edit, llama, tmp_path / "other", rank=0)


def test_an_adapter_on_a_bfloat16_model(tmp_path: Path) -> None:
    lm = tiny("llama")
    lm.model.to(torch.bfloat16)
    edit = weights_edit(lm)
    export_peft(edit, lm, tmp_path / "adapter")
    found, wanted = peft_logits(lm, tmp_path / "adapter"), applied_logits(lm, [edit])
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 0.05


def test_an_edited_model_exports_the_same_adapter(llama: LM, tmp_path: Path) -> None:
    first, second, *_ = some_edits(llama)
    export_peft(second, llama, tmp_path / "plain")
    with first.applied(llama), second.applied(llama):
        export_peft(second, llama, tmp_path / "edited")
    plain, edited = (load_file(tmp_path / who / FILE) for who in ("plain", "edited"))
    assert_same(plain, edited)


def test_transformers_loads_the_base_model_of_an_adapter(tmp_path: Path) -> None:
    lm = saved("llama", tmp_path / "base")
    edit = weights_edit(lm)
    export_peft(edit, lm, tmp_path / "adapter")
    model = read(tmp_path / "adapter")
    assert_close(logits(replace(lm, model=model)), applied_logits(lm, [edit]))


def test_changes_that_lora_cannot_express_are_refused(gpt2: LM, tmp_path: Path) -> None:
    for name in ("transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"):
        delta = Dense(torch.ones(gpt2.model.get_parameter(name).shape))
        with pytest.raises(BadEdit, match=f"{name} belongs to no linear.*whole checkpoint"):
            export_peft(edit_of(gpt2, {name: delta}), gpt2, tmp_path / "adapter")
    with pytest.raises(BadEdit, match="changes no weight"):
        export_peft(edit_of(gpt2, {}), gpt2, tmp_path / "adapter")
    bad = Dense(torch.full((32, 128), torch.nan))
    with pytest.raises(BadEdit, match="NaN or infinite"):
        export_peft(edit_of(gpt2, {mlp(gpt2, 0): bad}), gpt2, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_a_harmful_multiple_is_exported_only_if_forced(tmp_path: Path) -> None:
    lm = text_lm("gpt2")
    edit = edit_of(lm, {mlp(lm, 0): low_rank(lm, mlp(lm, 0), size=1e-3)})
    with pytest.raises(UnsafeEdit, match="update norm"):
        export_peft(1e6 * edit, lm, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []
    export_peft(1e6 * edit, lm, tmp_path / "adapter", force=True)
    export_peft(2.0 * edit, lm, str(tmp_path / "other"))


def test_an_untied_head_is_exported(llama: LM, tmp_path: Path) -> None:
    assert llama.model.lm_head.weight is not llama.embed.weight
    edit = edit_of(llama, {"lm_head.weight": low_rank(llama, "lm_head.weight", 2)})
    export_peft(edit, llama, tmp_path / "adapter")
    assert_close(peft_logits(llama, tmp_path / "adapter"), applied_logits(llama, [edit]))


def test_an_adapter_for_another_model_is_refused(gpt2: LM, llama: LM, tmp_path: Path) -> None:
    edit = some_edits(gpt2)[0]
    with pytest.raises(BadEdit, match="not for tiny llama"):
        export_peft(edit, llama, tmp_path / "adapter")
    with pytest.raises(BadEdit, match="no weight"):
        export_peft(edit, llama, tmp_path / "adapter", force=True)
    small = edit_of(gpt2, {mlp(gpt2, 0): Dense(torch.ones(2, 2))})
    with pytest.raises(BadEdit, match=r"shape \(32, 128\).* \(2, 2\)"):
        export_peft(small, gpt2, tmp_path / "adapter")
    assert list(tmp_path.iterdir()) == []


def test_an_edit_that_fails_its_checks_is_exported_only_by_force(llama: LM, tmp_path: Path) -> None:
    edit = replace(weights_edit(llama), checks=UNSAFE)
    with pytest.raises(UnsafeEdit, match="update norm"):
        export_peft(edit, llama, tmp_path / "adapter")
    with pytest.raises(UnsafeEdit, match="update norm"):
        export_checkpoint([edit], llama, tmp_path / "checkpoint")
    assert list(tmp_path.iterdir()) == []
    export_peft(edit, llama, tmp_path / "adapter", force=True)
    assert (tmp_path / "adapter" / FILE).is_file()


# ---- checkpoints


def saved(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> LM:
    """A tiny model with a tokenizer of its family, saved and loaded."""
    kind = tiny_model(family).config.model_type
    tok = tokenizer(TOKENIZERS[kind])
    model = tiny_model(family, vocabulary=len(tok)).to(dtype)
    model.save_pretrained(folder)
    tok.save_pretrained(folder)
    return from_model(read(folder), tok, name=str(folder), check=False)


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_checkpoint_is_bit_for_bit_the_edited_model(lm: LM, tmp_path: Path) -> None:
    """For every family, loaded by transformers and by factscope, bit-for-bit."""
    made = saved(lm.name.removeprefix("tiny "), tmp_path / "base")
    edit, before = weights_edit(made), state_of(made)
    export_checkpoint([edit], made, tmp_path / "out")
    assert_same(state_of(made), before)
    assert applied_edits(made) == ()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]
    wanted = applied_logits(made, [edit])
    model = read(tmp_path / "out")
    assert torch.equal(logits(replace(made, model=model)), wanted)
    with edit.applied(made):
        assert_same(dict(model.state_dict()), state_of(made))
    loaded = factscope.load(tmp_path / "out", device="cpu")
    assert torch.equal(logits(loaded), wanted)
    words = "The Eiffel Tower is in Paris."
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")(words)["input_ids"]
    assert ids == made.tokenizer(words)["input_ids"]


@pytest.fixture
def made(tmp_path: Path) -> LM:
    return saved("gpt2", tmp_path / "base")


def test_edits_are_added_to_those_already_applied(made: LM, tmp_path: Path) -> None:
    first, second, third, _ = some_edits(made)
    wanted = applied_logits(made, [first, second, third])
    export_checkpoint([first, second, third], made, tmp_path / "one")
    with first.applied(made), second.applied(made):
        inside = state_of(made)
        export_checkpoint([second, third], made, tmp_path / "two")
        assert applied_edits(made) == (first, second)
        assert_same(state_of(made), inside)
    for name in ("one", "two"):
        assert torch.equal(logits(replace(made, model=read(tmp_path / name))), wanted)


def test_a_checkpoint_without_edits(made: LM, tmp_path: Path) -> None:
    export_checkpoint([], made, tmp_path / "out")
    assert_same(dict(read(tmp_path / "out").state_dict()), state_of(made))


def test_tied_weights_stay_tied(made: LM, tmp_path: Path) -> None:
    delta = Dense(0.1 * torch.randn(made.embed.weight.shape))
    edit = edit_of(made, {"transformer.wte.weight": delta})
    export_checkpoint([edit], made, tmp_path / "out")
    model = read(tmp_path / "out")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(logits(replace(made, model=model)), applied_logits(made, [edit]))
    names = {name for file in (tmp_path / "out").glob("*.safetensors") for name in load_file(file)}
    assert "lm_head.weight" not in names


def test_an_invalid_generation_config_is_replaced(
    made: LM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = made.model.generation_config
    settings.temperature, settings.do_sample = 0.9, False
    export_checkpoint([], made, tmp_path / "out")
    assert "generation settings are invalid" in caplog.text
    assert made.model.generation_config is settings
    assert settings.temperature == 0.9
    assert torch.equal(logits(replace(made, model=read(tmp_path / "out"))), logits(made))


def test_a_bfloat16_checkpoint(tmp_path: Path) -> None:
    made = saved("llama", tmp_path / "base", dtype=torch.bfloat16)
    edit = weights_edit(made)
    export_checkpoint([edit], made, tmp_path / "out")
    model = read(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(logits(replace(made, model=model)), applied_logits(made, [edit]))


# ---- failures of writing


def test_a_folder_that_is_not_empty_is_refused(made: LM, tmp_path: Path) -> None:
    edit, before = weights_edit(made), state_of(made)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in ("full", "file"):
        with pytest.raises(BadSetting, match="new or empty folder"):
            export_checkpoint([edit], made, tmp_path / place)
        with pytest.raises(BadSetting, match="new or empty folder"):
            export_peft(edit, made, tmp_path / place)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine.txt"]
    assert (tmp_path / "file").read_text() == "mine"
    assert_same(state_of(made), before)


def test_empty_and_nested_folders_are_accepted(made: LM, tmp_path: Path) -> None:
    edit = weights_edit(made)
    (tmp_path / "empty").mkdir()
    export_checkpoint([edit], made, tmp_path / "empty")
    export_peft(edit, made, str(tmp_path / "a" / "b" / "adapter"))
    assert (tmp_path / "empty" / "config.json").is_file()
    names = sorted(p.name for p in (tmp_path / "a" / "b" / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_full_disk_leaves_no_files(
    made: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, before = weights_edit(made), state_of(made)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(made.tokenizer, "save_pretrained", full)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BadSetting, match=r"No space left.*nothing was left"):
        export_checkpoint([edit], made, tmp_path / "out")
    with pytest.raises(BadSetting, match=r"No space left.*nothing was left"):
        export_peft(edit, made, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert_same(state_of(made), before)
    assert applied_edits(made) == ()


def test_free_disk_space_is_checked_beforehand(
    made: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(path: Path) -> Any:
        return type("Usage", (), {"free": 1000})

    monkeypatch.setattr("factscope.editing.export.shutil.disk_usage", usage)
    with pytest.raises(BadSetting, match="GB free; give a folder on another disk"):
        export_checkpoint([], made, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_any_error_leaves_the_model_and_the_disk_unchanged(
    made: LM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    edit, before = weights_edit(made), state_of(made)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr(made.model, "save_pretrained", broken)
    with pytest.raises(error):
        export_checkpoint([edit], made, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert_same(state_of(made), before)
    assert applied_edits(made) == ()


def test_a_bad_edit_reverts_the_good_one(made: LM, tmp_path: Path) -> None:
    good, before = weights_edit(made), state_of(made)
    bad = edit_of(made, {mlp(made, 1): Dense(torch.ones(32, 129))})
    with pytest.raises(BadEdit, match="another model"):
        export_checkpoint([good, bad], made, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["base"]
    assert_same(state_of(made), before)
    assert applied_edits(made) == ()
