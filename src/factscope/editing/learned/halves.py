"""The model in two: below the first edited layer, which no edit changes, and from there on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.forward import forward
from factscope.lm.hooks import on_call, on_output
from factscope.lm.replay import Replay, View

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Halves"]


class Halves:
    """A model cut below a layer: the lower half is run once, the upper one under many edits."""

    def __init__(self, lm: "LM", first: int) -> None:
        self.lm, self.first = lm, first
        self._replays: dict[int, Replay] = {}

    @torch.no_grad()
    def below(
        self, ids: Int[Tensor, "line token"], lengths: Sequence[int] = ()
    ) -> tuple[Float[Tensor, "line token width"], Float[Tensor, "line token width"]]:
        """What enters the first edited layer, and what the unedited model's last layer returns.

        After that lines of those lengths, or as long as one alone, need no run of their own.
        """
        lengths = lengths or ([ids.shape[1]] if len(ids) == 1 else [])
        if lengths:
            run = forward(self.lm, ids)
            for length in lengths:
                view = View.whole(1, length, ids.device)
                self._replays[length] = Replay(self.lm, run, view)
            return (run.inputs, *run.states)[self.first], run.states[-1]
        entering: list[Tensor] = []
        last: list[Tensor] = []
        blocks = self.lm.blocks

        def enter(args: tuple, named: dict) -> None:
            entering.append(args[0] if args else named["hidden_states"])

        with on_call((blocks[self.first], enter)), on_output((blocks[-1], last.append)):
            self.lm.model.base_model(ids, use_cache=False)
        return entering[0], last[0]

    def above(self, hidden: Float[Tensor, "line token width"]) -> Float[Tensor, "line token width"]:
        """The last layer's states, as the layers from the first edited one on are now."""
        replay = self._replay(hidden.shape[1])
        for layer in range(self.first, self.lm.n_layers):
            hidden = replay(layer, hidden)
        return hidden

    def _replay(self, length: int) -> Replay:
        """How the blocks are called on lines of a length; one line's calls serve any number."""
        if length not in self._replays:
            self.below(torch.zeros(1, length, dtype=torch.long, device=self.lm.device))
        return self._replays[length]
