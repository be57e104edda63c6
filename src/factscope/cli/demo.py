"""factscope demo: a first trace, from nothing to pictures."""

from pathlib import Path
from typing import Annotated

import typer

from factscope.cli.options import Device, Json, Model
from factscope.cli.show import doing, notes, print_json, results

__all__ = ["demo"]


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the pictures go.")] = Path("demo"),
    model: Model = "smollm2-135m",
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Trace where the model keeps the Eiffel Tower's city, with figures and a page."""
    from factscope.cli.trace import _print as print_trace
    from factscope.facts import Fact
    from factscope.lm.load import load
    from factscope.records import write_records
    from factscope.report.figures import save_figure, severed_detail, traces_figure
    from factscope.report.page import trace_page
    from factscope.report.save import save_text
    from factscope.tracing.settings import Tracing
    from factscope.tracing.trace import trace

    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Paris")
    notes.print(f"Loading {model}; the first time it is fetched and converted.")
    with doing(f"loading {model}"):
        lm = load(model, device=device)
    with doing(f"tracing {fact.text!r}"):
        record = trace(lm, fact, Tracing(sever=("mlp", "attn"), sever_rows="last_subject"))
    out.mkdir(parents=True, exist_ok=True)
    write_records(out / "trace.jsonl", [record])
    save_figure(traces_figure(record), out / "trace.png")
    save_figure(severed_detail(record), out / "severed.png")
    save_text(out / "index.html", trace_page(record))
    written = [out / name for name in ("index.html", "trace.png", "severed.png", "trace.jsonl")]
    if json:
        print_json({"files": [str(path) for path in written]})
        return
    print_trace(record)
    results.print("Written: " + ", ".join(map(str, written)), soft_wrap=True)
