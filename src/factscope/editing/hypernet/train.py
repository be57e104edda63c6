"""Training of hypernetworks (MEND, eq. 4).

    L = c_edit · -log P(new object | edited) + c_loc · KL(unedited ‖ edited)

The edit loss is the mean over the fact's prompt and a paraphrase; the divergence is measured on a
prompt that the edit must not change. Adam minimises the mean over a batch of edits. The result is
the network with the lowest loss on the validation examples; training stops after `patience`
evaluations without improvement. A checkpoint holds the network, Adam's state and the progress;
training resumes from it bit-for-bit.
"""

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.hypernet.examples import BatchCache, ExampleBatch, Examples, split_examples
from factscope.editing.hypernet.gradients import (
    SplitModel,
    changes_applied,
    gradient_factors,
    target_modules,
)
from factscope.editing.hypernet.model import (
    HypernetWeights,
    Hypernetwork,
    build_network,
    cpu_copy,
    network_for,
    pack_tensors,
    read_tensors,
)
from factscope.editing.hypernet.settings import Training
from factscope.errors import BadRunFolder, BadSetting, DidNotConverge
from factscope.io import write_atomic
from factscope.records import TrainingRecord

if TYPE_CHECKING:
    from factscope.lm.model import LM

CHECKPOINT_FORMAT = "factscope-checkpoint"
CHECKPOINT_VERSION = 2


@dataclass(frozen=True, eq=False)
class BatchLosses:
    """Losses and accuracies of the edits of a batch; see `TrainingRecord`, which has the means."""

    unedited_loss: Float[Tensor, " fact"]
    edit_loss: Float[Tensor, " fact"]
    rephrase_loss: Float[Tensor, " fact"]
    locality_loss: Float[Tensor, " fact"]
    edit_accuracy: Float[Tensor, " fact"]
    rephrase_accuracy: Float[Tensor, " fact"]
    locality_accuracy: Float[Tensor, " fact"]


def training_pass(
    split: SplitModel, network: Hypernetwork, batch: ExampleBatch, epoch: int, *, train: bool
) -> BatchLosses:
    """Edit each fact of a batch and score it; with `train`, with gradients for the network."""
    lm = split.lm
    factors, unedited_loss = gradient_factors(split, batch.entering[0], batch.edit)
    if train:
        network.update_norms(factors)
    with torch.set_grad_enabled(train):
        changes = network(factors, network.encode(lm.embed(batch.edit.ids), batch.edit.lengths))
        locality, entering, last = batch.locality_rows(epoch)
        rows = [batch.edit, locality]
        states = [batch.entering[0], entering]
        if batch.rephrase is not None:
            rows.append(batch.rephrase)
            states.append(batch.entering[1])
        with changes_applied(split.targets, changes):  # all rows of a fact are adjacent
            hidden = split.above(torch.stack(states, dim=1).flatten(0, 1))
        hidden = hidden.unflatten(0, (len(batch), len(rows)))
        edited = [row_batch.log_probs(lm, hidden[:, i]) for i, row_batch in enumerate(rows)]
        with torch.no_grad():
            unedited = locality.log_probs(lm, last)
        kl = (unedited.exp() * (unedited - edited[1])).sum(-1)
        same = unedited.argmax(-1) == edited[1].argmax(-1)
        rephrase, rephrased = batch.rephrase, edited[-1]
        if rephrase is None:  # the edit row takes its place
            rephrase, rephrased = batch.edit, edited[0]
        return BatchLosses(
            unedited_loss=unedited_loss,
            edit_loss=batch.edit.losses(edited[0]),
            rephrase_loss=rephrase.losses(rephrased),
            locality_loss=locality.row_means(kl),
            edit_accuracy=batch.edit.all_correct(edited[0]).float(),
            rephrase_accuracy=rephrase.all_correct(rephrased).float(),
            locality_accuracy=locality.row_means(same.float()),
        )


@dataclass
class TrainingProgress:
    """How far training is; saved in checkpoints."""

    step: int = 0
    seconds: float = 0.0
    best_loss: float = math.inf
    """The lowest validation loss so far."""
    best_step: int = -1
    evaluations_since_best: int = 0
    loss_sum: float = 0.0
    """Sum of the training losses since the last evaluation, over `loss_count` steps."""
    loss_count: int = 0


