"""Reference implementation of causal tracing: one hooked forward pass per cell.

It works like the paper's code: one fact at a time; every pass samples the noise again and runs the
full model. Tests check that the engine gives the same numbers; benchmarks measure its speedup.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from factscope.lm.forward import forward
from factscope.lm.hooks import hook_outputs
from factscope.lm.model import LM
from factscope.tracing.corruption import NoiseScale, corrupt_embeddings, sample_noise
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import CleanAnswer

Hook = tuple[nn.Module, Callable[[Tensor], Tensor | None]]


class ReferenceTrace:
    """The trace of one fact. Its prompt is a batch: row 0 is clean, the others are corrupted."""

    def __init__(self, lm: LM, answer: CleanAnswer, settings: Tracing, scale: NoiseScale) -> None:
        self.lm, self.fact, self.settings, self.scale = lm, answer.fact, settings, scale
        rows = 1 + settings.corruption.samples
        self.ids = torch.tensor([answer.ids] * rows, device=lm.device)
        self.length = len(answer.prompt)
        self.corrupt = settings.corruption.token_range(answer.subject, self.length)
        self.answer = answer.answer_ids
        self.clean = self._probabilities([])[0].item()
        self.corrupted = self._score([])

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
            rows = out.view(*self.ids.shape, -1)
            rows[1:, token] = rows[0, token]

        if kind == "states":
            return [(self.lm.blocks[layer], put_clean)]
        start, stop = self.settings.window_around(layer, self.lm.n_layers)
        return [(self.lm.contribution(kind, i), put_clean) for i in range(start, stop)]

    def _corrupt_embeddings(self, out: Tensor) -> Tensor:
        corruption, (start, stop) = self.settings.corruption, self.corrupt
        noise = sample_noise(corruption, self.scale, self.fact, stop - start, out.shape[-1])
        out[1:, start:stop] = corrupt_embeddings(out[1:, start:stop], noise, corruption.replace)
        return out

    @torch.no_grad()
    def _probabilities(self, hooks: list[Hook]) -> Tensor:
        """The answer's probability in each row: the product over its tokens."""
        with hook_outputs((self.lm.embed, self._corrupt_embeddings), *hooks):
            logits = self.lm.model(self.ids).logits
        p = logits[:, self.length - 1 :].float().softmax(-1)
        return torch.stack([p[:, i, token] for i, token in enumerate(self.answer)]).prod(0)

    def _score(self, hooks: list[Hook]) -> float:
        """The answer's mean probability over the corrupted rows."""
        return self._probabilities(hooks)[1:].mean().item()
