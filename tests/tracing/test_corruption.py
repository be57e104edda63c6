"""Noise: the paper's stream number for number, the level rules, independence of the batch."""

import numpy as np
import pytest
import torch

from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.lm.families import family_of
from factscope.lm.model import LM
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
def worded() -> LM:
    """A tiny model with a real tokenizer."""
    words = tokenizer("gpt2")
    model = tiny_model("gpt2", vocabulary=len(words))
    return LM(model=model, tokenizer=words, family=family_of(model), name="worded")


def test_the_papers_stream() -> None:
    corruption = Corruption(stream="paper", seed=1, samples=10)
    wanted = np.random.RandomState(1).randn(10, 4, 6) * (3 * 0.5)
    np.testing.assert_array_equal(sample_noise(corruption, SCALE, FACT, 4, 6), wanted)
    np.testing.assert_array_equal(
        sample_noise(corruption, SCALE, OTHER, 4, 6), wanted
    )  # begun anew


def test_the_papers_uniform_stream() -> None:
    corruption = Corruption(
        stream="paper", seed=1, samples=2, distribution="uniform", level=0.1346, in_sigmas=False
    )
    wanted = np.random.RandomState(1).uniform(-1, 1, (2, 3, 4)) * 0.1346
    np.testing.assert_array_equal(sample_noise(corruption, SCALE, FACT, 3, 4), wanted)


def test_by_default_facts_have_noise_of_their_own_that_can_be_had_again() -> None:
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
def test_the_level_is_what_it_says(corruption: Corruption, spread: float) -> None:
    noise = sample_noise(corruption, SCALE, FACT, 50, 200)
    assert noise.std() == pytest.approx(spread, rel=0.02)
    assert noise.mean() == pytest.approx(0, abs=0.02 * spread)


def test_embedding_noise_has_their_mean_and_covariance() -> None:
    rng = np.random.default_rng(0)
    root = rng.normal(size=(5, 5))
    root = root @ root.T
    measured = NoiseScale(sigma=1.0, mean=np.arange(5.0), spread=root)
    noise = sample_noise(Corruption(distribution="embedding", samples=400), measured, FACT, 50, 5)
    flat = noise.reshape(-1, 5)
    np.testing.assert_allclose(flat.mean(0), np.arange(5.0), atol=0.15)
    wanted = root @ root
    np.testing.assert_allclose(np.cov(flat.T), wanted, atol=0.05 * wanted.max())


def test_sigma_is_over_every_entry_of_the_subjects_embeddings(worded: LM) -> None:
    subjects = ["The Eiffel Tower", "Big Ben"]
    ids = [i for s in subjects for i in worded.tokenizer(s, add_special_tokens=False)["input_ids"]]
    wanted = worded.embed.weight[ids].double().std()  # unbiased
    assert measure_noise_scale(worded, Corruption(), subjects, []).sigma == pytest.approx(
        wanted.item()
    )


def test_the_covariance_is_that_of_the_texts_tokens(worded: LM) -> None:
    texts = ["The Eiffel Tower is located in the city of Paris", "Rome is the capital of Italy"]
    ids = [i for s in texts for i in worded.tokenizer(s, add_special_tokens=False)["input_ids"]]
    found = measure_noise_scale(worded, Corruption(distribution="embedding"), ["Big Ben"], texts)
    assert found.mean is not None
    assert found.spread is not None
    rows = worded.embed.weight[ids].double().numpy()
    np.testing.assert_allclose(found.mean, rows.mean(0))
    np.testing.assert_allclose(found.spread @ found.spread, np.cov(rows.T), atol=1e-12)


def test_noise_is_added_or_put_in_place() -> None:
    clean = torch.ones(2, 3, 4)
    noise = np.full((2, 3, 4), 0.5)
    assert torch.equal(corrupt_embeddings(clean, noise, replace=False), torch.full((2, 3, 4), 1.5))
    assert torch.equal(corrupt_embeddings(clean, noise, replace=True), torch.full((2, 3, 4), 0.5))


def test_extra_tokens_stop_at_the_end() -> None:
    assert Corruption(extra_tokens=2).tokens((1, 3), 10) == (1, 5)
    assert Corruption(extra_tokens=2).tokens((1, 3), 4) == (1, 4)


@pytest.mark.parametrize(
    ("text", "level"), [("3s", (3.0, True)), ("0.25", (0.25, False)), (" 1.5s ", (1.5, True))]
)
def test_levels_as_people_write_them(text: str, level: tuple[float, bool]) -> None:
    assert parse_noise_level(text) == level


@pytest.mark.parametrize("text", ["", "s", "three", "3x"])
def test_what_is_no_level(text: str) -> None:
    with pytest.raises(BadSetting, match="3s"):
        parse_noise_level(text)


@pytest.mark.parametrize(
    "fields", [{"samples": 0}, {"level": -1.0}, {"extra_tokens": -1}, {"seed": -1}]
)
def test_settings_out_of_range(fields: dict) -> None:
    with pytest.raises(BadSetting):
        Corruption(**fields)
