"""Processes that a test can kill; each starts with torch and the package already imported."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

IMPORTED = ["factscope.cli.app", "factscope.lm.load", "transformers.models.gpt2.modeling_gpt2"]
"""Imported once, by the fork server; importing in each process would take seconds."""


def start_process(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Call a function of a test file in a new process, with the current environment."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(IMPORTED)
    process = server.Process(target=_call, args=(dict(os.environ), function, args), daemon=True)
    process.start()
    return process


def _call(environment: dict[str, str], function: Callable[..., None], args: Any) -> None:
    os.environ.update(environment)
    function(*args)
