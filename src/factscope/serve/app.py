"""The application: the page, what it needs to know, and the routes of its views."""

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib import metadata, resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from factscope.data.everyday import everyday
from factscope.editing.defaults import rome_defaults
from factscope.errors import BadSetting, Busy, FactscopeError, NotHere
from factscope.report.look import LOOKS
from factscope.serve.compare import compare_routes
from factscope.serve.edits import edit_routes
from factscope.serve.guard import Guard
from factscope.serve.locate import locate_routes
from factscope.serve.served import Served
from factscope.serve.words import shown, status_of, words_of
from factscope.stats.find import layers_known

__all__ = ["LOCAL", "make_app"]

log = logging.getLogger(__name__)

LOCAL = ("localhost",)
"""The name that a server on one's own machine goes by, besides its address."""
STATIC = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
EXAMPLES = 8


def make_app(served: Served, names: Collection[str] = LOCAL) -> FastAPI:
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
    app.add_middleware(Guard, names=names, body=served.limits.body)  # pyright: ignore[reportArgumentType]
    return app


def about(served: Served) -> dict[str, Any]:
    """What the page needs to know before anything is asked."""
    lm, default = served.lm, rome_defaults(served.lm)
    return {
        "model": lm.name,
        "layers": lm.n_layers,
        "layer": default.layer,
        "why": default.why,
        "layers_known": layers_known(lm),
        "limits": asdict(served.limits),
        "looks": {
            kind: {"name": look.name, "what": look.what, "shades": look.shades, "line": look.line}
            for kind, look in LOOKS.items()
        },
        "examples": examples(),
        "runs": served.runs is not None,
        "version": metadata.version("factscope"),
    }


def examples() -> list[dict[str, str]]:
    """A well-known fact of each relation, to begin with."""
    first = {fact.relation: fact for fact in reversed(everyday())}
    chosen = [fact for fact in everyday() if first[fact.relation] is fact]
    return [{"prompt": fact.text, "subject": fact.subject} for fact in chosen[:EXAMPLES]]


def _show_the_page(app: FastAPI, served: Served) -> None:
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
            raise NotHere(f"there is no file {name[:80]!r}")
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
    files["page.css"] = resources.files("factscope.report").joinpath("page.css").read_bytes()
    return files


def _answer_errors(app: FastAPI) -> None:
    """Every error as JSON, in the words of the command line."""

    @app.exception_handler(FactscopeError)
    async def ours(request: Request, error: FactscopeError) -> JSONResponse:
        headers = {"retry-after": "30"} if isinstance(error, Busy) else None
        return JSONResponse({"error": words_of(error)}, status_of(error), headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        said = BadSetting(validation_words(error))
        return JSONResponse({"error": words_of(said)}, status_of(said))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        said = {"kind": "NotHere" if error.status_code == 404 else "BadSetting"}
        message = f"{request.method} {request.url.path[:80]}: {error.detail}"
        body = {"error": {**said, "message": shown(message)}}
        return JSONResponse(body, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("a request failed", exc_info=error)
        return JSONResponse({"error": words_of(error)}, 500)


def validation_words(error: RequestValidationError) -> str:
    """What does not fit in a request, the first few of it."""
    found = [
        f"{'.'.join(str(part)[:40] for part in one['loc'][1:]) or 'the request'}: {one['msg']}"
        for one in error.errors()[:3]
    ]
    return shown("; ".join(found))
