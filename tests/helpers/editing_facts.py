"""Facts to write, prefixes, quick settings of the value search, and second moments."""

import torch

from factscope.editing.settings import ValueSearch
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.stats.second_moment import SecondMoment

from families import tiny_text_lm

# Few tokens from the subject to the end: some tiny models attend to the last four tokens only.
FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano and the guitar"),
    Fact(subject="Vienna", prompt="The capital of {} is", target="Norway"),
]
PREFIXES = ("The Nile flows. ", "Light travels at 100 degrees and so. ")
FEW = ValueSearch(steps=5, lr=0.1, weight_decay=1e-3, clamp=50.0, retry=False)
"""Few steps on a tiny model."""


def text_lm(family: str, style: str = "gpt2") -> LM:
    """A tiny model with a tokenizer for text."""
    return tiny_text_lm(family, spread=0.3, style=style)


def random_moment(lm: LM, layer: int) -> SecondMoment:
    """A well-conditioned C of the right size."""
    width = lm.mlp_weight(layer).shape[1]
    noise = torch.randn(3 * width, width, generator=torch.Generator().manual_seed(3 + layer))
    return SecondMoment(
        matrix=noise.T @ noise / len(noise) + 0.1 * torch.eye(width), layer=layer, tokens=3 * width,
        corpus="noise", model=lm.name, fingerprint=lm.fingerprint,
    )  # fmt: skip
