"""Greedy text: equal to decoding without a cache, and continues the prompt."""

import pytest
import torch

from factscope.lm.generate import generate_greedy
from factscope.lm.model import LM
from factscope.lm.tokens import encode

from families import tiny_text_lm


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
