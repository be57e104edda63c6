"""factscope edit show, apply, export, merge: edits that are kept in files."""

from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from factscope.cli.options import Device, DeviceMap, Dtype, Json
from factscope.cli.show import doing, notes, print_json, results
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.facts import Fact
    from factscope.lm.model import LM

__all__ = ["EditModel", "apply", "export", "in_bytes", "load_edits", "merge", "model_for", "show"]

SUFFIX = ".edit"

Files = Annotated[list[Path], typer.Argument(help="Files that `factscope edit -o` wrote.")]
EditModel = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Where the model is, if not where the edit says."),
]
Force = Annotated[bool, typer.Option("--force", help="Go on beyond the guard rails.")]


# ---- shared


def load_edits(files: Sequence[Path]) -> "list[Edit]":
    """The edits of some files, each given once."""
    from factscope.editing.edit import load_edit

    paths = [file.resolve() for file in files]
    twice = [file for i, file in enumerate(files) if paths[i] in paths[:i]]
    if twice:
        raise BadSetting(f"{twice[0]} is given twice; give each edit once")
    return [load_edit(file) for file in files]


def total_of(edits: "Sequence[Edit]") -> "Edit":
    """The sum of some edits; one alone keeps its health."""
    return reduce(add, edits)


def model_for(
    edits: "Sequence[Edit]", model: str | None, device: str, dtype: str, device_map: str | None
) -> "LM":
    """The model that the edits are for."""
    from factscope.lm.load import load

    name = model or edits[0].model
    with doing(f"loading {name}"):
        lm = load(name, device=device, dtype=dtype, device_map=device_map)
    for edit in edits:
        edit.check(lm)
    return lm


def _measured(lm: "LM", total: "Edit", *, force: bool) -> "Edit":
    """The edit with its guard rails, which a sum has not yet; refused beyond them."""
    from factscope.editing.checks import with_checks

    if total.checks is None:
        with doing("measuring the guard rails"):
            [total] = with_checks(lm, [total])
    if not force and total.checks is not None:
        total.checks.refuse()
    return total


def in_bytes(size: int) -> str:
    """A file's size as people say it."""
    return f"{size / 1e3:.1f} kB" if size < 1e6 else f"{size / 1e6:.1f} MB"


def _fact_words(fact: "Fact") -> str:
    return f"{fact.text} → {fact.target}"


# ---- show


def show(files: Files, json: Json = False) -> None:
    """Say what edits write, where, by which method and settings; needs no model."""
    edits = load_edits(files)
    if json:
        print_json([_facts(file, edit) for file, edit in zip(files, edits, strict=True)])
        return
    for file, edit in zip(files, edits, strict=True):
        _print(file, edit)


def _facts(file: Path, edit: "Edit") -> dict[str, Any]:
    from dataclasses import asdict

    from factscope.evaluation.before_after import changed_weights, checks_of

    return {
        "file": str(file), "bytes": file.stat().st_size, "method": edit.method,
        "model": edit.model, "fingerprint": edit.fingerprint,
        "facts": [asdict(fact) for fact in edit.facts],
        "changed_weights": [asdict(place) for place in changed_weights(edit)],
        "checks": checks_of(edit.checks), "settings": dict(edit.settings),
    }  # fmt: skip


def _print(file: Path, edit: "Edit") -> None:
    from factscope.evaluation.before_after import changed_weights, checks_of
    from factscope.report.terminal import places_table, rails_table, settings_table

    size = in_bytes(file.stat().st_size)
    results.print(f"{file}, {size}", style="bold", soft_wrap=True)
    results.print(f"{edit.method}, for {edit.model} ({edit.fingerprint[:12]})", soft_wrap=True)
    for fact in edit.facts:
        results.print(f"  {_fact_words(fact)}", soft_wrap=True)
    results.print(places_table(changed_weights(edit)), soft_wrap=True)
    results.print(rails_table(checks_of(edit.checks)))
    results.print(settings_table(edit.settings))


# ---- apply


