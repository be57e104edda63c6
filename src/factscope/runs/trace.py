"""Many traces into a run's folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from factscope.data.readers import FactsFile, read_facts
from factscope.errors import BadFact
from factscope.facts import Fact
from factscope.io import sha256
from factscope.lm.model import LM
from factscope.lm.tokens import encode_fact
from factscope.runs.folder import RunFolder, run_info
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import default_scale, trace_many

__all__ = ["TraceRun"]


@dataclass(frozen=True, kw_only=True)
class TraceRun:
    """Which facts to trace on which model, and how."""

    model: str
    dtype: str
    facts: Path
    limit: int | None
    settings: Tracing

    def read(self) -> FactsFile:
        """The facts to trace, with what could not be read."""
        file = read_facts(self.facts)
        return FactsFile(file.facts[: self.limit], file.problems)

    def spec(self) -> dict[str, Any]:
        """What makes two runs the same."""
        return {
            "command": "trace",
            "model": self.model,
            "dtype": self.dtype,
            "facts": self.facts.name,
            "facts_sha256": sha256(self.facts),
            "limit": self.limit,
            "tracing": self.settings.to_dict(),
        }

    def fitting(self, lm: LM, facts: tuple[Fact, ...]) -> FactsFile:
        """The facts that the model can read, and what is wrong with the others."""
        fit: list[Fact] = []
        problems: list[str] = []
        for fact in facts:
            try:
                encode_fact(lm, fact)
                fit.append(fact)
            except BadFact as error:
                problems.append(f"{self.facts.name}, fact {fact.id}: {error}")
        return FactsFile(tuple(fit), tuple(problems))

    def begin(self, lm: LM, path: Path) -> RunFolder:
        """A new run in a folder, or the same run taken up again."""
        return RunFolder.begin(path, self.spec(), run_info(lm))

    def go_on(
        self,
        lm: LM,
        folder: RunFolder,
        facts: tuple[Fact, ...],
        *,
        memory: int | None = None,
        progress: Callable[[int], None] = lambda n: None,
    ) -> None:
        """Trace what is not yet in the folder. σ is that of all the run's subjects."""
        finished = {record.fact for record in folder.records()}
        progress(sum(fact in finished for fact in facts))
        scale = default_scale(lm, self.settings.corruption, facts)
        for record in trace_many(
            lm,
            facts,
            self.settings,
            scale=scale,
            memory=memory,
            finished=finished,
            progress=progress,
        ):
            folder.append(record)
