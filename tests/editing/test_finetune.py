"""FT, FT+L and AttnEdit: the fast method equals torch's Adam on the model's own weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.editing import finetune as module
from factscope.editing.contexts import target_ids
from factscope.editing.defaults import FINETUNE, FINETUNE_BY_DEPTH
from factscope.editing.edit import Edit
from factscope.editing.per_row import edited
from factscope.editing.settings import ATTN_EDIT, EDITORS, FT, FT_L, FineTune
from factscope.errors import BadEdit, BadFact, BadSetting, DidNotConverge, OutOfMemory
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from families import FAMILIES, tiny_text_lm

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome"),
    Fact(subject="France", prompt="The capital of {} is", target="Ottawa in Kenya"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano"),
]
"""The second object has several tokens in every vocabulary."""

KINDS = {
    "ft": FineTune(layer=1, steps=4, lr=2e-3),
    "ft-l": FineTune(layer=0, max_change=3e-3, steps=4, lr=2e-3),
    "attn": FineTune(layer=1, weights="attn", max_change=2e-3, steps=4, lr=1e-3),
    "ft, paper": FineTune(layer=2, objective="last-position", bias=True, steps=4, lr=2e-3),
    "attn, paper": replace(EDITORS["attn"]["paper"], layer=1, max_change=2e-3, steps=6),
    "ft, stops early": FineTune(layer=1, steps=8, lr=1e-2, stop_loss=5.5),
}
NOISE = {("tiny bloom", "attn, paper"): 2e-2}
"""The bias of the keys has no effect on attention, so its gradient is rounding error; Adam still
takes steps along it, and BLOOM computes its softmax in float32."""


def small(family: str, dtype: torch.dtype = torch.float32) -> LM:
    return tiny_text_lm(family, spread=0.1, dtype=dtype)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def worded(request: pytest.FixtureRequest) -> LM:
    """A tiny model of each family that reads words, exact enough to compare Adam's steps."""
    return small(request.param, torch.float64)


@pytest.fixture(scope="module")
def llama() -> LM:
    return small("llama")


# ---- the reference


