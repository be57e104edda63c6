"""Edit: a fact rewritten for one visitor, what it changes, and the edit to take away.

No weight is written. An edit is a value that its visitor keeps; asking puts the ones that are
switched on into some rows of a batch, so that visitors cannot touch each other's model.
"""

import io
import math
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from factscope.data.readers import everyday
from factscope.editing.defaults import check_layer
from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.editing.export import export_peft
from factscope.editing.methods import editor
from factscope.editing.per_row import edited
from factscope.errors import NotFound
from factscope.evaluation.before_after import before_after, room
from factscope.evaluation.score import Query, score_queries
from factscope.facts import Case, Fact
from factscope.lm.generate import generate_greedy, top_next_tokens
from factscope.lm.tokens import encode
from factscope.records import EditRecord, Generation
from factscope.report.edits import edit_page
from factscope.report.figures.edits import before_after_figure
from factscope.report.labels import check_rows, weight_label
from factscope.report.style import FIGURE_FORMATS, display_token, figure_bytes
from factscope.serve.jobs import Job
from factscope.serve.responses import attached
from factscope.serve.schemas import AskBody, EditBody
from factscope.serve.sessions import ServerState, StoredEdit, visitor_of

__all__ = ["edit_routes", "neighbours_for"]

LIKELIEST = 5
"""How many next tokens are shown."""
SEARCH = 0.7
"""The share of an edit's time that the search takes, about."""
FEW = 2
"""So many editors are kept with their statistics, which may be large."""
FILES = ["edit.safetensors", "adapter.zip", "record.json", "page.html",
         *(f"figure.{kind}" for kind in FIGURE_FORMATS)]  # fmt: skip


def edit_routes(served: ServerState) -> APIRouter:
    """The routes of this view."""
    routes = APIRouter(prefix="/api", tags=["edit"])
    editors = Editors(served)

    @routes.post("/edits", response_class=Response)
    async def make(body: EditBody, request: Request) -> Response:
        """Rewrite a fact: events, one a line; the last one holds the edit's number."""
        case, visitor = body.case(served.limits), visitor_of(request)
        if body.layer is not None:
            check_layer(served.lm, body.layer)
        served.visitors.check_room(visitor)
        asked = body.model_dump()

        def work(job: Job) -> None:
            check_lengths(served, [case.fact.text, *case.paraphrases, *case.neighbours])
            edit = editors.find(body)(
                served.lm, [case.fact], progress=lambda x: job.done(SEARCH * x)
            )
            record = tried(served, edit, case)
            made = served.visitors.keep(visitor, edit, record, asked)
            job.say({"event": "edit", "edit": told(made)})

        return served.stream(request, work)

    @routes.get("/edits")
    def mine(request: Request) -> dict[str, Any]:
        """The visitor's edits, the oldest first."""
        return {"edits": [told(made) for made in served.visitors.edits(visitor_of(request))]}

    @routes.delete("/edits/{id}")
    def remove(id: str, request: Request) -> dict[str, Any]:
        """Forget one of them."""
        served.visitors.remove(visitor_of(request), id)
        return {"removed": id}

    @routes.get("/edits/{ids}/{file}", response_class=Response)
    def download(ids: str, file: str, request: Request) -> Response:
        """An edit, or several added up (1,3), as a file; of several only edit and adapter."""
        chosen = served.visitors.chosen(visitor_of(request), ids.split(","))
        together = served.visitors.together(visitor_of(request), ids.split(","))
        assert together is not None
        with served.reading:
            content = written(served, chosen, together, file)
        return attached(file, content, f"edit-{'-'.join(m.id for m in chosen)}-{file}")

    @routes.post("/ask", response_class=Response)
    async def ask(body: AskBody, request: Request) -> Response:
        """What the model says as it is, and with the edits that are on."""
        texts, tokens = body.texts(served.limits), body.length(served.limits)
        visitor = visitor_of(request)
        every = served.visitors.edits(visitor)
        edit = served.visitors.together(visitor, body.edits)

        def work(job: Job) -> None:
            check_lengths(served, texts)
            job.say({"event": "facts", "facts": facts_now(served, every, edit)})
            for text in texts:
                job.say({"event": "answer", **answered(served, text, edit, tokens)})
                job.done(1 / len(texts))
            job.say({"event": "asked"})

        return served.stream(request, work)

    return routes


# ---- making


class Editors:
    """Methods with their prefixes and statistics settled; the last few are kept."""

    def __init__(self, served: ServerState) -> None:
        self._lm = served.lm
        self._kept: dict[tuple[str, int | None, bool], Editor] = {}

    def find(self, body: EditBody) -> Editor:
        """The editor that a request names."""
        key = body.method, body.layer, body.without_statistics
        if key not in self._kept:
            made = self._made(body).resolve(self._lm)
            while len(self._kept) >= FEW:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = made
        return self._kept[key]

    def _made(self, body: EditBody) -> Editor:
        layer: dict[str, Any] = {"layer": body.layer}
        if body.method == "memit":
            layer = {"layers": None if body.layer is None else (body.layer,)}
        moment = "identity" if body.without_statistics else None
        return editor(body.method, second_moment=moment, **layer)


