"""Corrupt the subject: noise on its token embeddings (paper §2.1, App. B).

A `Corruption` chooses the noise, `measure_noise_scale` measures σ of this model's embeddings and
`sample_noise` draws the samples. The noise depends only on the settings and the fact, not on the
facts that share a batch with it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode
from factscope.tracing.settings import Corruption

__all__ = ["NoiseScale", "corrupt_embeddings", "measure_noise_scale", "sample_noise"]


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseScale:
    """The size and shape of a model's embeddings."""

    sigma: float
    """σ over all entries of the subjects' token embeddings."""
    mean: Float64[np.ndarray, " width"] | None = None
    spread: Float64[np.ndarray, "width width"] | None = None
    """A square root of the covariance of the token embeddings."""


def measure_noise_scale(
    lm: LM, corruption: Corruption, subjects: Iterable[str], texts: Sequence[str]
) -> NoiseScale:
    """Measure σ over subjects (each tokenized alone), and μ, Σ over texts where they are needed."""
    x = _embeddings(lm, subjects)
    sigma = x.std().item()
    if corruption.distribution != "embedding":
        return NoiseScale(sigma=sigma)
    x = _embeddings(lm, texts)
    values, vectors = torch.linalg.eigh(torch.cov(x.T))
    spread = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return NoiseScale(sigma=sigma, mean=x.mean(0).numpy(), spread=spread.numpy())


@torch.no_grad()
def _embeddings(lm: LM, texts: Iterable[str]) -> Float64[Tensor, "token width"]:
    """The embedding module's outputs for every token of the texts."""
    ids = [i for text in texts if text for i in encode(lm, text, special=False).ids]
    if len(ids) < 2:
        raise BadSetting("the noise level in σ needs at least two tokens of text to measure σ on")
    return lm.embed(torch.tensor(ids, device=lm.device)).double().cpu()


def sample_noise(
    corruption: Corruption, scale: NoiseScale, fact: Fact, tokens: int, width: int
) -> Float64[np.ndarray, "sample token width"]:
    """The noise for one fact's corrupted tokens, every sample of it."""
    shape = (corruption.samples, tokens, width)
    if corruption.stream == "paper":
        random = np.random.RandomState(corruption.seed)
        normal, uniform = random.randn, random.uniform
    else:
        generator = np.random.default_rng([corruption.seed, _number(fact)])
        normal, uniform = lambda *s: generator.standard_normal(s), generator.uniform
    level = corruption.level * (scale.sigma if corruption.in_sigmas else 1.0)
    if corruption.distribution == "uniform":
        return uniform(-1.0, 1.0, shape) * level
    if corruption.distribution == "gaussian":
        return normal(*shape) * level
    assert scale.mean is not None
    assert scale.spread is not None
    return normal(*shape) @ scale.spread + scale.mean


def _number(fact: Fact) -> int:
    """The fact as a number, the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{fact.subject}\0{fact.text}".encode()).digest()[:8])


def corrupt_embeddings(
    clean: Float[Tensor, "sample token width"],
    noise: Float64[np.ndarray, "sample token width"],
    replace: bool,
) -> Float[Tensor, "sample token width"]:
    """Embeddings with the noise added or put in their place, summed in double precision."""
    wide = torch.from_numpy(noise)
    if clean.device.type != "mps":  # which has no double precision
        wide = wide.to(clean.device)
    total = wide if replace else clean.to(wide.device).double() + wide
    return total.to(device=clean.device, dtype=clean.dtype)
