"""Small hypernetworks for tiny models, and quick settings to train them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from factscope.editing.contexts import TokenBatch, edit_request
from factscope.editing.hypernet.model import (
    HypernetWeights,
    Hypernetwork,
    SplitModel,
    gradient_factors,
    network_for,
    target_modules,
)
from factscope.editing.hypernet.settings import KeConfig, MendConfig, Training
from factscope.editing.settings import HypernetEditor, Ke, Mend
from factscope.facts import Fact
from factscope.lm.model import LM

from counterfact import record
from families import tiny_text_lm

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome"),
    Fact(subject="France", prompt="The capital of {} is", target="Ottawa in Kenya"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano"),
]

EDITORS: dict[str, type[HypernetEditor]] = {"mend": Mend, "ke": Ke}

CONFIGS = {
    "mend": MendConfig(rank=6, edit_lr=1e-2),
    "ke": KeConfig(lstm_width=7, condition_width=9, hidden_width=5, edit_lr=1e-2),
}


def tiny_lm(family: str) -> LM:
    return tiny_text_lm(family, spread=0.1)


def make_network(lm: LM, method: str, layers: Sequence[int] = (1, 2), spread: float = 0.1) -> Any:
    """A network with random parameters and running normalisation over `FACTS`."""
    split = SplitModel(lm, target_modules(lm, layers))
    network = network_for(lm, split.targets, CONFIGS[method])
    network.update_norms(factors_of(split, token_batch(lm, FACTS)))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in network.parameters():
            parameter.data += spread * torch.randn_like(parameter)
    return network.eval()


def weights_of(lm: LM, network: Hypernetwork, **training: Any) -> HypernetWeights:
    return HypernetWeights(
        network=network, model=lm.name, fingerprint=lm.fingerprint, training=training, sha256="none"
    )


def token_batch(lm: LM, facts: Sequence[Fact]) -> TokenBatch:
    return TokenBatch.of([edit_request(lm, fact).rows[0] for fact in facts], lm.device)


def factors_of(split: SplitModel, batch: TokenBatch) -> Any:
    """The gradient factors of a batch at every target module."""
    return gradient_factors(split, split.below(batch.ids)[0], batch)[0]


def quick_training(method: str = "mend", **settings: Any) -> Training:
    """Settings with which a few steps change something."""
    networks = {
        "mend": MendConfig(rank=8, edit_lr=1e-3),
        "ke": KeConfig(lstm_width=8, condition_width=8),
    }
    quick = {"network": networks[method], "batch_size": 4, "eval_every": 5, "lr": 3e-3}
    return Training(**{**quick, "validation_examples": 6, "warmup_steps": 2, **settings})


def write_towers(path: Path, count: int = 40) -> Path:
    """A file of CounterFact cases."""
    path.write_text(json.dumps([record(i) for i in range(count)]))
    return path
