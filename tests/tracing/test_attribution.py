"""Attribution patching equals explicit loops over cells and dropped layers, in every family."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from factscope.errors import BadSetting
from factscope.facts import Fact
from factscope.lm.forward import answer_probability, forward
from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.lm.memory import Budget
from factscope.lm.model import LM
from factscope.records import TraceRecord
from factscope.tracing.attribution import Attribution, attribution_patching
from factscope.tracing.corruption import NoiseScale
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import clean_answers, trace, trace_batch

from families import LAYERS, tiny, tiny_text_lm

LENGTH, START, ANSWER = 5, 2, 7
CHECKED = (START, LENGTH - 1)  # tokens whose cells are compared
KINDS = ("states", "mlp", "attn", "heads")
Hook = tuple[nn.Module, Callable[[Tensor], Tensor | None]]


def prompts() -> Tensor:
    """A source row and a base row that differ in the two tokens from START on."""
    rows = np.random.default_rng(0).integers(3, 99, (2, LENGTH))
    rows[1] = rows[0]
    rows[1, START : START + 2] = (11, 12)
    return torch.tensor(rows)


def attribution(lm: LM, **settings: int) -> Attribution:
    run = forward(lm, prompts(), keep=("attn", "mlp", "heads"))

    def metric(states: Tensor) -> Tensor:
        return answer_probability(lm, states[:, -1:], torch.full((len(states), 1), ANSWER)).log()

    return Attribution(
        lm=lm, run=run, base=torch.tensor([1]), source=torch.tensor([0]), start=START,
        metric=metric, kinds=KINDS, **settings,
    )  # fmt: skip


class Plain:
    """Attribution by full forward passes of the model with hooks, one node at a time."""

    def __init__(self, lm: LM) -> None:
        self.lm, self.ids = lm, prompts()
        self.modules = {"states": lm.blocks}
        for kind in ("attn", "mlp"):
            self.modules[kind] = [lm.contribution(kind, i) for i in range(LAYERS)]
        self.base, self.source = self.outputs(self.ids[1:]), self.outputs(self.ids[:1])
        self.gradient = cache(self.gradient)

    def outputs(self, ids: Tensor, *hooks: Hook) -> dict[str, list[Tensor]]:
        """The outputs of blocks and modules, and the inputs of attention's output projection."""
        found: dict[str, list[Tensor]] = {"heads": []}
        recorders: list[Hook] = []
        for kind, modules in self.modules.items():
            found[kind] = []
            recorders += [(m, lambda out, k=kind: found[k].append(out.clone())) for m in modules]
        inputs = [
            (module, lambda args, _: found["heads"].append(args[0].clone()))
            for module in self.modules["attn"]
        ]
        with torch.no_grad(), hook_outputs(*hooks, *recorders), hook_calls(*inputs):
            self.lm.model(ids)
        return {kind: [x.view(LENGTH, -1) for x in layers] for kind, layers in found.items()}

    def metric(self, hooks: list[Hook]) -> Tensor:
        with hook_outputs(*hooks):
            return self.lm.model(self.ids[1:]).logits[0, -1].log_softmax(-1)[ANSWER]

    def change(self, kind: str, head: int, token: int, layer: int) -> Tensor:
        """x_source - x_base of a node, as a change of its module's output."""
        if kind != "heads":
            change = self.source[kind][layer][token] - self.base[kind][layer][token]
        else:
            z = self.source["heads"][layer][token] - self.base["heads"][layer][token]
            size = len(z) // self.lm.n_heads
            alone = torch.zeros_like(z)
            alone[head * size : (head + 1) * size] = z[head * size : (head + 1) * size]
            projection = self.modules["attn"][layer]
            with torch.no_grad():  # linear up to its bias
                change = projection(alone[None])[0] - projection(torch.zeros_like(z)[None])[0]
        whole = torch.zeros(LENGTH, len(change))
        whole[token] = change
        return whole

    def patch(self, kind: str, layer: int, change: Tensor) -> Hook:
        module = self.modules["attn" if kind == "heads" else kind][layer]
        return module, lambda out: out + change.view(out.shape)

    def linear(self, kind: str, head: int, token: int, layer: int) -> float:
        """The derivative along the change, by autograd through the whole model."""
        amount = torch.zeros((), requires_grad=True)
        change = self.change(kind, head, token, layer)
        value = self.metric([self.patch(kind, layer, amount * change)])
        return torch.autograd.grad(value, amount)[0].item()

    def gradient(self, dropped: int | None, layer: int) -> Tensor:
        """The gradient at a block's output, without that through the dropped layer's modules."""
        zero = torch.zeros_like(self.base["states"][layer], requires_grad=True)
        hooks = [self.patch("states", layer, zero)]
        if dropped is not None:
            hooks += [(self.modules[m][dropped], Tensor.detach) for m in ("attn", "mlp")]
        return torch.autograd.grad(self.metric(hooks), zero)[0]

    def corrected(self, kind: str, head: int, token: int, layer: int) -> float:
        """AtP*: one patched run, and its effect above the next block under each drop."""
        change = self.change(kind, head, token, layer)
        patched = self.outputs(self.ids[1:], self.patch(kind, layer, change))["states"]
        delta = [after - before for after, before in zip(patched, self.base["states"], strict=True)]

        def effect(dropped: int | None) -> float:
            if dropped == layer and kind != "states":
                return 0.0
            at = layer if layer == LAYERS - 1 or dropped == layer + 1 else layer + 1
            return (delta[at] * self.gradient(dropped, at)).sum().item()

        drops = LAYERS if kind == "states" else LAYERS - 1
        magnitude = sum(abs(effect(dropped)) for dropped in range(LAYERS)) / drops
        return float(np.sign(effect(None))) * magnitude


