"""A learned editor trained into a run's folder.

weights.safetensors is the best network so far, records.jsonl how it did on what was held out, and
checkpoint.safetensors what a killed run goes on from. How long to train is no part of the spec: a
finished run goes on when it is given more steps or minutes.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from factscope.data.readers import read_cases
from factscope.editing.hypernet.examples import (
    CaseExamples,
    ExampleSource,
    Locality,
    TextExamples,
    without_overlap,
)
from factscope.editing.hypernet.train import Trainer, Training, load_checkpoint_, write_checkpoint
from factscope.editing.hypernet.weights import pack_weights
from factscope.errors import BadSetting, DidNotConverge
from factscope.facts import Case
from factscope.io import sha256, write_atomic
from factscope.records import TrainingRecord, write_records
from factscope.runs.folder import WEIGHTS, RunFolder, run_info
from factscope.stats.text import GeneratedText, documents, window_of, windows

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["CHECKPOINT", "FromCases", "FromText", "Source", "TrainRun"]

CHECKPOINT = "checkpoint.safetensors"
SHARE = 20
"""Writing may take one part in so many of the time: large networks have gigabytes."""


@runtime_checkable
class Source(Protocol):
    """What a network is trained on."""

    @property
    def name(self) -> str:
        """What the data set is called."""
        ...

    def spec(self) -> dict[str, Any]:
        """What makes two sources the same."""
        ...

    def lessons(self, lm: "LM") -> ExampleSource:
        """Its examples for a model."""
        ...


@dataclass(frozen=True, kw_only=True)
class FromCases:
    """Facts of a file, without those that an evaluation will ask about."""

    name: str
    """What the data set is called: "counterfact", "zsre" or one's own."""
    path: Path
    exclude: tuple[tuple[Path, int | None], ...] = ()
    """Files of cases whose subjects are left out, and how many of the first; None for all."""
    limit: int | None = None
    """How many cases to take, after those are left out."""
    locality: Locality = "unrelated"
    seed: int = 0
    """Of the order in which they are taken."""

    def spec(self) -> dict[str, Any]:
        """The files by their hashes."""
        return {
            "data": self.name,
            "data_sha256": sha256(self.path),
            "exclude": [f"{sha256(path)} {n or 'all'}" for path, n in self.exclude],
            "limit": self.limit,
            "locality": self.locality,
            "seed": self.seed,
        }

    def lessons(self, lm: "LM") -> CaseExamples:
        """The cases as examples."""
        return CaseExamples(self.cases(), self.locality)

    def cases(self) -> tuple[Case, ...]:
        """The cases to train on, shuffled."""
        everyone = read_cases(self.path).cases
        left = list(without_overlap(everyone, self.excluded()))
        if len(left) < min(10, len(everyone)):
            raise BadSetting(
                f"{self.path.name} has {len(everyone)} cases, and {len(left)} of them are about "
                "subjects that are not excluded: too few to train on. Exclude only what you will "
                "evaluate, as --exclude counterfact:7500 for the first 7500"
            )
        random.Random(f"cases {self.seed}").shuffle(left)
        return tuple(left[: self.limit])

    def excluded(self) -> list[Case]:
        """The cases that must not be learned from."""
        return [case for path, n in self.exclude for case in read_cases(path).cases[:n]]


