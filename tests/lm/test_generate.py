"""Texts generated in a batch equal those of each row alone, without a cache; greedy text."""

import math

import pytest
import torch

from factscope.errors import BadFact, BadModelFile
from factscope.lm.generate import (
    argmax_choice,
    generate,
    generate_greedy,
    sample_texts,
    top_k_choice,
    uniform_draws,
)
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from editing_facts import text_lm
from families import FAMILIES, tiny_text_lm


def plain(lm, row: list[int], draws: torch.Tensor, k: int) -> list[int]:
    """One row, every token by a forward pass over all of it."""
    ids = list(row)
    while len(ids) < len(draws):
        logits = lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1]
        best = logits.float().topk(k)
        reached, choice = best.values.softmax(-1).cumsum(-1), 0
        while choice < k - 1 and draws[len(ids)] >= reached[choice]:
            choice += 1
        ids.append(int(best.indices[choice]))
    return ids[: len(draws)]


@pytest.mark.parametrize(
    ("static", "k"), [(False, 1), (False, 5), (True, 1), (True, 5), ("own kernel", 5)]
)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_row_in_a_batch_gets_what_it_gets_alone(
    family: str, k: int, static: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if static == "own kernel":
        monkeypatch.setattr("factscope.lm.accel.decode.has_kernels", lambda device: True)
    monkeypatch.setattr("factscope.lm.accel.decode.MIN_STEPS", 2)
    monkeypatch.setattr("factscope.lm.accel.decode.TOLERANCE", {torch.float32: 1e-4})
    lm = text_lm(family)
    rows = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14] * 3, [15, 16, 17, 18]]
    draws = uniform_draws(["a", "b", "c", "d"], 12, seed=3)
    found = sample_texts(lm, rows, draws, k=k, static=bool(static))
    with torch.no_grad():
        assert found == [plain(lm, row, mine, k) for row, mine in zip(rows, draws, strict=True)]


def test_draws_depend_on_name_and_seed_only() -> None:
    many = uniform_draws(["a", "b", "c"], 6, seed=1)
    assert torch.equal(uniform_draws(["b"], 6, seed=1)[0], many[1])
    assert not torch.equal(uniform_draws(["b"], 6, seed=2)[0], many[1])
    assert not torch.equal(many[0], many[1])
    assert torch.equal(uniform_draws(["a"], 4, seed=1)[0], many[0, :4])


def test_draws_follow_the_probabilities() -> None:
    from factscope.lm.generate import _sampled

    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0]]).expand(20000, -1)
    draws = torch.linspace(0, 1, 20001)[:-1]
    counts = torch.bincount(_sampled(logits, draws, 3), minlength=4) / 20000
    wanted = torch.tensor([0.0, 2.0, 1.0]).softmax(-1)
    assert torch.allclose(counts[:3], wanted, atol=1e-3)
    assert counts[3] == 0


def test_a_row_that_is_long_enough_is_cut() -> None:
    lm = text_lm("gpt2")
    rows = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 10, 11]]
    assert sample_texts(lm, rows, uniform_draws(["a", "b"], 4, seed=0), k=1) == [
        row[:4] for row in rows
    ]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "gpt_neox", "opt", "qwen2", "phi3"])
