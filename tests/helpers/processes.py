"""Processes that a test can kill: each has begun with torch and the package imported."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

__all__ = ["begun"]

IMPORTED = ["factscope.cli.main", "factscope.lm.load", "transformers.models.gpt2.modeling_gpt2"]
"""Once, by a server that has each process as its fork: seconds, for which every test would wait."""


def begun(function: Callable[..., None], *words: Any) -> BaseProcess:
    """A process of its own in which a function of a test file is called, in this environment."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    process = server.Process(target=_call, args=(dict(os.environ), function, words), daemon=True)
    process.start()
    return process


def _call(environment: dict[str, str], function: Callable[..., None], words: Any) -> None:
    os.environ.update(environment)
    function(*words)