def assert_equal(lm: LM, found: dict[str, Tensor], cell: Callable[..., float]) -> None:
    for kind in KINDS:
        shape = (lm.n_heads if kind == "heads" else 1, len(CHECKED), LAYERS)
        wanted = np.zeros(shape)
        for head, i, layer in np.ndindex(*shape):
            wanted[head, i, layer] = cell(kind, head, CHECKED[i], layer)
        scale = np.abs(wanted).max()
        assert scale > 1e-4, kind
        cells = found[kind][:, 0, [token - START for token in CHECKED]]
        np.testing.assert_allclose(cells, wanted, rtol=1e-3, atol=1e-4 * scale, err_msg=kind)


def test_atp_is_the_derivative_along_the_change_of_each_cell(lm: LM) -> None:
    assert_equal(lm, attribution_patching(attribution(lm)), Plain(lm).linear)


def test_atp_star_equals_loops_over_cells_and_dropped_layers(lm: LM) -> None:
    found = attribution_patching(attribution(lm), corrected=True)
    assert_equal(lm, found, Plain(lm).corrected)


def test_calls_of_a_few_tokens_give_the_same_estimates() -> None:
    lm = tiny("llama")
    whole = attribution_patching(attribution(lm), corrected=True)
    split = attribution_patching(attribution(lm, slots=1), corrected=True)
    for kind in KINDS:
        torch.testing.assert_close(split[kind], whole[kind], rtol=1e-4, atol=1e-6)


# ---- in a trace

FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is located in the city of"),
    Fact(subject="Rome", prompt="People who live in {} speak"),
]
SCALE = NoiseScale(sigma=0.2)


@pytest.fixture(scope="module")
def llama() -> LM:
    """A tiny model in double precision, with a tokenizer of words."""
    return tiny_text_lm("llama", spread=0.2, dtype=torch.float64)


def tables(record: TraceRecord) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The measured and the estimated effects of each kind."""
    measured = {**record.restored, "heads": record.heads}
    estimated = {**record.attribution, "heads": record.head_attribution}

    def effects(tables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {kind: np.array(cells) - record.base_value for kind, cells in tables.items()}

    return effects(measured), effects(estimated)


@pytest.mark.parametrize(
    ("metric", "direction"),
    [
        ("probability", "restore"),
        ("log-probability", "corrupt"),
        ("logit-difference", "restore"),
        ("logit-difference", "corrupt"),
    ],
)
def test_with_little_noise_the_estimates_equal_the_measured_cells(
    llama: LM, metric: Any, direction: Any
) -> None:
    settings = Tracing(
        corruption=Corruption(level=1e-3, samples=2), window=1, heads=True, attribution="atp",
        metric=metric, direction=direction,
    )  # fmt: skip
    measured, estimated = tables(trace(llama, FACTS[0], settings, scale=SCALE))
    assert measured.keys() == estimated.keys() == {"states", "mlp", "attn", "heads"}
    for kind, cells in measured.items():
        largest = np.abs(cells).max()
        assert largest > 0
        np.testing.assert_allclose(estimated[kind], cells, rtol=0, atol=0.02 * largest)


@pytest.mark.parametrize("method", ["atp", "atp-star"])
def test_facts_together_and_in_little_memory_give_the_estimates_of_each_alone(
    llama: LM, method: Any
) -> None:
    settings = Tracing(
        corruption=Corruption(samples=3), window=2, heads=True, attribution=method,
        metric="logit-difference",
    )  # fmt: skip
    answers = clean_answers(llama, FACTS, settings)
    together = trace_batch(llama, answers, settings, SCALE, Budget(2**29))
    for answer, record in zip(answers, together, strict=True):
        [alone] = trace_batch(llama, [answer], settings, SCALE, Budget(2**20))
        for kind, cells in tables(record)[1].items():
            np.testing.assert_allclose(tables(alone)[1][kind], cells, rtol=1e-5, atol=1e-6)


def test_metrics_without_a_gradient_are_refused() -> None:
    with pytest.raises(BadSetting, match="rank"):
        Tracing(metric="rank", attribution="atp")
    flat = Tracing(metric="kl", attribution="atp")
    with pytest.raises(BadSetting, match="kl"):
        replace(flat, direction="corrupt")