class Trainer:
    """Trains a network on a model."""

    def __init__(self, lm: "LM", examples: Examples, training: Training) -> None:
        self.lm, self.training = lm, training
        targets = target_modules(lm, training.layers or None)
        self.split = SplitModel(lm, targets)
        for_training, held_out = split_examples(len(examples), training.validation_examples)
        self.batches = BatchCache(self.split, examples, for_training, training.batch_size)
        self.validation = BatchCache(self.split, examples, held_out, training.batch_size)
        self.network = network_for(lm, targets, training.network, training.seed).to(lm.device)
        self.adam = torch.optim.Adam(self.network.parameter_groups(training.lr))
        self.lrs = [group["lr"] for group in self.adam.param_groups]
        self.progress = TrainingProgress()
        self.norms_ready = False
        self.best: dict[str, Tensor] = {}
        """The network's tensors at the best evaluation."""

    def init_norms(self) -> None:
        """Before the first step: take the scale of the gradient factors from one batch."""
        batch = None if self.norms_ready else self.batches.batch(0)
        self.norms_ready = True
        if batch is not None:
            factors, _ = gradient_factors(self.split, batch.entering[0], batch.edit)
            self.network.update_norms(factors)

    def loss(self, losses: BatchLosses) -> Float[Tensor, " fact"]:
        """c_edit · edit loss + c_loc · KL, for each fact."""
        edit = (losses.edit_loss + losses.rephrase_loss) / 2
        training = self.training
        return training.edit_weight * edit + training.locality_weight * losses.locality_loss

    def step(self) -> float:
        """Take one step of Adam on the next batch; return its loss, NaN if it has no examples."""
        start, progress, training = time.monotonic(), self.progress, self.training
        self.init_norms()
        loss = torch.tensor(math.nan)
        batch, epoch = self.batches.at_step(progress.step, training.seed)
        if batch is not None:
            self.network.train()
            warmup = min(1.0, (progress.step + 1) / max(1, training.warmup_steps))
            for group, lr in zip(self.adam.param_groups, self.lrs, strict=True):
                group["lr"] = lr * warmup
            losses = training_pass(self.split, self.network, batch, epoch, train=True)
            loss = self.loss(losses).mean()
            self._check_finite("loss", loss.item())
            self.adam.zero_grad()
            loss.backward()
            parameters = self.network.parameters()
            norm = torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
            self._check_finite("gradient norm", norm.item())
            self.adam.step()
            progress.loss_sum += loss.item()
            progress.loss_count += 1
        progress.step += 1
        progress.seconds += time.monotonic() - start
        return loss.item()

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise DidNotConverge(
                f"the {name} of training is {value} at step {self.progress.step}; the best network "
                f"so far, of step {max(0, self.progress.best_step)}, is saved. Lower --lr, or load "
                "the model in float32"
            )

    def evaluate(self) -> TrainingRecord:
        """Score the validation examples, and keep the network if it is the best so far."""
        start = time.monotonic()
        self.init_norms()
        self.network.eval()
        results = [
            training_pass(self.split, self.network, batch, 0, train=False)
            for i in range(len(self.validation))
            if (batch := self.validation.batch(i)) is not None
        ]
        if not results:
            raise BadSetting("none of the validation examples can be tokenized; give others")
        columns = zip(*(vars(losses).values() for losses in results), strict=True)
        losses = BatchLosses(*(torch.cat(column) for column in columns))
        loss, progress = self.loss(losses).mean().item(), self.progress
        train_loss = progress.loss_sum / progress.loss_count if progress.loss_count else None
        progress.loss_sum, progress.loss_count = 0.0, 0
        if loss < progress.best_loss:
            progress.best_loss, progress.best_step = loss, progress.step
            progress.evaluations_since_best = 0
            self.best = {name: x.clone() for name, x in self.network.state_dict().items()}
        else:
            progress.evaluations_since_best += 1
        progress.seconds += time.monotonic() - start
        return TrainingRecord(
            step=progress.step,
            seconds=progress.seconds,
            train_loss=train_loss,
            loss=loss,
            **{name: x.mean().item() for name, x in vars(losses).items()},
        )

    @property
    def stopped_early(self) -> bool:
        """Whether the validation loss has not improved for `patience` evaluations."""
        patience = self.training.patience
        return patience is not None and self.progress.evaluations_since_best >= patience

    def weights(self, source: Mapping[str, Any]) -> HypernetWeights:
        """The best network so far; `source` describes its training."""
        network = build_network(self.training.network, self.network.weights)
        network.load_state_dict(self.best)
        digest = hashlib.sha256()
        for tensor in self.best.values():
            digest.update(cpu_copy(tensor).numpy().tobytes())
        progress = self.progress
        return HypernetWeights(
            network=network,
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            training={**source, "step": progress.best_step, "loss": progress.best_loss},
            sha256=digest.hexdigest(),
        )


# ---- checkpoints


def write_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write the state that training resumes from, atomically."""
    adam = trainer.adam.state_dict()["state"]
    tensors = {
        **{f"network.{name}": x for name, x in trainer.network.state_dict().items()},
        **{f"best.{name}": x for name, x in trainer.best.items()},
        **{f"adam.{i}.{name}": x for i, state in adam.items() for name, x in state.items()},
    }
    header = {
        "format": f"{CHECKPOINT_FORMAT} {CHECKPOINT_VERSION}",
        "progress": asdict(trainer.progress),
    }
    write_atomic(path, pack_tensors(tensors, header))


def load_checkpoint_(trainer: Trainer, path: Path) -> None:
    """Bring a new trainer to the state that a checkpoint holds."""
    _, header, tensors = read_tensors(path, CHECKPOINT_FORMAT, (CHECKPOINT_VERSION,))

    def with_prefix(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)
        }

    try:
        trainer.progress, trainer.norms_ready = TrainingProgress(**header["progress"]), True
        trainer.network.load_state_dict(with_prefix("network."))
        trainer.best = {name: x.to(trainer.lm.device) for name, x in with_prefix("best.").items()}
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in with_prefix("adam.").items():
            number, _, name = key.partition(".")
            state.setdefault(int(number), {})[name] = tensor
        groups = trainer.adam.state_dict()["param_groups"]
        trainer.adam.load_state_dict({"state": state, "param_groups": groups})
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BadRunFolder(f"cannot resume from {path} ({reason}); give another folder") from error
