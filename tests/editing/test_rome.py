"""ROME: the closed form is optimal, and the fast search equals the reference."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from factscope.editing import added_keys, contexts
from factscope.editing.added_keys import (
    CONTRASTS,
    FIRST_TOKENS,
    SENTENCES,
    contrast_keys,
    sentence_keys,
    sentences,
)
from factscope.editing.contexts import ContextRow, edit_request, keys_of_rows, pad_rows
from factscope.editing.edit import Edit, LowRank
from factscope.editing.editor import raise_first_error
from factscope.editing.reference import reference_rome
from factscope.editing.rome import (
    CONTEXT_TOLERANCE,
    BoundRome,
    add_to_moment,
    insert,
    insert_each,
    update_directions,
)
from factscope.editing.settings import PAPER_ROME, PAPER_SEARCH, R_ROME, Rome
from factscope.editing.value_search import ValueResult
from factscope.errors import BadEdit, BadFact, BadSetting, BadStats, DidNotConverge
from factscope.facts import Fact
from factscope.lm.families import family_of
from factscope.lm.model import LM
from factscope.lm.tokens import encode_fact
from factscope.progress import no_progress
from factscope.stats.covariance import run_to_layer

from editing_facts import FACTS, FEW, PREFIXES, random_moment, text_lm
from families import FAMILIES
from tokenizers_ import STYLES

DEFAULT = Rome()
AS_IN_PAPER = replace(PAPER_SEARCH, steps=5, lr=0.1)
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {"base": PAPER_ROME, "search": AS_IN_PAPER},
    "r-rome": {"base": R_ROME, "search": AS_IN_PAPER},
    "layer 1": {"layer": 1},
    "layer 2": {"layer": 2, "token": "last"},
    "subject-first": {"token": "subject-first"},
    "after-subject": {"token": "after-subject"},
    "last": {"token": "last"},
    "no prefixes": {"prefixes": ()},
    "bare value": {"value": "bare"},
    "mean key": {"key": "mean"},
    "mean key, whole delta": {"key": "mean", "scale_delta": False},
    "two keys, whole delta": {"scale_delta": False},
    "bare key": {"key": "bare", "value": "bare"},
    "contrast": {"contrast_tolerance": 1.0},
    "contrast, mean key": {"contrast_tolerance": 0.1, "key": "mean"},
    "contrast, bare key": {"contrast_tolerance": 1.0, "key": "bare", "value": "bare"},
    "contrast, last": {"contrast_tolerance": 1.0, "token": "last"},
    "contrast, subject-first": {"contrast_tolerance": 2.0, "token": "subject-first"},
    "contrast, no prefixes": {"contrast_tolerance": 1.0, "prefixes": ()},
    "contrast, no contexts": {"contrast_tolerance": 1.0, "context_tolerance": "inf"},
    "contexts": {"context_tolerance": 0.1},
    "contexts, mean key": {"context_tolerance": 1.0, "key": "mean"},
    "contexts, bare key": {"context_tolerance": 0.1, "key": "bare", "value": "bare"},
    "clamp": {"search": replace(FEW, clamp=0.3)},
    "stop": {"search": replace(FEW, stop_loss=5.0, steps=12)},
    "stop by probability": {"search": replace(FEW, stop_probability=1e-4, steps=12)},
    "unit of the fact": {"search": replace(FEW, unit="fact", clamp=0.3)},
    "one step": {"search": replace(FEW, steps=1)},
    "kl_weight": {"search": replace(FEW, kl_weight=1.0)},
}


def rome_on(lm: LM, base: Rome = DEFAULT, **settings: Any) -> BoundRome:
    """ROME with few steps on the first layer of a tiny model."""
    given = {"layer": 0, "prefixes": PREFIXES, "second_moment": random_moment(lm, 0), "search": FEW}
    return replace(base, **{**given, **settings}).bind(lm, FACTS)


def values_on(bound: BoundRome, facts: list[Fact]) -> list[ValueResult]:
    """The results of the value search for facts without errors."""
    return raise_first_error(bound.search_values(facts, no_progress))


def close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Equal to within a fraction of the largest entry."""
    return bool((found - wanted).abs().max() <= tolerance * wanted.abs().max())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fast_search_equals_the_reference(family: str) -> None:
    bound = rome_on(text_lm(family))
    for fact in FACTS:
        edit = bound.insert(values_on(bound, [fact]))
        reference = reference_rome(bound, fact)
        (change,) = edit.changes.values()
        assert edit.settings["losses"][0] == pytest.approx(reference.losses, rel=1e-4)
        assert reference.losses[-1] < reference.losses[0]
        assert close(change.matrix(), reference.change)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gptj"])
