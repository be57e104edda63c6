"""factscope check: does this installation work, and how fast?"""

import json
import logging
import math
import platform
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from factscope.cli.flags import Command, Options
from factscope.cli.output import doing, print_json, say
from factscope.errors import FactscopeError
from factscope.facts import Case, Fact
from factscope.io import cache_folder, scratch_folder
from factscope.settings import Flag

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.lm.model import LM

SUBJECTS = ("The Eiffel Tower", "The Louvre", "The Colosseum")
PROMPT = "{} is located in the city of"
CHECKS = {
    "environment": None, "versions": None, "cache": None, "model": None,
    "trace": "model", "edit": "model", "revert": "edit", "resume": "model",
}  # fmt: skip
"""Check → the check that it needs."""


@dataclass(frozen=True, kw_only=True)
class CheckOptions(Options):
    model: Annotated[str | None, Flag(short="m")] = None
    """Model to check with. None for the default model if it was downloaded before, otherwise a tiny
    random one."""
    device: str = "auto"
    """Device as torch names it, e.g. cpu; auto for the best available."""


class Checks:
    """The checks in their order; each returns a line, or raises an error."""

    lm: "LM"
    edit: "Edit"

    def __init__(self, model: str | None, device: str, folder: Path) -> None:
        self.model, self.device, self.folder = model, device, folder

    def check_environment(self) -> str:
        """Python, the platform and the device."""
        import torch

        from factscope.lm.accel import best_device

        device = best_device() if self.device == "auto" else self.device
        threads = f"{torch.get_num_threads()} threads"
        return f"Python {platform.python_version()}, {platform.platform()}, {device}, {threads}"

    def check_versions(self) -> str:
        """Every required package is installed in a version that pyproject.toml allows."""
        from packaging.requirements import Requirement

        wrong = []
        for text in requires("factscope") or ():
            needed = Requirement(text)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            try:
                found = version(needed.name)
            except PackageNotFoundError:
                found = "missing"
            if found == "missing" or not needed.specifier.contains(found, prereleases=True):
                wrong.append(f"{needed.name} is {found}, needs {needed.specifier}")
        if wrong:
            raise FactscopeError(f"{'; '.join(wrong)}; `pip install --upgrade factscope`")
        names = ("factscope", "torch", "transformers", "numpy")
        return ", ".join(f"{name} {version(name)}" for name in names)

    def check_cache(self) -> str:
        """The cache folder can be written."""
        with scratch_folder(cache_folder()) as folder:
            (folder / "file").write_text("")
        return str(cache_folder())

    def check_model(self) -> str:
        """Load the model, or build a tiny one."""
        from factscope.lm.load import load, tiny_lm
        from factscope.lm.sources import DEFAULT_MODEL, SHORT_NAMES, is_converted

        if self.model is None and not is_converted(DEFAULT_MODEL):
            self.lm = tiny_lm(self.device)
            size = SHORT_NAMES[DEFAULT_MODEL].size / 1e6
            return f"a tiny random one; {DEFAULT_MODEL} is downloaded at first use ({size:.0f} MB)"
        self.lm = load(self.model or DEFAULT_MODEL, device=self.device)
        return self.lm.name

    def check_trace(self) -> str:
        """Trace one fact; all probabilities are finite."""
        from factscope.tracing.settings import Corruption, Tracing
        from factscope.tracing.trace import trace

        fact = Fact(subject=SUBJECTS[0], prompt=PROMPT)
        record = trace(self.lm, fact, Tracing(corruption=Corruption(samples=1)))
        tables = record.restored.values()
        cells = [x for table in tables for row in table for x in row if x is not None]
        if not cells or not all(0 <= x <= 1 for x in (*cells, record.clean, record.corrupted)):
            raise FactscopeError("a traced probability is NaN or not within 0 and 1")
        return f"P clean {record.clean:.3f}, corrupted {record.corrupted:.3f}, {len(cells)} cells"

    def check_edit(self) -> str:
        """ROME makes a new object more likely."""
        from factscope.editing.settings import Rome
        from factscope.evaluation.before_after import before_after
        from factscope.lm.sources import DEFAULT_MODEL

        if self.lm.name == DEFAULT_MODEL:
            editor = Rome()
        else:  # without statistics, which would take minutes to collect
            editor = Rome(second_moment="identity", layer=0 if self.lm.name == "tiny" else None)
        fact = Fact(subject=SUBJECTS[0], prompt=PROMPT, target="Rome")
        self.edit = editor(self.lm, [fact])
        [change] = before_after(self.lm, self.edit, Case(fact=fact), generation_tokens=1).prompts
        before, after = change.before.new, change.after.new
        if not after > before:
            raise FactscopeError(f"the edit moved P(Rome) from {before:.4f} to {after:.4f}")
        return f"P(Rome) from {before:.4f} to {after:.4f}"

    def check_revert(self) -> str:
        """Apply the edit and revert it: the weights are bit-for-bit as before."""
        names = self.edit.changed_weights
        weights = [self.lm.model.get_parameter(name) for name in names]
        originals = [weight.detach().clone() for weight in weights]
        self.edit.apply(self.lm, force=True)
        changed = [not w.equal(old) for w, old in zip(weights, originals, strict=True)]
        self.edit.revert(self.lm)
        if not all(changed):
            raise FactscopeError("the edit did not change the weights")
        if not all(w.equal(old) for w, old in zip(weights, originals, strict=True)):
            raise FactscopeError("reverting did not restore the weights")
        return f"{', '.join(names)} restored bit-for-bit"

    def check_resume(self) -> str:
        """A run that was killed while writing its second record ends with the same records."""
        from factscope.runs.trace import TraceRun
        from factscope.tracing.settings import Corruption, Tracing

        file = self.folder / "facts.jsonl"
        facts = [{"subject": subject, "prompt": PROMPT} for subject in SUBJECTS]
        file.write_text("".join(json.dumps(fact) + "\n" for fact in facts))
        settings = Tracing(corruption=Corruption(samples=1), kinds=("states",))
        run = TraceRun(model=self.lm.name, dtype="float32", facts=file, settings=settings)
        uninterrupted = run.create_or_open(self.lm, self.folder / "run")
        run.run(self.lm, uninterrupted, run.read().facts)
        records = {record.fact: record for record in uninterrupted.trace_records()}
        lines = uninterrupted.records_path.read_text("utf-8").splitlines()
        uninterrupted.records_path.write_text(f"{lines[0]}\n{lines[1][:40]}", "utf-8")
        resumed = run.create_or_open(self.lm, self.folder / "run")
        run.run(self.lm, resumed, run.read().facts)
        again = {record.fact: record for record in resumed.trace_records()}
        same = again.keys() == records.keys() and all(
            math.isclose(again[fact].corrupted, records[fact].corrupted, rel_tol=1e-3)
            for fact in records
        )
        if not same or len(again) != len(facts):
            raise FactscopeError("a resumed run has other records than an uninterrupted one")
        return f"{len(facts) - 1} of {len(facts)} facts traced again after an interruption"


@Command
def check(options: CheckOptions) -> None:
    """Check the installation: versions, cache, model, a trace, an edit, a resumed run."""
    done: list[dict[str, Any]] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        checks = Checks(options.model, options.device, Path(folder))
        for name, needed in CHECKS.items():
            start = time.perf_counter()
            logging.disable(logging.WARNING)  # such as that the statistics are left out
            try:
                if needed in failed:
                    raise FactscopeError(f"not run, since {needed} failed")
                with doing(f"checking {name}"):
                    detail = getattr(checks, f"check_{name}")()
            except Exception as error:  # any error is a result here
                failed.append(name)
                kind = "" if isinstance(error, FactscopeError) else f"{type(error).__name__}: "
                detail = f"{kind}{error}".partition("\n")[0]
            finally:
                logging.disable(logging.NOTSET)
            ok, seconds = name not in failed, time.perf_counter() - start
            done.append({"check": name, "ok": ok, "seconds": round(seconds, 3), "detail": detail})
            if not options.json:
                say(f"{'ok' if ok else 'failed':7} {name:12} {seconds:6.1f} s  {detail}")
    if options.json:
        print_json({"ok": not failed, "checks": done})
    if failed:
        raise FactscopeError(f"these checks failed: {', '.join(failed)}")
