"""Edits of tiny models, and comparison of weights."""

from typing import Any

import torch
from torch import Tensor

from factscope.editing.edit import Change, Dense, Edit, EditChecks, LowRank
from factscope.facts import Fact
from factscope.lm.model import LM

FACT = Fact(subject="The Louvre", prompt="{} is in", target="Rome", id="7", relation="P131")
IDS = torch.arange(3 * 6).reshape(3, 6) * 7 % 97 + 3

PASSED = EditChecks(
    division_factor=0.5, update_norm=0.1, perplexity_before=10.0, perplexity_after=10.0
)
"""Checks that pass: without them, `apply` measures an edit, and these are large."""

State = dict[str, Tensor]


def mlp(lm: LM, layer: int, kind: str = "weight") -> str:
    return f"{lm.name_of(lm.mlp_out(layer))}.{kind}"


def attention(lm: LM, layer: int) -> list[str]:
    return [f"{lm.name_of(module)}.weight" for module in lm.attn_in(layer)]


BIASED = ["bloom", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "opt, projected"]
"""The families whose MLP output has a bias."""


def has_bias(lm: LM) -> bool:
    return getattr(lm.mlp_out(0), "bias", None) is not None


def shape_of(lm: LM, name: str) -> tuple[int, ...]:
    """In the paper's orientation; for weights within blocks."""
    shape = tuple(lm.model.get_parameter(name).shape)
    return shape[::-1] if lm.family.transposed else shape


def low_rank(lm: LM, name: str, rank: int = 1, seed: int = 0, size: float = 0.1) -> LowRank:
    value, key = shape_of(lm, name)
    generator = torch.Generator().manual_seed(seed)
    B, A = (
        torch.randn(value, rank, generator=generator),
        torch.randn(rank, key, generator=generator),
    )
    return LowRank(size * B, A)


def dense(lm: LM, name: str, seed: int = 0, size: float = 0.1) -> Dense:
    generator = torch.Generator().manual_seed(seed)
    return Dense(size * torch.randn(shape_of(lm, name), generator=generator))


def edit_of(lm: LM, changes: dict[str, Change], **fields: Any) -> Edit:
    return Edit(
        **{
            "changes": changes,
            "model": lm.name,
            "fingerprint": lm.fingerprint,
            "method": "test",
            "facts": (FACT,),
            "checks": PASSED,
            **fields,
        }
    )


def some_edits(lm: LM) -> list[Edit]:
    """Overlapping edits: low rank and dense, of several layers, of a bias where there is one."""
    first, second = mlp(lm, 0), mlp(lm, 1)
    biases: dict[str, Change] = {}
    if has_bias(lm):
        biases = {mlp(lm, 1, "bias"): dense(lm, mlp(lm, 1, "bias"), seed=9)}
    return [
        edit_of(lm, {first: low_rank(lm, first, 1, seed=1)}),
        edit_of(lm, {first: dense(lm, first, seed=2), second: low_rank(lm, second, 2, seed=3)}),
        edit_of(lm, {second: dense(lm, second, seed=4), **biases}),
        edit_of(lm, {name: low_rank(lm, name, 3, seed=5) for name in attention(lm, 1)}),
    ]


def state_of(lm: LM) -> State:
    return {name: weight.clone() for name, weight in lm.model.state_dict().items()}


def assert_same(found: State, wanted: State) -> None:
    """Bit-for-bit."""
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@torch.no_grad()
def logits(lm: LM, ids: Tensor = IDS) -> Tensor:
    return lm.model(ids).logits
