"""Training of hypernetworks (MEND, eq. 4).

    L = c_edit · -log P(new object | edited) + c_loc · KL(unedited ‖ edited)

The edit loss is the mean over the fact's prompt and a paraphrase; the divergence is measured on a
prompt that the edit must not change. Adam minimises the mean over a batch of edits. The result is
the network with the lowest loss on the validation examples; training stops after `patience`
evaluations without improvement. A checkpoint holds the network, Adam's state and the progress;
training resumes from it bit-for-bit.

Examples from cases: an edit writes a fact's new object, and a paraphrase tests whether it
generalises. The locality prompt is the case's unrelated question (zsRE), one of its neighbours, or
the prompt of another case. Examples from text: an edit teaches a continuation that the model
sampled after a sequence of tokens, and the locality prompt is another sequence.

Batches always consist of the same examples, and `BatchCache` keeps the hidden states that enter the
first edited layer. A training step therefore runs only the layers above. Recomputed states are
bit-for-bit identical to cached ones, also in a resumed run.
"""

import hashlib
import math
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.editing.contexts import TokenBatch, TokenRow, edit_request
from factscope.editing.hypernet.model import (
    HypernetWeights,
    Hypernetwork,
    SplitModel,
    build_network,
    changes_applied,
    cpu_copy,
    gradient_factors,
    network_for,
    pack_tensors,
    read_tensors,
    target_modules,
)
from factscope.editing.hypernet.settings import Locality, Training
from factscope.errors import BadFact, BadRunFolder, BadSetting, DidNotConverge
from factscope.facts import Case
from factscope.io import write_atomic
from factscope.lm.accel import free_memory, on_gpu
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.tokens import continuation_ids, encode
from factscope.records import TrainingRecord
from factscope.stats.text import GeneratedText, TokenSequence

if TYPE_CHECKING:
    from factscope.lm.model import LM

CHECKPOINT_FORMAT = "factscope-checkpoint"
CHECKPOINT_VERSION = 2
TOP_K = 50
"""Continuations of text are sampled from the 50 most likely tokens."""
CPU_CACHE_BYTES = 4 << 30
"""Hidden states that are cached in main memory. On a GPU: half of its free memory."""


# ---- examples


@dataclass(frozen=True)
class Example:
    """One edit to make."""

    edit: TokenRow
    rephrase: TokenRow
    """A paraphrase that must show the edit; the edit's own row if there is none."""
    locality: TokenRow | None
    """A row that must not change; None: the edit row of another example of the batch."""


def _row(prompt: Sequence[int], target: Sequence[int]) -> TokenRow:
    """A prompt followed by the target, which is scored."""
    end = len(prompt) - 1
    positions = tuple(range(end, end + len(target)))
    return TokenRow(ids=(*prompt, *target[:-1]), positions=positions, labels=tuple(target))


# ---- from cases


@dataclass(frozen=True)
class CaseExamples:
    """Examples from cases."""

    cases: tuple[Case, ...]
    locality: Locality = "unrelated"

    def __len__(self) -> int:
        return len(self.cases)

    def by_length(self, indices: range) -> list[int]:
        """The indices sorted by the length of the prompt."""
        return sorted(indices, key=lambda i: len(self.cases[i].fact.text))

    def load(self, lm: "LM", indices: Sequence[int]) -> list[Example]:
        """The examples at these indices, without cases that cannot be tokenized."""
        examples = []
        for i in indices:
            with suppress(BadFact):
                examples.append(self._example(lm, self.cases[i]))
        return examples

    def _example(self, lm: "LM", case: Case) -> Example:
        def row(text: str, target: str) -> TokenRow:
            prompt = encode(lm, text)
            return _row(prompt.ids, continuation_ids(lm, prompt, text, target.strip()))

        edit = edit_request(lm, case.fact).rows[0]
        new = (case.fact.target or "").strip()
        rephrase = row(case.paraphrases[0], new) if case.paraphrases else edit
        # The neighbour of a zsRE case, which has no true object, is an unrelated question.
        usable = self.locality == "neighbours" or case.true is None
        if not usable or not case.neighbours:
            return Example(edit, rephrase, None)
        answer = case.neighbour_answers[0] if case.neighbour_answers else case.true
        return Example(edit, rephrase, row(case.neighbours[0], answer or new))


def without_overlap(cases: Iterable[Case], others: Iterable[Case]) -> tuple[Case, ...]:
    """The cases whose subject does not occur in the others."""

    def subject(case: Case) -> str:
        return " ".join(case.fact.subject.casefold().split())

    subjects = {subject(case) for case in others}
    return tuple(case for case in cases if subject(case) not in subjects)


# ---- from text


