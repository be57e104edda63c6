"""Training a hypernetwork: Adam on many edits a step, seen on held-out ones, stopped early.

What training makes small: the edits' losses, and what they do to unrelated text (MEND, eq. 4).

c_edit · mean -log P(new object | edited) + c_local · KL(unedited ‖ edited)

Training under way, as a file: the network, Adam's state and how far it is. Safetensors.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.hypernet.editor import told_of
from factscope.editing.hypernet.examples import (
    BatchCache,
    ExampleBatch,
    ExampleSource,
    split_examples,
)
from factscope.editing.hypernet.gradients import (
    SplitModel,
    TargetModule,
    TokenBatch,
    changes_applied,
    gradient_factors,
    last_layers,
    target_modules,
)
from factscope.editing.hypernet.model import Hypernetwork
from factscope.editing.hypernet.weights import (
    NETWORKS,
    HypernetWeights,
    build_network,
    bytes_of,
    detached,
    digest_of,
    tensors_in,
)
from factscope.errors import BadRunFolder, BadSetting, DidNotConverge
from factscope.io import write_atomic
from factscope.records import TrainingRecord

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = [
    "BatchLosses",
    "Trainer",
    "Training",
    "TrainingProgress",
    "load_checkpoint_",
    "training_pass",
    "write_checkpoint",
]


@dataclass(frozen=True, eq=False)
class BatchLosses:
    """What edits did to their group, fact by fact."""

    before: Float[Tensor, " fact"]
    """The loss of the new object before the edit."""
    edit: Float[Tensor, " fact"]
    """And after it."""
    rephrased: Float[Tensor, " fact"]
    local: Float[Tensor, " fact"]
    """KL(unedited ‖ edited) where nothing should change."""
    said: Float[Tensor, " fact"]
    """1 where the new object is now the likeliest, token by token."""
    said_rephrased: Float[Tensor, " fact"]
    kept: Float[Tensor, " fact"]
    """The share of tokens that are the likeliest as before, where nothing should change."""


def training_pass(
    lm: "LM", places: Sequence[TargetModule], halves: SplitModel, network: Hypernetwork,
    group: ExampleBatch, turn: int, *, learn: bool,
) -> BatchLosses:  # fmt: skip
    """Edit every fact of a group by the network and see; with `learn`, in a way to learn from."""
    factors, before = gradient_factors(lm, places, halves, group.entering[0], group.edit)
    if learn:
        network.observe(factors)
    with torch.set_grad_enabled(learn):
        changes = network(factors, told_of(lm, group.edit))
        local, entering, last = group.local(turn)
        kinds: list[TokenBatch] = [group.edit, local]
        states = [group.entering[0], entering]
        if group.rephrased is not None:
            kinds.append(group.rephrased)
            states.append(group.entering[1])
        with changes_applied(places, changes):
            hidden = halves.above(torch.stack(states, dim=1).flatten(0, 1))
        hidden = hidden.unflatten(0, (len(group), len(kinds)))
        logs = [lines.logs(lm, hidden[:, i]) for i, lines in enumerate(kinds)]
        with torch.no_grad():
            unedited = local.logs(lm, last)
        apart = (unedited.exp() * (unedited - logs[1])).sum(-1)
        again = group.edit if group.rephrased is None else group.rephrased
        return BatchLosses(
            before=before,
            edit=group.edit.losses(logs[0]),
            rephrased=again.losses(logs[0 if group.rephrased is None else 2]),
            local=local.means(apart),
            said=group.edit.all_said(logs[0]).float(),
            said_rephrased=again.all_said(logs[0 if group.rephrased is None else 2]).float(),
            kept=local.means((unedited.argmax(-1) == logs[1].argmax(-1)).float()),
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a network is trained."""

    method: str
    """mend or ke."""
    layers: tuple[int, ...] | None = None
    """The layers whose MLPs are edited; None for the last three."""
    design: tuple[tuple[str, Any], ...] = ()
    """Further settings of the network, such as ("rank", 256); see its design."""
    lr: float = 3e-4
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
        if not self.lr > 0:
            raise BadSetting(f"lr is {self.lr}; it must be above 0")
        design, _ = NETWORKS[self.method]
        own = {field.name for field in fields(design)} - {"places", "layers", "width"}
        for name, _ in self.design:
            if name not in own:
                raise BadSetting(f"a {self.method} network has no {name!r}; it has {sorted(own)}")

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "design": dict(self.design)}


