"""Request bodies, and the facts and settings that they describe.

Settings of traces and edits come from the dataclasses `Tracing`, `Rome` and `Memit`: a body holds
a dict of setting names (those of the command line's flags) and values, and `describe_settings`
lists names, defaults, choices and help texts for the page's forms.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar, get_args

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, Field

from factscope.analysis.effects import TABLES
from factscope.editing.editor import Editor
from factscope.editing.settings import editor
from factscope.errors import BadFact, BadSetting, LimitExceeded
from factscope.facts import Case, Fact
from factscope.records import KINDS
from factscope.serve.examples import suggest_neighbours
from factscope.serve.limits import ServerLimits
from factscope.settings import build, settings_of
from factscope.tracing.settings import Corruption, Tracing

T = TypeVar("T")

# Only settings that read no file and do not multiply the cost of a request may be listed here.
TraceSetting = Literal[
    "distribution", "noise", "replace", "extra-tokens", "samples", "seed", "window", "metric",
    "direction",
]  # fmt: skip
TableSetting = Literal["knockout-window", "attribution"]
"""Settings of single tables: they are next to these tables, not in the form of the trace."""
EditSetting = Literal["token", "kl-weight", "weight-decay"]
Method = Literal["rome", "r-rome", "memit"]
TRACE_SETTINGS: tuple[str, ...] = get_args(TraceSetting)
TABLE_SETTINGS: tuple[str, ...] = get_args(TableSetting)
EDIT_SETTINGS: tuple[str, ...] = get_args(EditSetting)
METHODS: tuple[str, ...] = get_args(Method)
MAX_LAYERS = 10
"""Layers that MEMIT edits in one request."""

PAGE_TABLES = {**TABLES, "heads": ("heads", ""), "knockout": ("knockout", "")}
"""Tables that a request may name."""

# Bounds of any request, whatever the limits of the server.
Text = Annotated[str, Field(max_length=4000)]
Texts = Annotated[list[Text], Field(max_length=64)]
Integer = Annotated[int, Field(strict=True, ge=-(2**53), le=2**53)]  # exact in JavaScript
EditIds = Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=64)]
Value = bool | Integer | float | Annotated[str, Field(max_length=40)]


def default_tracing(limits: ServerLimits) -> Tracing:
    """Defaults of traces on the page: fewer noise samples than elsewhere, for a quick answer."""
    return Tracing(corruption=Corruption(samples=min(5, limits.max_samples)))


def describe_settings(base: Any, names: Sequence[str]) -> list[dict[str, Any]]:
    """Form controls for the named settings of a dataclass; the values of `base` are defaults."""
    controls = []
    for setting in (settings_of(base)[name] for name in names):
        control = "text"
        if setting.switch:
            control = "checkbox"
        elif setting.choices:
            control = "select"
        elif setting.type in (int, float) and setting.flag.parse is None:
            control = "number"
        default = setting.default if setting.switch else setting.text(setting.default)
        minimum = [limit.ge for limit in setting.limits if isinstance(limit, Ge)]
        controls.append(
            {
                "name": setting.name, "help": setting.help, "control": control,
                "default": default, "choices": setting.choices,
                "min": minimum[0] if minimum else None,
                "step": 1 if setting.type is int else "any",
            }
        )  # fmt: skip
    return controls


def apply_settings(base: T, given: Mapping[Any, Any]) -> T:
    """The base with the given settings."""
    try:
        return build(base, given)
    except BadSetting as error:
        raise BadSetting(str(error).removeprefix("--")) from None  # no flags on the page


class Body(BaseModel):
    """A request body. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PromptBody(Body):
    """A prompt."""

    prompt: Text


class FactBody(PromptBody):
    """A prompt and the subject in it."""

    subject: Text
    occurrence: Integer | None = None
    """Which occurrence of the subject in the prompt, from 1; by default the last."""

    def fact(self, limits: ServerLimits, target: str | None = None) -> Fact:
        """The fact; an error if the subject is not in the prompt."""
        limits.check_text("prompt", self.prompt)
        limits.check_text("subject", self.subject)
        return Fact.from_text(self.prompt, self.subject, self.occurrence, target=target)