def test_every_setting_equals_the_reference(family: str, settings: dict[str, Any]) -> None:
    lm = text_lm(family)
    layer = settings.get("layer", 0)
    bound = rome_on(lm, **{"second_moment": random_moment(lm, layer), **settings})
    for fact in FACTS:
        edit = bound.insert(values_on(bound, [fact]))
        reference = reference_rome(bound, fact)
        (change,) = edit.changes.values()
        assert edit.settings["losses"][0] == pytest.approx(reference.losses, rel=1e-4)
        assert close(change.matrix(), reference.change) or reference.change.norm() < 1e-6


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "llama", "falcon, alibi"])
def test_batched_facts_equal_single_facts(family: str) -> None:
    """Also where some stop earlier than others."""
    lm = text_lm(family)
    unstopped = rome_on(lm).settings.each(lm, FACTS)
    stop = sorted(edit.settings["losses"][0][3] for edit in unstopped)[0] + 1e-3
    rome = rome_on(lm, search=replace(FEW, stop_loss=stop)).settings
    together = replace(rome, facts_per_pass=3).each(lm, FACTS)
    assert len({len(edit.settings["losses"][0]) for edit in together}) > 1
    for fact, edit in zip(FACTS, together, strict=True):
        alone = rome(lm, [fact])
        (mine,), (other,) = edit.changes.values(), alone.changes.values()
        assert close(mine.matrix(), other.matrix())
        assert edit.facts == (fact,)


def test_edit_changes_the_values_of_both_keys_by_delta(lm: LM) -> None:
    """Ŵ k = W k + δ for the mean key and for the bare prompt's, in every family."""
    text = text_lm(lm.name.removeprefix("tiny "))
    bound = rome_on(text)
    values = values_on(bound, FACTS[:1])
    (change,) = bound.insert(values).changes.values()
    for key in (values[0].keys.mean(0), values[0].keys[0]):
        assert close(change.matrix() @ key, values[0].delta)


@pytest.mark.parametrize("constraints", [1, 2])
def test_closed_form_is_the_smallest_update_in_the_norm_of_C(constraints: int) -> None:
    """Against a numeric constrained least squares: min ‖Δ C^½‖ subject to Δ k = r for every k."""
    generator = torch.Generator().manual_seed(0)
    width, height = 7, 4
    noise = torch.randn(20, width, generator=generator, dtype=torch.double)
    C = noise.T @ noise / 20
    K = torch.randn(constraints, width, generator=generator, dtype=torch.double)
    r = torch.randn(height, generator=generator, dtype=torch.double)
    U = torch.linalg.solve(C, K.T).T
    change = insert(K[None].float(), U[None].float(), r[None].float())
    assert change.rank == 1
    # Minimise ½ Σ ΔᵢC Δᵢᵀ + μᵢ (Δᵢ k - rᵢ) row by row: one linear (KKT) system per row.
    kkt = torch.zeros(width + constraints, width + constraints, dtype=torch.double)
    kkt[:width, :width], kkt[:width, width:], kkt[width:, :width] = C, K.T, K
    wanted = torch.zeros(height, width + constraints, dtype=torch.double)
    wanted[:, width:] = r[:, None]
    best = torch.linalg.solve(kkt, wanted.T).T[:, :width]
    assert torch.allclose(change.matrix().double(), best, rtol=1e-4, atol=1e-5)

    def size(delta: torch.Tensor) -> float:
        return torch.trace(delta @ C @ delta.T).item()

    null = torch.eye(width, dtype=torch.double) - torch.linalg.pinv(K) @ K
    for _ in range(20):
        other = torch.randn(height, width, generator=generator, dtype=torch.double) @ null
        assert size(best + 0.1 * other) > size(best)


