"""FT, FT+L and AttnEdit: the fast descent is the plain one, whatever goes side by side."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from factscope.editing import finetune as module
from factscope.editing.contexts import target_ids
from factscope.editing.defaults import BY_DEPTH, KNOWN
from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.editing.finetune import FINE_TUNES, FineTune, attn_edit, ft, ft_l
from factscope.editing.per_row import edited
from factscope.errors import BadEdit, BadFact, BadSetting, DidNotConverge, OutOfMemory
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from families import FAMILIES, reader

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome"),
    Fact(subject="France", prompt="The capital of {} is", target="Ottawa in Kenya"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano"),
]
"""The second's object has several tokens in every vocabulary."""

KINDS = {
    "ft": FineTune(layer=1, steps=4, lr=2e-3),
    "ft-l": FineTune(layer=0, max_change=3e-3, steps=4, lr=2e-3),
    "attn": FineTune(layer=1, weights="attn", max_change=2e-3, steps=4, lr=1e-3),
    "ft, paper": FineTune(layer=2, objective="last-position", bias=True, steps=4, lr=2e-3),
    "attn, paper": attn_edit("paper", layer=1, max_change=2e-3, steps=6),
    "ft, done early": FineTune(layer=1, steps=8, lr=1e-2, stop=5.5),
}
NOISE = {("tiny bloom", "attn, paper"): 2e-2}
"""The keys' bias moves no attention, so its slope is 0 but for rounding; Adam makes steps of that,
and BLOOM's softmax rounds to float32."""


def small(family: str, dtype: torch.dtype = torch.float32) -> LM:
    return reader(family, spread=0.1, dtype=dtype)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def worded(request: pytest.FixtureRequest) -> LM:
    """A tiny model of each family that reads words, exact enough to compare Adam's steps."""
    return small(request.param, torch.float64)


@pytest.fixture(scope="module")
def llama() -> LM:
    return small("llama")


# ---- the plain procedure


def plainly(lm: LM, facts: Sequence[Fact], how: FineTune) -> dict[str, Tensor]:
    """torch's own Adam on the model's own weights, the whole model at every step."""
    assert how.layer is not None
    modules: Any = [lm.mlp_out(how.layer)] if how.weights == "mlp" else lm.attn_in(how.layer)
    weights = {f"{lm.name_of(m)}.weight": m.weight for m in modules}
    if how.bias:
        weights |= {f"{lm.name_of(m)}.bias": m.bias for m in modules if m.bias is not None}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    for weight in weights.values():
        weight.requires_grad_(True)
    adam = torch.optim.Adam(weights.values(), lr=how.lr)
    for _ in range(how.steps):
        adam.zero_grad()
        loss = torch.stack([plain_loss(lm, fact, how) for fact in facts]).mean()
        if loss.item() < how.stop:
            break
        loss.backward()
        adam.step()
        if how.max_change is not None:
            max_change = float(how.max_change)
            for name, weight in weights.items():
                weight.data.clamp_(before[name] - max_change, before[name] + max_change)
    change = {name: weight.detach() - before[name] for name, weight in weights.items()}
    for name, weight in weights.items():
        weight.requires_grad_(False)
        weight.grad = None
        weight.copy_(before[name])
    return {name: x.T if lm.family.transposed and x.dim() == 2 else x for name, x in change.items()}


def plain_loss(lm: LM, fact: Fact, how: FineTune) -> Tensor:
    prompt, target = encode(lm, fact.text).ids, target_ids(lm, fact)
    after = len(prompt) - 1
    if how.objective == "last-position":
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
def test_the_fast_way_is_the_plain_one(worded: LM, kind: str) -> None:
    how, near = KINDS[kind], NOISE.get((worded.name, kind), 1e-4)
    before = {name: weight.clone() for name, weight in worded.model.named_parameters()}
    edits = how.each(worded, FACTS)
    for fact, edit in zip(FACTS, edits, strict=True):
        assert edit.facts == (fact,)
        assert gap(edit, plainly(worded, [fact], how)) < near
    assert gap(how(worded, FACTS), plainly(worded, FACTS, how)) < near
    for name, weight in worded.model.named_parameters():
        assert torch.equal(weight, before[name])
        assert weight.grad is None


