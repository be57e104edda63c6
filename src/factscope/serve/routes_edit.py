"""Edits: compute an edit for one session, show what it changes, download it.

No weight is written. An edit is stored in its session; predictions run the model with the
session's selected edits on their rows of the batch (`editing.per_row`), so that sessions cannot
affect each other.
"""

import math
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import add
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from factscope.editing.defaults import check_layer
from factscope.editing.edit import Edit
from factscope.editing.editor import Editor
from factscope.editing.export import export_peft
from factscope.editing.per_row import edited
from factscope.errors import NotFound
from factscope.evaluation.before_after import (
    before_after,
    generate_before_after,
)
from factscope.evaluation.score import Query, score_queries
from factscope.lm.generate import fitting_tokens, generate_greedy, top_next_tokens
from factscope.lm.hooks import hook_outputs
from factscope.lm.tokens import encode
from factscope.records import Prediction
from factscope.report.edits import edit_page
from factscope.report.figures.edits import before_after_figure
from factscope.report.labels import check_rows, display_token, weight_label
from factscope.report.style import FIGURE_FORMATS, figure_bytes
from factscope.serve.examples import (
    suggest_generations,
    suggest_neighbours,
    suggest_paraphrases,
)
from factscope.serve.jobs import Job
from factscope.serve.routes_trace import TOP_TOKENS
from factscope.serve.schemas import EditBody, FactBody, PredictBody
from factscope.serve.security import attachment
from factscope.serve.sessions import ServerState, StoredEdit

EDIT_FRACTION = 0.7
"""Approximate fraction of an edit's time that the editor takes; the rest is its evaluation."""
PREDICTION_PASSES = 40
"""Approximate number of forward passes that predict the prompts before and after an edit."""
CACHED_EDITORS = 2
"""Editors in the cache; each holds second moments, which can be large."""
FILES = ["edit.safetensors", "adapter.zip", "record.json", "page.html",
         *(f"figure.{kind}" for kind in FIGURE_FORMATS)]  # fmt: skip


def edit_routes(state: ServerState) -> APIRouter:
    """Routes of edits and predictions."""
    routes = APIRouter(prefix="/api", tags=["edit"])
    lm, limits, sessions = state.lm, state.limits, state.sessions

    @lru_cache(maxsize=CACHED_EDITORS)
    def resolved(editor: Editor) -> Editor:
        """The editor with its prefixes and second moments loaded."""
        return editor.resolve(lm)

    def check_lengths(texts: Sequence[str]) -> None:
        for text in texts:
            limits.check_tokens(len(encode(lm, text)))

    @routes.post("/edits", response_class=Response)
    async def create_edit(body: EditBody, request: Request) -> Response:
        """Edit a fact. Streams events, one JSON object per line; the last has the edit."""
        case, editor = body.case(limits), body.editor(lm.n_layers)
        session = request.state.session
        if body.layer is not None:
            check_layer(lm, body.layer)
        sessions.check_capacity(session)

        def work(job: Job) -> None:
            check_lengths([case.fact.text, *case.paraphrases, *case.neighbours, *case.generations])
            edit = resolved(editor)(
                lm, [case.fact], progress=lambda x: job.progress(EDIT_FRACTION * x)
            )
            texts = case.generations or (case.fact.text,)
            # About one forward pass for each generated token, and a few for the predictions.
            passes = 2 * len(texts) * limits.max_new_tokens + PREDICTION_PASSES
            step = (1 - EDIT_FRACTION) / passes
            with hook_outputs((lm.embed, lambda output: job.progress(step))):
                record = before_after(lm, edit, case, generation_tokens=0)
                generations = [
                    generation
                    for text in texts
                    for generation in generate_before_after(lm, edit, [text], limits.max_new_tokens)
                ]
            record = replace(record, generations=tuple(generations))
            stored = sessions.store(session, edit, record, body.model_dump())
            job.send({"event": "edit", "edit": edit_to_dict(stored)})

        return state.stream(request, work)

    @routes.post("/suggestions")
    async def suggestions(body: FactBody) -> dict[str, Any]:
        """Prompts to test an edit of a fact with, from the built-in facts of its relation."""
        fact = body.fact(limits)
        return {
            "paraphrases": suggest_paraphrases(fact),
            "neighbours": suggest_neighbours(fact),
            "generations": suggest_generations(fact),
        }

    @routes.get("/edits")
    def list_edits(request: Request) -> dict[str, Any]:
        """The session's edits, oldest first."""
        return {"edits": [edit_to_dict(e) for e in sessions.edits(request.state.session)]}

    @routes.delete("/edits/{id}")
    def delete_edit(id: str, request: Request) -> dict[str, Any]:
        """Remove an edit."""
        sessions.remove(request.state.session, id)
        return {"removed": id}

    @routes.get("/edits/{ids}/{file}", response_class=Response)
    async def download_edit(ids: str, file: str, request: Request) -> Response:
        """An edit as a file; the sum of several edits (ids 1,3) as an edit file or adapter."""
        session = request.state.session
        selected = sessions.select(session, ids.split(","))
        if file == "adapter.zip":  # the edit's checks run the model
            content = await state.compute(session, lambda: file_content(state, selected, file))
        else:
            content = await state.reports.run(file_content, state, selected, file)
        return attachment(content, f"edit-{'-'.join(e.id for e in selected)}-{file}")

    @routes.post("/predict", response_class=Response)
    async def predict(body: PredictBody, request: Request) -> Response:
        """Predictions of the unedited model and of the model with the selected edits.

        Streams P(new) and P(old) of all edited facts, then a prediction for each prompt.
        """
        texts = limits.check_prompts("prompts", body.prompts)
        new_tokens, session = body.new_tokens(limits), request.state.session
        stored = sessions.edits(session)
        selected = [one.edit for one in sessions.select(session, body.edits)]
        edit = reduce(add, selected) if selected else None

        def work(job: Job) -> None:
            check_lengths(texts)
            job.send({"event": "facts", "facts": fact_probabilities(state, stored, edit)})
            for text in texts:
                job.send({"event": "prediction", **prediction(state, text, edit, new_tokens)})
                job.progress(1 / len(texts))
            job.send({"event": "done"})

        return state.stream(request, work)

    return routes