def test_static_decoding_is_used_where_a_family_allows_it(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise every step of a long text would launch its operations one by one."""
    from factscope.lm.accel import decode

    taken = []
    steps = decode.static_decode

    def watched(*x: object, **more: object) -> torch.Tensor | None:
        taken.append(steps(*x, **more))  # pyright: ignore[reportArgumentType]
        return taken[-1]

    monkeypatch.setattr(decode, "static_decode", watched)
    lm = text_lm(family)
    rows = [[5, 6, 7], [8, 9, 10, 11, 12]]
    sample_texts(lm, rows, uniform_draws(["a", "b"], 16, seed=3), k=5, static=True)
    assert len(taken) == 1
    assert taken[0] is not None


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("position", [0, 5, 31, 32, 40])
def test_decode_attention_equals_torch(position: int, key_heads: int) -> None:
    from factscope.lm.accel.kernels import decode_attention

    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn(3, heads, tokens, 20, generator=generator)

    query, keys, values = draw(4, 1), draw(key_heads, 50), draw(key_heads, 50)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, keys[:, :, : position + 1], values[:, :, : position + 1], scale=0.3,
        enable_gqa=key_heads < 4,
    ).transpose(1, 2)  # fmt: skip
    found = decode_attention(query, keys, values, torch.tensor([position]), 0.3)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


# ---- greedy text


@pytest.fixture(scope="module")
def gpt2() -> LM:
    return tiny_text_lm("gpt2", spread=0.2)


TEXTS = (
    "The Eiffel Tower is located in the city of",
    "Paris",
    "The capital of Italy is",
    "The mother tongue of Danielle Darrieux is",
    "The capital of Spain is",
    "Rome is in the country of",
)


@torch.no_grad()
def without_cache(lm: LM, text: str, tokens: int) -> list[int]:
    """Greedy text by a full forward pass for every token."""
    ids = list(encode(lm, text).ids)
    begin = len(ids)
    for _ in range(tokens):
        ids.append(int(lm.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[begin:]


@pytest.mark.parametrize(
    ("family", "style"),
    [("gpt2", "gpt2"), ("llama", "llama"), ("mistral", "llama"), ("bloom", "bloom"),
     ("gemma2", "gemma"), ("gpt_neo", "gpt2"), ("opt", "opt")],
)  # fmt: skip
def test_greedy_text_equals_that_without_a_cache(
    family: str, style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = tiny_text_lm(family, spread=0.2, style=style)
    assert family != "mistral" or lm.model.config.sliding_window == 4
    monkeypatch.setattr(type(lm.tokenizer), "decode", lambda self, ids: " ".join(map(str, ids)))
    end = lm.tokenizer.eos_token_id
    wanted = []
    for text in TEXTS:
        ids = without_cache(lm, text, 8)
        wanted.append(ids[: ids.index(end)] if end in ids else ids)
    said = generate_greedy(lm, TEXTS, 8, rows=2)
    assert [s.split()[-len(w) :] if w else [] for s, w in zip(said, wanted, strict=True)] == [
        [str(i) for i in ids] for ids in wanted
    ]


def test_greedy_text_ends_at_eos(gpt2: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = without_cache(gpt2, TEXTS[0], 6)
    stop = ids[3]
    monkeypatch.setattr(type(gpt2.tokenizer), "eos_token_id", stop, raising=False)
    assert generate_greedy(gpt2, [TEXTS[0]], 6) == [gpt2.tokenizer.decode(ids[: ids.index(stop)])]


@pytest.mark.parametrize("style", ["gpt2", "llama", "gemma", "opt", "qwen", "bloom"])
def test_greedy_text_continues_the_prompt(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the tokenizer drops the first space when it decodes the new ids alone."""
    lm = tiny_text_lm("gpt2", spread=0.2, style=style)
    wanted = encode(lm, TEXTS[0] + " Paris and").ids[len(encode(lm, TEXTS[0])) :]

    def answer(lm: LM, rows: list[tuple[int, ...]], *how: object) -> list[list[int]]:
        return [list(wanted) for _ in rows]

    monkeypatch.setattr("factscope.lm.generate.generate_ids", answer)
    assert generate_greedy(lm, [TEXTS[0]], 5) == [" Paris and"]


def test_a_string_in_place_of_a_list_of_texts_is_refused(gpt2: LM) -> None:
    with pytest.raises(BadFact, match=r"texts is the string 'The Nile'"):
        generate_greedy(gpt2, "The Nile", 3)


def test_nan_is_refused() -> None:
    """Otherwise every token would be the first of the vocabulary, or sampling would fail."""
    lm = text_lm("gpt2")
    lm.mlp_weight(0).fill_(math.nan)
    for choose in (argmax_choice, top_k_choice(5, 0)):
        with pytest.raises(BadModelFile, match="predicts NaN: its weights or edits are NaN"):
            generate(lm, ["The Nile"], 3, choose)
