"""Reference implementation of causal tracing: one hooked forward pass per cell.

It works like the paper's code: one fact at a time; every pass samples the noise again and runs the
full model. Tests check that the engine gives the same numbers; benchmarks measure its speedup.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn

from factscope.lm.forward import forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.tracing.corruption import NoiseScale, corrupt_embeddings, sample_noise
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import CleanAnswer

Hook = tuple[nn.Module, Callable[[Tensor], Tensor | None]]


class ReferenceTrace:
    """One prompt as a batch: row 0 is clean, the others are corrupted samples."""

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
    def of(
        cls, lm: LM, answer: CleanAnswer, settings: Tracing, scale: NoiseScale
    ) -> "ReferenceTrace":
        """The reference for the trace of a fact."""
        start, stop = settings.corruption.token_range(answer.subject, len(answer.prompt))
        width = lm.embed.weight.shape[1]

        def noise() -> Float64[np.ndarray, "sample token width"]:
            return sample_noise(settings.corruption, scale, answer.fact, stop - start, width)

        return cls(lm, answer.prompt.ids, (start, stop), noise, settings)

    def restored(self, kind: str, token: int, layer: int) -> float:
        """P*[o] with one state, or one window of contributions, restored from the clean run."""
        return self._score(self._restore(kind, token, layer))

    def severed(self, module: str, token: int, layer: int) -> float:
        """P*[o] with one state restored and a module frozen at its corrupted outputs."""
        corrupted = forward(
            self.lm, self.ids, keep=("attn", "mlp"), embed=self._corrupt_embeddings
        ).contributions[module]
        tokens = slice(None) if self.settings.freeze_at == "all" else slice(token, token + 1)

        def freeze(layer: int) -> Callable[[Tensor], None]:
            def overwrite(out: Tensor) -> None:
                out.view(corrupted[layer].shape)[1:, tokens] = corrupted[layer][1:, tokens]

            return overwrite

        layers = range(self.lm.n_layers)
        hooks: list[Hook] = [(self.lm.contribution(module, i), freeze(i)) for i in layers]
        return self._score(hooks + self._restore("states", token, layer))

    def _restore(self, kind: str, token: int, layer: int) -> list[Hook]:
        def put_clean(out: Tensor) -> None:
            rows = out.view(len(self.ids), self.length, -1)
            rows[1:, token] = rows[0, token]

        if kind == "states":
            return [(self.lm.blocks[layer], put_clean)]
        start, stop = self.settings.window_around(layer, self.lm.n_layers)
        return [(self.lm.contribution(kind, i), put_clean) for i in range(start, stop)]

    def _corrupt_embeddings(self, out: Tensor) -> Tensor:
        start, stop = self.corrupt
        out[1:, start:stop] = corrupt_embeddings(
            out[1:, start:stop], self.noise(), self.settings.corruption.replace
        )
        return out

    @torch.no_grad()
    def _probabilities(self, hooks: list[Hook]) -> Tensor:
        with hook_outputs((self.lm.embed, self._corrupt_embeddings), *hooks):
            logits = self.lm.model(self.ids).logits
        return logits[:, -1].float().softmax(-1)

    def _score(self, hooks: list[Hook]) -> float:
        """The answer's mean probability over the corrupted rows."""
        return self._probabilities(hooks)[1:, self.answer].mean().item()
