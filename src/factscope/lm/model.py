"""LM: a model with its tokenizer and access to its embedding, blocks, MLPs and head."""

import hashlib
import html
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from factscope.lm.families import Family


@dataclass(frozen=True, kw_only=True, eq=False)
class LM:
    """A model with its tokenizer and its family's module names."""

    model: Any
    """A transformers decoder model with a language-modelling head."""
    tokenizer: Any
    """Its fast tokenizer."""
    family: Family
    name: str
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Per-model cache of values derived from the weights, such as fast layers."""

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        family = self.model.config.model_type
        return f"LM({self.name!r}, {family}, {self.n_layers} layers, {dtype}, {self.device})"

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"

    @cached_property
    def blocks(self) -> list[nn.Module]:
        """The transformer blocks, first to last."""
        return list(self.model.get_submodule(self.family.blocks))

    @cached_property
    def embed(self) -> nn.Embedding:
        """The token embedding."""
        return self.model.get_submodule(self.family.embed)

    @property
    def n_layers(self) -> int:
        """L, the number of blocks."""
        return len(self.blocks)

    @property
    def width(self) -> int:
        """H, the width of a hidden state."""
        return self.model.config.hidden_size

    @property
    def n_heads(self) -> int:
        """The number of attention heads of a block; of query heads if they share keys."""
        return self.model.config.num_attention_heads

    @property
    def context(self) -> int | None:
        """The longest prompt in tokens, if the config gives it."""
        return getattr(self.model.config, "max_position_embeddings", None)

    @property
    def device(self) -> torch.device:
        """The device of the embedding, where token ids go."""
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return self.embed.weight.dtype

    def contribution(self, name: str, layer: int) -> nn.Module:
        """The module that returns a layer's contribution a ("attn") or m ("mlp")."""
        path = {"attn": self.family.attn_out, "mlp": self.family.mlp_out}[name]
        return self.blocks[layer].get_submodule(path)

    def mlp_out(self, layer: int) -> nn.Module:
        """The MLP's output projection."""
        return self.contribution("mlp", layer)

    def mlp_weight(self, layer: int) -> Float[Tensor, "value key"]:
        """W_proj in the paper's orientation: W k = v."""
        weight: Any = self.mlp_out(layer).weight
        return weight.T if self.family.transposed else weight

    def head_weight(self, layer: int) -> Float[Tensor, "head dim width"]:
        """The attention's output projection: what each head's output adds to the contribution a."""
        weight: Any = self.contribution("attn", layer).weight
        weight = weight if self.family.transposed else weight.T
        return weight.unflatten(0, (self.n_heads, -1))

    def mlp_act(self, layer: int) -> nn.Module:
        """The MLP's nonlinearity."""
        return self.blocks[layer].get_submodule(self.family.mlp_act)

    def mlp_norm(self, layer: int) -> nn.Module | None:
        """The norm between the MLP's output and the hidden state, in families that have one."""
        name = self.family.mlp_norm
        return None if name is None else self.blocks[layer].get_submodule(name)

    def attn_in(self, layer: int) -> list[nn.Module]:
        """The modules that compute a layer's queries, keys and values."""
        return [self.blocks[layer].get_submodule(name) for name in self.family.attn_in]

    def mlp_in(self, layer: int) -> list[nn.Module]:
        """The modules that compute the keys (hidden activations) of a layer's MLP."""
        return [self.blocks[layer].get_submodule(name) for name in self.family.mlp_in]

    def name_of(self, module: nn.Module) -> str:
        """A module's full name in the model."""
        names = self.cache.setdefault("module names", {})
        if module not in names or _submodule(self.model, names[module]) is not module:
            names[module] = next(n for n, other in self.model.named_modules() if other is module)
        return names[module]

    def decode(self, states: Float[Tensor, "... width"]) -> Float[Tensor, "... vocabulary"]:
        """The logits of a last-layer state: final norm, then head."""
        for norm in self.norms:
            states = norm(states)
        return self.head(states)

    @cached_property
    def norms(self) -> list[nn.Module]:
        """The modules between the last block and the head, mostly the final norm."""
        modules = [_submodule(self.model, path) for path in self.family.norm]
        return [module for module in modules if module is not None]

    def head(self, states: Float[Tensor, "... width"]) -> Float[Tensor, "... vocabulary"]:
        """The logits of a normalised last-layer state."""
        logits = self.model.get_output_embeddings()(states)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the family and of the name, shape and up to 16 entries of every weight.

        Entries are rounded to bfloat16, so that a model has one fingerprint in float32, TF32 and
        bfloat16. It must be computed before an edit is applied (see `editing.edit`).
        """
        digest = hashlib.sha256(self.model.config.model_type.encode())
        for name, weight in self.model.named_parameters():
            flat = weight.detach().flatten()
            step = max(1, flat.numel() // 16)
            digest.update(f"{name} {tuple(weight.shape)}".encode())
            rounded = flat[::step][:16].to(torch.bfloat16)
            digest.update(rounded.float().cpu().numpy().tobytes())
        return digest.hexdigest()


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a dotted path, or None where the model has none."""
    module: Any = model
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
