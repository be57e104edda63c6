"""Fixtures: tiny models of every family, and the default model for the few tests that need it."""

# ruff: noqa: E402 (what must be set before the package is imported stands first)
import os
import signal

# A shell ignores SIGINT in background jobs, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Kernels run in triton's interpreter, on a CPU; `make test-gpu` sets 0. triton reads it on import.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Ray runs its workers with a low priority: next to other tests they would take minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")

import jaxtyping

from signatures import shapes_checked

jaxtyping.jaxtyped = shapes_checked  # before the package is imported

import pytest

from factscope.lm.model import LM

from families import FAMILIES, tiny


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def lm(request: pytest.FixtureRequest) -> LM:
    """A tiny random model of each family in turn."""
    return tiny(request.param)


@pytest.fixture(scope="session")
def default_model() -> LM:
    """The default model, fetched and converted the first time."""
    from factscope.lm.load import load

    return load("smollm2-135m", device="cpu")


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write figures as dummy files: drawing takes longer than the runs of tiny models."""
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, file, **options: file.write(b"figure")
    )
