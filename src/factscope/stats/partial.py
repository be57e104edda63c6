"""What a collection has so far, on the disk: a killed run goes on from it."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from factscope.errors import WrongRun
from factscope.stats.sums import Sums

__all__ = ["Partial", "State"]

History = dict[int, list[tuple[int, float]]]

SHARE = 20
"""Writing may take one part in so many of the time: the sums of large models are gigabytes."""


@dataclass
class State:
    """How far a collection is."""

    sums: Sums
    windows: int = 0
    """Windows done, of this shard."""
    history: History = field(default_factory=dict)
    """By layer: tokens so far and the gap between the halves."""


class Partial:
    """The file of a collection under way; without a path nothing is written."""

    def __init__(self, path: Path | None, spec: Mapping[str, Any], every: float) -> None:
        self.path = path
        self.spec = spec
        self.every = every
        self.due = time.monotonic() + every

    def read(self, fresh: State) -> State:
        """What an earlier run with the same settings left, or the fresh state."""
        if self.path is None or not self.path.is_file():
            return fresh
        try:
            with safe_open(self.path, framework="pt") as file:
                header = json.loads((file.metadata() or {})["state"])
            self._must_match(header["spec"])
            tensors = load_file(self.path)
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise WrongRun(
                f"{self.path} cannot be gone on from ({error}); delete it to begin anew"
            ) from error
        sums = Sums(layers=fresh.sums.layers, counts=tuple(header["counts"]))
        for layer in fresh.sums.layers:
            sums.halves[layer] = tensors[f"{layer}.0"], tensors[f"{layer}.1"]
        history = {int(k): [(n, gap) for n, gap in v] for k, v in header["history"].items()}
        return State(sums=sums, windows=header["windows"], history=history)

    def keep(self, state: State) -> None:
        """Write the state where it is time to."""
        if self.path is None or time.monotonic() < self.due:
            return
        began = time.monotonic()
        self._write(self.path, state)
        now = time.monotonic()
        self.due = now + max(self.every, SHARE * (now - began))

    def _write(self, path: Path, state: State) -> None:
        from factscope.fetch import whole

        header = {
            "spec": self.spec,
            "windows": state.windows,
            "counts": state.sums.counts,
            "history": state.history,
        }
        tensors = {
            f"{layer}.{i}": half.cpu()
            for layer, halves in state.sums.halves.items()
            for i, half in enumerate(halves)
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as temporary:
            save_file(tensors, temporary, metadata={"state": json.dumps(header)})

    def _must_match(self, there: Mapping[str, Any]) -> None:
        asked = json.loads(json.dumps(self.spec))
        names = [name for name in {**there, **asked} if there.get(name) != asked.get(name)]
        if names:
            changes = [f"{n}: there {there.get(n)!r}, asked {asked.get(n)!r}" for n in names]
            raise WrongRun(
                f"{self.path} was left by a run with other settings; give those, another --out, "
                "or delete it to begin anew:\n  " + "\n  ".join(changes)
            )
