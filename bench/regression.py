"""Record what factscope computes, and compare it after a change of the code.

    python bench/regression.py record before.json                    # then change the code
    python bench/regression.py compare before.json
    python bench/regression.py record tiny.json --model none         # only the tiny models

Three groups: tiny random models of every family (traces, edits by every method that needs no
training, scores, text), two of them in more depth (statistics, trained editors, files, run
folders), and a real model. Everything runs on a CPU in float32, on one thread.

The file holds numbers and generated text under names of this script, and no setting and no field
name of a record, so that it outlives their renaming. Fields are read in their order. A number may
differ by 1e-6: absolutely for probabilities, else relative to the largest number of its entry.
"""

import argparse
import dataclasses
import json
import logging
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from factscope import (
    LM,
    PRESETS,
    Case,
    Edit,
    Evaluation,
    Fact,
    FactscopeError,
    FromCases,
    Ke,
    KeConfig,
    Mend,
    MendConfig,
    Tracing,
    Training,
    TrainRun,
    editor,
    load,
    read_case_records,
    read_trace_records,
    summarize,
    trace,
)
from factscope.data.readers import everyday_cases
from factscope.editing.export import export_peft
from factscope.evaluation.before_after import before_after
from factscope.evaluation.settings import ScoringOptions
from factscope.runs.evaluate import EvaluateRun
from factscope.runs.trace import TraceRun
from factscope.stats.covariance import collect
from factscope.stats.settings import StatsSettings
from factscope.stats.text import token_sequences

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

from families import FAMILIES, tiny_text_lm
from tokenizers_ import TEXT

Numbers = dict[str, list[Any] | str]
"""A name → numbers or text."""

TOLERANCE = 1e-6
WHOLE = 5000
"""Larger matrices are recorded by random projections from both sides."""
DEEP = ("gpt2", "llama")
"""The tiny models of the second group: one with Conv1D and biases, one gated without."""
METHODS = ("rome", "r-rome", "ft", "ft-l", "attn", "kn", "memit")
# The prompt is short, since some tiny models see no more than four tokens back.
EIFFEL = Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome", id="0")
CASE = Case(
    fact=EIFFEL,
    true="Paris",
    paraphrases=("To see the Eiffel Tower, travel to the city of",),
    neighbours=("The Louvre is located in the city of",),
    generations=("The Eiffel Tower is",),
)
FRANCE = Case(
    fact=Fact(subject="France", prompt="The capital of {} is", target="Rome in Kenya", id="1"),
    true="Paris",
    neighbours=("The capital of Italy is", "The capital of Spain is"),
)


# ---- settings


def tracing(samples: int, preset: str = "default", window: int = 2, **noise: Any) -> Tracing:
    """Few samples and a small window, with severed modules and gradients."""
    corruption = replace(PRESETS[preset].corruption, samples=samples, **noise)
    return replace(
        PRESETS[preset], corruption=corruption, window=window, sever=("mlp", "attn"), gradients=True
    )


def quick(method: str, preset: str = "default", moment: Any = "identity") -> Any:
    """An editor of few steps, that needs no statistics and makes progress on a tiny model."""
    made: Any = editor(method, preset)
    if not hasattr(made, "search"):
        return replace(made, steps=4)
    search = replace(made.search, steps=5, lr=0.1, weight_decay=1e-3, clamp=50.0)
    return replace(made, second_moment=moment, search=search)


# ---- what is recorded of a result


