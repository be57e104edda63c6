"""Small hypernetworks for tiny models."""

from collections.abc import Sequence
from typing import Any

import torch

from factscope.editing.contexts import edit_request
from factscope.editing.settings import HypernetEditor, Ke, Mend
from factscope.editing.hypernet.gradients import (
    SplitModel,
    TokenBatch,
    gradient_factors,
    target_modules,
)
from factscope.editing.hypernet.model import Hypernetwork
from factscope.editing.hypernet.weights import (
    NETWORKS,
    HypernetWeights,
    build_network,
)
from factscope.facts import Fact
from factscope.lm.model import LM

from families import reader

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome"),
    Fact(subject="France", prompt="The capital of {} is", target="Ottawa in Kenya"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano"),
]


EDITORS: dict[str, type[HypernetEditor]] = {"mend": Mend, "ke": Ke}


def small(family: str) -> LM:
    return reader(family, spread=0.1)


def a_network(lm: LM, method: str, layers: Sequence[int] = (1, 2), spread: float = 0.1) -> Any:
    """A network nothing of which is as it began, that has seen what is usual."""
    design: Any = NETWORKS[method][0]
    places = target_modules(lm, layers)
    own = {"rank": 6} if method == "mend" else {"lstm": 7, "condition": 9, "hidden": 5}
    made = build_network(
        method,
        design(places=tuple(p.shape for p in places), layers=tuple(layers),
               width=lm.embed.weight.shape[1], lr=1e-2, **own),
    )  # fmt: skip
    halves = SplitModel(lm, places[0].layer)
    lines = lines_of(lm, FACTS)
    made.observe(gradient_factors(lm, places, halves, halves.below(lines.ids)[0], lines)[0])
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in made.parameters():
            parameter.data += spread * torch.randn_like(parameter)
    return made.eval()


def weights_of(lm: LM, network: Hypernetwork, **trained: Any) -> HypernetWeights:
    return HypernetWeights(
        network=network, model=lm.name, fingerprint=lm.fingerprint, trained=trained, sha256="none"
    )


def lines_of(lm: LM, facts: Sequence[Fact]) -> TokenBatch:
    return TokenBatch.of([edit_request(lm, fact).rows[0] for fact in facts], lm.device)
