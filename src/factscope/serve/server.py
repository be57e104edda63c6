"""The server itself: the application behind uvicorn, on one's own machine unless told otherwise."""

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
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=16_384,
    )
    try:
        socket = config.bind_socket()
    except SystemExit as error:
        raise BadSetting(f"{host}:{port} cannot be listened on; choose another --port") from error
    shown = f"[{host}]" if ":" in host else host
    ready(f"http://{shown}:{socket.getsockname()[1]}/")
    uvicorn.Server(config).run(sockets=[socket])