def leaves(value: Any) -> Iterator[Any]:
    """Numbers and texts inside a record, in the order of its fields; keys are left out."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def numbers_in(value: Any) -> list[float | None]:
    found = [x for x in leaves(value) if not isinstance(x, str)]
    return [None if x is None or not math.isfinite(x) else float(x) for x in found]


def texts_in(value: Any) -> str:
    return "\n".join(x for x in leaves(value) if isinstance(x, str))


def of_tensor(x: torch.Tensor) -> Any:
    """A small tensor itself; of a large matrix, its projections."""
    x = x.detach().double()
    if x.numel() > WHOLE and x.dim() == 2:
        random = np.random.default_rng(0)
        left = torch.from_numpy(random.standard_normal((2, x.shape[0])))
        right = torch.from_numpy(random.standard_normal((x.shape[1], 2)))
        return [of_tensor(left @ x), of_tensor(x @ right)]
    return json.loads(json.dumps(x.tolist()), parse_float=lambda text: float(f"{float(text):.9g}"))


def of_trace(record: Any) -> Numbers:
    return {
        "probability clean and corrupted": numbers_in(
            [record.clean, record.corrupted, record.corrupted_samples]
        ),
        "probability restored": numbers_in(record.restored),
        "probability severed": numbers_in(record.severed),
        "gradients": numbers_in(record.gradients),
    }


def of_edit(lm: LM, edit: Edit, case: Case, tokens: int = 8) -> Numbers:
    """The weight changes, the checks of the edit, and what the model says before and after."""
    record = before_after(lm, edit, case, generation_tokens=tokens)
    changes: Numbers = {
        f"change of {name}": of_tensor(change.matrix()) for name, change in edit.changes.items()
    }
    return changes | {
        "checks": numbers_in(edit.checks),
        "probability before and after": numbers_in(record.prompts),
        "text": texts_in(record.generations),
    }


def of_cases(records: list[Any]) -> Numbers:
    found: Numbers = {}
    for i, record in enumerate(records):
        scores = (record.before, record.after)
        found |= {f"scores {i}": numbers_in(scores), f"text {i}": texts_in(scores)}
    for i, summary in enumerate(summarize(records)):
        found[f"summary {i}"] = numbers_in(summary.metrics)
    return found


def under(name: str, found: Numbers) -> Numbers:
    return {f"{name} / {inner}": value for inner, value in found.items()}


# ---- 1. every family


def of_family(family: str) -> Numbers:
    lm, found = tiny(family), {}
    for preset in ("default", "paper"):
        found |= under(f"trace, {preset}", of_trace(trace(lm, EIFFEL, tracing(2, preset))))
        for method in METHODS:
            found |= under(f"{method}, {preset}", edited_by(lm, quick(method, preset)))
    for method in ("rome", "ft"):
        found |= under(f"evaluation of {method}", evaluation(lm, quick(method), 16))
    return found


def tiny(family: str) -> LM:
    return tiny_text_lm(family, spread=0.3)


def edited_by(lm: LM, method: Any) -> Numbers:
    """One edit of two facts; KN as in the paper's code cannot edit the projected OPT."""
    try:
        edit = method(lm, [CASE.request, FRANCE.request])
    except FactscopeError:
        return {"edit": "refused"}
    return of_edit(lm, edit, CASE)


def evaluation(
    lm: LM, method: Any, length: int, cases: tuple[Case, ...] = (CASE, FRANCE)
) -> Numbers:
    plan = Evaluation(
        lm=lm,
        editor=method,
        data="counterfact",
        method="any",
        scoring=ScoringOptions(length=length),
    )
    return of_cases(plan.single(cases, plan.score_unedited(cases)))


# ---- 2. two families in depth


def of_deep(family: str, folder: Path) -> Numbers:
    lm = tiny(family)
    found = statistics(lm) | noises(lm) | files(lm, folder) | traced_run(lm, folder)
    data = folder / "cases.json"
    data.write_text(json.dumps([tower(i) for i in range(24)]))
    for protocol in ("single", "batch", "sequential"):
        found |= under(f"run, {protocol}", evaluated_run(lm, folder / protocol, data, protocol))
    for method in ("mend", "ke"):
        found |= under(f"trained {method}", trained(lm, folder / method, data, method))
    return found


def statistics(lm: LM) -> Numbers:
    moments = collect(
        lm, [0, 1, 2], token_sequences(lm, TEXT.splitlines(), 16), StatsSettings(tokens=600)
    )
    found: Numbers = {f"second moment {i}": of_tensor(m.matrix) for i, m in enumerate(moments)}
    for method in ("rome", "memit"):
        edit = quick(method, moment=moments)(lm, [CASE.request, FRANCE.request])
        found |= under(f"{method} with statistics", of_edit(lm, edit, CASE))
    return found


