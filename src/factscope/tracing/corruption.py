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

from factscope.data.readers import everyday_facts
from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import encode
from factscope.tracing.settings import Corruption

MIN_FACTS = 20
"""With fewer facts, σ is measured on the subjects of `everyday_facts`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class NoiseScale:
    """Size and shape of a model's embeddings."""

    sigma: float  # standard deviation over all entries of the subjects' token embeddings
    mean: Float64[np.ndarray, " width"] | None = None
    """μ of the token embeddings, for `embedding` noise."""
    spread: Float64[np.ndarray, "width width"] | None = None
    """Symmetric square root of their covariance Σ."""


def default_noise_scale(lm: LM, corruption: Corruption, facts: Sequence[Fact]) -> NoiseScale:
    """Measure the scale on the facts' subjects and prompts; on `everyday_facts` if there are
    fewer than `MIN_FACTS`."""
    if len(facts) < MIN_FACTS:
        facts = everyday_facts()
    return measure_noise_scale(lm, corruption, [f.subject for f in facts], [f.text for f in facts])


def measure_noise_scale(
    lm: LM, corruption: Corruption, subjects: Iterable[str], texts: Sequence[str]
) -> NoiseScale:
    """Measure σ on the subjects, each tokenized alone; for `embedding` noise μ and Σ on the texts.

    The paper's code also tokenizes subjects alone.
    """
    sigma = _embeddings(lm, subjects).std().item()
    if corruption.distribution != "embedding":
        return NoiseScale(sigma=sigma)
    x = _embeddings(lm, texts)
    values, vectors = torch.linalg.eigh(torch.cov(x.T))
    spread = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return NoiseScale(sigma=sigma, mean=x.mean(0).numpy(), spread=spread.numpy())


@torch.no_grad()
def _embeddings(lm: LM, texts: Iterable[str]) -> Float64[Tensor, "token width"]:
    """The embeddings of all tokens of the texts."""
    ids = [i for text in texts if text for i in encode(lm, text, special=False).ids]
    if len(ids) < 2:
        raise BadSetting("measuring σ needs at least two tokens of text; give longer subjects")
    return lm.embed(torch.tensor(ids, device=lm.device)).double().cpu()


def sample_noise(
    corruption: Corruption, scale: NoiseScale, fact: Fact, tokens: int, width: int
) -> Float64[np.ndarray, "sample token width"]:
    """All noise samples for the corrupted tokens of one fact."""
    shape = (corruption.samples, tokens, width)
    if corruption.rng == "paper":
        random = np.random.RandomState(corruption.seed)
        normal, uniform = random.standard_normal, random.uniform
    else:
        # A hash of the fact's text: the same on every machine and in every batch.
        digest = hashlib.sha256(f"{fact.subject}\0{fact.text}".encode()).digest()
        generator = np.random.default_rng([corruption.seed, int.from_bytes(digest[:8])])
        normal, uniform = generator.standard_normal, generator.uniform
    level = corruption.level * (scale.sigma if corruption.in_sigmas else 1.0)
    if corruption.distribution == "uniform":
        return uniform(-1.0, 1.0, shape) * level
    if corruption.distribution == "gaussian":
        return normal(shape) * level
    assert scale.mean is not None
    assert scale.spread is not None
    return normal(shape) @ scale.spread + scale.mean


def corrupt_embeddings(
    clean: Float[Tensor, "sample token width"],
    noise: Float64[np.ndarray, "sample token width"],
    replace: bool,
) -> Float[Tensor, "sample token width"]:
    """The embeddings plus the noise, added in double precision; or the noise alone."""
    wide = torch.from_numpy(noise)
    if clean.device.type != "mps":  # MPS has no double precision
        wide = wide.to(clean.device)
    total = wide if replace else clean.to(wide.device).double() + wide
    return total.to(device=clean.device, dtype=clean.dtype)
