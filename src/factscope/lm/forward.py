"""Forward pass that records hidden states, keys and values, and each block's arguments."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.lm.model import LM

_signature = cache(inspect.signature)


@dataclass(frozen=True, kw_only=True)
class ActivationCache:
    """The activations of a forward pass over rows of tokens."""

    inputs: Float[Tensor, "row token width"]  # the states before the first block
    states: list[Float[Tensor, "row token width"]]  # h: each block's output
    contributions: dict[str, list[Float[Tensor, "row token _"]]]
    """a ("attn") and m ("mlp") of each layer, and z ("heads"): the outputs of its attention heads,
    concatenated. If requested."""
    keys: list[Float[Tensor, "row head token dim"]]
    values: list[Float[Tensor, "row head token dim"]]
    block_args: list[dict[str, Any]]  # the arguments that each block received, by name

    def with_half_keys(self) -> "ActivationCache":
        """The same with keys and values in float16."""
        keys, values = ([x.half() for x in layers] for layers in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def select(self, rows: Int[Tensor, " selected"]) -> "ActivationCache":
        """The part that a replay of these rows needs: inputs, keys, values and block arguments."""
        all_rows = len(self.inputs)

        def cut(name: str, value: Any) -> Any:
            # Position biases come as (row · head, 1, key); a replay reads the first row's.
            if name != "alibi" or value is None or value.dim() != 3:
                return value
            return value[: len(value) // all_rows * len(rows)]

        return replace(
            self,
            inputs=self.inputs[rows.to(self.inputs.device)],
            states=[],
            contributions={},
            keys=[x[rows.to(x.device)] for x in self.keys],
            values=[x[rows.to(x.device)] for x in self.values],
            block_args=[{name: cut(name, x) for name, x in a.items()} for a in self.block_args],
        )


@torch.no_grad()
def forward(
    lm: LM,
    ids: Int[Tensor, "row token"],
    *,
    keep: Sequence[str] = (),
    embed: Callable[[Tensor], Tensor | None] | None = None,
) -> ActivationCache:
    """Run the model and record hidden states, keys, values and block arguments.

    Shorter rows are padded on the right with any token: a causal model's real tokens do not attend
    to padding, so no mask is needed. `embed` may change the token embeddings; `keep` names the
    contributions ("attn", "mlp", "heads") to record.
    """
    from transformers import DynamicCache

    rows, length = ids.shape
    contributions: dict[str, list[Tensor]] = {name: [] for name in keep}
    states: list[Tensor] = []
    block_args: list[dict[str, Any]] = []

    def record_output(name: str, out: Tensor) -> None:
        # Falcon adds in place to its MLP's output, so copy it.
        contributions[name].append(out.clone().view(rows, length, -1))

    def record_args(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = _signature(type(block).forward).bind(block, *args, **kwargs).arguments
        bound.pop("self")
        extra = bound.pop("kwargs", {})
        block_args.append({**bound, **extra})

    outputs: list[tuple[nn.Module, Callable[[Tensor], Tensor | None]]]
    outputs = [(block, states.append) for block in lm.blocks]
    for name in keep:
        if name != "heads":
            record = partial(record_output, name)
            outputs += [(lm.contribution(name, i), record) for i in range(lm.n_layers)]
    if embed is not None:
        outputs.append((lm.embed, embed))
    calls: list[tuple[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]]]
    calls = [(block, partial(record_args, block)) for block in lm.blocks]
    if "heads" in keep:  # they are the input of the output projection
        projections = [lm.contribution("attn", i) for i in range(lm.n_layers)]
        calls += [(m, lambda args, _: record_output("heads", args[0])) for m in projections]
    # A cache without a config holds every key. One with a config drops keys outside a sliding
    # window, but the replay needs them and applies the mask itself.
    cache = DynamicCache()
    with hook_outputs(*outputs), hook_calls(*calls):
        lm.model.base_model(ids, past_key_values=cache, use_cache=True)
    layers: Any = cache.layers
    return ActivationCache(
        inputs=block_args[0]["hidden_states"],
        states=states,
        contributions=contributions,
        keys=[layer.keys for layer in layers],
        values=[layer.values for layer in layers],
        block_args=block_args,
    )


@torch.no_grad()
def mlp_keys(lm: LM, ids: Int[Tensor, "row token"], layer: int) -> Float[Tensor, "row token key"]:
    """k: the input of a layer's MLP output weight."""
    keys: list[Tensor] = []
    with hook_calls((lm.mlp_out(layer), lambda args, _: keys.append(args[0]))):
        lm.model.base_model(ids, use_cache=False)
    return keys[0].reshape(*ids.shape, -1)


def answer_log_probability(
    lm: LM, states: Float[Tensor, "row token width"], answer: Int[Tensor, "row token"]
) -> Float[Tensor, " row"]:
    """log P[answer] of each row in float32, summed over its tokens, which `states` predict."""
    logits = lm.decode(states.flatten(0, 1)).float()
    ids = answer.flatten().to(logits.device)
    log_p = logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(1)
    return log_p.view(answer.shape).sum(1)


def answer_probability(
    lm: LM, states: Float[Tensor, "row token width"], answer: Int[Tensor, "row token"]
) -> Float[Tensor, " row"]:
    """P[answer] of each row: the product over the answer's tokens."""
    return answer_log_probability(lm, states, answer).exp()


def token_probability(
    lm: LM, states: Float[Tensor, "row width"], token: Int[Tensor, " row"]
) -> Float[Tensor, " row"]:
    """P[token] of each last-layer state."""
    return answer_probability(lm, states[:, None], token[:, None])