def noises(lm: LM) -> Numbers:
    """Noise of other distributions, added to the embeddings and in their place."""
    found: Numbers = {}
    for shape in ("uniform", "embedding"):
        settings = tracing(3, "paper", distribution=shape, replace=shape == "embedding")
        found |= under(f"trace, {shape} noise", of_trace(trace(lm, EIFFEL, settings)))
    return found


def files(lm: LM, folder: Path) -> Numbers:
    """An edit saved and loaded, applied, scaled and added; an adapter for peft."""
    first, second = quick("rome")(lm, [EIFFEL]), quick("ft")(lm, [FRANCE.request])
    first.save(folder / "saved.edit")
    loaded = Edit.load(folder / "saved.edit")
    export_peft(first, lm, folder / "adapter", force=True)
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    found = under("loaded edit", of_edit(lm, loaded, CASE))
    found |= under("sum of edits", of_edit(lm, first * 0.5 + second, CASE))
    found |= {f"adapter / {name}": of_tensor(x) for name, x in tensors.items()}
    with torch.no_grad(), first.applied(lm, force=True):
        found["logits of the applied edit"] = of_tensor(lm.model(torch.arange(3, 13)[None]).logits)
    return found


def traced_run(lm: LM, folder: Path) -> Numbers:
    facts = folder / "facts.json"
    facts.write_text(
        json.dumps([{"subject": c.fact.subject, "prompt": c.fact.prompt} for c in (CASE, FRANCE)])
    )
    run = TraceRun(model="any", dtype="float32", facts=facts, limit=None, settings=tracing(2))
    run.run(lm, run.create_or_open(lm, folder / "traces"), run.read().facts)
    records = list(read_trace_records(folder / "traces" / "records.jsonl"))
    found: Numbers = {}
    for i, record in enumerate(records):
        found |= under(f"traced run, {i}", of_trace(record))
    return found


def evaluated_run(lm: LM, folder: Path, data: Path, protocol: Any) -> Numbers:
    run = EvaluateRun(
        model="any", dtype="float32", data=data, name="counterfact", method="memit", limit=4,
        editor=quick("memit"), protocol=protocol, scoring=ScoringOptions(length=12),
    )  # fmt: skip
    run.run(lm, run.create_or_open(lm, folder), run.read().cases)
    return of_cases(list(read_case_records(folder / "records.jsonl")))


def trained(lm: LM, folder: Path, data: Path, method: str) -> Numbers:
    """A network after a few steps, how training went, and its edit."""
    networks = {"mend": MendConfig(rank=8), "ke": KeConfig(lstm_width=8, condition_width=8)}
    settings = Training(
        network=networks[method], batch_size=4, eval_every=3, validation_examples=4, warmup_steps=2
    )
    source = FromCases(name="towers", path=data)
    run = TrainRun(model="any", dtype="float32", source=source, training=settings, steps=6)
    weights = run.run(lm, run.create_or_open(lm, folder))
    lines = (folder / "records.jsonl").read_text("utf-8").splitlines()
    made = {"mend": Mend, "ke": Ke}[method].load(weights)
    norms = sorted(x.double().norm().item() for x in load_file(weights).values())
    return of_edit(lm, made(lm, [CASE.request, FRANCE.request]), CASE) | {
        "norms of the weights": norms,
        "course of training": [
            numbers_in(
                {k: v for k, v in json.loads(line).items() if k not in ("seconds", "version")}
            )
            for line in lines
        ],
    }


def tower(number: int) -> dict[str, Any]:
    """A case as CounterFact's files have it."""
    places = ("Rome", "Vienna", "Oslo", "Berlin", "Paris", "Madrid")
    subject = f"Tower {number}"
    return {
        "case_id": number,
        "requested_rewrite": {
            "prompt": "{} is in", "subject": subject, "relation_id": "P1",
            "target_new": {"str": places[number % 5 + 1]},
            "target_true": {"str": places[number % 5]},
        },
        "paraphrase_prompts": [f"One finds {subject} in"],
        "neighborhood_prompts": ["The Louvre is in"],
        "attribute_prompts": [],
        "generation_prompts": [subject],
    }  # fmt: skip


