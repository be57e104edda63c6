"""factscope report: figures, tables and a page from a run's records."""

from pathlib import Path
from typing import Annotated

import typer

from factscope.cli.options import Json
from factscope.cli.show import doing, print_json, results
from factscope.errors import BadRecord, BadSetting

__all__ = ["report"]


def report(
    run: Annotated[Path, typer.Argument(help="The folder that `factscope trace --out` wrote.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write; RUN/report by default.")
    ] = None,
    preset: Annotated[
        str, typer.Option(help="default, or paper to pool tokens as the paper's notebook does.")
    ] = "default",
    json: Json = False,
) -> None:
    """Draw average effects and write tables and a page; needs no model."""
    from factscope.analysis.effects import average_kinds
    from factscope.report.run import write_report
    from factscope.report.tables import as_markdown, summary_table
    from factscope.runs.folder import RunFolder

    if preset not in ("default", "paper"):
        raise BadSetting(f"the preset {preset!r} is not known; choose from default, paper")
    paper = preset == "paper"
    pooling = "tokens" if paper else "facts"
    records = RunFolder.open(run).records()
    if not any(record.known for record in records):
        raise BadRecord(f"{run} has no fact that the model knows; there is nothing to average")
    folder = out or run / "report"
    with doing("drawing"):
        written = write_report(
            records, folder, title=f"Causal traces: {run.name}", pooling=pooling, paper_roles=paper
        )
    effects = average_kinds(records, pooling=pooling, paper_roles=paper)
    if json:
        print_json({"files": [str(p) for p in written], "summary": _numbers(effects)})
        return
    results.print(as_markdown(summary_table(effects)), soft_wrap=True)
    results.print(f"{len(written)} files; open {folder / 'index.html'}", soft_wrap=True)


def _numbers(effects: dict) -> dict:
    """The averages as plain numbers, by kind and role."""
    return {
        kind: {
            "facts": e.facts,
            "skipped": e.skipped,
            "average_total_effect": e.total.mean,
            "peaks": {
                role: {"layer": layer, "effect": peak.mean, "half_width": peak.half_width}
                for role in e.roles
                if e.measured(role)
                for layer, peak in [e.peak(role)]
            },
        }
        for kind, e in effects.items()
    }