def check_lengths(served: ServerState, texts: Sequence[str]) -> None:
    """Refuse a prompt with too many tokens."""
    for text in texts:
        served.limits.check_tokens(len(encode(served.lm, text)))


def tried(served: ServerState, edit: Edit, case: Case) -> EditRecord:
    """The fact before and after; where no neighbours were given, with well-known facts."""
    full = Case(
        fact=case.fact,
        paraphrases=case.paraphrases,
        neighbours=case.neighbours or neighbours_for(case.fact),
    )
    return before_after(served.lm, edit, full, generation_tokens=served.limits.written)


def neighbours_for(fact: Fact, count: int = 6) -> tuple[str, ...]:
    """Prompts about other subjects: well-known facts in the same words, else of every relation."""
    others = [f for f in everyday() if f.subject not in fact.text and fact.subject not in f.text]
    alike = [f.text for f in others if f.prompt == fact.prompt]
    by_relation = {f.relation: f.text for f in reversed(others)}
    return tuple(dict.fromkeys([*alike, *by_relation.values()]))[:count]


# ---- asking


def facts_now(
    served: ServerState, every: Sequence[StoredEdit], edit: Edit | None
) -> list[dict[str, Any]]:
    """How each of a visitor's facts stands with the edits that are on."""
    asks = [
        Query(made.record.fact.text, target, which)
        for made in every
        for which in (None, None if edit is None else 0)
        for target in (made.record.own.new, made.record.own.old or made.record.own.new)
    ]
    found = iter(score_queries(served.lm, asks, [] if edit is None else [edit]))
    return [
        {
            "id": made.id,
            "new": made.record.own.new,
            "old": made.record.own.old,
            "before": {"new": p_of(next(found).nll), "old": p_of(next(found).nll)},
            "after": {"new": p_of(next(found).nll), "old": p_of(next(found).nll)},
        }
        for made in every
    ]


def p_of(nll: float) -> float:
    """The paper's P."""
    return math.exp(-nll)


def answered(served: ServerState, text: str, edit: Edit | None, tokens: int) -> dict[str, Any]:
    """A prompt's likeliest next tokens and its continuation, before and after."""
    lm = served.lm
    tokens = room(lm, [text], tokens)
    sides = {}
    for name, change in (("before", None), ("after", edit)):
        with nullcontext() if change is None else edited(lm, [change]):
            best = top_next_tokens(lm, text, LIKELIEST)
            said = generate_greedy(lm, [text], tokens)[0]
        likeliest = [{"token": display_token(token), "p": p} for token, p in best]
        sides[name] = {"likeliest": likeliest, "said": said}
    return {"text": text, **sides}


# ---- telling


def told(made: StoredEdit) -> dict[str, Any]:
    """An edit as the page shows it."""
    record = made.record
    return {
        "id": made.id,
        "asked": made.asked,
        "subject": record.fact.subject_span,
        "text": record.fact.text,
        "new": record.own.new,
        "old": record.true,
        "method": record.method,
        "changed_weights": [weight_label(place) for place in record.changed_weights],
        "prompts": [_prompt(scores) for scores in record.prompts],
        "generations": [vars_of(generation) for generation in record.generations],
        "rails": [vars(rail) for rail in check_rows(record.checks)] if record.checks else [],
        "complaints": list(record.checks.get("complaints", [])),
    }


def _prompt(scores: Any) -> dict[str, Any]:
    sides = {
        name: {**vars(side), "top": display_token(side.top)}
        for name, side in (("before", scores.before), ("after", scores.after))
    }
    return {**vars(scores), **sides}


def vars_of(generation: Generation) -> dict[str, str]:
    """A generation as plain values."""
    return dict(vars(generation))


# ---- files


def written(served: ServerState, chosen: Sequence[StoredEdit], together: Edit, file: str) -> bytes:
    """Edits as a file of that name."""
    if file not in FILES:
        raise NotFound(f"an edit has no file {file[:40]!r}; it has {', '.join(FILES)}")
    if file == "edit.safetensors":
        return _by_way_of_disk(lambda folder: together.save(folder / file), file)
    if file == "adapter.zip":
        return _zipped(lambda folder: export_peft(together, served.lm, folder / "adapter"))
    if len(chosen) > 1:
        raise NotFound(f"{file} is of one edit; name one, or take edit.safetensors or adapter.zip")
    record = chosen[0].record
    if file == "record.json":
        return (record.to_json() + "\n").encode(errors="replace")
    if file == "page.html":
        return edit_page(record).encode(errors="replace")
    return figure_bytes(before_after_figure(record), file.partition(".")[2])


def _by_way_of_disk(write: Callable[[Path], None], file: str) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name))
        return (Path(name) / file).read_bytes()


def _zipped(write: Callable[[Path], None]) -> bytes:
    """A folder that is written, as one file."""
    buffer = io.BytesIO()
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(buffer, "w") as archive:
        write(Path(name))
        for path in sorted(Path(name).rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(name).as_posix())
    return buffer.getvalue()
