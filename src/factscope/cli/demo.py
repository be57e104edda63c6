"""factscope demo: a first trace, from nothing to pictures."""

from pathlib import Path
from typing import Annotated

import typer

from factscope.cli.options import Device, Json, Model
from factscope.cli.show import doing, notes, print_json, results, working
from factscope.cli.view import draw, print_trace

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the pictures go.")] = Path("demo"),
    model: Model = "smollm2-135m",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Trace where the model keeps the Eiffel Tower's city, with figures and a page."""
    from factscope.facts import Fact
    from factscope.lm.load import load
    from factscope.records import write_records
    from factscope.tracing.settings import Tracing
    from factscope.tracing.trace import trace

    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Paris")
    notes.print(f"Loading {model}; the first time it is fetched and converted.")
    with doing(f"loading {model}"):
        lm = load(model, device=device)
    settings = Tracing(sever=("mlp", "attn"))
    with working(f"tracing {fact.text!r}") as done:
        record = trace(lm, fact, settings, done=done)
    records = out / "trace.jsonl"
    write_records(records, [record])
    written = [*draw(record, out / "index.html"), *draw(record, out / "trace.png"), records]
    if json:
        print_json({"files": [str(path) for path in written]})
        return
    print_trace(record)
    results.print("Written: " + ", ".join(map(str, written)), soft_wrap=True)
