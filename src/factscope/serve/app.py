"""The application: the page's files, general information, errors as JSON, and all routes."""

import asyncio
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
from starlette.exceptions import HTTPException

from factscope.data.readers import everyday_facts
from factscope.editing.defaults import memit_defaults, rome_defaults
from factscope.editing.settings import editor
from factscope.errors import BadSetting, FactscopeError, NotFound, ServerBusy
from factscope.report.html import asset
from factscope.report.labels import HEAD_SHADES, KIND_STYLES, editor_name
from factscope.serve.connections import bounded_protocol
from factscope.serve.limits import ServerLimits
from factscope.serve.routes_edit import edit_routes
from factscope.serve.routes_runs import run_routes
from factscope.serve.routes_trace import trace_routes
from factscope.serve.schemas import (
    EDIT_SETTINGS,
    METHODS,
    TABLE_SETTINGS,
    TRACE_SETTINGS,
    default_tracing,
    describe_settings,
)
from factscope.serve.security import SecurityMiddleware, error_response, media_type
from factscope.serve.sessions import ServerState
from factscope.stats.second_moment import layers_with_second_moments

log = logging.getLogger(__name__)


def run(
    state: ServerState,
    *,
    host: str,
    port: int,
    allowed_hosts: Collection[str] = (),
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve until interrupted; `ready` is called with the address."""
    config = server_config(create_app(state, allowed_hosts), state.limits)
    with listen(host, port) as listening:
        name = f"[{host}]" if ":" in host else host
        ready(f"http://{name}:{listening.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address; an error if it is taken."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadSetting(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another --host "
            "or --port"
        ) from error


def server_config(app: FastAPI, limits: ServerLimits) -> uvicorn.Config:
    """How uvicorn serves the application."""
    return uvicorn.Config(
        app,
        http=bounded_protocol(limits),
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=16_384,
    )


def create_app(state: ServerState, allowed_hosts: Collection[str] = ()) -> FastAPI:
    """The server for one model, reached by IP address, as localhost or as an allowed host."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        state.start()
        yield
        state.queue.close()
        state.reports.close()

    app = FastAPI(
        title="factscope",
        summary="Find where a language model stores a fact, edit it, and measure what changed.",
        version=metadata.version("factscope"),
        openapi_url="/api/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_error_handlers(app)
    _add_page(app, state)
    app.include_router(trace_routes(state))
    app.include_router(edit_routes(state))
    app.include_router(run_routes(state.runs, state.reports))
    app.add_middleware(
        SecurityMiddleware,  # pyright: ignore[reportArgumentType]
        allowed_hosts=["localhost", *allowed_hosts],
        max_body_bytes=state.limits.max_body_bytes,
    )
    return app


def _add_page(app: FastAPI, state: ServerState) -> None:
    folder = resources.files("factscope.serve").joinpath("static")
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    files["page.css"] = asset("page.css").encode()  # shared with the report pages
    about_values = about(state)
    headers = {"cache-control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(files["index.html"], 200, headers, media_type("index.html"))

    @app.get("/static/{name}", include_in_schema=False)
    async def static(name: str) -> Response:
        if name not in files or name == "index.html":
            raise NotFound(f"there is no file {name[:80]!r}")
        return Response(files[name], 200, headers, media_type(name))

    @app.get("/api/about", tags=["page"])
    async def get_about() -> dict[str, Any]:
        """The model, the limits, and the settings of traces and edits."""
        return about_values

    @app.get("/api/examples", tags=["page"])
    async def get_examples() -> dict[str, Any]:
        """Facts that the model knows, with its answer and the answer's probability."""
        return {"examples": await asyncio.wrap_future(state.examples)}

    @app.get("/api/queue", tags=["page"])
    async def get_queue(request: Request) -> dict[str, Any]:
        """The number of jobs that wait or run, and the ids of the session's edits."""
        edits = [stored.id for stored in state.sessions.edits(request.state.session)]
        return {"jobs": len(state.queue), "max_jobs": state.limits.max_jobs, "edits": edits}


def about(state: ServerState) -> dict[str, Any]:
    """Model, limits and settings, which the page loads at its start."""
    lm, default = state.lm, rome_defaults(state.lm)
    layers = {"memit": memit_defaults(lm).layers}
    first = state.first_trace.fact if state.first_trace else everyday_facts()[0]
    return {
        "version": metadata.version("factscope"),
        "model": lm.name,
        "n_layers": lm.n_layers,
        "default_layer": default.layer,
        "default_layer_source": default.source,
        "layers_with_statistics": layers_with_second_moments(lm),
        "limits": asdict(state.limits),
        "n_heads": lm.n_heads,
        "trace_settings": describe_settings(default_tracing(state.limits), TRACE_SETTINGS),
        "table_settings": describe_settings(default_tracing(state.limits), TABLE_SETTINGS),
        "methods": {
            method: {
                "name": editor_name(method),
                "settings": describe_settings(editor(method), EDIT_SETTINGS),
                "layers": layers.get(method, (default.layer,)),
            }
            for method in METHODS
        },
        "kinds": {
            **{k: {"name": style.name, "colors": style.shades} for k, style in KIND_STYLES.items()},
            "heads": {"name": "heads", "colors": HEAD_SHADES},
        },
        "first": {"prompt": first.text, "subject": first.subject},
        "first_is_traced": state.first_trace is not None,
        "has_runs": state.runs is not None,
    }


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(FactscopeError)
    async def factscope_error(request: Request, error: FactscopeError) -> Response:
        headers = {"retry-after": "30"} if isinstance(error, ServerBusy) else None
        return error_response(error, headers=headers)

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> Response:
        problems = []
        for problem in error.errors()[:3]:
            path = [str(part)[:40] for part in problem["loc"][1:] if part != "[key]"]
            problems.append(f"{'.'.join(path) or 'the request'}: {problem['msg']}")
        return error_response(BadSetting("; ".join(problems)))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        kind = NotFound if error.status_code == 404 else BadSetting
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
        return error_response(kind(message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected_error(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return error_response(error)