def reference_finetune(lm: LM, facts: Sequence[Fact], settings: FineTune) -> dict[str, Tensor]:
    """torch's Adam on the model's own weights, the whole model at every step."""
    assert settings.layer is not None
    modules: Any = (
        [lm.mlp_out(settings.layer)] if settings.weights == "mlp" else lm.attn_in(settings.layer)
    )
    weights = {f"{lm.name_of(m)}.weight": m.weight for m in modules}
    if settings.bias:
        weights |= {f"{lm.name_of(m)}.bias": m.bias for m in modules if m.bias is not None}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.requires_grad_(True)
    adam = torch.optim.Adam(weights.values(), lr=settings.lr)
    for _ in range(settings.steps):
        adam.zero_grad()
        loss = torch.stack([reference_loss(lm, fact, settings) for fact in facts]).mean()
        if loss.item() < settings.stop_loss:
            break
        loss.backward()
        adam.step()
        if settings.max_change is not None:
            max_change = float(settings.max_change)
            for name, weight in weights.items():
                weight.data.clamp_(before[name] - max_change, before[name] + max_change)
    change = {name: weight.detach() - before[name] for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.requires_grad_(False)
        weight.grad = None
        weight.copy_(before[name])
    return {name: x.T if lm.family.transposed and x.dim() == 2 else x for name, x in change.items()}


def reference_loss(lm: LM, fact: Fact, settings: FineTune) -> Tensor:
    prompt, target = encode(lm, fact.text).ids, target_ids(lm, fact)
    after = len(prompt) - 1
    if settings.objective == "last-position":
        logits = lm.model(torch.tensor([prompt])).logits[0, [after] * len(target)]
    else:
        logits = lm.model(torch.tensor([prompt + target])).logits[0, after:-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(target))


def gap(edit: Edit, wanted: dict[str, Tensor]) -> float:
    """How far an edit is from the wanted change, relative to that."""
    assert set(edit.changes) == set(wanted)
    found = {name: change.matrix().double() for name, change in edit.changes.items()}
    off = sum((found[name] - x.double()).square().sum().item() for name, x in wanted.items())
    size = sum(x.double().square().sum().item() for x in wanted.values())
    return (off / size) ** 0.5 if size else off


@pytest.mark.parametrize("kind", KINDS)
def test_fast_method_equals_the_reference(worded: LM, kind: str) -> None:
    settings, near = KINDS[kind], NOISE.get((worded.name, kind), 1e-4)
    facts = FACTS if kind == "ft, stops early" else FACTS[:2]  # at different steps
    before = {name: weight.clone() for name, weight in worded.model.named_parameters()}
    edits = settings.each(worded, facts)
    for fact, edit in zip(facts, edits, strict=True):
        assert edit.facts == (fact,)
        assert gap(edit, reference_finetune(worded, [fact], settings)) < near
    assert gap(settings(worded, facts), reference_finetune(worded, facts, settings)) < near
    for name, weight in worded.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("kind", ["ft", "ft-l", "attn", "ft, paper", "ft, stops early"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_batched_facts_equal_single_facts_in_float32(family: str, kind: str) -> None:
    lm, settings = small(family), KINDS[kind]
    # Adam divides by the gradient: where that is nearly 0, as in attention, rounding errors show.
    near = 1e-3 if kind == "attn" else 1e-4
    for fact, edit in zip(FACTS, settings.each(lm, FACTS), strict=True):
        assert gap(settings(lm, [fact]), matrices(edit)) < near
        assert gap(edit, reference_finetune(lm, [fact], settings)) < near


def test_facts_stop_at_the_stop_loss(llama: LM) -> None:
    edits = KINDS["ft, stops early"].each(llama, FACTS)
    losses = [mine for edit in edits for mine in edit.settings["losses"]]
    assert len({len(mine) for mine in losses}) > 1
    for mine in losses:
        assert all(loss >= 5.5 for loss in mine[:-1])


def test_losses_equal_the_reference(llama: LM) -> None:
    """Before each step and after the last; of several facts in one edit, their mean."""
    settings = KINDS["ft"]
    before = [reference_loss(llama, fact, settings).item() for fact in FACTS]
    edit = settings(llama, FACTS)
    with edited(llama, [edit]):
        after = [reference_loss(llama, fact, settings).item() for fact in FACTS]
    (together,) = edit.settings["losses"]
    assert len(together) == settings.steps + 1
    assert together[0] == pytest.approx(sum(before) / 3, rel=1e-4)
    assert together[-1] == pytest.approx(sum(after) / 3, rel=1e-4)
    apart = [edit.settings["losses"] for edit in settings.each(llama, FACTS)]
    assert [mine[0] for (mine,) in apart] == pytest.approx(before, rel=1e-4)


def test_batch_size_does_not_change_the_result(llama: LM) -> None:
    settings = KINDS["ft"]
    whole, reported = settings(llama, FACTS), []
    pieces = replace(settings, facts_per_pass=2)(llama, FACTS, progress=reported.append)
    assert gap(pieces, matrices(whole)) < 1e-4
    assert sum(reported) == pytest.approx(1)
    assert len(reported) == settings.steps + 1
    for one, other in zip(
        settings.each(llama, FACTS),
        replace(settings, facts_per_pass=2).each(llama, FACTS),
        strict=True,
    ):
        assert gap(one, matrices(other)) < 1e-4


def test_batches_are_halved_when_memory_runs_out(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, wanted = KINDS["ft"], KINDS["ft"].each(llama, FACTS)
    real, sizes, reported = module.minimise, [], []

    def scarce(objectives: list[Any], weights: Any, groups: int, *rest: Any) -> Any:
        rows = max(len(x.states) for x in objectives)
        sizes.append(rows)
        if rows > limit:
            raise torch.OutOfMemoryError("no more")
        return real(objectives, weights, groups, *rest)

    monkeypatch.setattr(module, "minimise", scarce)
    limit = 1
    edits = settings.each(llama, FACTS, progress=reported.append)
    assert sizes == [3, 1, 1, 1]
    assert sum(reported) == pytest.approx(1)
    assert all(gap(a, matrices(b)) < 1e-4 for a, b in zip(edits, wanted, strict=True))
    sizes.clear()
    assert settings(llama, FACTS).facts == tuple(FACTS)
    assert sizes == [3, 1]
    limit = 0
    with pytest.raises(OutOfMemory, match=r"one item at a time.*no more.*bfloat16"):
        settings(llama, FACTS)


def matrices(edit: Edit) -> dict[str, Tensor]:
    return {name: change.matrix() for name, change in edit.changes.items()}


# ---- the edit


def test_edit_records_its_settings(llama: LM) -> None:
    for name, settings in {"ft": FT, "ft-l": FT_L, "attn": ATTN_EDIT}.items():
        edit = replace(settings, steps=3)(llama, FACTS[:2])
        assert edit.method == name
        assert edit.facts == tuple(FACTS[:2])
        assert (edit.model, edit.fingerprint) == (llama.name, llama.fingerprint)
        assert isinstance(edit.settings["layer"], int)
        assert edit.settings["max_change"] != "default"
        assert (edit.settings["max_change"] is None) == (name == "ft")
        if name != "ft":
            assert all(
                x.abs().max() <= edit.settings["max_change"] * 1.0001
                for x in matrices(edit).values()
            )
        modules = [llama.mlp_out(0)] if name != "attn" else llama.attn_in(2)
        assert set(edit.changes) == {f"{llama.name_of(m)}.weight" for m in modules}
        assert all(x.dtype == torch.float32 for x in matrices(edit).values())


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize("method", ["ft", "ft-l", "attn"])
def test_applied_edit_equals_per_row_edit(family: str, method: str) -> None:
    lm = small(family)
    settings = replace(EDITORS[method]["paper"], layer=1, steps=8)
    fact = FACTS[0]
    edit = settings(lm, [fact])
    before = reference_loss(lm, fact, settings).item()
    with edited(lm, [edit]):
        beside = reference_loss(lm, fact, settings).item()
    with edit.applied(lm):
        within = reference_loss(lm, fact, settings).item()
    assert within == pytest.approx(beside, rel=1e-4)
    assert within < before
    assert reference_loss(lm, fact, settings).item() == before


def test_a_bfloat16_model_is_trained_in_float32() -> None:
    lm = small("llama", torch.bfloat16)
    edit = FineTune(layer=1, lr=2e-3, steps=8)(lm, FACTS[:1])
    assert all(x.dtype == torch.float32 for x in matrices(edit).values())
    assert any((x != x.bfloat16()).any() for x in matrices(edit).values())


def test_no_change_where_the_loss_is_low_already(llama: LM) -> None:
    edit = FineTune(layer=0, stop_loss=1e3)(llama, FACTS[:1])
    assert all((x == 0).all() for x in matrices(edit).values())
    assert edit.settings["losses"] == [[pytest.approx(reference_loss(llama, FACTS[0], FT).item())]]
    assert edit.checks is not None
    assert (edit.checks.update_norm, edit.checks.perplexity_growth) == (0, pytest.approx(1))
    with pytest.raises(BadEdit, match="so small"):
        edit.apply(llama)


def test_checks_are_measured(llama: LM) -> None:
    settings = FineTune(layer=1, bias=True, steps=3, lr=2e-3)
    for edit in (settings(llama, FACTS), *settings.each(llama, FACTS)):
        assert edit.checks is not None
        fractions = [
            x.norm().item() / llama.model.get_parameter(name).norm().item()
            for name, x in matrices(edit).items()
        ]
        assert edit.checks.update_norm == pytest.approx(max(fractions), rel=1e-4)
        assert edit.checks.perplexity_after != edit.checks.perplexity_before


# ---- settings


def test_presets() -> None:
    assert FineTune() == FT
    assert [x.max_change for x in (FT, FT_L, ATTN_EDIT)] == [None, "default", "default"]
    assert (ATTN_EDIT.weights, ATTN_EDIT.lr) == ("attn", 1e-3)
    for method in ("ft", "ft-l", "attn"):
        presets = EDITORS[method]
        as_in_paper = replace(presets["default"], objective="last-position", bias=True)
        assert presets["paper"] == as_in_paper
    variants = (FT, FT_L, replace(FT_L, max_change=1e-3), replace(ATTN_EDIT, max_change=None))
    assert [settings.method for settings in variants] == ["ft", "ft-l", "ft-l", "attn"]


def test_layer_and_limit_come_from_the_table(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(settings: FineTune) -> tuple[Any, Any]:
        found = settings.resolve(llama)
        return found.layer, found.max_change

    std = llama.mlp_weight(0).std().item()
    in_stds = FINETUNE_BY_DEPTH["ft-l"].max_change_in_stds
    assert in_stds is not None
    assert resolved(FT_L) == (0, pytest.approx(in_stds * std))
    assert resolved(replace(FT_L, max_change=0.1)) == (0, 0.1)
    assert resolved(FT) == (0, None)
    assert resolved(ATTN_EDIT)[0] == 2  # 33 of 48, here 2 of 3
    xl = FINETUNE["gpt2", 48, 1600]
    monkeypatch.setitem(FINETUNE, ("llama", 3, 32), xl | {"attn": replace(xl["attn"], layer=1)})
    assert resolved(FT) == (1, None)
    assert resolved(FT_L) == (0, 5e-4)
    assert resolved(ATTN_EDIT) == (1, 1e-3)
    assert resolved(replace(FT_L, layer=2))[0] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_change": 0.0}, "max_change is 0.0; give more than 0"),
        ({"steps": 0}, "steps is 0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"facts_per_pass": 0}, "facts_per_pass is 0"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        FineTune(**settings)


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_out_of_range_is_refused(llama: LM, layer: int) -> None:
    with pytest.raises(BadSetting, match=f"layer is {layer}; tiny llama has layers 0 to 2"):
        FineTune(layer=layer).each(llama, FACTS)


def test_a_fact_without_an_object_is_refused(llama: LM) -> None:
    with pytest.raises(BadFact, match="no facts"):
        FT(llama, [])
    with pytest.raises(BadFact, match="empty"):
        FT.each(llama, [replace(FACTS[0], target=" ")])


def test_a_loss_that_does_not_fall_is_an_error(llama: LM) -> None:
    settings = FineTune(layer=1, lr=1e-30, steps=2)
    with pytest.raises(
        DidNotConverge, match=r"did not lower the loss.*by step: [0-9.]+, [0-9.]+, "
    ) as caught:
        settings(llama, FACTS)
    assert "Eiffel Tower is located in the city of' → 'Rome' and 2 more" in str(caught.value)
    with pytest.raises(DidNotConverge, match="did not lower the loss"):
        settings.each(llama, FACTS)


def test_nan_loss_is_an_error() -> None:
    lm = small("llama")
    lm.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DidNotConverge, match=r"is NaN or infinite.*by step: nan.*float32"):
        FineTune(layer=1).each(lm, FACTS)


def test_a_bad_fact_does_not_stop_the_others(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, reported, real = KINDS["ft"], [], module.minimise
    bad = replace(FACTS[0], target="")

    def hindered(*given: Any) -> list[module.FineTuneResult]:
        founds = real(*given)
        founds[0].losses[-1] = 1e3
        return founds

    wanted = settings.each(llama, FACTS[1:])
    results = settings.attempt(llama, [bad, *FACTS[1:]], progress=reported.append)
    assert [type(result).__name__ for result in results] == ["BadFact", "Edit", "Edit"]
    assert sum(reported) == pytest.approx(1)
    for found, edit in zip(results[1:], wanted, strict=True):
        assert isinstance(found, Edit)
        assert found.facts == edit.facts
        assert gap(found, matrices(edit)) == 0
    monkeypatch.setattr(module, "minimise", hindered)
    results = settings.attempt(llama, [FACTS[1], bad, FACTS[2]])
    assert [type(result).__name__ for result in results] == ["DidNotConverge", "BadFact", "Edit"]
    with pytest.raises(DidNotConverge):
        settings.each(llama, FACTS)
    assert settings.attempt(llama, []) == []


# ---- the default model


@pytest.mark.model
def test_the_eiffel_tower_moves_to_rome(default_model: LM) -> None:
    lm, fact = default_model, FACTS[0]
    asked = fact.text, "The Louvre is located in the city of"
    first = [encode(lm, " " + city, special=False).ids[0] for city in ("Rome", "Paris")]

    def says(text: str) -> tuple[float, float]:
        with torch.no_grad():
            logits = lm.model(torch.tensor([encode(lm, text).ids])).logits[0, -1]
        rome, paris = logits.softmax(-1)[first].tolist()
        return rome, paris

    assert says(asked[0])[0] < 0.01 < 0.5 < says(asked[0])[1]
    with FT(lm, [fact]).applied(lm):
        assert says(asked[0])[0] > 0.9
        assert says(asked[1])[0] < 0.1 < 0.5 < says(asked[1])[1]
