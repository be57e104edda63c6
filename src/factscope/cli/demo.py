"""factscope demo: a first trace and a first edit, from nothing to pictures."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factscope.cli.edit import made_safely
from factscope.cli.edit_view import draw_edit, print_edit
from factscope.cli.options import Device, Json, Model
from factscope.cli.show import doing, notes, print_json, results, working
from factscope.cli.view import draw, print_trace

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.lm.model import LM
    from factscope.records import EditRecord, TraceRecord

__all__ = ["demo"]

SUBJECT, PROMPT = "The Eiffel Tower", "{} is located in the city of"
PARAPHRASES = (
    "To see the Eiffel Tower, travel to the city of",
    "Where is the Eiffel Tower? It is in",
)
NEIGHBOURS = (
    "The Louvre is located in the city of",
    "The Brandenburg Gate is located in the city of",
)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the pictures go.")] = Path("demo"),
    model: Model = "smollm2-135m",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Trace where the model keeps the Eiffel Tower's city, move it to Rome, and draw both."""
    from factscope.io import write_atomic
    from factscope.lm.load import load
    from factscope.records import write_records
    from factscope.report.edits import trace_and_edit_page

    notes.print(f"Loading {model}; the first time it is fetched and converted.")
    with doing(f"loading {model}"):
        lm = load(model, device=device)
    traced = _trace(lm)
    write_records(out / "trace.jsonl", [traced])
    made, edited = _edit(lm)
    made.save(out / "rome.edit")
    write_atomic(out / "edit.json", edited.to_json() + "\n")
    write_atomic(out / "index.html", trace_and_edit_page(traced, edited))
    pictures = [*draw(traced, out / "trace.png"), *draw_edit(edited, None, out / "edit.png")]
    written = [
        out / "index.html", *pictures, out / "trace.jsonl", out / "edit.json", out / "rome.edit",
    ]  # fmt: skip
    if json:
        print_json({"files": [str(path) for path in written]})
        return
    print_trace(traced)
    results.print()
    print_edit(edited)
    results.print("Written: " + ", ".join(map(str, written)), soft_wrap=True)


def _trace(lm: "LM") -> "TraceRecord":
    """Where the city is."""
    from factscope.facts import Fact
    from factscope.tracing.settings import Tracing
    from factscope.tracing.trace import trace

    fact = Fact(subject=SUBJECT, prompt=PROMPT, target="Paris")
    with working(f"tracing {fact.text!r}") as done:
        return trace(lm, fact, Tracing(sever=("mlp", "attn")), progress=done)


def _edit(lm: "LM") -> "tuple[Edit, EditRecord]":
    """Another city, and what came of it."""
    from factscope.editing.methods import editor
    from factscope.evaluation.before_after import before_after
    from factscope.facts import Case, Fact

    fact = Fact(subject=SUBJECT, prompt=PROMPT, target="Rome")
    case = Case(fact=fact, paraphrases=PARAPHRASES, neighbours=NEIGHBOURS)
    made = made_safely(lm, editor("rome"), [case])
    with doing("asking before and after"):
        return made, before_after(lm, made, case)
