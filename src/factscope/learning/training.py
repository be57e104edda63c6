"""Training a hypernetwork: Adam on many edits a step, seen on held-out ones, stopped early."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from factscope.editing.learned.factors import factors_of
from factscope.editing.learned.halves import Halves
from factscope.editing.learned.network import Hypernetwork
from factscope.editing.learned.places import last_layers, places_of
from factscope.editing.learned.weights import NETWORKS, Weights, built, digest_of
from factscope.errors import BadSetting, NoProgress
from factscope.learning.examples import Lessons
from factscope.learning.groups import Group, Shelf, split
from factscope.learning.objective import Seen, look
from factscope.records.training import TrainingRecord

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Progress", "Trainer", "Training"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained."""

    method: str
    """mend or ke."""
    layers: tuple[int, ...] | None = None
    """The layers whose MLPs are edited; None for the last three."""
    design: tuple[tuple[str, Any], ...] = ()
    """Further settings of the network, such as ("rank", 256); see its design."""
    rate: float = 3e-4
    """Adam's learning rate."""
    warm_up: int = 20
    """Steps over which the rate rises from 0."""
    batch: int = 16
    """Edits a step."""
    edit_weight: float = 0.1
    """c_edit, what the edits' loss is multiplied by."""
    local_weight: float = 1.0
    """c_local, what the divergence on unrelated text is multiplied by."""
    clip: float = 1.0
    """The longest that a gradient may be."""
    held_out: int = 64
    """Examples that training does not see: a fifth of all at most."""
    every: int = 50
    """Steps from one look at the held-out examples to the next."""
    patience: int | None = 20
    """After so many looks without a better one training stops; None for never."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in NETWORKS:
            raise BadSetting(f"no learned method {self.method!r}; there are {', '.join(NETWORKS)}")
        for name, least in (("batch", 2), ("every", 1), ("held_out", 2), ("warm_up", 0)):
            if getattr(self, name) < least:
                raise BadSetting(f"{name} is {getattr(self, name)}; it must be {least} or more")
        if not self.rate > 0:
            raise BadSetting(f"rate is {self.rate}; it must be above 0")
        design, _ = NETWORKS[self.method]
        own = {field.name for field in fields(design)} - {"places", "layers", "width"}
        for name, _ in self.design:
            if name not in own:
                raise BadSetting(f"a {self.method} network has no {name!r}; it has {sorted(own)}")

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "design": dict(self.design)}


@dataclass
class Progress:
    """How far training is."""

    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    """The least loss on the held-out examples so far."""
    best_step: int = -1
    worse: int = 0
    """Looks since then."""
    since: float = 0.0
    """The sum of the steps' losses since the last look."""
    steps_since: int = 0


