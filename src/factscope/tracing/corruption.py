"""Corrupt the subject: noise on its token embeddings (paper §2.1, App. B), or other tokens.

A `Corruption` chooses the noise, `measure_noise_scale` measures σ of this model's embeddings and
`sample_noise` draws the samples. The noise depends only on the settings and the fact, not on the
facts that share a batch with it.

Token replacement (Zhang & Nanda, 2024) puts another subject of equal token length in the subject's
place: the fact's own `replacement`, or the subject of another fact of the same relation.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor

from factscope.data.readers import everyday_facts
from factscope.errors import BadFact, BadSetting
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt, encode, encode_fact
from factscope.tracing.settings import Corruption, Tracing

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
    if corruption.replaces_tokens:
        return NoiseScale(sigma=0.0)  # no noise
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
    corruption: Corruption,
    scale: NoiseScale,
    fact: Fact,
    tokens: int,
    width: int,
    *,
    draw: int = 0,
) -> Float64[np.ndarray, "sample token width"]:
    """All noise samples for the corrupted tokens of one fact.

    `draw` counts the draws of this size from the same random numbers.
    """
    shape = (1 + draw, corruption.samples, tokens, width)
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
        return uniform(-1.0, 1.0, shape)[draw] * level
    if corruption.distribution == "gaussian":
        return normal(shape)[draw] * level
    assert scale.mean is not None
    assert scale.spread is not None
    return normal(shape)[draw] @ scale.spread + scale.mean


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


# ---- token replacement


def replaced_prompt(lm: LM, fact: Fact) -> Prompt:
    """The prompt with the fact's `replacement`, which must change no token outside the subject."""
    if fact.replacement is None:
        raise BadFact(
            f"the fact about {fact.subject!r} has no replacement; give a subject with as many "
            "tokens (--replace-with)"
        )
    other = replace(fact, subject=fact.replacement, replacement=None)
    (clean, (start, stop)), (changed, own) = encode_fact(lm, fact), encode_fact(lm, other)
    same_length = own == (start, stop) and len(changed) == len(clean)
    outside = [*range(start), *range(stop, len(clean))]
    if not same_length or any(clean.ids[i] != changed.ids[i] for i in outside):
        raise BadFact(
            f"the replacement must have the tokens of the prompt and a subject of equal length: "
            f"{_shown(clean, (start, stop))} and {_shown(changed, own)}; choose another one"
        )
    if changed.ids == clean.ids:
        raise BadFact(
            f"the replacement {fact.replacement!r} has the subject's tokens; give another subject"
        )
    return changed


def _shown(prompt: Prompt, subject: tuple[int, int]) -> str:
    """A tokenization with its number of subject tokens."""
    return f"{'|'.join(prompt.texts)!r} ({subject[1] - subject[0]} subject tokens)"


def choose_replacement(lm: LM, fact: Fact, facts: Sequence[Fact]) -> str | None:
    """A subject of equal token length from the facts of the same relation with another target.

    Facts are of the same relation if they have the same relation id or the same prompt. The first
    that fits after the fact itself is taken, so that facts get different replacements.
    """
    start = facts.index(fact) + 1 if fact in facts else 0
    for other in (*facts[start:], *facts[:start]):
        related = other.prompt == fact.prompt or (
            fact.relation is not None and other.relation == fact.relation
        )
        differs = other.subject != fact.subject and (
            fact.target is None or other.target != fact.target
        )
        if related and differs:
            try:
                replaced_prompt(lm, replace(fact, replacement=other.subject))
            except BadFact:
                continue
            return other.subject
    return None


def with_replacement(lm: LM, fact: Fact, among: Sequence[Fact]) -> Fact:
    """The fact with a replacement that fits: its own, or one chosen among other facts."""
    chosen = fact.replacement or choose_replacement(lm, fact, among)
    if chosen is None:
        raise BadFact(
            f"no other fact has the relation of {fact.text!r}, another target and a subject of "
            "equal token length; give a replacement (--replace-with), or leave the fact out"
        )
    fact = replace(fact, replacement=chosen)
    replaced_prompt(lm, fact)  # raises BadFact if it does not fit
    return fact


def paired_facts(
    lm: LM, facts: Sequence[Fact], settings: Tracing, among: Sequence[Fact]
) -> list[Fact]:
    """With token replacement: the facts, each with a replacement, chosen where it has none."""
    if not settings.corruption.replaces_tokens:
        return list(facts)
    return [with_replacement(lm, fact, among) for fact in facts]
