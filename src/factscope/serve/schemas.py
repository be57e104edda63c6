"""What the page asks for: bodies of requests, and the facts and settings that they mean.

How much a server does for one visitor and for all of them; beyond it, a refusal in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from factscope.analysis.effects import TABLES
from factscope.errors import BadFact, BadSetting, LimitExceeded, PromptTooLong
from factscope.facts import Case, Fact
from factscope.records import KINDS
from factscope.tracing.settings import Corruption, Tracing

__all__ = [
    "AskBody",
    "EditBody",
    "FactBody",
    "LocateBody",
    "ServerLimits",
]


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The bounds of a server. With them, its memory is bounded too."""

    characters: int = 600
    """The longest text in a field."""
    tokens: int = 48
    """The longest prompt, as the model counts."""
    samples: int = 10
    """The most samples of the noise in a trace."""
    prompts: int = 12
    """The most prompts in a list: paraphrases, neighbours, questions."""
    written: int = 40
    """The most tokens that are written after a prompt."""
    waiting: int = 24
    """The most jobs that wait or run; the next is refused."""
    each: int = 2
    """The same for one visitor."""
    visitors: int = 500
    """How many visitors' edits are remembered; the one longest away is forgotten first."""
    edits: int = 12
    """The most edits of one visitor."""
    traces: int = 64
    """How many finished traces are remembered, to be downloaded or shown again."""
    body: int = 32_768
    """The most bytes of a request."""

    def check_text(self, name: str, text: str) -> str:
        """The text, if it is one that can be read, and not too long."""
        if len(text) > self.characters:
            raise LimitExceeded(
                f"the {name} has {len(text)} characters, this server reads at most "
                f"{self.characters}; shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadFact(
                f"the {name} holds half a character ({text[error.start]!r}); leave it out"
            ) from error
        return text

    def check_prompts(self, name: str, texts: Sequence[str]) -> tuple[str, ...]:
        """The prompts, if they are not too many; empty ones are left out."""
        if len(texts) > self.prompts:
            raise LimitExceeded(
                f"there are {len(texts)} {name}, this server takes at most {self.prompts}; "
                "leave some out"
            )
        return tuple(self.check_text(name, text).strip() for text in texts if text.strip())

    def check_samples(self, samples: int) -> int:
        """The samples of a trace, if they are not too many."""
        if samples > self.samples:
            raise LimitExceeded(
                f"samples is {samples}, this server draws at most {self.samples}; ask for fewer"
            )
        return samples

    def check_tokens(self, tokens: int) -> None:
        """A prompt's tokens, if they are not too many."""
        if tokens > self.tokens:
            raise PromptTooLong(
                f"the prompt has {tokens} tokens, this server reads at most {self.tokens}; "
                "shorten it"
            )


MOST = 4000
"""No field is longer, whatever the limits of the server."""
MANY = 64
"""No list is longer."""

Text = Annotated[str, Field(max_length=MOST)]
Texts = Annotated[list[Text], Field(max_length=MANY)]
Whole = Annotated[int, Field(strict=True, ge=-(2**53), le=2**53)]
"""A number that JavaScript can say, too."""


class Body(BaseModel):
    """A request: what it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class FactBody(Body):
    """A prompt with its subject marked in it."""

    prompt: Text
    subject: Text
    occurrence: Whole | None = None
    """Which of the subject's places in the prompt, from 1; the last where nothing is said."""

    def fact(self, limits: ServerLimits, target: str | None = None) -> Fact:
        """The fact, if it is one."""
        for name in ("prompt", "subject"):
            limits.check_text(name, getattr(self, name))
        return Fact.from_text(self.prompt, self.subject, self.occurrence, target=target)


class CorruptionBody(Body):
    """How the subject is hidden."""

    distribution: Literal["gaussian", "uniform", "embedding"] = "gaussian"
    level: float = 3.0
    in_sigmas: bool = True
    replace: bool = False
    extra_tokens: Whole = 0
    samples: Whole = 5
    seed: Whole = 0

    def corruption(self, limits: ServerLimits) -> Corruption:
        """The same as a setting."""
        limits.check_samples(self.samples)
        return Corruption(**self.model_dump())


class LocateBody(FactBody):
    """Which tables of a trace to make."""

    tables: Annotated[list[Text], Field(max_length=MANY)] = list(KINDS)
    """By their names: states, mlp, attn, states severed mlp, gradients states, …"""
    corruption: CorruptionBody = CorruptionBody()
    window: Whole = 10

    def names(self) -> set[tuple[str, str]]:
        """Where the tables are in a record."""
        unknown = [name for name in self.tables if name not in TABLES]
        if unknown or not self.tables:
            said = repr(unknown[0][:80]) if unknown else "nothing"
            raise BadSetting(f"the table {said} is not known; there are: {', '.join(TABLES)}")
        return {TABLES[name] for name in self.tables}

    def settings(self, limits: ServerLimits) -> Tracing:
        """The settings in which these tables are made."""
        names = self.names()
        kinds = {kind for table, kind in names if table != "severed"}
        return Tracing(
            corruption=self.corruption.corruption(limits),
            kinds=tuple(kind for kind in KINDS if kind in kinds),
            window=self.window,
            sever=tuple(m for m in ("attn", "mlp") if ("severed", m) in names),
            gradients=any(table == "gradients" for table, _ in names),
        )

    def base(self) -> dict[str, Any]:
        """What traces of the same fact in the same way have in common."""
        return self.model_dump(exclude={"tables"})


class EditBody(FactBody):
    """A fact to be rewritten."""

    target: Text
    layer: Whole | None = None
    """None for the model's default."""
    method: Literal["rome", "r-rome", "memit"] = "rome"
    without_statistics: bool = False
    """Leave the second moment out, where there is none of the layer."""
    paraphrases: Texts = []
    neighbours: Texts = []

    def case(self, limits: ServerLimits) -> Case:
        """The fact as it shall be, and what to ask afterwards."""
        target = limits.check_text("new object", self.target).strip()
        if not target:
            raise BadFact("the new object is empty; say what the model shall answer")
        return Case(
            fact=self.fact(limits, target),
            paraphrases=limits.check_prompts("paraphrases", self.paraphrases),
            neighbours=limits.check_prompts("neighbours", self.neighbours),
        )


class AskBody(Body):
    """Prompts to be continued by the model as it is and with some of the visitor's edits."""

    prompts: Texts = []
    edits: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=MANY)] = []
    """The numbers of those that are on."""
    tokens: Whole | None = None
    """How many are written after a prompt; None for as many as the server writes."""

    def texts(self, limits: ServerLimits) -> tuple[str, ...]:
        """The prompts, if they can be asked."""
        return limits.check_prompts("prompts", self.prompts)

    def length(self, limits: ServerLimits) -> int:
        """How many tokens are written after each."""
        wanted = limits.written if self.tokens is None else self.tokens
        if not 0 <= wanted <= limits.written:
            raise BadSetting(f"tokens is {wanted}; give a number from 0 to {limits.written}")
        return wanted