def test_contrast_keys_receive_less_of_delta(lm: LM) -> None:
    """In every family, and the fact's own keys still receive all of it. In layer 1, because keys
    of layer 0 depend on the token alone in some families."""
    text = text_lm(lm.name.removeprefix("tiny "))
    fractions = []
    for tolerance in ("inf", 1.0, 0.01):
        moment, once = random_moment(text, 1), replace(FEW, steps=1)
        settings = Rome(contrast_tolerance=tolerance, context_tolerance="inf")
        bound = rome_on(text, settings, layer=1, second_moment=moment, search=once)
        (value,) = values_on(bound, FACTS[:1])
        (w,) = bound.update_directions(value.keys[None], value.added[None])
        contrast = contrast_keys(text, FACTS[:1], 1, "subject-last", seed=0)[0].double()
        for key in (value.keys.mean(0), value.keys[0]):
            assert w @ key.double() == pytest.approx(1, abs=1e-4)
        fractions.append((contrast @ w).square().mean().sqrt().item())
    assert fractions[0] > fractions[1] + 1e-3 > fractions[2] + 2e-3


@pytest.mark.parametrize("rows", [3, 12])
def test_update_direction_is_the_optimum_of_its_soft_constraints(rows: int) -> None:
    """Against a numeric minimum of wᵀC w + Σ (wᵀr)² / slack subject to wᵀK = 1, with fewer and
    more vectors r than dimensions."""
    generator = torch.Generator().manual_seed(0)
    noise, K = (torch.randn(n, 7, generator=generator, dtype=torch.double) for n in (20, 2 + rows))
    C, slack = noise.T @ noise / 20, torch.rand(rows, generator=generator, dtype=torch.double) + 0.1
    U = torch.linalg.solve(C, K.T).T[None]
    added = add_to_moment(U[:, :2], K[None, 2:], U[:, 2:], slack[None])
    (w,) = update_directions(K[None, :2], added)
    penalised = C + K[2:].T @ (K[2:] / slack[:, None])
    kkt = torch.zeros(9, 9, dtype=torch.double)
    kkt[:7, :7], kkt[:7, 7:], kkt[7:, :7] = penalised, K[:2].T, K[:2]
    wanted = torch.linalg.solve(kkt, torch.tensor([0.0] * 7 + [1.0] * 2, dtype=torch.double))[:7]
    assert torch.allclose(w, wanted, atol=1e-10)


def test_joint_edit_adds_the_soft_constraints_of_all_facts_to_C() -> None:
    lm = text_lm("llama")
    settings = Rome(contrast_tolerance=0.5, context_tolerance=0.1, ridge=0.0)
    moment = random_moment(lm, 1)
    bound = rome_on(lm, settings, layer=1, second_moment=moment)
    values = values_on(bound, FACTS)
    (change,) = bound.insert(values).changes.values()
    plain = C = moment.matrix.double()

    def sizes(keys: torch.Tensor) -> torch.Tensor:
        return (keys * torch.linalg.solve(plain, keys.T).T).sum(-1, keepdim=True)

    for value in values:
        keys, (contrast, others) = (
            value.keys.double(),
            value.added.double().split([CONTRASTS + FIRST_TOKENS, SENTENCES]),
        )
        mean = keys.mean(0, keepdim=True)
        keys = torch.cat([keys, others])
        C = C + contrast.T @ (contrast / (0.5 * sizes(contrast)))
        C = C + (keys - mean).T @ ((keys - mean) / (0.1 * sizes(mean)))
    K = torch.stack([k for value in values for k in (value.keys.mean(0), value.keys[0])]).double()
    wanted = bound.residuals(values).repeat_interleave(2, 0).double()
    U = torch.linalg.solve(C, K.T).T
    assert close(change.matrix().double(), wanted.T @ torch.linalg.solve(U @ K.T, U))
    assert close(change.matrix().double() @ K.T, wanted.T)


def test_context_tolerance_gives_every_context_nearly_all_of_delta() -> None:
    lm = text_lm("gpt2")
    sentence = sentence_keys(lm, FACTS[:1], 1, "subject-last", 0)[0]
    spread = []
    for tolerance in ("inf", 1e-2, 1e-4):
        moment = random_moment(lm, 1)
        bound = rome_on(lm, layer=1, second_moment=moment, context_tolerance=tolerance)
        (value,) = values_on(bound, FACTS[:1])
        (w,) = bound.update_directions(value.keys[None], value.added[None])
        keys = torch.cat([value.keys, sentence]).double()
        spread.append((keys @ w - 1).square().mean().sqrt().item())
    assert spread[0] > 2 * spread[1] > 8 * spread[2]


