"""Causal tracing as the paper's own code does it: a hooked forward pass for every cell.

Slow and obvious, one fact at a time, the noise drawn anew and the whole model run with its default
settings at every pass. The engine must give the same numbers, and its benchmarks count from here.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from factscope.lm.forward import ActivationCache, forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.tracing.corruption import NoiseScale, corrupt_embeddings, sample_noise
from factscope.tracing.settings import Tracing, window_around
from factscope.tracing.trace import CleanAnswer

__all__ = ["ReferenceTrace"]


class ReferenceTrace:
    """One prompt: a clean row and as many corrupted rows as there are samples of the noise."""

    def __init__(
        self,
        lm: LM,
        ids: tuple[int, ...],
        corrupt: tuple[int, int],
        noise: Callable[[], Float64[np.ndarray, "sample token width"]],
        settings: Tracing,
    ) -> None:
        self.lm, self.corrupt, self.noise, self.settings = lm, corrupt, noise, settings
        self.ids = torch.tensor([ids] * (1 + settings.corruption.samples), device=lm.device)
        self.length = len(ids)
        clean = self._probabilities([])[0]
        self.answer = int(clean.argmax())
        self.clean = clean[self.answer].item()
        self.corrupted = self._score([])

    @classmethod
    def of(cls, lm: LM, q: CleanAnswer, settings: Tracing, scale: NoiseScale) -> "ReferenceTrace":
        """The slow twin of a question's trace."""
        start, stop = settings.corruption.tokens(q.subject, len(q.prompt))
        width = lm.embed.weight.shape[1]

        def noise() -> Float64[np.ndarray, "sample token width"]:
            return sample_noise(settings.corruption, scale, q.fact, stop - start, width)

        return cls(lm, q.prompt.ids, (start, stop), noise, settings)

    def restored(self, kind: str, token: int, layer: int) -> float:
        """P*[o] with one state, or one window of contributions, of the clean run put back."""
        return self._score(self._restorations(kind, token, layer))

    def severed(self, module: str, token: int, layer: int) -> float:
        """The same for a state, in the graph where a module is frozen at its corrupted values."""
        corrupted = self._corrupted_run()
        every = self.settings.sever_at == "every"

        def freeze(at: int) -> Callable[[Tensor], None]:
            frozen = corrupted.contributions[module][at]
            tokens = slice(None) if every else slice(token, token + 1)

            def put(out: Tensor) -> None:
                out.view(frozen.shape)[1:, tokens] = frozen[1:, tokens]

            return put

        hooks = [(self.lm.contribution(module, at), freeze(at)) for at in range(self.lm.n_layers)]
        return self._score(hooks + self._restorations("states", token, layer))

    def _restorations(self, kind: str, token: int, layer: int) -> list:
        def put_clean(out: Tensor) -> None:
            rows = out.view(len(self.ids), self.length, -1)
            rows[1:, token] = rows[0, token]

        if kind == "states":
            return [(self.lm.blocks[layer], put_clean)]
        start, stop = window_around(self.settings, layer, self.lm.n_layers)
        return [(self.lm.contribution(kind, i), put_clean) for i in range(start, stop)]

    def _corrupt_embeddings(self, out: Tensor) -> Tensor:
        start, stop = self.corrupt
        out[1:, start:stop] = corrupt_embeddings(
            out[1:, start:stop], self.noise(), self.settings.corruption.replace
        )
        return out

    def _corrupted_run(self) -> ActivationCache:
        return forward(self.lm, self.ids, keep=("attn", "mlp"), embed=self._corrupt_embeddings)

    @torch.no_grad()
    def _probabilities(self, hooks: list) -> Tensor:
        with hook_outputs((self.lm.embed, self._corrupt_embeddings), *hooks):
            logits = self.lm.model(self.ids).logits
        return logits[:, -1].float().softmax(-1)

    def _score(self, hooks: list) -> float:
        return self._probabilities(hooks)[1:, self.answer].mean().item()
