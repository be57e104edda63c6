"""factscope evaluate: an editor on many cases, into a run's folder."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from factscope.cli import edit_options as flags
from factscope.cli import evaluate_options as asked
from factscope.cli.edit_stats import with_statistics
from factscope.cli.options import Device, DeviceMap, Dtype, Json, Model
from factscope.cli.report import summary_values
from factscope.cli.show import notes, print_json, progress, results
from factscope.errors import BadSetting

if TYPE_CHECKING:
    from factscope.records import CaseRecord

__all__ = ["evaluate"]


def evaluate(
    data: asked.Data = "everyday",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The run's folder; it can be gone on with.")
    ] = None,
    limit: flags.Limit = None,
    protocol: asked.Protocol = "single",
    batch_size: asked.BatchSize = None,
    length: asked.Length = 100,
    seed: asked.Seed = 0,
    references: asked.References = None,
    on: asked.On = "here",
    ray_address: asked.RayAddress = None,
    workers: asked.Workers = None,
    model: Model = "smollm2-135m",
    device: Device = "auto",
    device_map: DeviceMap = None,
    dtype: Dtype = "float32",
    json: Json = False,
    method: flags.MethodName = "rome",
    preset: flags.Preset = "default",
    layer: flags.LayerWord = None,
    token: flags.TokenName = None,
    stats: flags.Stats = None,
    no_stats: flags.NoStats = False,
    prefixes: flags.Prefixes = None,
    prefix_lengths: flags.PrefixLengths = None,
    ridge: flags.Ridge = None,
    prefix_seed: asked.PrefixSeed = None,
    steps: flags.Steps = None,
    lr: flags.Rate = None,
    clamp: flags.Clamp = None,
    max_change: flags.Bound = None,
    neurons: flags.Neurons = None,
    threshold: flags.Threshold = None,
    share: flags.Share = None,
    new_weight: flags.NewWeight = None,
    old_weight: flags.OldWeight = None,
    weights: flags.Weights = None,
    scale: flags.Scale = None,
) -> None:
    """Edit and score many cases: the paper's metrics, in a folder that survives a kill."""
    if out is None:
        raise BadSetting("give --out FOLDER: the run's records go there, and it goes on from there")
    asked.check_protocol(protocol, batch_size)
    worker = asked.Worker(on=on, device=device, address=ray_address, workers=workers)
    editor = asked.editor_from(
        method, preset, stats=stats, no_stats=no_stats, prefixes=prefixes,
        prefix_lengths=prefix_lengths, prefix_seed=prefix_seed, layer=layer, token=token,
        steps=steps, lr=lr, clamp=clamp, max_change=max_change, ridge=ridge, weights=weights,
        scale=scale, **flags.neurons_of(neurons, threshold, share, new_weight, old_weight),
    )  # fmt: skip
    row = asked.row_name(editor, method, preset)
    run = asked.run_from(
        editor, row, model=model, dtype=dtype, data=data, limit=limit,
        protocol=protocol, batch_size=batch_size, length=length, seed=seed, references=references,
    )  # fmt: skip
    file = run.read()
    for problem in file.problems:
        notes.print(f"left out: {problem}", soft_wrap=True)
    lm = worker.load(model, dtype, device_map)
    facts = [case.fact for case in file.cases]
    run = replace(run, editor=with_statistics(lm, editor, facts))
    resolve = replace(run, editor=run.editor.resolve(lm))
    folder = run.begin(lm, out)
    with worker.crew(lm, resolve) as crew, progress("evaluating", len(file.cases)) as done:
        resolve.go_on(lm, folder, file.cases, crew=crew, progress=done)
    tell(folder.case_records(), out, list(file.problems), json)


def tell(records: "list[CaseRecord]", out: Path, problems: list[str], json: bool) -> None:
    """The summary's row, and what to do next."""
    from factscope.analysis.metrics import summaries
    from factscope.report.evaluations import evaluation_tables
    from factscope.report.tables import as_markdown

    found = summaries(records)
    failed = [record for record in records if record.failed]
    if json:
        rows = [summary_values(row) for row in found]
        print_json({"run": str(out), "left_out": problems, "summaries": rows})
        return
    for record in failed[:5]:
        notes.print(f"failed: case {record.fact.id}: {record.error}", soft_wrap=True)
    for table in evaluation_tables(found, beside=False):
        results.print(as_markdown(table), soft_wrap=True)
    results.print(f"Next: factscope report {out}", soft_wrap=True)
