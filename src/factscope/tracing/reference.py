"""Reference implementation of causal tracing: one hooked forward pass per cell.

It works like the paper's code: one fact at a time; every pass samples the noise again and runs the
full model. Tests check that the engine gives the same numbers; benchmarks measure its speedup.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from factscope.lm.forward import forward
from factscope.lm.hooks import hook_calls, hook_outputs
from factscope.lm.model import LM
from factscope.tracing.corruption import NoiseScale, corrupt_embeddings, sample_noise
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import CleanAnswer

Hook = tuple[nn.Module, Callable[[Tensor], Tensor | None]]
CallHook = tuple[nn.Module, Callable[[tuple[Any, ...], dict[str, Any]], None]]


class ReferenceTrace:
    """The trace of one fact. Its prompt is a batch: row 0 is clean, the next rows are corrupted.

    To corrupt cells of clean runs, as many further rows are clean. Cells are put from the `source`
    rows into the `base` rows.
    """

    def __init__(
        self,
        lm: LM,
        answer: CleanAnswer,
        settings: Tracing,
        scale: NoiseScale,
        foil: int | None = None,
    ) -> None:
        self.lm, self.fact, self.settings, self.scale = lm, answer.fact, settings, scale
        n = settings.corruption.samples
        tokens = settings.corruption.replaces_tokens
        rows = [answer.ids] + [answer.replaced_ids if tokens else answer.ids] * n
        self.corrupted_rows, self.source, self.base = slice(1, 1 + n), [0] * n, range(1, 1 + n)
        if settings.direction == "corrupt":
            rows += [answer.ids] * n
            self.source, self.base = self.base, range(1 + n, 1 + 2 * n)
        self.ids = torch.tensor(rows, device=lm.device)
        self.length = len(answer.prompt)
        self.corrupt = settings.corruption.token_range(answer.subject, self.length)
        self.answer = answer.answer_ids
        logits = self._logits([])
        p = self._metrics(logits, "probability")
        self.clean, self.corrupted = p[0].item(), p[self.corrupted_rows].mean().item()
        self.clean_logits = logits[0, 0]
        likely = logits[self.corrupted_rows, 0].softmax(-1).mean(0)
        likely[self.answer[0]] = 0
        self.foil = int(likely.argmax()) if foil is None else foil
        values = self._metrics(logits, settings.metric)
        self.clean_metric = values[0].item()
        self.corrupted_metric = values[self.corrupted_rows].mean().item()

    def restored(self, kind: str, token: int, layer: int) -> float:
        """The metric with one state, or one window of contributions, put in."""
        return self._score(self._restore(kind, token, layer))

    def severed(self, module: str, token: int, layer: int) -> float:
        """The metric with one state put in and a module frozen at its outputs in the base run."""
        outputs = self._outputs(module)
        tokens = slice(None) if self.settings.freeze_at == "all" else slice(token, token + 1)

        def freeze(layer: int) -> Callable[[Tensor], None]:
            def overwrite(out: Tensor) -> None:
                rows = out.view(outputs[layer].shape)
                rows[self.base, tokens] = outputs[layer][self.base, tokens]

            return overwrite

        layers = range(self.lm.n_layers)
        hooks: list[Hook] = [(self.lm.contribution(module, i), freeze(i)) for i in layers]
        draw = 1 if self.settings.sever_draws == "two" else 0
        return self._score(hooks + self._restore("states", token, layer), draw=draw)

    def head(self, head: int, token: int, layer: int) -> float:
        """The metric with the output of one attention head put in."""

        def put(args: tuple[Tensor, ...], _: object) -> None:
            heads = args[0].view(*self.ids.shape, self.lm.n_heads, -1)
            heads[self.base, token, head] = heads[self.source, token, head]

        return self._score([], [(self.lm.contribution("attn", layer), put)])

    def _outputs(self, module: str) -> list[Tensor]:
        """The outputs of a module in each layer, without an intervention."""
        run = forward(self.lm, self.ids, keep=(module,), embed=self._corrupt_embeddings(0))
        return run.contributions[module]

    def _restore(self, kind: str, token: int, layer: int) -> list[Hook]:
        def put(out: Tensor) -> None:
            rows = out.view(*self.ids.shape, -1)
            rows[self.base, token] = rows[self.source, token]

        if kind == "states":
            return [(self.lm.blocks[layer], put)]
        start, stop = self.settings.window_around(layer, self.lm.n_layers)
        return [(self.lm.contribution(kind, i), put) for i in range(start, stop)]

    def _corrupt_embeddings(self, draw: int) -> Callable[[Tensor], Tensor]:
        corruption, (start, stop) = self.settings.corruption, self.corrupt

        def corrupt(out: Tensor) -> Tensor:
            rows, width = out[self.corrupted_rows, start:stop], out.shape[-1]
            if not corruption.replaces_tokens:
                noise = sample_noise(
                    corruption, self.scale, self.fact, stop - start, width, draw=draw
                )
                rows[:] = corrupt_embeddings(rows, noise, corruption.replace)
            return out

        return corrupt

    @torch.no_grad()
    def _logits(
        self, hooks: Sequence[Hook], calls: Sequence[CallHook] = (), draw: int = 0
    ) -> Tensor:
        """The logits that predict the answer: (row, token of the answer, vocabulary)."""
        corrupt = (self.lm.embed, self._corrupt_embeddings(draw))
        with hook_outputs(corrupt, *hooks), hook_calls(*calls):
            logits = self.lm.model(self.ids).logits
        return logits[:, self.length - 1 :].float()

    def _metrics(self, logits: Tensor, name: str) -> Tensor:
        """A metric of each row."""
        p = logits.softmax(-1)
        of_answer = torch.stack([p[:, i, token] for i, token in enumerate(self.answer)]).prod(0)
        first = logits[:, 0]
        if name == "probability":
            return of_answer
        if name == "log-probability":
            return of_answer.log()
        if name == "logit-difference":
            return first[:, self.answer[0]] - first[:, self.foil]
        if name == "rank":
            order = first.argsort(dim=1, descending=True)
            return 1.0 + (order == self.answer[0]).nonzero()[:, 1]
        clean = self.clean_logits.log_softmax(-1)
        return torch.stack([(clean.exp() * (clean - x.log_softmax(-1))).sum() for x in first])

    def _score(self, hooks: Sequence[Hook], calls: Sequence[CallHook] = (), draw: int = 0) -> float:
        """The metric's mean over the base rows."""
        values = self._metrics(self._logits(hooks, calls, draw), self.settings.metric)
        return values[list(self.base)].mean().item()
