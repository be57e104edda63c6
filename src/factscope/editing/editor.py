"""Editor: facts → an Edit that writes them."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from factscope.editing.edit import Edit
from factscope.errors import FactscopeError
from factscope.facts import Fact
from factscope.progress import Progress

if TYPE_CHECKING:
    from factscope.lm.model import LM

__all__ = ["Editor", "map_valid", "raise_first_error"]

T = TypeVar("T")
U = TypeVar("U")


@runtime_checkable
class Editor(Protocol):
    """A method with its settings: a frozen dataclass that can be called."""

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values; those that depend on the model are not settled."""
        ...

    def resolve(self, lm: "LM") -> "Editor":
        """The same with what the model and the disk decide written out: prefixes, statistics.

        It then does the same on a model that edits have changed, and reads nothing twice.
        """
        ...

    def __call__(self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = ...) -> Edit:
        """One edit that writes all the facts together."""
        ...

    def each(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = lambda share: None
    ) -> list[Edit]:
        """An edit for each fact alone, as if the others were not there; solved in batches."""
        return raise_first_error(self.attempt(lm, facts, progress=progress))

    def attempt(
        self, lm: "LM", facts: Sequence[Fact], *, progress: Progress = ...
    ) -> list[Edit | FactscopeError]:
        """The same, but a fact that cannot be written leaves its error and not the others'."""
        ...


def raise_first_error(results: Sequence[T | FactscopeError]) -> list[T]:
    """The results, or the first error among them, raised."""
    for result in results:
        if isinstance(result, FactscopeError):
            raise result
    return [result for result in results if not isinstance(result, FactscopeError)]


def map_valid(
    items: Sequence[T | FactscopeError], change: Callable[[list[T]], Sequence[U | FactscopeError]]
) -> list[U | FactscopeError]:
    """Change all items at once, errors left where they are."""
    good = [item for item in items if not isinstance(item, FactscopeError)]
    changed = iter(change(good) if good else [])
    return [item if isinstance(item, FactscopeError) else next(changed) for item in items]