@pytest.mark.parametrize("kind", ["ft", "ft-l", "attn", "ft, paper", "ft, done early"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon"])
def test_side_by_side_is_one_by_one_in_single_precision(family: str, kind: str) -> None:
    lm, how = small(family), KINDS[kind]
    # Adam divides by the slope: where that is nearly 0, as in attention, rounding shows.
    near = 1e-3 if kind == "attn" else 1e-4
    for fact, edit in zip(FACTS, how.each(lm, FACTS), strict=True):
        assert gap(how(lm, [fact]), matrices(edit)) < near
        assert gap(edit, plainly(lm, [fact], how)) < near


def test_a_fact_that_is_done_stops(llama: LM) -> None:
    edits = KINDS["ft, done early"].each(llama, FACTS)
    losses = [mine for edit in edits for mine in edit.settings["losses"]]
    assert len({len(mine) for mine in losses}) > 1
    for mine in losses:
        assert all(loss >= 5.5 for loss in mine[:-1])


def test_losses_are_the_plain_ones(llama: LM) -> None:
    """Before each step and after the last; of several facts in one edit, their mean."""
    how = KINDS["ft"]
    before = [plain_loss(llama, fact, how).item() for fact in FACTS]
    edit = how(llama, FACTS)
    with edited(llama, [edit]):
        after = [plain_loss(llama, fact, how).item() for fact in FACTS]
    (together,) = edit.settings["losses"]
    assert len(together) == how.steps + 1
    assert together[0] == pytest.approx(sum(before) / 3, rel=1e-4)
    assert together[-1] == pytest.approx(sum(after) / 3, rel=1e-4)
    apart = [edit.settings["losses"] for edit in how.each(llama, FACTS)]
    assert [mine[0] for (mine,) in apart] == pytest.approx(before, rel=1e-4)


def test_pieces_change_nothing(llama: LM) -> None:
    how = KINDS["ft"]
    whole, heard = how(llama, FACTS), []
    pieces = replace(how, facts_per_pass=2)(llama, FACTS, progress=heard.append)
    assert gap(pieces, matrices(whole)) < 1e-4
    assert sum(heard) == pytest.approx(1)
    assert len(heard) == how.steps + 1
    for one, other in zip(
        how.each(llama, FACTS), replace(how, facts_per_pass=2).each(llama, FACTS), strict=True
    ):
        assert gap(one, matrices(other)) < 1e-4


def test_where_memory_runs_out_fewer_go_at_once(llama: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    how, wanted = KINDS["ft"], KINDS["ft"].each(llama, FACTS)
    real, sizes, heard = module.minimise, [], []

    def scarce(problems: list[Any], parts: Any, groups: int, *rest: Any) -> Any:
        rows = max(len(problem.states) for problem in problems)
        sizes.append(rows)
        if rows > limit:
            raise torch.OutOfMemoryError("no more")
        return real(problems, parts, groups, *rest)

    monkeypatch.setattr(module, "minimise", scarce)
    limit = 1
    edits = how.each(llama, FACTS, progress=heard.append)
    assert sizes == [3, 1, 1, 1]
    assert sum(heard) == pytest.approx(1)
    assert all(gap(a, matrices(b)) < 1e-4 for a, b in zip(edits, wanted, strict=True))
    sizes.clear()
    assert how(llama, FACTS).facts == tuple(FACTS)
    assert sizes == [3, 1]
    limit = 0
    with pytest.raises(OutOfMemory, match=r"one fact at a time.*no more.*bfloat16"):
        how(llama, FACTS)


def matrices(edit: Edit) -> dict[str, Tensor]:
    return {name: change.matrix() for name, change in edit.changes.items()}


# ---- what comes out


def test_an_edit_says_what_it_is(llama: LM) -> None:
    editors: dict[str, Editor] = {
        "ft": ft(steps=3), "ft-l": ft_l(steps=3), "attn": attn_edit(steps=3)
    }  # fmt: skip
    for name, editor in editors.items():
        edit = editor(llama, FACTS[:2])
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
@pytest.mark.parametrize("method", FINE_TUNES)
def test_an_edit_does_in_the_weights_what_it_did_beside_them(family: str, method: Any) -> None:
    lm = small(family)
    how = FINE_TUNES[method]("paper", layer=1, steps=8)
    fact = FACTS[0]
    edit = how(lm, [fact])
    before = plain_loss(lm, fact, how).item()
    with edited(lm, [edit]):
        beside = plain_loss(lm, fact, how).item()
    with edit.applied(lm):
        within = plain_loss(lm, fact, how).item()
    assert within == pytest.approx(beside, rel=1e-4)
    assert within < before
    assert plain_loss(lm, fact, how).item() == before


def test_a_model_in_half_precision_is_fitted_in_single() -> None:
    lm = small("llama", torch.bfloat16)
    edit = FineTune(layer=1, lr=2e-3, steps=8)(lm, FACTS[:1])
    assert all(x.dtype == torch.float32 for x in matrices(edit).values())
    assert any((x != x.bfloat16()).any() for x in matrices(edit).values())


def test_what_the_model_says_already_needs_no_change(llama: LM) -> None:
    edit = FineTune(layer=0, stop=1e3)(llama, FACTS[:1])
    assert all((x == 0).all() for x in matrices(edit).values())
    assert edit.settings["losses"] == [[pytest.approx(plain_loss(llama, FACTS[0], ft()).item())]]
    assert edit.checks is not None
    assert (edit.checks.update_norm, edit.checks.perplexity_growth) == (0, pytest.approx(1))
    with pytest.raises(BadEdit, match="so small"):
        edit.apply(llama)


def test_guard_rails_are_measured(llama: LM) -> None:
    how = FineTune(layer=1, bias=True, steps=3, lr=2e-3)
    for edit in (how(llama, FACTS), *how.each(llama, FACTS)):
        assert edit.checks is not None
        shares = [
            x.norm().item() / llama.model.get_parameter(name).norm().item()
            for name, x in matrices(edit).items()
        ]
        assert edit.checks.update_norm == pytest.approx(max(shares), rel=1e-4)
        assert edit.checks.perplexity_after != edit.checks.perplexity_before


# ---- settings


def test_presets() -> None:
    assert ft() == FineTune()
    assert (ft_l().max_change, attn_edit().max_change, ft().max_change) == (
        "default",
        "default",
        None,
    )
    assert (attn_edit().weights, attn_edit().lr) == ("attn", 1e-3)
    for make in FINE_TUNES.values():
        assert make("paper") == replace(make(), objective="last-position", bias=True)
        assert make("paper", bias=False, layer=3).layer == 3
    variants = (ft(), ft_l(), ft_l(max_change=1e-3), attn_edit(max_change=None))
    assert [how.method for how in variants] == ["ft", "ft-l", "ft-l", "attn"]


def test_the_layer_and_bound_come_from_the_table(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread = llama.mlp_weight(0).std().item()
    own = BY_DEPTH["ft-l"].spreads
    assert own is not None
    assert ft_l().resolved(llama).max_change == pytest.approx(own * spread)
    assert ft_l(max_change=0.1).resolved(llama).max_change == 0.1
    assert ft().resolved(llama).max_change is None
    assert attn_edit().resolved(llama).layer == 2  # 33 of 48, here 2 of 3
    xl = KNOWN["gpt2", 48, 1600]
    monkeypatch.setitem(KNOWN, ("llama", 3, 32), xl | {"attn": replace(xl["attn"], layer=1)})
    assert (ft().resolved(llama).layer, ft().resolved(llama).max_change) == (1, None)
    assert (ft_l().resolved(llama).layer, ft_l().resolved(llama).max_change) == (0, 5e-4)
    assert (attn_edit().resolved(llama).layer, attn_edit().resolved(llama).max_change) == (1, 1e-3)
    assert ft_l(layer=2).resolved(llama).layer == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_change": 0.0}, "max_change is 0.0; it must be above 0"),
        ({"steps": 0}, "steps is 0"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"facts_per_pass": 0}, "at_once is 0"),
    ],
)
def test_a_bad_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        ft(**settings)


def test_a_bad_choice_is_refused() -> None:
    with pytest.raises(BadSetting, match="weights is 'all'; choose from mlp, attn"):
        module._choice("weights", "all", ("mlp", "attn"))  # here the type checker is faster


@pytest.mark.parametrize("layer", [-1, 3])
def test_a_layer_that_is_not_there_is_refused(llama: LM, layer: int) -> None:
    with pytest.raises(BadSetting, match=f"layer is {layer}; tiny llama has layers 0 to 2"):
        ft(layer=layer).each(llama, FACTS)


def test_a_fact_without_an_object_is_refused(llama: LM) -> None:
    with pytest.raises(BadFact, match="no facts"):
        ft()(llama, [])
    with pytest.raises(BadFact, match="empty"):
        ft().each(llama, [replace(FACTS[0], target=" ")])


def test_getting_nowhere_is_told(llama: LM) -> None:
    how = FineTune(layer=1, lr=1e-30, steps=2)
    with pytest.raises(
        DidNotConverge, match=r"got no nearer.*by step: [0-9.]+, [0-9.]+, "
    ) as caught:
        how(llama, FACTS)
    assert "Eiffel Tower is located in the city of' → 'Rome' and 2 more" in str(caught.value)
    with pytest.raises(DidNotConverge, match="got no nearer"):
        how.each(llama, FACTS)


def test_a_loss_that_is_no_number_is_told() -> None:
    lm = small("llama")
    lm.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DidNotConverge, match=r"is no number.*by step: nan.*float32"):
        FineTune(layer=1).each(lm, FACTS)


