"""Integrated gradients: exact gradients along the path, and complete attributions; quadrature."""

from typing import Any

import numpy as np
import pytest
import torch

from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.tracing.gradients import attributions, integrated_gradients, quadrature

from families import LAYERS, tiny

IDS = (5, 9, 20, 33, 4)


def probability(lm: LM, kind: str, layer: int, scale: torch.Tensor) -> torch.Tensor:
    """The next-token distribution with a layer's states or contributions scaled."""

    def scaled(out: torch.Tensor) -> torch.Tensor:
        return (out.view(1, len(IDS), -1) * scale).view(out.shape)

    module = lm.blocks[layer] if kind == "states" else lm.contribution(kind, layer)
    with hook_outputs((module, scaled)):
        return lm.model(torch.tensor([IDS])).logits[0, -1].softmax(-1)


def answer(lm: LM) -> int:
    return int(probability(lm, "states", 0, torch.ones(1)).argmax())


@pytest.mark.parametrize("kind", ["mlp", "attn"])
@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama", "bloom", "falcon", "opt", "gpt_neo"])
def test_a_layers_attributions_add_up_to_its_effect(family: str, kind: str) -> None:
    lm = tiny(family)
    found = attributions(lm, IDS, (answer(lm),), kind, layer=1, steps=100).sum()
    ends = [probability(lm, kind, 1, torch.full((1,), x))[answer(lm)] for x in (1.0, 0.0)]
    assert found.item() == pytest.approx((ends[0] - ends[1]).item(), rel=0.01, abs=1e-3)


@pytest.mark.parametrize("kind", ["mlp", "attn"])
def test_a_single_states_attributions_add_up_to_its_effect(kind: str) -> None:
    lm = tiny("llama")
    found = attributions(lm, IDS, (answer(lm),), kind, layer=1, path="state")[2].sum()
    without = torch.ones(1, len(IDS), 1)
    without[0, 2] = 0
    ends = [probability(lm, kind, 1, scale)[answer(lm)] for scale in (torch.ones(1), without)]
    assert found.item() == pytest.approx((ends[0] - ends[1]).item(), rel=0.01, abs=1e-3)


@pytest.mark.parametrize("kind", ["states", "mlp", "attn"])
def test_one_node_is_the_gradient_at_the_middle_of_the_path(lm: LM, kind: str) -> None:
    """With one Gauss–Legendre node IG(h) = h ⊙ ∂P/∂h at h/2; autograd through hooks agrees."""
    token = answer(lm)
    captured: list[torch.Tensor] = []

    def halved(out: torch.Tensor) -> torch.Tensor:
        captured.append((out.detach() / 2).requires_grad_())
        return captured[-1].clone()

    module = lm.blocks[1] if kind == "states" else lm.contribution(kind, 1)
    with hook_outputs((module, halved)), torch.enable_grad():
        p = lm.model(torch.tensor([IDS])).logits[0, -1].softmax(-1)[token]
        [gradient] = torch.autograd.grad(p, captured)
    expected = (2 * captured[0] * gradient).detach().view(len(IDS), -1)
    found = attributions(lm, IDS, (token,), kind, layer=1, steps=1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_the_table_has_the_norm_at_every_state() -> None:
    lm = tiny("gpt2")
    table = integrated_gradients(lm, IDS, (answer(lm),), "mlp", steps=3)
    assert table.shape == (len(IDS), LAYERS)
    expected = attributions(lm, IDS, (answer(lm),), "mlp", 2, steps=3).norm(dim=-1)
    torch.testing.assert_close(table[:, 2], expected)


@pytest.mark.parametrize("rule", ["radau", "gauss"])
def test_gauss_and_radau_are_exact_for_polynomials(rule: Any) -> None:
    for steps in (2, 3, 6):
        points, weights = quadrature(steps, rule)
        for power in range(2 * steps - 1):
            assert (weights * points**power).sum().item() == pytest.approx(1 / (power + 1))
    assert (points[0] == 0) == (rule == "radau")


def test_equally_spaced_nodes_include_both_ends() -> None:
    points, weights = quadrature(5, "ends")
    np.testing.assert_allclose(points, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(weights, [0.2] * 5)
