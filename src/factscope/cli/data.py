"""factscope data: facts to work with, where they are and how to get them."""

import json as json_module
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.data_build import build_counterfact, show_composition
from factscope.cli.data_show import show_cases
from factscope.cli.options import Device, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, progress, results, working

if TYPE_CHECKING:
    from factscope.facts import Fact

__all__ = ["data"]

data = typer.Typer(help="Facts to work with.", no_args_is_help=True)

data.command("build-counterfact")(build_counterfact)
data.command("composition")(show_composition)
data.command("show")(show_cases)


@data.callback()
def _data() -> None:
    """Facts to work with."""


@data.command("list")
def list_(json: Json = False) -> None:
    """List the data sets: what they are, where they are, and how many records they have."""
    with doing("counting records"):
        rows = [_row(name) for name in _names()]
    if json:
        print_json({"data_sets": rows})
    else:
        _show(rows)


@data.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set of `factscope data list`.")],
    sha256: Annotated[
        str | None, typer.Option(help="The SHA-256 that the fetched file must have.")
    ] = None,
    json: Json = False,
) -> None:
    """Fetch a data set into the cache, unless it is here, and print where it is."""
    from factscope.data.registry import find_data

    with working(f"fetching {name}") as done:
        path = find_data(name, sha256=sha256, progress=done)
    if json:
        print_json({"name": name, "path": str(path)})
    else:
        results.print(str(path), soft_wrap=True)


def _names() -> list[str]:
    from factscope.data.registry import DATA_SETS

    return list(DATA_SETS)


def _row(name: str) -> dict[str, Any]:
    """What is to say of a data set; `from` is where it is, or how it can be had."""
    from factscope.data.registry import DATA_SETS, count_records, find_local

    data, found = DATA_SETS[name], find_local(name)
    return {
        "name": name,
        "what": data.what,
        "from": found.origin if found else "to fetch" if data.sha256 else "by hand",
        "path": str(found.path) if found else None,
        "records": count_records(found.path) if found else None,
        "download_bytes": data.size,
        "url": data.url,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.table import Table

    table = Table("name", "what", "records", "from", box=box.SIMPLE)
    for row in rows:
        size = f" ({row['download_bytes'] / 1e6:,.1f} MB)" if row["from"] == "to fetch" else ""
        count = "" if row["records"] is None else f"{row['records']:,}"
        table.add_row(row["name"], row["what"], count, row["from"] + size)
    results.print(table)
    for row in rows:
        if row["path"]:
            results.print(f"{row['name']}: {row['path']}", soft_wrap=True)
    results.print(
        "`factscope data get NAME` fetches one; FACTSCOPE_DATA names a folder of your own",
        soft_wrap=True,
    )


@data.command("find-known")
def find_known(
    facts: Annotated[
        Path, typer.Option(help="ParaRel's table of facts, or a facts file with templates.")
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where the known facts go (JSON lines).")
    ],
    patterns: Annotated[
        Path | None, typer.Option(help="ParaRel's table of patterns, with [X] and [Y].")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Ask only so many facts, drawn at random.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1)] = 10,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Find the facts that a model knows: greedy text names the object before any other name."""
    from factscope.data.readers import pararel_facts, read_facts
    from factscope.io import write_atomic
    from factscope.lm.load import load
    from factscope.tracing.known import find_known as find_known_facts

    if patterns is None:
        file = read_facts(facts)
        for problem in file.problems:
            notes.print(f"left out: {problem}", soft_wrap=True)
        asked = list(file.facts)
    else:
        asked = list(pararel_facts(facts, patterns))
    if limit is not None and limit < len(asked):
        asked = random.Random(seed).sample(asked, limit)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype)
    with progress("asking", len(asked)) as done:
        found = list(find_known_facts(lm, asked, tokens=tokens, progress=done))
    write_atomic(out, "".join(_line(i, fact, said) for i, (fact, said) in enumerate(found)))
    if json:
        print_json({"asked": len(asked), "known": len(found), "file": str(out)})
        return
    summary = f"{len(found)} of {len(asked)} facts are known to {model}: {out}"
    results.print(f"{summary}\nNext: factscope trace --facts {out} --out RUN", soft_wrap=True)


def _line(number: int, fact: "Fact", said: str) -> str:
    """A known fact as known_1000 has it."""
    record = {
        "known_id": number,
        "subject": fact.subject,
        "attribute": fact.target,
        "prompt": fact.text,
        "prediction": said,
        "relation_id": fact.relation,
    }
    return json_module.dumps(record, ensure_ascii=False) + "\n"
