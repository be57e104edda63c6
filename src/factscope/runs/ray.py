"""Run an evaluation's work items on Ray: each actor loads the model once, the driver writes.

A dead actor is replaced, and its work item runs again.
"""

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from factscope.errors import BadSetting, RunInterrupted
from factscope.records import CaseRecord, Protocol
from factscope.runs.evaluate import (
    CaseGroup,
    EvaluateRun,
    Executor,
    Results,
    WorkItem,
    run_item,
)

if TYPE_CHECKING:
    from factscope.evaluation.protocols import Evaluation

log = logging.getLogger(__name__)

MakeEvaluation = Callable[[], "Evaluation"]
"""Loads the model and resolves the editor; called once in each actor."""
ATTEMPTS = 3
"""How often a work item is started before the run gives up."""


def make_evaluation(run: EvaluateRun, device: str) -> "Evaluation":
    """The evaluation of a run, whose editor is resolved; loads the model in this process."""
    from factscope.lm.load import load

    return run.evaluation(load(run.model, device=device, dtype=run.dtype, check=False))


class Worker:
    """The actor: an evaluation with its model."""

    def __init__(self, make: MakeEvaluation, protocol: Protocol) -> None:
        self.evaluation = make()
        self.protocol: Protocol = protocol

    def run(self, item: WorkItem) -> list[tuple[CaseGroup, list[CaseRecord]]]:
        """Run one work item."""
        return list(run_item(self.evaluation, self.protocol, item))


def check_ray(protocol: Protocol) -> None:
    """Raise BadSetting if this protocol cannot run on Ray, or Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise BadSetting("Ray is not installed; pip install 'factscope[ray]'")
    if protocol == "sequential":
        raise BadSetting(
            "protocol is sequential, whose edits depend on each other; run it without Ray"
        )


@contextmanager
def ray_executor(
    make: MakeEvaluation,
    protocol: Protocol,
    *,
    address: str | None = None,
    workers: int | None = None,
) -> Iterator[Executor]:
    """An executor with `workers` actors; by default one per GPU of the cluster."""
    check_ray(protocol)
    import ray

    if not ray.is_initialized():
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=40)
    gpus = int(ray.cluster_resources().get("GPU", 0))
    count = workers or gpus or max(1, int(ray.cluster_resources().get("CPU", 1)) // 2)
    resources: dict[str, Any] = {"num_gpus": 1} if gpus else {"num_cpus": 1}
    actor: Any = ray.remote(**resources)(Worker)
    stored = ray.put(make)  # serialized once for all actors
    try:
        yield Executor(
            lambda items: _run_items(ray, lambda: actor.remote(stored, protocol), count, items),
            on_gpu=gpus > 0,
        )
    finally:
        if address is None:
            ray.shutdown()


def _run_items(
    ray: Any, start_actor: Callable[[], Any], count: int, items: Iterable[WorkItem]
) -> Results:
    """Yield results as they arrive; the item of a dead actor runs again on a new one."""
    waiting = [(item, 1) for item in items]
    running: dict[Any, tuple[Any, WorkItem, int]] = {}
    idle = [start_actor() for _ in range(min(count, len(waiting)))]
    while waiting or running:
        while waiting and idle:
            (item, attempt), actor = waiting.pop(0), idle.pop()
            running[actor.run.remote(item)] = (actor, item, attempt)
        (ready,), _ = ray.wait(list(running), num_returns=1)
        actor, item, attempt = running.pop(ready)
        try:
            yield from ray.get(ready)
            idle.append(actor)
        except ray.exceptions.RayActorError as error:
            log.warning("an actor died (%s); work item %d runs again", error, item.number)
            if attempt == ATTEMPTS:
                raise RunInterrupted(
                    f"actors died {ATTEMPTS} times on work item {item.number}; see Ray's logs and "
                    "give each actor more memory, then the same command resumes"
                ) from error
            waiting.insert(0, (item, attempt + 1))
            idle.append(start_actor())
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None
