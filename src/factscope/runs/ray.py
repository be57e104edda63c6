"""The pieces of a run spread over Ray: each actor holds the model once, the driver alone writes.

An actor that dies is replaced, and what it was doing is done again elsewhere.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from factscope.errors import BadSetting, RunInterrupted
from factscope.evaluation.protocols import Evaluation
from factscope.records import CaseRecord, Protocol
from factscope.runs.evaluate import EvaluateRun, Executor, WorkItem, run_item

__all__ = ["Make", "WorkerSetup", "ray_executor"]

log = logging.getLogger(__name__)

Make = Callable[[], Evaluation]
"""Loads the model and settles the editor: called once in each actor."""

TRIES = 3
"""How often a piece is begun before the run gives up on it."""


@dataclass(frozen=True)
class WorkerSetup:
    """What an actor begins with: the run, its editor settled, and a device."""

    run: EvaluateRun
    device: str

    def __call__(self) -> Evaluation:
        """Load the model here."""
        from factscope.lm.load import load

        return self.run.evaluation(load(self.run.model, device=self.device, dtype=self.run.dtype))


class Worker:
    """What lives in an actor."""

    def __init__(self, make: Make, protocol: Protocol) -> None:
        self.evaluation = make()
        self.protocol: Protocol = protocol

    def do(self, piece: WorkItem) -> tuple[WorkItem, list[CaseRecord]]:
        """One piece's unedited scores and records."""
        return run_item(self.evaluation, self.protocol, piece)


@contextmanager
def ray_executor(
    make: Make, protocol: Protocol, *, address: str | None = None, workers: int | None = None
) -> Iterator[Executor]:
    """A crew of actors, one for each GPU of the cluster, or `workers` of them."""
    ray = _ray()
    if protocol == "sequential":
        raise BadSetting("sequential edits build on each other and cannot be spread; leave out ray")
    if not ray.is_initialized():
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=40)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    count = workers or gpus or max(1, int(ray.cluster_resources().get("CPU", 1)) // 2)
    options = {"num_gpus": 1} if gpus else {"num_cpus": 1}
    actor = ray.remote(**options)(Worker)
    make_at_once = ray.put(make)

    def hire() -> Any:
        return actor.remote(make_at_once, protocol)

    try:
        yield lambda pieces: _shared(ray, hire, count, pieces)
    finally:
        if address is None:
            ray.shutdown()


def _shared(
    ray: Any, hire: Callable[[], Any], count: int, pieces: Iterable[WorkItem]
) -> Iterator[tuple[WorkItem, list[CaseRecord]]]:
    """Results as they come; a piece whose actor died goes back to the others."""
    waiting = [(piece, 1) for piece in pieces]
    busy: dict[Any, tuple[Any, WorkItem, int]] = {}
    idle = [hire() for _ in range(min(count, len(waiting)))]
    while waiting or busy:
        while waiting and idle:
            (piece, tries), worker = waiting.pop(0), idle.pop()
            busy[worker.do.remote(piece)] = (worker, piece, tries)
        (ready,), _ = ray.wait(list(busy), num_returns=1)
        worker, piece, tries = busy.pop(ready)
        try:
            yield ray.get(ready)
            idle.append(worker)
        except ray.exceptions.RayActorError as error:
            log.warning("an actor died (%s); piece %d is done again", error, piece.number)
            if tries == TRIES:
                raise RunInterrupted(
                    f"actors died {TRIES} times on piece {piece.number}; see Ray's logs, give each "
                    "more memory, and the same command goes on from here"
                ) from error
            waiting.insert(0, (piece, tries + 1))
            idle.append(hire())
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise BadSetting("Ray is not installed; pip install 'factscope[ray]'") from error
    return ray