@dataclass(frozen=True, kw_only=True)
class FromText:
    """Stretches of a text file, or of text that the model writes itself."""

    path: Path | None = None
    count: int = 10_000
    """How many stretches."""
    stretch: int = 32
    """Tokens in each."""
    tokens: int = 10
    """Tokens of a continuation, as in the paper's originals."""
    seed: int = 0
    name: str = "text"

    def spec(self) -> dict[str, Any]:
        """The text by its hash."""
        return {
            "data": self.name,
            "text_sha256": None if self.path is None else sha256(self.path),
            "limit": self.count,
            "stretch": self.stretch,
            "tokens": self.tokens,
            "seed": self.seed,
        }

    def lessons(self, lm: "LM") -> TextExamples:
        """The stretches as examples."""
        length = window_of(lm, self.stretch)
        if lm.context is not None and length + self.tokens > lm.context:
            raise BadSetting(
                f"{length} tokens and {self.tokens} more; {lm.name} reads {lm.context}"
            )
        if self.path is None:
            source: Any = GeneratedText(lm=lm, window=length, seed=self.seed)
            return self._lessons(source, self.count)
        cut = windows(lm, documents(self.path, self.seed), length)
        source = list(islice((row for row in cut if len(row) == length), self.count))
        return self._lessons(source, len(source))

    def _lessons(self, source: Any, count: int) -> TextExamples:
        return TextExamples(source=source, count=count, tokens=self.tokens, seed=self.seed)


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """Which editor to train on what, and for how long."""

    model: str
    dtype: str
    source: Source
    training: Training
    steps: int | None = None
    """How many steps at most."""
    minutes: float | None = None
    """How long at most; what was spent before a kill counts."""
    save_every: float = 60.0
    """Seconds from one checkpoint to the next, at least."""

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise BadSetting("say how long to train: a number of steps or of minutes")
        for name in ("steps", "minutes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise BadSetting(f"{name} is {value}; it must be above 0")

    def spec(self) -> dict[str, Any]:
        """What makes two runs the same."""
        return {
            "command": "train",
            "model": self.model,
            "dtype": self.dtype,
            "source": self.source.spec(),
            "training": self.training.to_dict(),
        }

    def trainer(self, lm: "LM") -> Trainer:
        """A network at its first step; what is wrong with the data or the layers shows here."""
        return Trainer(lm, self.source.lessons(lm), self.training)

    def begin(self, lm: "LM", path: Path) -> RunFolder:
        """A new run in a folder, or the same run taken up again."""
        return RunFolder.begin(path, self.spec(), run_info(lm))

    def go_on(
        self,
        lm: "LM",
        folder: RunFolder,
        trainer: Trainer | None = None,
        *,
        progress: Callable[[float], None] = lambda share: None,
        seen: Callable[[TrainingRecord], None] = lambda record: None,
    ) -> Path:
        """Train from where the folder is to the end; the file of the best weights.

        `done` hears each share of the work, `seen` every look at the held-out examples.
        """
        trainer = trainer or self.trainer(lm)
        _take_up(trainer, folder)
        saver = _Saver(self, trainer, folder)
        progress(self._share(trainer))
        try:
            if not folder.training_records():
                saver.look(seen)
            while not self._over(trainer):
                before = self._share(trainer)
                trainer.step()
                at_end = self._over(trainer)
                if trainer.progress.step % self.training.every == 0 or at_end:
                    saver.look(seen)
                progress(self._share(trainer) - before)
        except DidNotConverge:
            saver.write_weights()
            raise
        saver.write()
        return folder.path / WEIGHTS

    def _share(self, trainer: Trainer) -> float:
        """How much of the work is done."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(trainer.progress.step / self.steps)
        if self.minutes is not None:
            shares.append(trainer.progress.seconds / (60 * self.minutes))
        return min(1.0, max(shares))

    def _over(self, trainer: Trainer) -> bool:
        return self._share(trainer) >= 1 or trainer.stopped


def _take_up(trainer: Trainer, folder: RunFolder) -> None:
    """Bring the trainer to where the last checkpoint left it, with no record of what came after."""
    path = folder.path / CHECKPOINT
    if path.is_file():
        load_checkpoint_(trainer, path)
    there = folder.training_records()
    kept = [r for r in there if path.is_file() and r.step <= trainer.progress.step]
    if len(kept) < len(there):
        write_records(folder.records_path, kept)


class _Saver:
    """Writes what training leaves, the larger files not too often."""

    def __init__(self, run: TrainRun, trainer: Trainer, folder: RunFolder) -> None:
        self.run, self.trainer, self.folder = run, trainer, folder
        self.due = time.monotonic() + run.save_every

    def look(self, seen: Callable[[TrainingRecord], None]) -> None:
        """See the held-out examples, write that down, and save where it is time to."""
        record = self.trainer.look()
        self.folder.append(record)
        seen(record)
        if time.monotonic() >= self.due:
            began = time.monotonic()
            self.write()
            now = time.monotonic()
            self.due = now + max(self.run.save_every, SHARE * (now - began))

    def write(self) -> None:
        """The weights, and then what to go on from."""
        self.write_weights()
        write_checkpoint(self.trainer, self.folder.path / CHECKPOINT)

    def write_weights(self) -> None:
        """The best network so far."""
        weights = self.trainer.weights(self._trained())
        write_atomic(
            self.folder.path / WEIGHTS,
            pack_weights(weights.network, weights.model, weights.fingerprint, weights.trained),
        )

    def _trained(self) -> Mapping[str, Any]:
        return {**self.run.source.spec(), "training": self.run.training.to_dict()}