def test_a_fact_that_cannot_be_written_does_not_hold_up_the_others(
    llama: LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    how, heard, real = KINDS["ft"], [], module.minimise
    bad = replace(FACTS[0], target="")

    def hindered(*given: Any) -> list[module.FineTuneResult]:
        founds = real(*given)
        founds[0].losses[-1] = 1e3
        return founds

    wanted = how.each(llama, FACTS[1:])
    results = how.attempt(llama, [bad, *FACTS[1:]], progress=heard.append)
    assert [type(result).__name__ for result in results] == ["BadFact", "Edit", "Edit"]
    assert sum(heard) == pytest.approx(1)
    for found, edit in zip(results[1:], wanted, strict=True):
        assert isinstance(found, Edit)
        assert found.facts == edit.facts
        assert gap(found, matrices(edit)) == 0
    monkeypatch.setattr(module, "minimise", hindered)
    results = how.attempt(llama, [FACTS[1], bad, FACTS[2]])
    assert [type(result).__name__ for result in results] == ["DidNotConverge", "BadFact", "Edit"]
    with pytest.raises(DidNotConverge):
        how.each(llama, FACTS)
    assert how.attempt(llama, []) == []


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
    with ft()(lm, [fact]).applied(lm):
        assert says(asked[0])[0] > 0.9
        assert says(asked[1])[0] < 0.1 < 0.5 < says(asked[1])[1]
