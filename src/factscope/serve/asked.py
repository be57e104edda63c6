"""What the page asks for: bodies of requests, and the facts and settings that they mean."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from factscope.analysis.grids import TABLES
from factscope.errors import BadFact, BadSetting
from factscope.facts import Case, Fact
from factscope.records import KINDS
from factscope.serve.limits import Limits
from factscope.tracing.corrupt import Corruption
from factscope.tracing.settings import Tracing

__all__ = ["AskBody", "EditBody", "FactBody", "LocateBody"]

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

    def fact(self, limits: Limits, target: str | None = None) -> Fact:
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

    def corruption(self, limits: Limits) -> Corruption:
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

    def settings(self, limits: Limits) -> Tracing:
        """The settings in which these tables are made."""
        names = self.names()
        kinds = {kind for table, kind in names if table != "severed"}
        return Tracing(
            corruption=self.corruption.corruption(limits),
            kinds=tuple(kind for kind in KINDS if kind in kinds),
            window=self.window,
            sever=tuple(sorted(kind for table, kind in names if table == "severed")),
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

    def case(self, limits: Limits) -> Case:
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

    def texts(self, limits: Limits) -> tuple[str, ...]:
        """The prompts, if they can be asked."""
        return limits.check_prompts("prompts", self.prompts)

    def length(self, limits: Limits) -> int:
        """How many tokens are written after each."""
        wanted = limits.written if self.tokens is None else self.tokens
        if not 0 <= wanted <= limits.written:
            raise BadSetting(f"tokens is {wanted}; give a number from 0 to {limits.written}")
        return wanted