class Trainer:
    """A network in training on a model."""

    def __init__(self, lm: "LM", lessons: Lessons, training: Training) -> None:
        self.lm, self.training = lm, training
        layers = training.layers or last_layers(lm)
        self.places = places_of(lm, layers)
        self.halves = Halves(lm, self.places[0].layer)
        shown, held = split(len(lessons), training.held_out)
        self.shelf = Shelf(lm, self.halves, lessons, shown, training.batch)
        self.held = Shelf(lm, self.halves, lessons, held, training.batch)
        self.network = self._network(tuple(sorted(set(layers))))
        self.adam = torch.optim.Adam(self.network.groups(training.rate))
        self.rates = [group["lr"] for group in self.adam.param_groups]
        self.progress = Progress()
        self.begun = False
        self.best: dict[str, Tensor] = {}
        """The network's tensors at the best look."""

    def _network(self, layers: tuple[int, ...]) -> Hypernetwork:
        design, _ = NETWORKS[self.training.method]
        places = tuple(place.shape for place in self.places)
        said = design(
            places=places, layers=layers, width=self.lm.embed.weight.shape[1],
            **dict(self.training.design),
        )  # fmt: skip
        return built(self.training.method, said, self.training.seed).to(self.lm.device)

    def begin(self) -> None:
        """Before the first step: learn from one group how large factors usually are."""
        if self.begun:
            return
        self.begun = True
        group = self.shelf.group(0)
        if group is not None:
            factors, _ = factors_of(
                self.lm, self.places, self.halves, group.entering[0], group.edit
            )
            self.network.observe(factors)

    # ---- one step

    def step(self) -> float:
        """Learn from the next group; its loss."""
        began = time.monotonic()
        self.begin()
        now = self.progress
        group, turn = self.shelf.at(now.step, self.training.seed)
        loss = math.nan if group is None else self._learn(group, turn)
        now.step += 1
        if group is not None:
            now.since += loss
            now.steps_since += 1
        now.seconds += time.monotonic() - began
        return loss

    def _learn(self, group: Group, turn: int) -> float:
        self.network.train()
        warm = min(1.0, (self.progress.step + 1) / max(1, self.training.warm_up))
        for settings, rate in zip(self.adam.param_groups, self.rates, strict=True):
            settings["lr"] = rate * warm
        seen = look(
            self.lm, self.places, self.halves, self.network, group, turn, learn=True
        )  # fmt: skip
        total = self._total(seen).mean()
        loss = total.item()
        if not math.isfinite(loss):
            raise NoProgress(self._diverged("loss", loss))
        self.adam.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.training.clip)
        if not math.isfinite(norm.item()):
            raise NoProgress(self._diverged("gradient", norm.item()))
        self.adam.step()
        return loss

    def _total(self, seen: Seen) -> Tensor:
        edits = (seen.edit + seen.rephrased) / 2
        return self.training.edit_weight * edits + self.training.local_weight * seen.local

    def _diverged(self, what: str, value: float) -> str:
        return (
            f"at step {self.progress.step} the {what} of training is no number ({value}); what "
            f"was learned up to step {max(0, self.progress.best_step)} is kept. Lower --rate, or "
            "load the model in float32"
        )

    # ---- a look at what is held out

    def look(self) -> TrainingRecord:
        """See the held-out examples, and note whether that is the best so far."""
        began = time.monotonic()
        self.begin()
        self.network.eval()
        groups = [g for g in map(self.held.group, range(len(self.held))) if g is not None]
        if not groups:
            raise BadSetting("none of the held-out examples can be read by the model; give others")
        seen = [
            look(self.lm, self.places, self.halves, self.network, group, 0, learn=False)
            for group in groups
        ]

        def mean(of: Callable[[Seen], Tensor]) -> float:
            return torch.cat([of(some) for some in seen]).mean().item()

        names = [field.name for field in fields(Seen)]
        means = {name: mean(lambda some, name=name: getattr(some, name)) for name in names}
        now = self.progress
        loss = mean(self._total)
        trained = now.since / now.steps_since if now.steps_since else None
        now.since, now.steps_since = 0.0, 0
        if loss < now.best:
            now.best, now.best_step, now.worse = loss, now.step, 0
            self.best = {name: x.clone() for name, x in self.network.state_dict().items()}
        else:
            now.worse += 1
        now.seconds += time.monotonic() - began
        return TrainingRecord(
            step=now.step, seconds=now.seconds, trained=trained, loss=loss, **means
        )

    @property
    def stopped(self) -> bool:
        """Whether the held-out examples have not got better for too long."""
        patience = self.training.patience
        return patience is not None and self.progress.worse >= patience

    def weights(self, trained: Mapping[str, Any]) -> Weights:
        """The best network so far, as an editor takes it."""
        network = built(self.training.method, self.network.design)
        network.load_state_dict(self.best)
        told = {**trained, "step": self.progress.best_step, "loss": self.progress.best}
        return Weights(
            network=network, model=self.lm.name, fingerprint=self.lm.fingerprint, trained=told,
            sha256=digest_of(list(self.best.values())),
        )  # fmt: skip