# ---- predictions


def fact_probabilities(
    state: ServerState, stored: Sequence[StoredEdit], edit: Edit | None
) -> list[dict[str, Any]]:
    """P(new) and P(old) of each stored edit's fact, unedited and with the selected edits."""
    prompts = [e.record.fact_prompt for e in stored]
    queries = [
        Query(prompt.text, target, which)
        for prompt in prompts
        for which in (None, None if edit is None else 0)
        for target in (prompt.new, prompt.old or prompt.new)
    ]
    scores = score_queries(state.lm, queries, [] if edit is None else [edit])
    p = iter([math.exp(-score.nll) for score in scores])
    return [
        {
            "id": e.id,
            "new": prompt.new,
            "old": prompt.old,
            "before": {"new": next(p), "old": next(p)},
            "after": {"new": next(p), "old": next(p)},
        }
        for e, prompt in zip(stored, prompts, strict=True)
    ]


def prediction(state: ServerState, text: str, edit: Edit | None, tokens: int) -> dict[str, Any]:
    """The most likely next tokens and the greedy continuation of a prompt, before and after."""
    lm = state.lm
    tokens = fitting_tokens(lm, [text], tokens)
    result: dict[str, Any] = {"text": text}
    for name, applied in (("before", None), ("after", edit)):
        with edited(lm, [applied]):
            top = top_next_tokens(lm, text, TOP_TOKENS)
            continuation = generate_greedy(lm, [text], tokens)[0]
        result[name] = {
            "top_tokens": [{"token": display_token(token), "p": p} for token, p in top],
            "continuation": continuation,
        }
    return result


# ---- JSON and files


def edit_to_dict(stored: StoredEdit) -> dict[str, Any]:
    """An edit as JSON."""

    def prediction_to_dict(prediction: Prediction) -> dict[str, Any]:
        return {**vars(prediction), "top": display_token(prediction.top)}

    record = stored.record
    return {
        "id": stored.id,
        "request": stored.request,
        "subject": record.fact.subject_span,
        "text": record.fact.text,
        "new": record.fact_prompt.new,
        "old": record.true,
        "method": record.method,
        "changed_weights": [weight_label(weight) for weight in record.changed_weights],
        "verdict": record.checks.get("verdict"),
        "prompts": [
            {
                **vars(prompt),
                "changed": prompt.top_changed,
                "before": prediction_to_dict(prompt.before),
                "after": prediction_to_dict(prompt.after),
            }
            for prompt in record.prompts
        ],
        "generations": [dict(vars(generation)) for generation in record.generations],
        "checks": [vars(row) for row in check_rows(record.checks)] if record.checks else [],
        "complaints": list(record.checks.get("complaints", [])),
    }


def file_content(state: ServerState, selected: Sequence[StoredEdit], file: str) -> bytes:
    """Edits as one of `FILES`."""
    if file not in FILES:
        raise NotFound(f"an edit has no file {file[:40]!r}; choose from {', '.join(FILES)}")
    if file in ("edit.safetensors", "adapter.zip"):
        combined = reduce(add, [stored.edit for stored in selected])
        with tempfile.TemporaryDirectory() as folder:
            path, adapter = Path(folder) / file, Path(folder) / "adapter"
            if file == "edit.safetensors":
                combined.save(path)
            else:
                export_peft(combined, state.lm, adapter)
                with zipfile.ZipFile(path, "w") as archive:
                    for part in sorted(adapter.iterdir()):
                        archive.write(part, f"adapter/{part.name}")
            return path.read_bytes()
    if len(selected) > 1:
        raise NotFound(
            f"{file} exists for single edits only; for several, get edit.safetensors or adapter.zip"
        )
    record = selected[0].record
    if file == "record.json":
        return (record.to_json() + "\n").encode(errors="replace")
    if file == "page.html":
        return edit_page(record).encode(errors="replace")
    return figure_bytes(before_after_figure(record), file.partition(".")[2])