@dataclass(frozen=True, kw_only=True)
class TextExamples:
    """Examples from text: token sequences, each with a continuation that the model sampled."""

    sequences: Sequence[TokenSequence] | GeneratedText
    """Token sequences of one length, or text generated by the model."""
    count: int
    target_tokens: int = 10
    """Tokens of the continuation that an edit teaches."""
    seed: int = 0
    cache: dict[int, list[Example]] = field(default_factory=dict, compare=False, repr=False)
    """Sampled examples, by the index of the first of each batch."""

    def __post_init__(self) -> None:
        if self.target_tokens < 1:
            raise BadSetting(f"target_tokens is {self.target_tokens}; give 1 or more")

    def __len__(self) -> int:
        return self.count

    def by_length(self, indices: range) -> list[int]:
        """The indices in their order: all examples have the same length."""
        return list(indices)

    def load(self, lm: "LM", indices: Sequence[int]) -> list[Example]:
        """The examples at these indices."""
        size = 256 if on_gpu(lm) else 64
        examples = []
        for i in indices:
            first = i // size * size
            if first not in self.cache:
                # Always the same batch: rounding, and so a sample, can depend on the other rows.
                self.cache[first] = self._sample(lm, range(first, min(first + size, self.count)))
            examples.append(self.cache[first][i - first])
        return examples

    def _sample(self, lm: "LM", indices: range) -> list[Example]:
        source = self.sequences
        if isinstance(source, GeneratedText):
            length = source.length
            longer = replace(source, length=length + self.target_tokens, batch_size=len(indices))
            texts = list(longer.sequences(indices))
        else:
            prompts = [source[i] for i in indices]
            length = len(prompts[0])
            draws = uniform_draws([str(i) for i in indices], length + self.target_tokens, self.seed)
            texts = sample_texts(lm, prompts, draws, k=TOP_K)
        rows = [_row(ids[:length], ids[length:]) for ids in texts]
        return [Example(row, row, None) for row in rows]


Examples = CaseExamples | TextExamples


def split_examples(count: int, validation: int) -> tuple[range, range]:
    """Indices for training and for validation: the last ones, at most a fifth."""
    held_out = min(validation, count // 5)
    if held_out < 2:
        raise BadSetting(f"{count} examples are too few to train and validate; give at least 10")
    return range(count - held_out), range(count - held_out, count)


# ---- batches


@dataclass(frozen=True, eq=False)
class ExampleBatch:
    """Examples padded to one length, with hidden states of the unedited model.

    The first axis of the states is the kind of row: edit, then rephrase and locality where given.
    """

    edit: TokenBatch
    rephrase: TokenBatch | None
    """None if no example has a paraphrase."""
    locality: TokenBatch | None
    """None if not every example has a locality row."""
    entering: Float[Tensor, "kind fact token width"]
    """Input of the first edited layer."""
    last: Float[Tensor, "kind fact token width"]
    """Output of the last layer."""

    def __len__(self) -> int:
        return len(self.edit.ids)

    def locality_rows(self, epoch: int) -> tuple[TokenBatch, Tensor, Tensor]:
        """Rows that must not change, and their states; by default edit rows, paired by epoch."""
        if self.locality is not None:
            return self.locality, self.entering[-1], self.last[-1]
        shift = 1 + epoch % (len(self) - 1)
        return self.edit.roll(shift), self.entering[0].roll(shift, 0), self.last[0].roll(shift, 0)


class BatchCache:
    """Batches of examples; their hidden states are cached as far as memory allows."""

    def __init__(self, split: SplitModel, examples: Examples, indices: range, size: int) -> None:
        self.split, self.examples = split, examples
        order = examples.by_length(indices)
        self.batches = [order[i : i + size] for i in range(0, len(order), size)]
        """Indices of the examples in each batch, at least two."""
        if len(self.batches) > 1 and len(self.batches[-1]) < 2:
            last = self.batches.pop()
            self.batches[-1] += last
        self.cached: dict[int, ExampleBatch] = {}
        device = split.lm.device
        self.free_bytes = free_memory(device) // 2 if on_gpu(device) else CPU_CACHE_BYTES

    def __len__(self) -> int:
        return len(self.batches)

    def at_step(self, step: int, seed: int) -> tuple[ExampleBatch | None, int]:
        """The batch of a training step, and its epoch; every epoch has an order of its own."""
        epoch, position = divmod(step, len(self))
        order = list(range(len(self)))
        random.Random(f"{seed} {epoch}").shuffle(order)
        return self.batch(order[position]), epoch

    def batch(self, number: int) -> ExampleBatch | None:
        """A batch; None if fewer than two of its examples can be used."""
        if number in self.cached:
            return self.cached[number]
        examples = self.examples.load(self.split.lm, self.batches[number])
        if len(examples) < 2:
            return None
        batch = self._build(examples)
        size = batch.entering.nbytes + batch.last.nbytes
        if size <= self.free_bytes:
            self.free_bytes -= size
            self.cached[number] = batch
        return batch

    def _build(self, examples: Sequence[Example]) -> ExampleBatch:
        has_rephrase = any(example.rephrase != example.edit for example in examples)
        locality = [example.locality for example in examples if example.locality is not None]
        has_locality = len(locality) == len(examples)
        kinds = [[example.edit for example in examples]]
        if has_rephrase:
            kinds.append([example.rephrase for example in examples])
        if has_locality:
            kinds.append(locality)
        length = max(len(row.ids) for rows in kinds for row in rows)
        batches = [TokenBatch.of(rows, self.split.lm.device, length) for rows in kinds]
        ids = torch.cat([batch.ids for batch in batches])
        tokens = 16384 if on_gpu(self.split.lm) else 1024  # per forward pass
        size = max(1, tokens // length)
        size += len(ids) % size == 1  # no row alone: its pass would round differently
        parts = zip(*(self.split.below(chunk) for chunk in ids.split(size)), strict=True)
        entering, last = (torch.cat(part).unflatten(0, (len(kinds), -1)) for part in parts)
        return ExampleBatch(
            edit=batches[0],
            rephrase=batches[1] if has_rephrase else None,
            locality=batches[-1] if has_locality else None,
            entering=entering,
            last=last,
        )


# ---- training


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
