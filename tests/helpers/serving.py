"""A server on a tiny model, in a thread and on a free port."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from factscope.lm.families import family_of
from factscope.lm.model import LM
from factscope.serve.app import create_app, server_config
from factscope.serve.limits import ServerLimits
from factscope.serve.sessions import ServerState

from families import tiny_model
from tokenizers_ import tokenizer

CITY = "The Eiffel Tower is located in the city of"
TOWER = "The Eiffel Tower"


def serving_lm(family: str = "llama") -> LM:
    """A tiny model with a trained tokenizer; an edit of its layer 1 passes the checks."""
    tok = tokenizer(family)
    model = tiny_model(family, vocabulary=len(tok), spread=0.15)
    return LM(model=model, tokenizer=tok, family=family_of(model), name="tiny")


@contextmanager
def running_server(
    lm: LM, *, runs: Path | None = None, limits: ServerLimits | None = None
) -> Iterator[tuple[str, ServerState]]:
    """Address and state of a server that runs inside the block."""
    state = ServerState(lm=lm, runs=runs, limits=limits)
    server = uvicorn.Server(server_config(create_app(state), state.limits))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", state
        finally:
            server.should_exit = True
            thread.join(timeout=120)
            assert not thread.is_alive()