class TraceBody(FactBody):
    """A fact to trace."""

    tables: Annotated[list[Text], Field(max_length=64)] = list(KINDS)
    """Tables to compute: states, mlp, attn, states severed mlp, gradients states, lens clean,
    attribution states, heads, knockout, …"""
    settings: dict[TraceSetting | TableSetting, Value] = {}
    token: Annotated[int, Field(strict=True, ge=0, le=4000)] | None = None
    """Token, from 0, at which the table heads restores heads; by default the last."""
    answer: Text | None = None
    """Answer to trace; by default the most likely next token."""
    foil: Text | None = None
    """The token that the metric logit-difference compares the answer with; by default the corrupted
    run's most likely one."""
    replacement: Text | None = None
    """The subject of the corrupted run, if the distribution is tokens; by default a subject of the
    same relation with as many tokens."""
    edits: EditIds = []
    """Ids of the session's edits to apply to the model."""

    def fact(self, limits: ServerLimits, target: str | None = None) -> Fact:
        """The fact with its replacement."""
        replacement = limits.check_text("replacement", self.replacement or "").strip()
        return replace(super().fact(limits, target), replacement=replacement or None)

    def table_names(self) -> set[tuple[str, str]]:
        """For each table its field in a `TraceRecord` and the key in that field."""
        unknown = [name for name in self.tables if name not in PAGE_TABLES]
        if unknown or not self.tables:
            value = repr(unknown[0][:80]) if unknown else "empty"
            raise BadSetting(f"tables is {value}; choose from {', '.join(PAGE_TABLES)}")
        return {PAGE_TABLES[name] for name in self.tables}

    def traced_answer(self, limits: ServerLimits) -> str | None:
        """The answer to trace; None for the most likely next token."""
        return limits.check_text("answer", self.answer or "").strip() or None

    def traced_foil(self, limits: ServerLimits) -> str | None:
        """The token to compare with; None for the default, and for metrics without one."""
        foil = limits.check_text("foil", self.foil or "").strip() or None
        return foil if self.settings.get("metric") == "logit-difference" else None

    def tracing(self, limits: ServerLimits, tables: Collection[tuple[str, str]]) -> Tracing:
        """The settings that compute these tables, which are fields and keys of a record."""
        given = apply_settings(default_tracing(limits), self.settings)
        if (samples := given.corruption.samples) > limits.max_samples:
            raise LimitExceeded(f"samples is {samples}; give at most {limits.max_samples}")
        fields = {field for field, _ in tables}
        of_kinds = ("restored", "gradients", "attribution")
        kinds = {kind for field, kind in tables if field in of_kinds}
        method = "atp" if given.attribution == "none" else given.attribution
        return replace(
            given,
            kinds=tuple(kind for kind in KINDS if kind in kinds),
            sever=tuple(module for module in ("attn", "mlp") if ("severed", module) in tables),
            gradients="gradients" in fields,
            lens="lens" in fields,
            heads="heads" in fields,
            knockout="knockout" in fields,
            attribution=method if "attribution" in fields else "none",
        )


class EditBody(FactBody):
    """A fact to edit."""

    target: Text
    """The new object."""
    layer: Integer | None = None
    """Layer to edit; by default the model's. MEMIT takes `layers` instead."""
    layers: Annotated[list[Integer], Field(min_length=2, max_length=2)] | None = None
    """First and last layer of the range that MEMIT edits; by default the model's."""
    method: Method = "rome"
    without_statistics: bool = False
    """Edit with C = I, for layers without a second moment on this machine."""
    settings: dict[EditSetting, Value] = {}
    paraphrases: Texts = []
    neighbours: Texts = []
    """Prompts about other subjects; by default suggested ones."""
    generations: Texts = []
    """Prompts to continue before and after the edit; by default the fact's own."""
    from_link: bool = False
    """Whether the page made this edit from the link of another session; it is listed apart."""

    def case(self, limits: ServerLimits) -> Case:
        """The edited fact and the prompts to evaluate it with."""
        target = limits.check_text("new object", self.target).strip()
        if not target:
            raise BadFact("the new object is empty; give the answer that the model should predict")
        fact = self.fact(limits, target)
        neighbours = limits.check_prompts("neighbours", self.neighbours)
        return Case(
            fact=fact,
            paraphrases=limits.check_prompts("paraphrases", self.paraphrases),
            neighbours=neighbours or suggest_neighbours(fact),
            generations=limits.check_prompts("generations", self.generations),
        )

    def editor(self, n_layers: int) -> Editor:
        """The editing method with its settings, for a model with that many layers."""
        layer: dict[str, Any] = {"layer": self.layer}
        if self.method == "memit":
            layer = {"layers": self._layers(n_layers)}
        elif self.layers is not None:
            raise BadSetting(f"layers is for memit; give {self.method} one layer as layer")
        second_moment = "identity" if self.without_statistics else None
        base = editor(self.method, second_moment=second_moment, **layer)
        return apply_settings(base, self.settings)

    def _layers(self, n_layers: int) -> tuple[int, ...] | None:
        """The layers that MEMIT edits; None for the model's default."""
        if self.layer is not None:
            raise BadSetting("layer is for one layer; give memit layers, such as [4, 8]")
        if self.layers is None:
            return None
        first, last = self.layers
        if not 0 <= first <= last < n_layers or last - first >= MAX_LAYERS:
            raise BadSetting(
                f"layers is {first} to {last}; give a range of at most {MAX_LAYERS} of the layers "
                f"0 to {n_layers - 1}"
            )
        return tuple(range(first, last + 1))


class PredictBody(Body):
    """Prompts to continue with the unedited model and with some of the session's edits."""

    prompts: Texts = []
    edits: EditIds = []
    """Ids of the edits to apply."""
    max_new_tokens: Integer | None = None
    """Tokens of a continuation; by default the server's limit."""

    def new_tokens(self, limits: ServerLimits) -> int:
        """`max_new_tokens` within the server's limit."""
        if self.max_new_tokens is None:
            return limits.max_new_tokens
        if not 0 <= self.max_new_tokens <= limits.max_new_tokens:
            raise BadSetting(
                f"max_new_tokens is {self.max_new_tokens}; give 0 to {limits.max_new_tokens}"
            )
        return self.max_new_tokens