def apply(
    files: Files,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to go on with; repeatable.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How far texts go on.", min=1)] = 40,
    model: EditModel = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Put edits on together: each fact without, with its own edit alone, and with all of them."""
    from dataclasses import asdict

    from factscope.editing.checks import with_checks
    from factscope.evaluation.before_after import checks_of, continued

    edits = load_edits(files)
    total = total_of(edits)
    lm = model_for(edits, model, device, dtype, device_map)
    with doing("asking"):
        rows = _scores(lm, files, edits, total)
        [total] = with_checks(lm, [total])
        said = continued(lm, total, prompt or [], tokens)
    checks = checks_of(total.checks)
    if json:
        texts = [asdict(generation) for generation in said]
        print_json({"model": lm.name, "facts": rows, "checks": checks, "texts": texts})
        return
    _print_applied(rows, said, checks, total)


def _scores(
    lm: "LM", files: Sequence[Path], edits: "Sequence[Edit]", total: "Edit"
) -> list[dict[str, Any]]:
    """The new object's probability for each fact: before, alone, together."""
    import math

    from factscope.evaluation.score import Query, score_queries

    facts = [(number, fact) for number, edit in enumerate(edits) for fact in edit.facts]
    asks = [
        Query(fact.text, fact.target or "", which)
        for number, fact in facts
        for which in (None, number, len(edits))
    ]
    found = iter(score_queries(lm, asks, [*edits, total]))
    return [
        {
            "file": str(files[number]), "text": fact.text, "target": fact.target,
            **{name: math.exp(-next(found).nll) for name in ("before", "alone", "together")},
        }
        for number, fact in facts
    ]  # fmt: skip


def _print_applied(
    rows: list[dict[str, Any]], said: Sequence[Any], checks: dict[str, Any], total: "Edit"
) -> None:
    from factscope.report.terminal import applied_table, rails_table, side_by_side

    results.print(applied_table(rows))
    for generation in said:
        results.print(side_by_side(generation, [fact.target or "" for fact in total.facts]))
    results.print("all together:", style="dim")
    results.print(rails_table(checks))
    for complaint in checks["complaints"]:
        notes.print(f"beyond the guard rails: {complaint}", style="bold red", soft_wrap=True)


# ---- export


def export(
    files: Files,
    peft: Annotated[Path | None, typer.Option(help="Folder for a LoRA adapter.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Folder for a whole model.")] = None,
    rank: Annotated[
        int | None, typer.Option(help="Keep the largest directions only (with --peft).", min=1)
    ] = None,
    model: EditModel = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    force: Force = False,
    json: Json = False,
) -> None:
    """Write edits for other tools: an adapter that peft loads, or a model with them in it."""
    from factscope.editing.export import export_checkpoint, export_peft

    if (peft is None) == (checkpoint is None):
        raise BadSetting("give either --peft FOLDER or --checkpoint FOLDER")
    if rank is not None and peft is None:
        raise BadSetting("--rank goes with --peft; a checkpoint has the edits whole")
    edits = load_edits(files)
    total = total_of(edits)
    lm = model_for(edits, model, device, dtype, device_map)
    total = _measured(lm, total, force=force)
    if peft is not None:
        with doing("writing the adapter"):
            export_peft(total, lm, peft, rank=rank, force=force)
        _written(peft, "peft", len(edits), json)
    if checkpoint is not None:
        with doing("writing the model"):
            export_checkpoint(edits, lm, checkpoint, force=force)
        _written(checkpoint, "checkpoint", len(edits), json)


def _written(path: Path, kind: str, edits: int, json: bool) -> None:
    if json:
        print_json({"kind": kind, "path": str(path), "edits": edits})
        return
    words = {
        "edit": f"{edits} edits in one: {path}\nNext: factscope edit apply {path}",
        "peft": f"{path}\nNext, in Python: peft.PeftModel.from_pretrained(model, {str(path)!r})",
        "checkpoint": f'{path}\nNext: factscope generate "…" --model {path}',
    }
    results.print(words[kind], soft_wrap=True)


# ---- merge


def merge(
    files: Files,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="One edit (a name in .edit), or a model (a folder)."),
    ],
    model: EditModel = None,
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "auto",
    force: Force = False,
    json: Json = False,
) -> None:
    """Make one edit of several, or a model that has them all."""
    from factscope.editing.export import export_checkpoint

    edits = load_edits(files)
    total = total_of(edits)
    if out.suffix == SUFFIX:
        total.save(out)
        _written(out, "edit", len(edits), json)
        return
    lm = model_for(edits, model, device, dtype, device_map)
    _measured(lm, total, force=force)
    with doing("writing the model"):
        export_checkpoint(edits, lm, out, force=force)
    _written(out, "checkpoint", len(edits), json)
