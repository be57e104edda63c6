"""Trace many facts into a run folder."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from factscope.data.readers import FactsFile, read_facts
from factscope.errors import BadFact
from factscope.facts import Fact
from factscope.io import sha256
from factscope.progress import Progress, no_progress
from factscope.runs.folder import Run, RunFolder, locks_folder
from factscope.settings import check
from factscope.tracing.settings import Tracing

if TYPE_CHECKING:
    from factscope.lm.model import LM


ADDED = (
    "metric", "direction", "heads", "sever_draws", "lens", "knockout", "knockout_window",
    "attribution",
)  # fmt: skip
"""Settings that older specs do not have: written only where they differ from the default, so that
older run folders resume."""


@dataclass(frozen=True, kw_only=True)
class TraceRun(Run):
    """Which facts to trace on which model, and how."""

    model: str
    """Model: a short name, a folder, a file or a hub id."""
    dtype: str
    """Number format of the weights."""
    facts: Path
    """File of facts."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use only the first N facts."""
    chat: bool = False
    """Put each prompt into the model's chat template."""
    edits: tuple[Path, ...] = ()
    """Edit files that are applied to the model."""
    settings: Tracing
    """Corruption, restored kinds, window and so on."""

    __post_init__ = check

    def read(self) -> FactsFile:
        """The facts to trace, and problems of the lines that cannot be read."""
        file = read_facts(self.facts)
        return FactsFile(file.facts[: self.limit], file.problems)

    def spec(self) -> dict[str, Any]:
        """What identifies the run."""
        tracing, default = self.settings.to_dict(), Tracing().to_dict()
        return {
            "command": "trace",
            "model": self.model,
            "dtype": self.dtype,
            "facts": self.facts.name,
            "facts_sha256": sha256(self.facts),
            "limit": self.limit,
            "tracing": {k: v for k, v in tracing.items() if k not in ADDED or v != default[k]},
            # Only where used, so that older run folders resume.
            **({"chat": True} if self.chat else {}),
            **({"edits": {file.name: sha256(file) for file in self.edits}} if self.edits else {}),
        }

    def readable_facts(self, lm: "LM", facts: tuple[Fact, ...]) -> FactsFile:
        """The facts that fit the model (its tokenizer and context), and problems of the others.

        With token replacement each fact gets a replacement, if it has none: the subject of another
        fact of the file.
        """
        from factscope.lm.tokens import chat_fact, encode_fact
        from factscope.tracing.corruption import with_replacement

        problems: list[str] = []

        def fitting(facts: Iterable[Fact], prepare: Callable[[Fact], Fact]) -> tuple[Fact, ...]:
            fit: list[Fact] = []
            for fact in facts:
                try:
                    fit.append(prepare(fact))
                except BadFact as error:
                    problems.append(f"{self.facts.name}, fact {fact.id}: {error}")
            return tuple(fit)

        def encodable(fact: Fact) -> Fact:
            fact = chat_fact(lm, fact) if self.chat else fact
            encode_fact(lm, fact)
            return fact

        fit = fitting(facts, encodable)
        if self.settings.corruption.replaces_tokens:
            fit = fitting(fit, lambda fact: with_replacement(lm, fact, fit))
        return FactsFile(fit, tuple(problems))

    @locks_folder
    def run(
        self,
        lm: "LM",
        folder: RunFolder,
        facts: tuple[Fact, ...],
        *,
        memory: int | None = None,
        progress: Progress = no_progress,
    ) -> None:
        """Trace the facts that are not yet in the folder."""
        from factscope.tracing.corruption import default_noise_scale
        from factscope.tracing.trace import trace_many

        finished = {record.fact for record in folder.trace_records()}
        progress(sum(fact in finished for fact in facts) / max(1, len(facts)))
        # σ is that of all subjects of the run, so that a resumed run adds the same noise.
        scale = default_noise_scale(lm, self.settings.corruption, facts)
        for record in trace_many(
            lm, facts, self.settings, scale=scale, memory=memory, finished=finished
        ):
            folder.append(record)
            progress(1 / len(facts))
