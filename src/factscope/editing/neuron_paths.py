"""Neurons on their way from nothing to what they are: the slopes of an answer's probability there.

A point is a layer whose neurons, at the token that an answer follows, are at some share of what
they are. Only that token is computed again, with the keys and values left of it taken from one run
beforehand; and the points of all layers go through the model in one walk upwards, each joining
where its layer is reached.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.forward import Run, forward
from factscope.lm.hooks import on_pass
from factscope.lm.replay import Replay, View
from factscope.tracing.engine import probability
from factscope.tracing.memory import Budget

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Looked", "Reading", "Site", "Walk", "start"]

Site = Literal["key", "before"]
"""Which numbers are a layer's neurons: the key k, which the MLP's output weight reads; or what its
nonlinearity reads before that."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A token of an answer, and the text that it is read after."""

    ids: tuple[int, ...]
    at: int
    """The token of the text that the answer's follows."""
    answer: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Looked:
    """What was seen at some points."""

    neurons: Float[Tensor, "point neuron"]
    """What the point's layer has at the end of the path."""
    slopes: Float[Tensor, "point neuron"]
    """∂P[o] / ∂k at the point."""
    p: Float[Tensor, " point"]
    """P[o] there."""


@torch.no_grad()
def start(lm: "LM", readings: Sequence[Reading], site: Site = "key") -> "Walk":
    """One run over the readings' texts, from which walks can start."""
    texts = list(dict.fromkeys(reading.ids for reading in readings))
    number = {ids: i for i, ids in enumerate(texts)}
    length = max(map(len, texts))
    ids = [[*text, *[0] * (length - len(text))] for text in texts]  # nothing looks at the zeros
    return Walk(
        lm=lm,
        run=forward(lm, torch.tensor(ids, device=lm.device)),
        site=site,
        row=torch.tensor([number[reading.ids] for reading in readings], device=lm.device),
        at=torch.tensor([reading.at for reading in readings], device=lm.device),
        answer=torch.tensor([reading.answer for reading in readings], device=lm.device),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """Readings, and the run over their texts."""

    lm: "LM"
    run: Run
    site: Site
    row: Int[Tensor, " reading"]
    """The row of the run that a reading belongs to."""
    at: Int[Tensor, " reading"]
    answer: Int[Tensor, " reading"]

    @torch.no_grad()
    def clean(self) -> Float[Tensor, " reading"]:
        """P of what is read, with every neuron as it is."""
        last = self.run.states[-1]
        ends = last[self.row.to(last.device), self.at.to(last.device)]
        return probability(self.lm, ends, self.answer).to(self.lm.device)

    def fitting(self) -> int:
        """How many points fit into memory: what the blocks keep of them for the slopes."""
        lm, length = self.lm, self.run.inputs.shape[1]
        keys = lm.mlp_weight(0).shape[1]
        heads, _, dim = self.run.keys[0].shape[1:]
        kept = 10 * lm.width + 3 * keys + 2 * heads * dim * length
        slots = 1 if lm.arch.packs else length
        return max(1, Budget.of(lm, None).bytes // (lm.n_layers * slots * kept * lm.dtype.itemsize))

    def look(
        self,
        reading: Int[Tensor, " point"],
        layer: Int[Tensor, " point"],
        share: Float[Tensor, " point"],
    ) -> Looked:
        """The slopes at some points, those of lower layers first."""
        joining = torch.bincount(layer, minlength=self.lm.n_layers).tolist()
        neurons: list[Tensor] = []
        points: list[Tensor] = []
        hidden, joined = self._entering(0, self._view(reading[:0])[0], slice(0)), 0
        with torch.enable_grad():
            for i, count in enumerate(joining):
                if not joined + count:
                    continue
                new = slice(joined, joined + count)
                joined += count
                view, spot = self._view(reading[:joined])
                hidden = torch.cat([hidden, self._entering(i, view, new).to(hidden.device)])
                with on_pass((self._module(i), self._grow(i, spot, new, share, neurons, points))):
                    hidden = Replay(self.lm, self.run, view)(i, hidden)
            spot = self._view(reading)[1].to(hidden.device)
            last = hidden[torch.arange(joined, device=hidden.device), spot]
        p, above = self._read(last.detach(), self.answer[reading])
        slopes = torch.autograd.grad(last, points, above)
        first = self.lm.device
        return Looked(
            neurons=torch.cat([x.to(first) for x in neurons]).float(),
            slopes=torch.cat([x.to(first) for x in slopes]).float(),
            p=p.to(first),
        )

    def _view(self, reading: Int[Tensor, " point"]) -> tuple[View, Int[Tensor, " point"]]:
        """Each point's token alone, or, where a family cannot, its whole text; and its slot."""
        row, at = self.row[reading], self.at[reading]
        if self.lm.arch.packs:
            token = at[:, None]
            return View(row=row, position=token, start=token, past=self._past), torch.zeros_like(at)
        whole = View.whole(len(row), self.run.inputs.shape[1], row.device)
        return View(row=row, position=whole.position, start=whole.start, past=0), at

    @cached_property
    def _past(self) -> int:
        return int(self.at.max())

    def _entering(self, layer: int, view: View, new: slice) -> Float[Tensor, "point slot width"]:
        """The states of the clean run that enter a layer, for the points that join there."""
        states = self.run.inputs if layer == 0 else self.run.states[layer - 1]
        row, position = (x[new].to(states.device) for x in (view.row, view.position))
        return states[row[:, None], position]

    def _module(self, layer: int) -> torch.nn.Module:
        return self.lm.mlp_out(layer) if self.site == "key" else self.lm.mlp_act(layer)

    def _grow(
        self, layer: int, spot: Tensor, new: slice, share: Tensor,
        neurons: list[Tensor], points: list[Tensor],
    ) -> Callable[[Tensor, Tensor], Tensor | None]:  # fmt: skip
        """Sets the neurons of the points that join to their share; notes what they are."""
        module = self._module(layer)

        def grow(x: Tensor, output: Tensor) -> Tensor | None:
            if new.start == new.stop:
                return None
            seen, out = (t.reshape(len(spot), -1, t.shape[-1]) for t in (x, output))
            number, slot = torch.arange(new.start, new.stop), spot[new].to(x.device)
            end = seen[number, slot].detach()
            point = (share[new].to(end)[:, None] * end).requires_grad_()
            neurons.append(end)
            points.append(point)
            if self.site == "key":
                shift = (point - end) @ self.lm.mlp_weight(layer).T
            else:
                shift = module.forward(point) - module.forward(end)
            # Some families add in place to what comes out: never hand out the model's own tensor.
            moved = torch.zeros_like(out).index_put((number.to(out.device), slot), shift)
            return (out + moved).reshape(output.shape)

        return grow

    def _read(
        self, states: Float[Tensor, "row width"], answer: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, " row"], Float[Tensor, "row width"]]:
        """P of each row's answer and its slope by the state, a few rows of logits at a time."""
        size = Budget.of(self.lm, None).job(self.lm).logits
        found: list[tuple[Tensor, Tensor]] = []
        for some, wanted in zip(states.split(size), answer.split(size), strict=True):
            leaf = some.detach().requires_grad_()
            with torch.enable_grad():
                p = probability(self.lm, leaf, wanted)
            found.append((p.detach(), torch.autograd.grad(p.sum(), leaf)[0]))
        p, slopes = zip(*found, strict=True)
        return torch.cat(p), torch.cat(slopes)