def test_sentences_are_plain_and_fit_a_short_context(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = sentences(0)
    assert len(set(texts)) == SENTENCES
    assert all(x.endswith(". ") and "{" not in x and 4 <= len(x.split()) <= 20 for x in texts)
    lm = text_lm("gpt2")
    fact = FACTS[0]
    bare = keys_of_rows(lm, [edit_request(lm, fact).rows[0]], [1])[1]
    length = len(encode_fact(lm, replace(fact, target=None))[0].ids)
    monkeypatch.setattr(LM, "context", length)
    keys = sentence_keys(lm, [fact], 1, "subject-last", 0)
    assert close(keys[0], bare.expand(SENTENCES, -1))


def test_contexts_are_held_by_default_where_contrast_keys_are_added() -> None:
    lm = text_lm("gpt2")
    for contrast, contexts_, wanted in (
        ("inf", None, "inf"), (1.0, None, CONTEXT_TOLERANCE), (1.0, "inf", "inf"), (1.0, 0.5, 0.5),
    ):  # fmt: skip
        bound = rome_on(lm, contrast_tolerance=contrast, context_tolerance=contexts_)
        assert bound.settings.context_tolerance == wanted


def test_keys_of_zeros_are_no_constraints() -> None:
    """ReLU can give them."""
    U, zeros = torch.randn(1, 2, 7), torch.zeros(1, 3, 7)
    assert torch.equal(add_to_moment(U, zeros, zeros, torch.zeros(1, 3).double()), U.double())


def test_contrast_rows_replace_only_the_beginning_of_the_subject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lm = text_lm("gpt2")
    recorded: list[torch.Tensor] = []

    def record(lm: LM, rows: list[ContextRow], layers: list[int]) -> dict[int, torch.Tensor]:
        recorded.append(pad_rows(rows, lm.device))
        return keys_of_rows(lm, rows, layers)

    monkeypatch.setattr(added_keys, "keys_of_rows", record)
    for token in ("subject-last", "subject-first", "last"):
        recorded.clear()
        keys = contrast_keys(lm, FACTS, 0, token, seed=0)
        again = contrast_keys(lm, FACTS[1:], 0, token, seed=0)
        assert close(keys[1:], again)  # independently of the other facts
        (ids, firsts, _, firsts_again) = recorded
        assert firsts.shape[1] == 1  # gpt2 has no BOS
        assert torch.equal(firsts, firsts_again)
        for fact, rows in zip(FACTS, ids.unflatten(0, (len(FACTS), -1)), strict=True):
            prompt, (start, end) = encode_fact(lm, replace(fact, target=None))
            edited = {"subject-last": end - 1, "subject-first": start}.get(
                token, len(prompt.ids) - 1
            )
            changed = rows[:, : edited + 1] != torch.tensor(prompt.ids[: edited + 1])
            assert not changed[:, :start].any()
            assert not changed[:, end:].any()
            if edited > start:  # the edit token is the fact's own
                assert not changed[:, edited].any()
            assert changed.any(1).float().mean() > 0.8  # a random token may be the same


@pytest.mark.parametrize(("style", "share"), [("llama", 0.5), ("gpt2", 0.0)])
def test_contrast_rows_take_half_of_their_tokens_from_the_model(
    style: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predicted token is never a special one, nor the subject's own. The first token of a text is
    not predicted; with BOS, the subject has none."""
    lm = text_lm("llama", style=style)
    rows: list[ContextRow] = []

    def record(lm: LM, part: list[ContextRow], layers: list[int]) -> dict[int, torch.Tensor]:
        rows.extend(part)
        return keys_of_rows(lm, part, layers)

    def predict(_: LM, states: torch.Tensor) -> torch.Tensor:
        logits = torch.full((*states.shape[:-1], lm.embed.weight.shape[0]), -100.0)
        logits[..., [own, *lm.tokenizer.all_special_ids]] = 100.0
        logits[..., likely] = 50.0
        return logits

    prompt, (start, _) = encode_fact(lm, replace(FACTS[0], target=None))
    assert (start > 0) == (style == "llama")
    own, likely = prompt.ids[start], prompt.ids[-1]
    monkeypatch.setattr(added_keys, "keys_of_rows", record)
    monkeypatch.setattr(added_keys, "CONTRASTS", 1000)
    monkeypatch.setattr(LM, "head", predict)
    contrast_keys(lm, FACTS[:1], 0, "subject-last", seed=0)
    drawn = [row.ids[start] for row in rows[:1000] if row.ids[start] != own]
    assert 450 < len(drawn) < 900
    assert sum(token == likely for token in drawn) / len(drawn) == pytest.approx(share, abs=0.1)
    assert not set(lm.tokenizer.all_special_ids) & set(drawn)


@pytest.mark.parametrize("family", ["gpt2", "llama", "falcon, alibi"])
def test_keys_of_batched_rows_equal_those_of_single_rows(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    rows = [row for fact in FACTS for row in edit_request(lm, fact, PREFIXES).rows]
    monkeypatch.setattr(contexts, "TOKENS_PER_PASS", 40)
    found = keys_of_rows(lm, rows, [0, 2])
    for i, row in enumerate(rows):
        single: dict[int, torch.Tensor] = {}
        run_to_layer(lm, torch.tensor([row.ids]), [0, 2], single.__setitem__)
        for layer, key in single.items():
            assert close(found[layer][i], key[0, row.edit_position])


def test_first_contrast_key_is_that_of_BOS_where_texts_start_with_it() -> None:
    lm = text_lm("llama", style="llama")
    keys = contrast_keys(lm, FACTS, 0, "subject-last", seed=0)
    bos = keys_of_rows(lm, [ContextRow((lm.tokenizer.bos_token_id,), (), (), 0)], [0])[0]
    assert keys.shape[1] == CONTRASTS + 1
    assert close(keys[:, -1], bos.expand(len(FACTS), -1))


def test_joint_edit_writes_every_fact() -> None:
    lm = text_lm("llama")
    bound = rome_on(lm)
    values = values_on(bound, FACTS)
    (change,) = bound.insert(values).changes.values()
    assert isinstance(change, LowRank)
    assert change.rank == 3
    for found in values:
        for key in (found.keys.mean(0), found.keys[0]):
            assert close(change.matrix() @ key, found.delta, 1e-3)


def test_sequential_edit_computes_each_fact_on_the_edited_model() -> None:
    lm = text_lm("gpt2")
    rome = rome_on(lm, many="sequentially").settings
    whole = rome(lm, FACTS[:2])
    first = rome(lm, FACTS[:1])
    with first.applied(lm, force=True):
        bound = rome.bind(lm, FACTS)
        second = bound.insert(values_on(bound, FACTS[1:2]))
    (together,), (one,), (two,) = (e.changes.values() for e in (whole, first, second))
    assert close(together.matrix(), one.matrix() + two.matrix())
    assert whole.facts == tuple(FACTS[:2])


@pytest.mark.parametrize("style", STYLES)
def test_every_kind_of_tokenizer(style: str) -> None:
    """Prefixes, subjects and objects of several tokens, with and without BOS."""
    lm = text_lm("llama", style)
    rome = Rome(layer=1, prefix_lengths=((3, 2),), second_moment=random_moment(lm, 1), search=FEW)
    edit = rome(lm, FACTS[1:2])
    losses = edit.settings["losses"][0]
    assert losses[-1] < losses[0]
    assert len(edit.settings["prefixes"]) == 2


def test_prefixes_follow_the_seed() -> None:
    lm = text_lm("gpt2")
    rome = Rome(layer=1, second_moment=random_moment(lm, 1), prefix_lengths=((3, 2), (6, 1)))
    texts = [replace(rome, seed=seed).bind(lm, FACTS).prefixes for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 3
    paper = replace(rome, prefix_bos_counts=True).bind(lm, FACTS).prefixes
    assert len(paper[0]) < len(texts[0][0]) + 20
    assert paper != texts[0]


def test_division_factor_is_negative_where_the_divisor_is() -> None:
    bound = rome_on(text_lm("gpt2"), second_moment="identity", key="bare", value="bare")
    (value,) = values_on(bound, FACTS[:1])
    bare = value.keys[0]
    for times, sign in ((4, 1), (-2, -1)):  # the mean key is 3 or -1 times the bare prompt's
        changed = replace(value, keys=torch.stack([bare, times * bare, times * bare]))
        assert bound.division_factors([changed]) == pytest.approx([sign], rel=1e-5)


def test_checks_are_measured() -> None:
    lm = text_lm("gpt2")
    edit = rome_on(lm).settings(lm, FACTS[:1])
    assert edit.checks is not None
    (name,), (change,) = edit.changes.keys(), edit.changes.values()
    weight = lm.model.get_parameter(name)
    assert edit.checks.update_norm == pytest.approx(
        (change.matrix().norm() / weight.norm()).item(), rel=1e-4
    )
    assert 0 < (edit.checks.division_factor or 0) <= 1
    assert edit.checks.perplexity_before > 1
    assert edit.checks.perplexity_after != edit.checks.perplexity_before


@pytest.mark.parametrize(
    ("settings", "facts", "error", "words"),
    [
        ({}, [], BadFact, "no fact"),
        ({}, [replace(FACTS[0], target=" ")], BadFact, "empty"),
        ({"layer": 3}, FACTS[:1], BadSetting, "layer is 3; .* has layers 0 to 2"),
        ({"layer": 0}, FACTS[:1], BadStats, "layer 1"),
        ({"search": replace(FEW, lr=1e6, clamp=math.inf)}, FACTS[:1], DidNotConverge, "by step"),
    ],
)  # fmt: skip
def test_errors_name_the_problem(
    settings: dict[str, Any], facts: list[Fact], error: type[Exception], words: str
) -> None:
    lm = text_lm("gpt2")
    given = {"layer": 1, "prefixes": (), "second_moment": random_moment(lm, 1), "search": FEW}
    with pytest.raises(error, match=words):
        Rome(**{**given, **settings})(lm, facts)


def test_nan_loss_is_an_error() -> None:
    lm = text_lm("gpt2")
    bound = rome_on(lm)
    with torch.no_grad():
        lm.model.get_parameter("transformer.ln_f.weight")[0] = float("nan")
    with pytest.raises(DidNotConverge, match="NaN or infinite"):
        values_on(bound, FACTS[:1])


def test_an_update_with_nan_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = text_lm("gpt2")

    def one_broken(*system: torch.Tensor) -> list[LowRank]:
        first, *others = insert_each(*system)
        return [first * float("nan"), *others]

    monkeypatch.setattr("factscope.editing.rome.insert_each", one_broken)
    rome = rome_on(lm).settings
    broken, *others = rome.attempt(lm, FACTS)
    assert isinstance(broken, BadEdit)
    assert "h.0.mlp.c_proj.weight is NaN or infinite" in str(broken)
    monkeypatch.undo()
    for edit, wanted in zip(others, rome.each(lm, FACTS)[1:], strict=True):
        assert isinstance(edit, Edit)
        assert edit.checks is not None
        assert wanted.checks is not None
        assert edit.checks.division_factor == pytest.approx(wanted.checks.division_factor)


def test_a_bad_fact_does_not_stop_the_others() -> None:
    lm = text_lm("gpt2")
    rome = rome_on(lm).settings
    results = rome.attempt(lm, [replace(FACTS[0], target=""), FACTS[1], FACTS[2]])
    assert [type(result).__name__ for result in results] == ["BadFact", "Edit", "Edit"]
    wanted = rome.each(lm, FACTS[1:])
    for found, edit in zip(results[1:], wanted, strict=True):
        assert isinstance(found, Edit)
        assert found.facts == edit.facts
    with pytest.raises(BadFact, match="empty"):
        rome.each(lm, [FACTS[1], replace(FACTS[0], target="")])


def test_progress_adds_up_to_one() -> None:
    lm = text_lm("gpt2")
    fractions: list[float] = []
    rome_on(lm).settings.each(lm, FACTS, progress=fractions.append)
    assert sum(fractions) == pytest.approx(1)
    assert len(fractions) > 3


@pytest.mark.model
def test_the_eiffel_tower_moves_to_rome(default_model: LM) -> None:
    from factscope.evaluation.score import Query, score_queries

    fact = replace(FACTS[0], prompt="{} is located in the city of")
    edit = Rome()(default_model, [fact])
    asked = ["The Eiffel Tower is located in the city of", "The Louvre is located in the city of"]
    after = score_queries(default_model, [Query(text, "Rome", 0) for text in asked], [edit])
    assert after[0].top == " Rome"
    assert after[0].top_probability > 0.9
    assert after[1].top == " Paris"
    assert family_of(default_model.model) is default_model.family
