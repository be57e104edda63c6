"""Noise: the random numbers of the paper's code, levels, and independence of the batch."""

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.lm.families import family_of
from factscope.lm.model import LM
from factscope.settings import build
from factscope.tracing.corruption import (
    NoiseScale,
    corrupt_embeddings,
    measure_noise_scale,
    sample_noise,
)
from factscope.tracing.settings import Corruption, parse_noise_level

from families import tiny_model
from tokenizers_ import tokenizer

FACT = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of")
OTHER = Fact(subject="Big Ben", prompt="{} is located in the city of")
SCALE = NoiseScale(sigma=0.5)


@pytest.fixture(scope="module")
def tiny_text_lm() -> LM:
    """A tiny model with a real tokenizer."""
    words = tokenizer("gpt2")
    model = tiny_model("gpt2", vocabulary=len(words))
    return LM(model=model, tokenizer=words, family=family_of(model), name="reader")


def test_gaussian_noise_of_the_papers_code() -> None:
    corruption = Corruption(rng="paper", seed=1, samples=10)
    expected = np.random.RandomState(1).randn(10, 4, 6) * (3 * 0.5)
    np.testing.assert_array_equal(sample_noise(corruption, SCALE, FACT, 4, 6), expected)
    np.testing.assert_array_equal(
        sample_noise(corruption, SCALE, OTHER, 4, 6), expected
    )  # restarted for every fact


def test_uniform_noise_of_the_papers_code() -> None:
    corruption = Corruption(
        rng="paper", seed=1, samples=2, distribution="uniform", level=0.1346, in_sigmas=False
    )
    expected = np.random.RandomState(1).uniform(-1, 1, (2, 3, 4)) * 0.1346
    np.testing.assert_array_equal(sample_noise(corruption, SCALE, FACT, 3, 4), expected)


def test_by_default_noise_is_reproducible_and_independent_between_facts() -> None:
    corruption = Corruption(samples=3)
    first = sample_noise(corruption, SCALE, FACT, 4, 6)
    np.testing.assert_array_equal(first, sample_noise(corruption, SCALE, FACT, 4, 6))
    assert not np.allclose(first, sample_noise(corruption, SCALE, OTHER, 4, 6))
    assert not np.allclose(first, sample_noise(Corruption(samples=3, seed=1), SCALE, FACT, 4, 6))


@pytest.mark.parametrize(
    ("corruption", "spread"),
    [
        (Corruption(level=3.0), 1.5),
        (Corruption(level=0.25, in_sigmas=False), 0.25),
        (Corruption(distribution="uniform", level=2.0), 1 / np.sqrt(3)),
    ],
)
def test_noise_has_the_requested_level(corruption: Corruption, spread: float) -> None:
    noise = sample_noise(corruption, SCALE, FACT, 50, 200)
    assert noise.std() == pytest.approx(spread, rel=0.02)
    assert noise.mean() == pytest.approx(0, abs=0.02 * spread)


def test_embedding_noise_has_the_mean_and_covariance_of_the_embeddings() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    root = root @ root.T
    measured = NoiseScale(sigma=1.0, mean=np.arange(5.0), spread=root)
    noise = sample_noise(Corruption(distribution="embedding", samples=400), measured, FACT, 50, 5)
    flat = noise.reshape(-1, 5)
    np.testing.assert_allclose(flat.mean(0), np.arange(5.0), atol=0.15)
    expected = root @ root
    np.testing.assert_allclose(np.cov(flat.T), expected, atol=0.05 * expected.max())


def test_sigma_is_measured_over_all_entries_of_the_subjects_embeddings(tiny_text_lm: LM) -> None:
    subjects = ["The Eiffel Tower", "Big Ben"]
    ids = [
        i
        for s in subjects
        for i in tiny_text_lm.tokenizer(s, add_special_tokens=False)["input_ids"]
    ]
    expected = tiny_text_lm.embed.weight[ids].double().std()  # unbiased
    assert measure_noise_scale(tiny_text_lm, Corruption(), subjects, []).sigma == pytest.approx(
        expected.item()
    )


def test_covariance_is_measured_on_the_tokens_of_the_texts(tiny_text_lm: LM) -> None:
    texts = ["The Eiffel Tower is located in the city of Paris", "Rome is the capital of Italy"]
    ids = [
        i for s in texts for i in tiny_text_lm.tokenizer(s, add_special_tokens=False)["input_ids"]
    ]
    found = measure_noise_scale(
        tiny_text_lm, Corruption(distribution="embedding"), ["Big Ben"], texts
    )
    assert found.mean is not None
    assert found.spread is not None
    rows = tiny_text_lm.embed.weight[ids].double().numpy()
    np.testing.assert_allclose(found.mean, rows.mean(0))
    np.testing.assert_allclose(found.spread @ found.spread, np.cov(rows.T), atol=1e-12)


def test_noise_is_added_or_replaces_the_embeddings() -> None:
    clean = torch.ones(2, 3, 4)
    noise = np.full((2, 3, 4), 0.5)
    assert torch.equal(corrupt_embeddings(clean, noise, replace=False), torch.full((2, 3, 4), 1.5))
    assert torch.equal(corrupt_embeddings(clean, noise, replace=True), torch.full((2, 3, 4), 0.5))


def test_extra_tokens_stop_at_the_end_of_the_prompt() -> None:
    assert Corruption(extra_tokens=2).token_range((1, 3), 10) == (1, 5)
    assert Corruption(extra_tokens=2).token_range((1, 3), 4) == (1, 4)


@pytest.mark.parametrize(
    ("text", "level"), [("3s", (3.0, True)), ("0.25", (0.25, False)), (" 1.5s ", (1.5, True))]
)
def test_noise_levels_are_parsed(text: str, level: tuple[float, bool]) -> None:
    assert parse_noise_level(text) == level
    corruption = build(Corruption(), {"noise": text})
    assert (corruption.level, corruption.in_sigmas) == level


@pytest.mark.parametrize("text", ["", "s", "three", "3x"])
def test_bad_noise_levels_are_refused(text: str) -> None:
    with pytest.raises(BadSetting, match=r"--noise is .*; write 3s"):
        build(Corruption(), {"noise": text})


@pytest.mark.parametrize(
    "fields",
    [
        {"samples": 0},
        {"level": -1.0},
        {"level": float("nan")},
        {"level": float("inf")},
        {"extra_tokens": -1},
        {"seed": -1},
        {"seed": 2**32},
        {"distribution": "pink"},
    ],
)
def test_settings_out_of_range_are_refused(fields: dict) -> None:
    with pytest.raises((BadSetting, TypeCheckError)):  # the latter where types are checked
        Corruption(**fields)
