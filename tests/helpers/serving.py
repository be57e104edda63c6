"""A server on a tiny model in a thread, on a port of its own, as tests need it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from factscope.lm.families import family_of
from factscope.lm.model import LM
from factscope.serve.app import make_app
from factscope.serve.schemas import ServerLimits
from factscope.serve.sessions import ServerState

from families import tiny_model
from tokenizers_ import tokenizer

__all__ = ["CITY", "TOWER", "listening", "worded"]

CITY = "The Eiffel Tower is located in the city of"
TOWER = "The Eiffel Tower"


def worded(family: str = "llama") -> LM:
    """A tiny model with a real tokenizer, in which an edit of layer 1 keeps the rails."""
    words = tokenizer(family)
    model = tiny_model(family, vocabulary=len(words), spread=0.15)
    return LM(model=model, tokenizer=words, family=family_of(model), name="tiny")


@contextmanager
def listening(
    lm: LM, *, runs: Path | None = None, limits: ServerLimits | None = None
) -> Iterator[tuple[str, ServerState]]:
    """The address of a server that is up inside the block."""
    served = ServerState(lm=lm, runs=runs, limits=limits or ServerLimits())
    config = uvicorn.Config(make_app(served), log_level="warning", ws="none")
    server = uvicorn.Server(config)
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{door.getsockname()[1]}", served
        finally:
            server.should_exit = True
            thread.join(timeout=120)
            assert not thread.is_alive()
