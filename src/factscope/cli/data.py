"""factscope data: facts to work with."""

import json as json_module
import random
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factscope.cli.options import Device, Dtype, Json, Model
from factscope.cli.show import doing, notes, print_json, progress, results

if TYPE_CHECKING:
    from factscope.facts import Fact

__all__ = ["data"]

data = typer.Typer(help="Facts to work with.", no_args_is_help=True)


@data.callback()
def _data() -> None:
    """Facts to work with."""


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
    from factscope.data.facts_file import read_facts
    from factscope.data.pararel import statements
    from factscope.files import write_whole
    from factscope.lm.load import load
    from factscope.tracing.discover import find_known as find

    if patterns is None:
        file = read_facts(facts)
        for problem in file.problems:
            notes.print(f"left out: {problem}", soft_wrap=True)
        asked = list(file.facts)
    else:
        asked = list(statements(facts, patterns))
    if limit is not None and limit < len(asked):
        asked = random.Random(seed).sample(asked, limit)
    with doing(f"loading {model}"):
        lm = load(model, device=device, dtype=dtype)
    with progress("asking", len(asked)) as done:
        found = list(find(lm, asked, tokens=tokens, done=done))
    write_whole(out, "".join(_line(i, fact, said) for i, (fact, said) in enumerate(found)))
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