@dataclass
class TrainingProgress:
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

    def __init__(self, lm: "LM", lessons: ExampleSource, training: Training) -> None:
        self.lm, self.training = lm, training
        layers = training.layers or last_layers(lm)
        self.places = target_modules(lm, layers)
        self.halves = SplitModel(lm, self.places[0].layer)
        shown, held = split_examples(len(lessons), training.held_out)
        self.shelf = BatchCache(lm, self.halves, lessons, shown, training.batch)
        self.held = BatchCache(lm, self.halves, lessons, held, training.batch)
        self.network = self._network(tuple(sorted(set(layers))))
        self.adam = torch.optim.Adam(self.network.groups(training.lr))
        self.rates = [group["lr"] for group in self.adam.param_groups]
        self.progress = TrainingProgress()
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
        return build_network(self.training.method, said, self.training.seed).to(self.lm.device)

    def begin(self) -> None:
        """Before the first step: learn from one group how large factors usually are."""
        if self.begun:
            return
        self.begun = True
        group = self.shelf.group(0)
        if group is not None:
            factors, _ = gradient_factors(
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

    def _learn(self, group: ExampleBatch, turn: int) -> float:
        self.network.train()
        warm = min(1.0, (self.progress.step + 1) / max(1, self.training.warm_up))
        for settings, lr in zip(self.adam.param_groups, self.rates, strict=True):
            settings["lr"] = lr * warm
        seen = training_pass(
            self.lm, self.places, self.halves, self.network, group, turn, learn=True
        )  # fmt: skip
        total = self._total(seen).mean()
        loss = total.item()
        if not math.isfinite(loss):
            raise DidNotConverge(self._diverged("loss", loss))
        self.adam.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.training.clip)
        if not math.isfinite(norm.item()):
            raise DidNotConverge(self._diverged("gradient", norm.item()))
        self.adam.step()
        return loss

    def _total(self, seen: BatchLosses) -> Tensor:
        edits = (seen.edit + seen.rephrased) / 2
        return self.training.edit_weight * edits + self.training.local_weight * seen.local

    def _diverged(self, what: str, value: float) -> str:
        return (
            f"at step {self.progress.step} the {what} of training is no number ({value}); what "
            f"was learned up to step {max(0, self.progress.best_step)} is kept. Lower --lr, or "
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
            training_pass(self.lm, self.places, self.halves, self.network, group, 0, learn=False)
            for group in groups
        ]

        def mean(of: Callable[[BatchLosses], Tensor]) -> float:
            return torch.cat([of(some) for some in seen]).mean().item()

        names = [field.name for field in fields(BatchLosses)]
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

    def weights(self, trained: Mapping[str, Any]) -> HypernetWeights:
        """The best network so far, as an editor takes it."""
        network = build_network(self.training.method, self.network.design)
        network.load_state_dict(self.best)
        told = {**trained, "step": self.progress.best_step, "loss": self.progress.best}
        return HypernetWeights(
            network=network, model=self.lm.name, fingerprint=self.lm.fingerprint, trained=told,
            sha256=digest_of(list(self.best.values())),
        )  # fmt: skip


FORMAT = "factscope-checkpoint"


def write_checkpoint(trainer: Trainer, path: Path) -> None:
    """Everything that training goes on from, whole or not at all."""
    adam = trainer.adam.state_dict()["state"]
    tensors = {
        **{f"network.{name}": detached(x) for name, x in trainer.network.state_dict().items()},
        **{f"best.{name}": detached(x) for name, x in trainer.best.items()},
        **{f"adam.{i}.{name}": detached(x) for i, some in adam.items() for name, x in some.items()},
    }
    header = {"format": f"{FORMAT} 1", "progress": asdict(trainer.progress)}
    write_atomic(path, bytes_of(tensors, header))


def load_checkpoint_(trainer: Trainer, path: Path) -> None:
    """Bring a fresh trainer to where another was."""
    header, tensors = tensors_in(path, FORMAT)
    try:
        trainer.progress, trainer.begun = TrainingProgress(**header["progress"]), True
        trainer.network.load_state_dict(_under("network.", tensors))
        device = trainer.lm.device
        trainer.best = {name: x.to(device) for name, x in _under("best.", tensors).items()}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("adam.", tensors).items():
            number, _, what = name.partition(".")
            state.setdefault(int(number), {})[what] = tensor
        groups = trainer.adam.state_dict()["param_groups"]
        trainer.adam.load_state_dict({"state": state, "param_groups": groups})
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BadRunFolder(
            f"{path} cannot be gone on from ({reason}); give another folder"
        ) from error


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)}
