"""Editor: a method with its settings. Called with a model and facts, it returns an Edit."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

from factscope.errors import BadFact, FactscopeError
from factscope.facts import Fact, check_facts
from factscope.progress import Progress, no_progress, shown
from factscope.settings import check

if TYPE_CHECKING:
    from factscope.editing.edit import Change, Edit
    from factscope.lm.model import LM

T = TypeVar("T")
U = TypeVar("U")


class BoundEditor(ABC):
    """A method bound to a model, every default resolved."""

    @abstractmethod
    def edit(self, facts: Sequence[Fact], progress: Progress) -> "Edit":
        """One edit for all facts."""

    @abstractmethod
    def attempt(self, facts: Sequence[Fact], progress: Progress) -> "list[Edit | FactscopeError]":
        """An edit for each fact on its own, or the error of a fact that cannot be edited."""


class Editor(ABC):
    """The settings of a method: a frozen dataclass that can be called.

    Importing an editor needs no torch; `bind` imports the method's algorithm.
    """

    def __post_init__(self) -> None:
        check(self)

    @property
    @abstractmethod
    def method(self) -> str:
        """Name of the method in edits, records and tables."""

    @abstractmethod
    def bind(self, lm: "LM", facts: Sequence[Fact]) -> BoundEditor:
        """The method on this model, every default resolved (the facts may choose the layer)."""

    @abstractmethod
    def resolve(self, lm: "LM") -> "Editor":
        """The same settings with defaults that depend on the model filled in.

        The resolved editor computes the same also after edits were applied to the model.
        """

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-compatible values; overridden where a field is not one."""
        return dict(vars(self))

    def new_edit(
        self, lm: "LM", changes: "Mapping[str, Change]", facts: Sequence[Fact], **results: Any
    ) -> "Edit":
        """An edit that records these settings and the results of the method, such as losses."""
        from factscope.editing.edit import Edit

        return Edit(
            changes=changes,
            model=lm.name,
            fingerprint=lm.fingerprint,
            method=self.method,
            facts=tuple(facts),
            settings={**self.to_dict(), **results},
        )

    def __call__(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress | None = None
    ) -> "Edit":
        """One edit for all facts. Notebooks show a progress bar by default."""
        check_facts(facts)
        if not facts:
            raise BadFact("there are no facts to write; give at least one")
        with shown(progress) as report:
            return self.bind(lm, facts).edit(facts, report)

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = no_progress
    ) -> "list[Edit | FactscopeError]":
        """An edit for each fact on its own, or the error of a fact that cannot be edited."""
        check_facts(facts)
        return self.bind(lm, facts).attempt(facts, progress)

    def each(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress | None = None
    ) -> "list[Edit]":
        """An edit for each fact on its own; raises the first error."""
        with shown(progress) as report:
            return raise_first_error(self.attempt(lm, facts, progress=report))


def raise_first_error(results: Sequence[T | FactscopeError]) -> list[T]:
    """The results, if there is no error among them."""
    for result in results:
        if isinstance(result, FactscopeError):
            raise result
    return [result for result in results if not isinstance(result, FactscopeError)]


def results_or_errors(
    function: Callable[..., U | FactscopeError], *items: Iterable[Any]
) -> list[U | FactscopeError]:
    """Map the function over the items; an error that it raises takes the place of the result."""
    results: list[U | FactscopeError] = []
    for values in zip(*items, strict=True):
        try:
            results.append(function(*values))
        except FactscopeError as error:
            results.append(error)
    return results


def sum_edits(edits: "Sequence[Edit]", *results: str) -> "Edit":
    """The sum of one editor's edits; joins these results in their settings, lists by fact."""
    if len(edits) == 1:
        return edits[0]
    joined = {name: [x for edit in edits for x in edit.settings[name]] for name in results}
    return replace(reduce(operator.add, edits), settings={**edits[0].settings, **joined})


def map_valid(
    items: Sequence[T | FactscopeError], function: Callable[[list[T]], Sequence[U | FactscopeError]]
) -> list[U | FactscopeError]:
    """Apply a batch function to the items that are not errors; errors keep their positions."""
    valid = [item for item in items if not isinstance(item, FactscopeError)]
    results = iter(function(valid) if valid else [])
    return [item if isinstance(item, FactscopeError) else next(results) for item in items]
