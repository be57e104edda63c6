"""Real captured graphs, kernels and split-precision products on a GPU, against the CPU's results.

Run with `make test-gpu` on a machine with a CUDA GPU.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from factscope.editing.settings import FineTune, Memit, Rome, ValueSearch
from factscope.evaluation.score import Query, score_queries
from factscope.facts import Fact
from factscope.lm.accel import accelerated, captured
from factscope.lm.accel.graphs import CACHE, CudaGraph
from factscope.lm.accel.kernels import decode_attention, suffix_attention
from factscope.lm.accel.matmul import _fused, half_matmul, split_matmul, supports_mixed
from factscope.lm.accel.model_cache import KEY, model_cache
from factscope.lm.forward import forward
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.model import LM
from factscope.tracing.settings import Corruption, Tracing
from factscope.tracing.trace import trace

from editing_facts import FACTS, PREFIXES, text_lm
from hypernets import EDITORS, make_network, tiny_lm, weights_of

GPU = torch.device("cuda")
FAMILIES = ["gpt2", "llama", "gptj", "opt", "gemma2", "bloom"]
SEARCH = ValueSearch(steps=6, lr=0.1, weight_decay=1e-3, clamp=50.0)
SHAPED = [
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome"),
    Fact(subject="The Tower Eiffel", prompt="{} in is", target="Peru"),
    Fact(subject="The Eiffel Tower", prompt="{} is", target="Rome"),
    Fact(subject="Vienna", prompt="The capital of {} is", target="Norway"),
    Fact(subject="The Nile Tower", prompt="{} is in", target="Peru"),
]


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    """Plain float32, whatever a test before chose."""
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")


def on_gpu(lm: LM) -> LM:
    """A copy of a model on the GPU."""
    return replace(lm, model=copy.deepcopy(lm.model).to(GPU), cache={})


def relative_gap(found: Tensor, expected: Tensor) -> float:
    return ((found.cpu() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_traces_equal_those_of_the_cpu(family: str) -> None:
    lm = text_lm(family)
    settings = Tracing(corruption=Corruption(samples=2), window=2, sever=("mlp",))
    slow, fast = (trace(model, FACTS[0], settings) for model in (lm, on_gpu(lm)))
    for kind, table in slow.restored.items():
        gap = (torch.tensor(fast.restored[kind]) - torch.tensor(table)).abs().max()
        assert gap < 1e-4 * slow.clean


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_traces_by_token_replacement_replay_their_runs(precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    lm = text_lm("gpt2")
    gpu = on_gpu(lm)
    settings = Tracing(corruption=Corruption(distribution="tokens"), window=2)
    for subject, other in (("Rome", "Peru"), ("Peru", "Rome"), ("Cairo", "London")):
        fact = Fact(subject=subject, prompt="{} is in", replacement=other)
        slow, fast = (trace(model, fact, settings) for model in (lm, gpu))
        for kind, table in slow.restored.items():
            gap = (torch.tensor(fast.restored[kind]) - torch.tensor(table)).abs().max()
            assert gap < (1e-4 if precision == "highest" else 1e-2) * slow.clean
    assert any(known.graph is not None for known in gpu.cache[CACHE].values())


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bfloat16_traces_use_suffix_attention(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = on_gpu(text_lm(family))
    lm = replace(lm, model=lm.model.bfloat16(), cache={})
    settings = Tracing(corruption=Corruption(samples=2), window=2, sever=("mlp",))
    fast = trace(lm, FACTS[0], settings)
    assert any(lm.cache.pop("supports suffix attention").values())
    monkeypatch.setattr("factscope.lm.accel.attention.has_kernels", lambda device: False)
    slow = trace(lm, FACTS[0], settings)
    for kind, table in slow.restored.items():
        gap = (torch.tensor(fast.restored[kind]) - torch.tensor(table)).abs().max()
        assert gap < 5e-2 * slow.clean


@pytest.mark.parametrize("family", FAMILIES)
def test_edits_in_sequence_replay_captured_steps(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = text_lm(family)
    gpu = on_gpu(lm)
    rome = Rome(layer=1, prefixes=PREFIXES, second_moment="identity", search=SEARCH)
    captures: list[CudaGraph] = []
    capture = CudaGraph._capture

    def counted(graph: CudaGraph, inputs: tuple[Tensor, ...]) -> None:
        captures.append(graph)
        capture(graph, inputs)

    monkeypatch.setattr(CudaGraph, "_capture", counted)
    for fact in SHAPED:
        [expected], [found] = (rome.each(model, [fact]) for model in (lm, gpu))
        (change,), (plain,) = found.changes.values(), expected.changes.values()
        assert relative_gap(change.matrix(), plain.matrix()) < 2e-3
    cache = gpu.cache[KEY]
    steps = [graph for _, _, graph in cache.graphs.values()]
    assert len([graph for graph in captures if graph in steps]) == len(steps)
    assert sum(graph.function.__name__ == "step" for graph in captures) == len(steps)
    assert cache.graphs
    assert all(graph.graph is not None for _, _, graph in cache.graphs.values())
    assert len(cache.graphs) < len(SHAPED)  # some facts shared one
    # Some versions of GPT-J and BLOOM make position tables on the CPU, which cannot be captured.
    captured = any(known.graph is not None for known in gpu.cache[CACHE].values())
    assert captured or family in ("gptj", "bloom")


@pytest.mark.parametrize(
    ("precision", "contrast"), [("highest", "inf"), ("high", "inf"), ("highest", 1.0)]
)
def test_a_batch_of_edits_equals_single_ones(
    precision: str, contrast: float | Literal["inf"]
) -> None:
    torch.set_float32_matmul_precision(precision)
    lm = text_lm("gpt2")
    gpu = on_gpu(lm)
    facts = [replace(FACTS[0], prompt="{} is in" + " the" * (i % 3)) for i in range(9)]
    rome = Rome(
        layer=1, prefixes=PREFIXES, second_moment="identity", search=SEARCH,
        contrast_tolerance=contrast,
    )  # fmt: skip
    tolerance = 2e-3 if precision == "highest" else 3e-2
    for found, fact in zip(rome.each(gpu, facts), facts, strict=True):
        [expected] = rome.each(lm, [fact])
        (change,), (plain,) = found.changes.values(), expected.changes.values()
        assert relative_gap(change.matrix(), plain.matrix()) < tolerance


@pytest.mark.parametrize(
    "editor",
    [
        Memit(layers=(0, 1), prefixes=PREFIXES, second_moment="identity", search=SEARCH),
        FineTune(layer=1, steps=4, lr=2e-3),
    ],
    ids=["memit", "ft"],
)
def test_other_editors_equal_those_of_the_cpu(editor: Any) -> None:
    lm = text_lm("gpt2")
    expected, found = (editor(model, FACTS[:2]) for model in (lm, on_gpu(lm)))
    for name, change in expected.changes.items():
        assert relative_gap(found.changes[name].matrix(), change.matrix()) < 2e-2


@pytest.mark.parametrize("method", sorted(EDITORS))
def test_hypernetwork_edits_are_captured(method: str) -> None:
    lm = tiny_lm("gpt2")
    network = make_network(lm, method)
    gpu = on_gpu(lm)
    slow = EDITORS[method](weights=weights_of(lm, network))
    fast = EDITORS[method](weights=weights_of(gpu, copy.deepcopy(network).to(GPU)))
    for _ in range(3):
        [expected], [found] = slow.each(lm, [SHAPED[0]]), fast.each(gpu, [SHAPED[0]])
        for name, change in expected.changes.items():
            assert relative_gap(found.changes[name].matrix(), change.matrix()) < 1e-3
    assert any(known.graph is not None for known in gpu.cache[CACHE].values())


def test_a_replay_sees_changed_weights_and_inputs() -> None:
    lm = on_gpu(text_lm("llama"))

    def last(ids: Tensor) -> Tensor:
        return forward(lm, ids).states[-1]

    rows = [torch.tensor([[i, i + 1, i + 2]], device=GPU) for i in range(5)]
    for ids in rows:
        torch.testing.assert_close(captured(lm, "a", last, ids), last(ids), rtol=1e-4, atol=1e-4)
    assert any(known.graph is not None for known in lm.cache[CACHE].values())
    with torch.no_grad():
        lm.mlp_weight(1).mul_(1.5)
    found = captured(lm, "a", last, rows[0]).clone()
    torch.testing.assert_close(found, last(rows[0]), rtol=1e-4, atol=1e-4)


def test_a_function_that_cannot_be_captured_runs_eagerly() -> None:
    graph = CudaGraph(lambda x: x * float(x.sum().item()))
    x = torch.ones(3, device=GPU)
    assert graph(x).tolist() == [3.0] * 3
    assert graph.failed
    assert (CudaGraph(torch.clone)(x) + 1).tolist() == [2.0] * 3  # capture still works


def test_an_overflow_falls_back_to_the_models_own_layers() -> None:
    lm = text_lm("gpt2")
    with torch.no_grad():  # activations beyond float16's range
        lm.blocks[1].mlp.c_fc.weight.mul_(1e6)  # pyright: ignore
    gpu = on_gpu(lm)
    ids = torch.arange(1, 13, device=GPU).expand(9, -1).contiguous()

    def states() -> Tensor:
        return gpu.model.base_model(ids, use_cache=False).last_hidden_state

    found = accelerated(gpu, states)
    assert found.isfinite().all()
    torch.testing.assert_close(found, states())


def test_a_model_cache_is_dropped_with_changed_weights() -> None:
    lm = on_gpu(text_lm("gpt2"))
    cache = model_cache(lm)
    assert cache is not None
    cache.build(lm, range(lm.n_layers))
    with torch.no_grad():
        lm.mlp_weight(1).mul_(2)
    again = model_cache(lm)
    assert again is cache
    assert sorted(cache.forwards) == [i for i in range(lm.n_layers) if i != 1]


@pytest.mark.parametrize("family", ["gpt2", "llama", "gptj", "opt", "gpt_neox", "qwen2"])
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_static_decoding_equals_dynamic(family: str, precision: str) -> None:
    torch.set_float32_matmul_precision(precision)
    lm = text_lm(family)
    rows = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14] * 3]
    draws = uniform_draws(["a", "b", "c"], 24, seed=3)
    expected = sample_texts(lm, rows, draws, k=1, static=False)
    found = sample_texts(on_gpu(lm), rows, draws, k=1, static=True)
    equal = sum(
        a == b for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert equal >= (72 if precision == "highest" else 64)


def test_scores_equal_those_of_the_cpu() -> None:
    lm = text_lm("gpt2")
    queries = [Query(f"The tower {i} is in", target) for i in range(12) for target in ("Rome", "a")]
    slow, fast = (score_queries(model, queries) for model in (lm, on_gpu(lm)))
    for one, other in zip(slow, fast, strict=True):
        assert other.nll == pytest.approx(one.nll, rel=1e-4)


@pytest.mark.parametrize(("matmul", "error"), [(split_matmul, 2e-6), (half_matmul, 2**-10)])
def test_split_products_have_their_precision(matmul: Any, error: float) -> None:
    assert supports_mixed(GPU)
    generator = torch.Generator(GPU).manual_seed(0)
    x = 3 * torch.randn(64, 1700, device=GPU, generator=generator)
    weight = 0.02 * torch.randn(1700, 501, device=GPU, generator=generator)
    bias = torch.randn(501, device=GPU, generator=generator)
    expected = x.double() @ weight.double() + bias.double()
    found = matmul(weight, bias)(x)
    assert ((found - expected).abs().max() / expected.abs().max()).item() < error
    assert _fused(GPU, 1700)


@pytest.mark.parametrize(("key_heads", "past"), [(4, 0), (4, 5), (2, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_suffix_attention_equals_torch(dtype: torch.dtype, key_heads: int, past: int) -> None:
    generator = torch.Generator(GPU).manual_seed(0)

    def draw(heads: int, tokens: int) -> Tensor:
        x = torch.randn(3, heads, tokens, 64, device=GPU, generator=generator)
        return x.to(dtype)

    query, key, value = (draw(heads, 5) for heads in (4, key_heads, key_heads))
    past_key, past_value = draw(key_heads, past), draw(key_heads, past)
    bias = torch.zeros(3, 1, 5, past + 5, device=GPU, dtype=dtype)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, torch.cat([past_key, key], 2), torch.cat([past_value, value], 2), scale=0.1,
        enable_gqa=key_heads < 4,
    ).transpose(1, 2)  # fmt: skip
    found = suffix_attention(query, key, value, past_key, past_value, bias, 0.1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("position", [0, 31, 40])
def test_decode_attention_equals_torch(position: int) -> None:
    generator = torch.Generator(GPU).manual_seed(0)
    query = torch.randn(3, 4, 1, 64, device=GPU, generator=generator)
    keys, values = (torch.randn(3, 2, 50, 64, device=GPU, generator=generator) for _ in range(2))
    seen = slice(position + 1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys[:, :, seen], values[:, :, seen], scale=0.1, enable_gqa=True
    ).transpose(1, 2)
    found = decode_attention(query, keys, values, torch.tensor([position], device=GPU), 0.1)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
