"""The server itself: the application behind uvicorn, on one's own machine unless told otherwise."""

import socket
from collections.abc import Callable, Collection

import uvicorn

from factscope.errors import BadSetting
from factscope.serve.app import LOCAL, make_app
from factscope.serve.served import Served

__all__ = ["run"]

CONNECTIONS = 256
"""Open at once; uvicorn refuses more by itself."""


def run(
    served: Served,
    *,
    host: str,
    port: int,
    names: Collection[str] = LOCAL,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until interrupted; `ready` hears the address."""
    config = uvicorn.Config(
        make_app(served, names),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=16_384,
    )
    with door(host, port) as listening:
        shown = f"[{host}]" if ":" in host else host
        ready(f"http://{shown}:{listening.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listening])


def door(host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        why = error.strerror or error
        raise BadSetting(
            f"{host}:{port} cannot be listened on ({why}); choose another --host or --port"
        ) from error
