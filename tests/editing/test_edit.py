"""Edits: applied and reverted bit-for-bit, added, scaled, and applied per row."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from factscope.editing.checks import with_checks
from factscope.editing.edit import Change, Dense, Edit, EditChecks, LowRank, applied_edits
from factscope.editing.per_row import edited
from factscope.errors import BadEdit, UnsafeEdit
from factscope.lm.model import LM

from editing_facts import text_lm
from edits import (
    BIASED,
    FACT,
    IDS,
    assert_same,
    attention,
    dense,
    edit_of,
    has_bias,
    logits,
    low_rank,
    mlp,
    some_edits,
    state_of,
)
from families import FAMILIES, tiny


@pytest.fixture
def gpt2() -> Iterator[LM]:
    """A tiny GPT-2, whose weights are stored transposed."""
    lm = tiny("gpt2")
    before = state_of(lm)
    yield lm
    for edit in applied_edits(lm):
        edit.revert(lm)
    assert_same(state_of(lm), before)


# ---- apply and revert


def test_an_edit_is_applied_and_reverted(lm: LM) -> None:
    before, unedited = state_of(lm), logits(lm)
    for edit in some_edits(lm):
        with edit.applied(lm) as same:
            assert same is lm
            assert applied_edits(lm) == (edit,)
            after = state_of(lm)
            assert not torch.allclose(logits(lm), unedited, rtol=1e-4, atol=1e-4)
            changed = {name for name in before if not torch.equal(after[name], before[name])}
            assert changed == set(edit.changes)
        assert_same(state_of(lm), before)
        assert applied_edits(lm) == ()
    assert torch.equal(logits(lm), unedited)


def test_the_edited_weight_is_w_plus_delta(lm: LM) -> None:
    layer, name = 1, mlp(lm, 1)
    before = lm.mlp_weight(layer).clone()
    for change in (low_rank(lm, name, 2), dense(lm, name)):
        with edit_of(lm, {name: change}).applied(lm):
            torch.testing.assert_close(lm.mlp_weight(layer), before + change.matrix())


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_edits_are_reverted_in_any_order(gpt2: LM, order: Sequence[int]) -> None:
    before, edits = state_of(gpt2), some_edits(gpt2)
    for edit in edits:
        edit.apply(gpt2)
    for taken in range(1, 5):
        edits[order[taken - 1]].revert(gpt2)
        left = [edit for i, edit in enumerate(edits) if i not in order[:taken]]
        assert applied_edits(gpt2) == tuple(left)
        # Bit-for-bit the same as the remaining edits on a new model.
        fresh = tiny("gpt2")
        for edit in left:
            edit.apply(fresh)
        assert_same(state_of(gpt2), state_of(fresh))
    assert_same(state_of(gpt2), before)


def test_edits_are_reverted_after_an_error(gpt2: LM) -> None:
    before = state_of(gpt2)
    first, second, *_ = some_edits(gpt2)
    with pytest.raises(KeyboardInterrupt), first.applied(gpt2), second.applied(gpt2):
        raise KeyboardInterrupt
    assert_same(state_of(gpt2), before)
    assert applied_edits(gpt2) == ()


def test_applied_blocks_may_overlap(gpt2: LM) -> None:
    before = state_of(gpt2)
    first, second, *_ = some_edits(gpt2)
    outer, inner = first.applied(gpt2), second.applied(gpt2)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert applied_edits(gpt2) == (second,)
    inner.__exit__(None, None, None)
    assert_same(state_of(gpt2), before)


def test_an_edit_cannot_be_applied_twice(gpt2: LM) -> None:
    edit = some_edits(gpt2)[0]
    with edit.applied(gpt2):
        there = state_of(gpt2)
        with pytest.raises(BadEdit, match="applied already"):
            edit.apply(gpt2)
        with pytest.raises(BadEdit, match="applied already"), edit.applied(gpt2):
            pass
        assert_same(state_of(gpt2), there)
        assert applied_edits(gpt2) == (edit,)


def test_an_edit_that_is_not_applied_cannot_be_reverted(gpt2: LM) -> None:
    first, second, *_ = some_edits(gpt2)
    with pytest.raises(BadEdit, match="apply it first"):
        first.revert(gpt2)
    with second.applied(gpt2), pytest.raises(BadEdit, match="apply it first"):
        first.revert(gpt2)


def test_models_have_separate_edits(gpt2: LM) -> None:
    other, edit = tiny("gpt2"), some_edits(gpt2)[0]
    with edit.applied(gpt2):
        assert applied_edits(other) == ()
        with edit.applied(other):
            assert_same(state_of(other), state_of(gpt2))
        assert applied_edits(gpt2) == (edit,)


# ---- refused edits


def test_another_model_is_refused(gpt2: LM) -> None:
    edit = replace(some_edits(gpt2)[0], fingerprint="0" * 64, model="another")
    before = state_of(gpt2)
    with pytest.raises(BadEdit, match=r"for another .*not for tiny gpt2"):
        edit.apply(gpt2)
    with pytest.raises(BadEdit, match="for another"), edited(gpt2, [edit]):
        pass
    assert_same(state_of(gpt2), before)
    with edit.applied(gpt2, force=True):
        assert applied_edits(gpt2) == (edit,)


def test_the_fingerprint_is_of_the_unedited_model(gpt2: LM) -> None:
    first, second, *_ = some_edits(gpt2)
    with first.applied(gpt2):
        second.check_model(gpt2)  # although the weights are edited now
        assert gpt2.fingerprint == tiny("gpt2").fingerprint


def test_a_forced_edit_must_still_fit(gpt2: LM) -> None:
    llama, before = tiny("llama"), state_of(gpt2)
    with pytest.raises(BadEdit, match=r"no weight 'model\.layers\.0"):
        some_edits(llama)[0].apply(gpt2, force=True)
    name = mlp(gpt2, 0)
    with pytest.raises(BadEdit, match=r"shape \(128, 32\), the edit's change of it \(3, 2\)"):
        edit_of(gpt2, {name: Dense(torch.ones(2, 3))}).apply(gpt2)
    assert_same(state_of(gpt2), before)


def test_an_edit_that_fails_its_checks_is_refused_unless_forced(gpt2: LM) -> None:
    checks = EditChecks(
        division_factor=0.5, update_norm=0.1, perplexity_before=10.0, perplexity_after=900.0
    )
    edit = replace(some_edits(gpt2)[0], checks=checks)
    with pytest.raises(UnsafeEdit, match="perplexity"):
        edit.apply(gpt2)
    assert applied_edits(gpt2) == ()
    with edit.applied(gpt2, force=True):
        assert applied_edits(gpt2) == (edit,)


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ({"taken": 1.0}, "took"),
        ({"taken": 0.0}, "did not take"),
        ({"taken": 0.5}, "took for 50 % of its facts"),
        ({"taken": 1.0, "paraphrases_taken": 1.0}, "took"),
        ({"taken": 1.0, "paraphrases_taken": 0.25}, "took, but only in 25 % of its paraphrases"),
        ({"taken": 0.0, "paraphrases_taken": 0.25}, "did not take"),
        ({}, "was not tried on its prompt"),
        ({"taken": 1.0, "neighbours_changed": 0.2}, "took"),
        ({"taken": 1.0, "neighbours_changed": 2 / 6}, "damaged others"),
        ({"taken": 0.0, "neighbours_changed": 2 / 6}, "did not take and damaged others"),
        ({"taken": 1.0, "perplexity_after": 900.0}, "broke the model"),
    ],
)
def test_verdicts(measured: dict[str, float], verdict: str) -> None:
    passed = EditChecks(
        division_factor=0.5, update_norm=0.1, perplexity_before=10.0, perplexity_after=10.1
    )
    assert replace(passed, **measured).verdict == verdict


@pytest.mark.parametrize("which", [0, 1])
def test_a_change_that_overflows_the_weight_changes_nothing(which: int) -> None:
    gpt2 = tiny("gpt2")
    gpt2.model.to(torch.float16)  # whose largest number is 65504
    before, there = state_of(gpt2), some_edits(gpt2)[1]
    names = [mlp(gpt2, 0), mlp(gpt2, 1)]
    changes: dict[str, Change] = {name: low_rank(gpt2, name) for name in names}
    changes[names[which]] = LowRank(torch.ones(32, 1), torch.full((1, 128), 1e5))
    edit = edit_of(gpt2, changes)
    with pytest.raises(BadEdit, match=f"would make {names[which]} infinite"):
        edit.apply(gpt2)
    assert_same(state_of(gpt2), before)
    with there.applied(gpt2):
        inside = state_of(gpt2)
        with pytest.raises(BadEdit, match="infinite"), edit.applied(gpt2):
            pass
        assert_same(state_of(gpt2), inside)
    assert applied_edits(gpt2) == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [0, 1])
def test_an_edit_with_nan_or_infinity_cannot_be_made(gpt2: LM, bad: float, which: int) -> None:
    names = [mlp(gpt2, 0), mlp(gpt2, 1)]
    zeros = torch.zeros(32, 128)  # 0 times infinity is NaN
    for change in (
        LowRank(torch.ones(32, 2), torch.tensor([[1.0] * 127 + [bad], [0.0] * 128])),
        LowRank(torch.full((32, 1), bad), torch.zeros(1, 128)),
        Dense(zeros.index_fill(0, torch.tensor(5), bad)),
    ):
        changes: dict[str, Change] = {name: low_rank(gpt2, name) for name in names}
        changes[names[which]] = change
        with pytest.raises(BadEdit, match=f"the change of {names[which]} is NaN or infinite"):
            edit_of(gpt2, changes)


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 1e39])
def test_a_multiple_that_is_not_finite_is_refused(gpt2: LM, factor: float) -> None:
    for edit in some_edits(gpt2)[:2]:
        with pytest.raises(BadEdit, match="is NaN or infinite"):
            _ = edit * factor


def test_factors_whose_product_is_infinite_are_refused(gpt2: LM) -> None:
    with pytest.raises(BadEdit, match="is NaN or infinite"):
        edit_of(gpt2, {mlp(gpt2, 0): LowRank(torch.ones(32, 1) * 1e30, torch.ones(1, 128) * 1e30)})


# ---- checks of sums and multiples


def test_a_harmful_multiple_or_sum_is_refused_unless_forced() -> None:
    lm = text_lm("gpt2")
    name, before = mlp(lm, 0), state_of(lm)
    small = edit_of(lm, {name: low_rank(lm, name, size=1e-3)})
    for edit in (1e6 * small, small + 1e6 * small, -(1e6 * small), replace(1e6 * small)):
        assert edit.checks is None
        with pytest.raises(UnsafeEdit, match="update norm"):
            edit.apply(lm)
        assert_same(state_of(lm), before)
        with edit.applied(lm, force=True):
            assert applied_edits(lm) == (edit,)
    for edit in (2.0 * small, small + small, -small):
        with edit.applied(lm):
            assert applied_edits(lm) == (edit,)
    assert_same(state_of(lm), before)


def test_missing_checks_include_the_perplexity() -> None:
    lm = text_lm("gpt2")
    # Within the limit of the norm, but it makes one token likely everywhere.
    token, size = lm.embed.weight[7], 0.45 * lm.mlp_weight(2).norm().item()
    B, A = (token / token.norm() * size)[:, None], torch.full((1, 128), 128**-0.5)
    edit = edit_of(lm, {mlp(lm, 2): LowRank(B, A)}, checks=None)
    with pytest.raises(UnsafeEdit, match="perplexity of unrelated text") as refused:
        edit.apply(lm)
    assert "update norm" not in str(refused.value)
    [checked] = with_checks(lm, [edit])
    assert checked.checks is not None
    assert str(refused.value).count(f"{checked.checks.perplexity_after:.4g}") == 1


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.ln_f.weight"])
def test_an_edit_of_no_linear_layer_is_checked_too(name: str) -> None:
    lm = text_lm("gpt2")
    W, before = lm.model.get_parameter(name).detach().clone(), state_of(lm)
    harmless, harmful = (
        edit_of(lm, {name: Dense(size * W)}, checks=None) for size in (1e-3, -0.999)
    )
    with pytest.raises(UnsafeEdit, match="update norm"):
        harmful.apply(lm)
    assert_same(state_of(lm), before)
    with harmless.applied(lm):
        assert applied_edits(lm) == (harmless,)


# ---- weights changed by hand


@pytest.mark.parametrize("data", [False, True])
def test_a_weight_changed_by_hand_is_not_overwritten(gpt2: LM, data: bool) -> None:
    first, second, *_ = some_edits(gpt2)  # both change the weight
    name, before = mlp(gpt2, 0), state_of(gpt2)
    first.apply(gpt2)
    weight = gpt2.model.get_parameter(name)
    with torch.no_grad():
        (weight.data if data else weight)[3, 4] += 1e-3
    there = state_of(gpt2)
    for change in (first.revert, second.apply):
        with pytest.raises(BadEdit, match=f"{name} was changed by hand since an edit"):
            change(gpt2)
        assert_same(state_of(gpt2), there)
        assert applied_edits(gpt2) == (first,)
    second.apply(gpt2, force=True)
    second.revert(gpt2)
    first.revert(gpt2)
    assert_same(state_of(gpt2), before)
    with pytest.raises(BadEdit, match="changed by hand"), first.applied(gpt2):
        weight.data[3, 4] += 1e-3
    first.revert(gpt2, force=True)
    assert_same(state_of(gpt2), before)


def test_other_weights_may_be_changed_by_hand(gpt2: LM) -> None:
    before = gpt2.mlp_weight(2).clone()
    with some_edits(gpt2)[0].applied(gpt2):
        gpt2.mlp_weight(2).data.mul_(2)
    torch.testing.assert_close(gpt2.mlp_weight(2), 2 * before)
    gpt2.mlp_weight(2).data.copy_(before)


def test_a_model_may_change_its_precision_while_edited(half: LM) -> None:
    lm = tiny(half.name.removeprefix("tiny "))
    with some_edits(lm)[0].applied(lm):
        lm.model.to(torch.bfloat16)
    assert_same(state_of(lm), state_of(half))


def test_a_change_below_precision_is_refused(gpt2: LM) -> None:
    name = mlp(gpt2, 0)
    large, small = low_rank(gpt2, name), low_rank(gpt2, name, size=1e-12)
    edit = edit_of(gpt2, {name: small})
    with pytest.raises(BadEdit, match="so small"):
        edit.apply(gpt2)
    with edit_of(gpt2, {name: large}).applied(gpt2), pytest.raises(BadEdit, match="so small"):
        edit.apply(gpt2)


def test_reverting_never_fails_because_remaining_edits_are_small(gpt2: LM) -> None:
    name, W, before = mlp(gpt2, 0), gpt2.mlp_weight(0).clone(), state_of(gpt2)
    wipe, small = (edit_of(gpt2, {name: Dense(W * size)}) for size in (-1.0, 1e-9))
    wipe.apply(gpt2)
    small.apply(gpt2)  # tiny, but not compared to the zeros that are there
    wipe.revert(gpt2)
    assert applied_edits(gpt2) == (small,)
    assert_same(state_of(gpt2), before)
    small.revert(gpt2)


def test_an_edit_and_its_negative_cancel(gpt2: LM) -> None:
    before, edit = state_of(gpt2), some_edits(gpt2)[0]
    with edit.applied(gpt2), (edit * -1.0).applied(gpt2, force=True):
        for name, weight in state_of(gpt2).items():
            torch.testing.assert_close(weight, before[name])
    assert_same(state_of(gpt2), before)


# ---- tied weights


def test_a_tied_weight_is_edited_under_one_name(gpt2: LM) -> None:
    delta = Dense(0.1 * torch.randn(gpt2.embed.weight.shape))
    with pytest.raises(BadEdit, match=r"tied to transformer\.wte\.weight"):
        edit_of(gpt2, {"lm_head.weight": delta}).apply(gpt2)
    before = gpt2.embed.weight.clone()
    with edit_of(gpt2, {"transformer.wte.weight": delta}).applied(gpt2):
        torch.testing.assert_close(gpt2.embed.weight, before + delta.matrix())
        assert gpt2.model.lm_head.weight is gpt2.embed.weight


# ---- bfloat16


@pytest.fixture(params=["gpt2", "llama"])
def half(request: pytest.FixtureRequest) -> LM:
    lm = tiny(request.param)
    lm.model.to(torch.bfloat16)
    return lm


def test_bfloat16_models_are_edited_in_float32(half: LM) -> None:
    before, edits = state_of(half), some_edits(half)
    for edit in edits:
        edit.apply(half)
    name = mlp(half, 0)
    total = (before[name].T if half.family.transposed else before[name]).float()
    for edit in edits:
        if name in edit.changes:
            total = total + edit.changes[name].matrix()
    assert half.mlp_weight(0).dtype == torch.bfloat16
    assert torch.equal(half.mlp_weight(0), total.bfloat16())
    for i in (1, 3, 0, 2):
        edits[i].revert(half)
    assert_same(state_of(half), before)


def test_a_change_below_bfloat16_precision_is_refused(half: LM) -> None:
    name = mlp(half, 0)
    with pytest.raises(BadEdit, match=r"does not change in torch\.bfloat16"):
        edit_of(half, {name: low_rank(half, name, size=1e-9)}).apply(half)


def test_the_fingerprint_is_the_same_in_float32_and_bfloat16(half: LM) -> None:
    family = half.name.removeprefix("tiny ")
    edit = some_edits(tiny(family))[0]
    with edit.applied(half):
        assert applied_edits(half) == (edit,)


def test_rows_in_bfloat16(half: LM) -> None:
    edits = some_edits(half)[:3]
    with edited(half, edits):
        found = logits(half)
    assert found.dtype == torch.bfloat16
    gaps = [_gap(found[i], _alone(half, edit)[i]) for i, edit in enumerate(edits)]
    assert max(gaps) < 0.1


# ---- sums and multiples


def test_a_sum_applies_both_edits(gpt2: LM) -> None:
    first, second, *_ = some_edits(gpt2)
    both = first + second
    assert both.facts == (FACT, FACT)
    assert both.method == "test"
    assert both.changed_weights == tuple(sorted({*first.changed_weights, *second.changed_weights}))
    with first.applied(gpt2), second.applied(gpt2):
        wanted = state_of(gpt2)
    with both.applied(gpt2, force=True):
        found = state_of(gpt2)
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])


def test_low_ranks_are_summed_until_dense_is_smaller(gpt2: LM) -> None:
    name = mlp(gpt2, 0)  # (32, 128): dense from rank 26 on
    one = edit_of(gpt2, {name: low_rank(gpt2, name, 12)})
    two = one + edit_of(gpt2, {name: low_rank(gpt2, name, 13, seed=1)})
    three = two + edit_of(gpt2, {name: low_rank(gpt2, name, 1, seed=2)})
    assert isinstance(two.changes[name], LowRank)
    assert two.changes[name].rank == 25
    assert isinstance(three.changes[name], Dense)
    total = low_rank(gpt2, name, 12).matrix() + low_rank(gpt2, name, 13, seed=1).matrix()
    torch.testing.assert_close(two.changes[name].matrix(), total)
    total = total + low_rank(gpt2, name, 1, seed=2).matrix()
    torch.testing.assert_close(three.changes[name].matrix(), total)


def test_a_multiple_scales_every_change(gpt2: LM) -> None:
    edit = replace(some_edits(gpt2)[1], settings={"layer": 3})
    twice = 2.0 * (edit * 0.5) * 2.0
    assert twice.settings == {"layer": 3, "scale": 2.0}
    assert edit.settings == {"layer": 3}
    for name, change in edit.changes.items():
        torch.testing.assert_close(twice.changes[name].matrix(), 2 * change.matrix())
        assert type(twice.changes[name]) is type(change)
        assert twice.changes[name].norm() == pytest.approx(2 * change.norm())
        assert change.norm() == pytest.approx(change.matrix().norm().item())


def test_a_sum_keeps_the_settings_of_its_parts(gpt2: LM) -> None:
    edits = [
        replace(edit, method=method, settings={"layer": layer})
        for edit, method, layer in zip(some_edits(gpt2), "abc", range(3), strict=False)
    ]
    half = (edits[0] + edits[1] * 3.0) * 0.5
    total = half + edits[2]
    assert total.method == "a + b + c"
    assert total.settings["parts"] == [
        {"method": "a", "layer": 0, "scale": 0.5},
        {"method": "b", "layer": 1, "scale": 1.5},
        {"method": "c", "layer": 2},
    ]
    assert total.checks is None


def test_edits_of_two_models_cannot_be_added(gpt2: LM) -> None:
    first, second, *_ = some_edits(gpt2)
    with pytest.raises(BadEdit, match="cannot be added"):
        _ = first + replace(second, fingerprint="0" * 64)
    name = mlp(gpt2, 0)
    with pytest.raises(BadEdit, match=r"\(32, 128\) and \(2, 2\)"):
        _ = first + edit_of(gpt2, {name: Dense(torch.ones(2, 2))})


def test_sum_minus_and_difference(gpt2: LM) -> None:
    first, second, *_ = some_edits(gpt2)
    name = mlp(gpt2, 0)
    a, b = first.changes[name].matrix(), second.changes[name].matrix()
    total = sum([first, second])
    assert isinstance(total, Edit)
    torch.testing.assert_close(total.changes[name].matrix(), a + b)
    torch.testing.assert_close((-first).changes[name].matrix(), -a)
    torch.testing.assert_close((first - second).changes[name].matrix(), a - b)
    assert sum([first]) is first
    for number in (1, "x"):
        with pytest.raises(TypeError):
            _ = number + first


def test_repr_is_short_and_html_is_escaped(gpt2: LM) -> None:
    edit = edit_of(gpt2, dict(some_edits(gpt2)[1].changes), facts=(FACT,) * 3, method="<b>")
    assert repr(edit) == (
        "Edit(<b> for tiny gpt2: 'The Louvre is in' → 'Rome'; 2 more facts; "
        "transformer.h.0.mlp.c_proj.weight: Dense(32 × 128); 1 more weights)"
    )
    assert repr(edit.changes[mlp(gpt2, 1)]) == "LowRank(rank 2, 32 × 128)"
    page = edit._repr_html_()
    assert "<b>Edit: &lt;b&gt; for tiny gpt2</b>" in page
    assert page.count("<li>&#x27;The Louvre is in&#x27; → &#x27;Rome&#x27;</li>") == 3
    assert "not checked" in repr(2.0 * edit)


# ---- per-row edits


def test_a_change_of_another_shape_cannot_be_given_to_rows(gpt2: LM) -> None:
    edit = edit_of(gpt2, {mlp(gpt2, 0): Dense(torch.ones(2, 3))})
    with pytest.raises(BadEdit, match=r"shape \(128, 32\), .*\(3, 2\)"), edited(gpt2, [edit]):
        pass


def _alone(lm: LM, edit: Edit | None, ids: Tensor = IDS) -> Tensor:
    """The logits with the edit applied to the weights."""
    if edit is None:
        return logits(lm, ids)
    with edit.applied(lm):
        return logits(lm, ids)


def _gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def assert_rows(lm: LM, edits: Sequence[Edit | None], index: Sequence[int] | None = None) -> None:
    """Each row has the logits of the model with its edit applied."""
    indices = list(range(len(edits))) if index is None else list(index)
    ids = torch.arange(len(indices) * 6).reshape(-1, 6) * 7 % 97 + 3
    before = state_of(lm)
    with edited(lm, edits, index):
        found = logits(lm, ids)
    assert_same(state_of(lm), before)
    alone = [_alone(lm, edit, ids) for edit in edits]
    for i, edit in enumerate(indices):
        assert _gap(found[i], alone[edit][i]) < 1e-5
    assert torch.equal(logits(lm, ids), _alone(lm, None, ids))


def test_rows_of_low_rank(lm: LM) -> None:
    name = mlp(lm, 1)
    edits = [edit_of(lm, {name: low_rank(lm, name, rank, seed=rank)}) for rank in (1, 3, 2)]
    assert_rows(lm, edits)


def test_rows_of_high_rank_and_dense(lm: LM) -> None:
    name = mlp(lm, 1)
    changes = [low_rank(lm, name, 9), dense(lm, name, seed=1), dense(lm, name, seed=2)]
    assert_rows(lm, [edit_of(lm, {name: change}) for change in changes])


def test_rows_of_mixed_edits_in_any_order(lm: LM) -> None:
    """Low rank and dense, several layers, attention inputs, biases; none; repeated."""
    assert_rows(lm, [*some_edits(lm), None], [2, 4, 0, 3, 1, 2, 4, 3, 0])


def test_rows_of_attention_inputs(lm: LM) -> None:
    names = attention(lm, 0)
    one = edit_of(lm, {name: low_rank(lm, name, 2) for name in names})
    two = edit_of(lm, {names[-1]: dense(lm, names[-1], seed=1)})
    assert_rows(lm, [one, None, two])


def test_the_list_of_families_with_biases() -> None:
    assert [family for family in sorted(FAMILIES) if has_bias(tiny(family))] == BIASED


@pytest.mark.parametrize("family", BIASED)
def test_rows_of_biases(family: str) -> None:
    lm = tiny(family)
    name = mlp(lm, 0, "bias")
    edits = [edit_of(lm, {name: dense(lm, name, seed)}) for seed in range(2)]
    assert_rows(lm, [edits[0], None, edits[1]])
    assert_rows(lm, edits, [1, 1, 0, 1])
    assert_rows(lm, [edits[0]], [0, 0])


def test_one_edit_for_all_rows(lm: LM) -> None:
    for edit in some_edits(lm):
        for ids in (IDS, IDS[:1]):
            with edited(lm, [edit]):
                found = logits(lm, ids)
            assert _gap(found, _alone(lm, edit, ids)) < 1e-5


def test_edited_rows_of_an_edited_model(gpt2: LM) -> None:
    first, second, third, _ = some_edits(gpt2)
    with first.applied(gpt2):
        assert_rows(gpt2, [second, None, third])


def test_unedited_rows_are_unchanged(gpt2: LM) -> None:
    with edited(gpt2, [None, None, None]):
        found = logits(gpt2)
    assert torch.equal(found, logits(gpt2))


def test_hooks_are_removed_after_an_error(gpt2: LM) -> None:
    wanted = logits(gpt2)
    with pytest.raises(KeyboardInterrupt), edited(gpt2, some_edits(gpt2)[:3]):
        raise KeyboardInterrupt
    assert torch.equal(logits(gpt2), wanted)


@pytest.mark.parametrize("count", [2, 4, 6, 9])
def test_a_batch_of_another_size_is_refused(lm: LM, count: int) -> None:
    edit = some_edits(lm)[0]
    with edited(lm, [edit], [0] * count), pytest.raises(BadEdit, match=f"edits for {count} rows"):
        logits(lm)  # three rows of six tokens, so that some counts fit a flat batch


@pytest.mark.parametrize("index", [-1, 2])
def test_an_edit_index_out_of_range_is_refused(gpt2: LM, index: int) -> None:
    edits = some_edits(gpt2)[:2]
    with (
        pytest.raises(BadEdit, match=f"edit {index}, but there are 2"),
        edited(gpt2, edits, [0, index, 1]),
    ):
        pass


@pytest.mark.parametrize("name", ["transformer.wte.weight", "transformer.ln_f.weight"])
def test_only_linear_layers_can_be_edited_per_row(gpt2: LM, name: str) -> None:
    delta = Dense(0.1 * torch.randn(gpt2.model.get_parameter(name).shape))
    edit = edit_of(gpt2, {name: delta})
    with edit.applied(gpt2):
        pass
    with pytest.raises(BadEdit, match="apply the edit instead"), edited(gpt2, [edit]):
        pass