# ---- 3. a real model


def of_model(name: str) -> Numbers:
    lm = load(name, device="cpu", dtype="float32")
    eiffel = replace(EIFFEL, prompt="{} is located in the city of")
    settings = replace(tracing(3, window=10), gradients=False)
    found = under("trace", of_trace(trace(lm, eiffel, settings)))
    edits = {
        "rome": editor("rome")(lm, [eiffel]),
        "memit": quick("memit")(lm, [eiffel, FRANCE.request]),
        "ft-l": editor("ft-l")(lm, [eiffel]),
    }
    for method, edit in edits.items():
        found |= under(method, of_edit(lm, edit, replace(CASE, fact=eiffel), 20))
    found |= under("evaluation", evaluation(lm, editor("rome"), 20, everyday_cases()[:1]))
    return found


# ---- record and compare


def everything(model: str) -> Iterator[tuple[str, Numbers]]:
    """Each group with its numbers."""
    for family in sorted(FAMILIES):
        yield f"tiny {family}", of_family(family)
    for family in DEEP:
        with tempfile.TemporaryDirectory() as folder:
            yield f"files of {family}", of_deep(family, Path(folder))
    if model != "none":
        yield model, of_model(model)


def difference(name: str, now: Any, then: Any) -> float:
    """The largest difference, in units of what the tolerance is relative to."""
    if isinstance(then, str) or isinstance(now, str):
        return 0.0 if now == then else math.inf
    a, b = flat(now), flat(then)
    if a.shape != b.shape or (np.isnan(a) != np.isnan(b)).any():
        return math.inf
    if not np.isfinite(b).any():
        return 0.0
    scale = 1.0 if "probability" in name else np.nanmax(np.abs(b)) or 1.0
    return float(np.nanmax(np.abs(a - b)) / scale)


def flat(value: Any) -> np.ndarray:
    return np.array([math.nan if x is None else float(x) for x in leaves(value)])


def compare(then: Mapping[str, Any], model: str) -> bool:
    """Print each group's largest difference; whether all is the same."""
    same, left = True, {name.partition(" / ")[0] for name in then}
    for group, found in everything(model):
        left.discard(group)
        now = under(group, found)
        wanted = {name: then[name] for name in then if name.startswith(f"{group} / ")}
        odd = sorted(now.keys() ^ wanted.keys())
        apart = {name: difference(name, now[name], wanted[name]) for name in now.keys() - {*odd}}
        bad = [name for name in sorted(apart) if apart[name] > TOLERANCE]
        kinds = {True: "absolute", False: "relative"}
        largest = {
            kinds[p]: max((x for n, x in apart.items() if ("probability" in n) == p), default=0.0)
            for p in kinds
        }
        told = ", ".join(f"{kind} {value:.1e}" for kind, value in largest.items())
        print(f"{group}: {len(apart)} entries, largest difference {told}", flush=True)
        for name in odd:
            print(f"  only {'now' if name in now else 'in the file'}: {name}")
        for name in bad:
            print(f"  {apart[name]:.1e}: {name}")
        same = same and not odd and not bad
    if model == "none":
        left = {group for group in left if group.startswith(("tiny ", "files of "))}
    for group in sorted(left):
        print(f"only in the file: {group}")
    return same and not left


def main() -> None:
    parser = argparse.ArgumentParser(description="Do the numbers stay the same?")
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="a real model, or none")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    if args.command == "compare":
        sys.exit(0 if compare(json.loads(args.file.read_text("utf-8")), args.model) else 1)
    numbers: Numbers = {}
    for group, found in everything(args.model):
        numbers |= under(group, found)
        print(f"{group}: {len(found)} entries", flush=True)
        for name in (name for name, value in found.items() if value == "refused"):
            print(f"  refused: {name}")
    args.file.write_text(json.dumps(numbers, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
