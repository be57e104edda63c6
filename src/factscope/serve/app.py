"""The application: the page, what it needs to know, and the routes of its views.

The server itself: the application behind uvicorn, on one's own machine unless told otherwise.
"""

import logging
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import metadata, resources
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from factscope.data.readers import everyday_facts
from factscope.editing.defaults import rome_defaults
from factscope.errors import BadSetting, FactscopeError, NotFound, ServerBusy
from factscope.report.html import asset
from factscope.report.style import KIND_STYLES
from factscope.serve.responses import error_message, error_status, shown
from factscope.serve.routes_edit import edit_routes
from factscope.serve.routes_runs import compare_routes
from factscope.serve.routes_trace import locate_routes
from factscope.serve.security import SecurityMiddleware
from factscope.serve.sessions import ServerState
from factscope.stats.second_moment import layers_with_second_moments

__all__ = [
    "LOCAL",
    "make_app",
    "run",
]

log = logging.getLogger(__name__)

LOCAL = ("localhost",)
"""The name that a server on one's own machine goes by, besides its address."""
STATIC = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
EXAMPLES = 8


def make_app(served: ServerState, names: Collection[str] = LOCAL) -> FastAPI:
    """The whole server for one model; `names` are those it goes by, besides addresses."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        served.queue.close()

    app = FastAPI(
        title="factscope",
        summary="Find where a language model keeps a fact, rewrite it, and measure what changed.",
        version=metadata.version("factscope"),
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=life,
    )
    _answer_errors(app)
    _show_the_page(app, served)
    for routes in (
        locate_routes(served),
        edit_routes(served),
        compare_routes(served.runs, served.reading),
    ):
        app.include_router(routes)
    app.add_middleware(SecurityMiddleware, names=names, body=served.limits.body)  # pyright: ignore[reportArgumentType]
    return app


def about(served: ServerState) -> dict[str, Any]:
    """What the page needs to know before anything is asked."""
    lm, default = served.lm, rome_defaults(served.lm)
    return {
        "model": lm.name,
        "layers": lm.n_layers,
        "layer": default.layer,
        "why": default.source,
        "layers_known": layers_with_second_moments(lm),
        "limits": asdict(served.limits),
        "looks": {
            kind: {"name": look.name, "what": look.what, "shades": look.shades, "line": look.line}
            for kind, look in KIND_STYLES.items()
        },
        "examples": examples(),
        "runs": served.runs is not None,
        "version": metadata.version("factscope"),
    }


def examples() -> list[dict[str, str]]:
    """A well-known fact of each relation, to begin with."""
    first = {fact.relation: fact for fact in reversed(everyday_facts())}
    chosen = [fact for fact in everyday_facts() if first[fact.relation] is fact]
    return [{"prompt": fact.text, "subject": fact.subject} for fact in chosen[:EXAMPLES]]


def _show_the_page(app: FastAPI, served: ServerState) -> None:
    files = static_files()
    known = about(served)

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(files["index.html"], media_type="text/html; charset=utf-8",
                        headers={"cache-control": "no-cache"})  # fmt: skip

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        kind = name[name.rfind(".") :]
        if name not in files or kind not in STATIC:
            raise NotFound(f"there is no file {name[:80]!r}")
        return Response(files[name], media_type=f"{STATIC[kind]}; charset=utf-8",
                        headers={"cache-control": "no-cache"})  # fmt: skip

    @app.get("/api/about", tags=["page"])
    async def tell() -> dict[str, Any]:
        """The model, its layers, the limits, the colours."""
        return known

    @app.get("/api/queue", tags=["page"])
    async def queue() -> dict[str, int]:
        """How many jobs wait or run."""
        return {"waiting": len(served.queue), "most": served.limits.waiting}


def static_files() -> dict[str, bytes]:
    """The page's files; its style begins with that of the written reports."""
    folder = resources.files("factscope.serve").joinpath("static")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    files["page.css"] = asset("page.css").encode()
    return files


def _answer_errors(app: FastAPI) -> None:
    """Every error as JSON, in the words of the command line."""

    @app.exception_handler(FactscopeError)
    async def ours(request: Request, error: FactscopeError) -> JSONResponse:
        headers = {"retry-after": "30"} if isinstance(error, ServerBusy) else None
        return JSONResponse({"error": error_message(error)}, error_status(error), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        said = BadSetting(validation_words(error))
        return JSONResponse({"error": error_message(said)}, error_status(said))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        said = {"kind": "NotFound" if error.status_code == 404 else "BadSetting"}
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
        body = {"error": {**said, "message": shown(message)}}
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return JSONResponse({"error": error_message(error)}, 500)


def validation_words(error: RequestValidationError) -> str:
    """What does not fit in a request, the first few of it."""
    found = [
        f"{'.'.join(str(part)[:40] for part in one['loc'][1:]) or 'the request'}: {one['msg']}"
        for one in error.errors()[:3]
    ]
    return shown("; ".join(found))


CONNECTIONS = 256
"""Open at once; uvicorn refuses more by itself."""


def run(
    served: ServerState,
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
