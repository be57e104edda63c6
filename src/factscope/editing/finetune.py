"""Fine-tuning on a fact: FT, FT+L and AttnEdit (App. E.1 and I).

One procedure, three settings. Adam changes some weights of one layer until the model gives the new
object after the fact's bare prompt (editing.descent):

    ft           the MLP's output weight, as far as it takes
    ft_l         the same, no entry further than a bound from where it was
    attn_edit    what makes queries, keys and values, within a bound
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from factscope.editing.batches import Progress, halving, with_fewer
from factscope.editing.descent import (
    Adam,
    Found,
    Objective,
    Part,
    Taught,
    descend,
    fitting,
    pose,
    spread_of,
    taught,
)
from factscope.editing.edit import Dense, Edit
from factscope.editing.editor import Done, Editor, all_of, each_or_error
from factscope.editing.finetune_defaults import Method, defaults
from factscope.editing.guard import with_health
from factscope.editing.requests import Request, requests_of
from factscope.errors import BadFact, BadSetting, FactscopeError, NoProgress
from factscope.facts import Fact

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["FINE_TUNES", "FineTune", "Preset", "attn_edit", "ft", "ft_l"]

Weights = Literal["mlp", "attn"]
Preset = Literal["default", "paper"]


@dataclass(frozen=True, kw_only=True)
class FineTune(Editor):
    """Adam on the weights of one layer; `ft`, `ft_l` and `attn_edit` make the paper's three."""

    layer: int | None = None
    """The layer to change; None takes the model's in `finetune_defaults`."""
    weights: Weights = "mlp"
    """What to change there: the MLP's output weight, or what makes queries, keys and values."""
    bound: float | Literal["default"] | None = None
    """The most that an entry may change by; None for no bound, "default" for the model's in
    `finetune_defaults`."""
    steps: int = 25
    """How often the weights are changed at most."""
    rate: float = 5e-4
    """Adam's learning rate."""
    stop: float = 0.01
    """The loss at which a fact is done: as in the paper's code; its text says 0.03."""
    objective: Objective = "each-token"
    """The mean over the object's tokens of -log P: each after the ones before it, or, as in the
    paper's code, all of them right after the prompt, which teaches a longer object wrongly."""
    bias: bool = False
    """Whether the modules' biases change too, as they do in the paper's code."""
    at_once: int | None = None
    """How many facts go through the model at once; None for as many as memory holds."""

    def __post_init__(self) -> None:
        _choice("weights", self.weights, get_args(Weights))
        _choice("objective", self.objective, get_args(Objective))
        if isinstance(self.bound, str):
            _choice("bound", self.bound, ("default",))
        elif self.bound is not None and not self.bound > 0:
            raise BadSetting(f"bound is {self.bound}; it must be above 0, or None for no bound")
        if self.steps < 1:
            raise BadSetting(f"steps is {self.steps}; fine-tuning needs at least one")
        if not self.rate > 0:
            raise BadSetting(f"rate is {self.rate}; it must be above 0")
        if self.at_once is not None and self.at_once < 1:
            raise BadSetting(f"at_once is {self.at_once}; at least one fact must go through")

    @property
    def method(self) -> Method:
        """The method's name in edits and tables."""
        if self.weights == "attn":
            return "attn"
        return "ft" if self.bound is None else "ft-l"

    def resolved(self, lm: "LM") -> "FineTune":
        """The same with the model's own layer and bound filled in."""
        model = defaults(lm, self.method)
        layer = model.layer_in(lm) if self.layer is None else self.layer
        if not 0 <= layer < lm.n_layers:
            raise BadSetting(f"layer is {layer}; {lm.name} has layers 0 to {lm.n_layers - 1}")
        placed = replace(self, layer=layer)
        if self.bound != "default":
            return placed
        return replace(placed, bound=model.bound_for(spread_of(placed.parts(lm))))

    def settled(self, lm: "LM") -> "FineTune":
        """The same, if it can be done on this model."""
        self.ready(lm)
        return self

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; those that depend on the model are not settled."""
        return dict(vars(self))

    def __call__(self, lm: "LM", facts: Sequence[Fact], *, done: Done = lambda share: None) -> Edit:
        """One edit that writes all the facts together: their mean loss is what falls."""
        if not facts:
            raise BadFact("there are no facts to write; give at least one")
        ready = self.ready(lm)
        return with_health(lm, [ready.together(all_of(requests_of(lm, facts)), done)])[0]

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, done: Done = lambda share: None
    ) -> list[Edit | FactscopeError]:
        """An edit for each fact alone, or why there is none.

        An edit is as large as the weights that it changes, and is kept in main memory: for large
        models, come with some hundred facts at a time.
        """
        ready = self.ready(lm)
        edits = each_or_error(requests_of(lm, facts), lambda asked: ready.apart(asked, done))
        return each_or_error(edits, lambda edits: with_health(lm, edits))

    def ready(self, lm: "LM") -> "Ready":
        """The method on a model, with every default settled."""
        mine = self.resolved(lm)
        assert mine.layer is not None
        assert mine.bound != "default"
        adam = Adam(steps=mine.steps, rate=mine.rate, stop=mine.stop, bound=mine.bound)
        return Ready(settings=mine, lm=lm, layer=mine.layer, parts=mine.parts(lm), adam=adam)

    def parts(self, lm: "LM") -> list[Part]:
        """The parameters to change."""
        assert self.layer is not None
        modules = [lm.mlp_out(self.layer)] if self.weights == "mlp" else lm.attn_in(self.layer)
        kinds = ("weight", "bias") if self.bias else ("weight",)
        return [
            Part.of(lm, module, kind)
            for module in modules
            for kind in kinds
            if getattr(module, kind, None) is not None
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class Ready:
    """The method on a model."""

    settings: FineTune
    lm: "LM"
    layer: int
    parts: list[Part]
    adam: Adam

    def together(self, requests: Sequence[Request], done: Done) -> Edit:
        """One change for all the facts, which go through the model in pieces."""
        lessons, progress = self._lessons(requests), Progress(done)

        def fit(size: int) -> Found:
            pieces = [lessons[i : i + size] for i in range(0, len(lessons), size)]
            problems = [pose(self.lm, piece, self.layer) for piece in pieces]
            return descend(problems, self.parts, 1, self.adam, progress.within(0.0, 1.0))[0]

        found, _ = with_fewer(fit, self._at_once(lessons, own_change=False))
        return all_of([self._edit([lesson.fact for lesson in lessons], found)])[0]

    def apart(self, requests: Sequence[Request], done: Done) -> list[Edit | NoProgress]:
        """A change for each fact alone, many side by side."""
        lessons = self._lessons(requests)

        def fit(some: Sequence[Taught], done: Done) -> list[Edit | NoProgress]:
            problem = pose(self.lm, some, self.layer)
            founds = descend([problem], self.parts, len(some), self.adam, done)
            return [self._edit([t.fact], found) for t, found in zip(some, founds, strict=True)]

        return halving(lessons, self._at_once(lessons, own_change=True), fit, done)

    def _lessons(self, requests: Sequence[Request]) -> list[Taught]:
        return [taught(asked, self.settings.objective) for asked in requests]

    def _at_once(self, lessons: Sequence[Taught], *, own_change: bool) -> int:
        return self.settings.at_once or fitting(
            self.lm, self.layer, self.parts, lessons, own_change=own_change
        )

    def _edit(self, facts: Sequence[Fact], found: Found) -> Edit | NoProgress:
        """What was found, as a value, if it led somewhere."""
        if trouble := self._trouble(facts, found.losses):
            return trouble
        settings = asdict(self.settings)
        del settings["at_once"]  # it changes nothing
        return Edit(
            changes={p.name: Dense(x) for p, x in zip(self.parts, found.changes, strict=True)},
            model=self.lm.name,
            fingerprint=self.lm.fingerprint,
            method=self.settings.method,
            facts=tuple(facts),
            settings={**settings, "losses": [found.losses]},
        )

    def _trouble(self, facts: Sequence[Fact], losses: Sequence[float]) -> NoProgress | None:
        """Fine-tuning must have led somewhere."""
        shown = ", ".join(f"{loss:.3g}" for loss in losses)
        what = f"{facts[0].text!r} → {facts[0].target!r}"
        what += f" and {len(facts) - 1} more" if len(facts) > 1 else ""
        if not all(map(math.isfinite, losses)):
            return NoProgress(
                f"the loss of {what} is no number (by step: {shown}); "
                "lower the rate, or load the model in float32"
            )
        if losses[0] >= self.adam.stop and losses[-1] >= losses[0]:
            return NoProgress(
                f"fine-tuning layer {self.layer} got no nearer to {what} (loss by step: {shown}); "
                "try another layer, a lower rate, more steps or a larger bound"
            )
        return None


def ft(preset: Preset = "default", **settings: Any) -> FineTune:
    """FT: fine-tuning of the MLP's output weight without a bound."""
    return FineTune(**{**_preset(preset), **settings})


def ft_l(preset: Preset = "default", **settings: Any) -> FineTune:
    """FT+L: the same within a bound."""
    return FineTune(**{"bound": "default", **_preset(preset), **settings})


def attn_edit(preset: Preset = "default", **settings: Any) -> FineTune:
    """AttnEdit: fine-tuning of what makes queries, keys and values, within a bound."""
    own: dict[str, Any] = {"weights": "attn", "bound": "default", "rate": 1e-3}
    return FineTune(**{**own, **_preset(preset), **settings})


FINE_TUNES: dict[Method, Callable[..., FineTune]] = {"ft": ft, "ft-l": ft_l, "attn": attn_edit}
"""Method → what makes its settings."""

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {"objective": "last-position", "bias": True},
}
"""`paper` does what the paper's own code does, of which its text says neither."""


def _preset(name: str) -> dict[str, Any]:
    _choice("preset", name, tuple(PRESETS))
    return PRESETS[name]


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise BadSetting(f"{name} is {value!r}; choose from {', '.join(known)}")
