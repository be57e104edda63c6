"""Visitors and what is theirs: edits, which nobody else sees.

A visitor is a random number in a cookie. Nothing is remembered of one who has made no edit.
"""

import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from factscope.errors import NotHere, TooMuch
from factscope.records import EditRecord

if TYPE_CHECKING:
    from factscope.editing.edit import Edit
    from factscope.serve.limits import Limits

__all__ = ["COOKIE", "Made", "Visitors", "new_name", "visitor_in"]

COOKIE = "factscope"
NAME = re.compile(rf"(?:^|;\s*){COOKIE}=([0-9a-f]{{32}})(?:;|$)")


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """An edit that a visitor made."""

    id: str
    edit: "Edit"
    record: EditRecord
    asked: dict[str, Any]
    """The request that made it: whoever sends it again gets the same."""


@dataclass
class _Own:
    """What one visitor has."""

    made: dict[str, Made] = field(default_factory=dict)
    count: int = 0


class Visitors:
    """Every visitor's edits, as many as the limits allow."""

    def __init__(self, limits: "Limits") -> None:
        self._limits = limits
        self._own: OrderedDict[str, _Own] = OrderedDict()
        self._lock = threading.Lock()

    def edits(self, visitor: str) -> list[Made]:
        """A visitor's edits, the oldest first."""
        with self._lock:
            own = self._own.get(visitor)
            if own is None:
                return []
            self._own.move_to_end(visitor)
            return list(own.made.values())

    def check_room(self, visitor: str) -> None:
        """Refuse an edit that would be one too many."""
        if len(self.edits(visitor)) >= self._limits.edits:
            raise TooMuch(
                f"you have {self._limits.edits} edits, and this server keeps no more; remove one"
            )

    def keep(self, visitor: str, edit: "Edit", record: EditRecord, asked: dict[str, Any]) -> Made:
        """Remember an edit."""
        self.check_room(visitor)
        with self._lock:
            own = self._own.setdefault(visitor, _Own())
            self._own.move_to_end(visitor)
            own.count += 1
            made = Made(id=str(own.count), edit=edit, record=record, asked=asked)
            own.made[made.id] = made
            while len(self._own) > self._limits.visitors:
                self._own.popitem(last=False)
        return made

    def remove(self, visitor: str, id: str) -> None:
        """Forget an edit."""
        self.chosen(visitor, [id])
        with self._lock:
            own = self._own.get(visitor)
            if own is not None:
                own.made.pop(id, None)

    def chosen(self, visitor: str, ids: Sequence[str]) -> list[Made]:
        """Some of a visitor's edits, by their numbers."""
        own = {made.id: made for made in self.edits(visitor)}
        missing = [id for id in ids if id not in own]
        if missing:
            known = ", ".join(own) or "none"
            raise NotHere(
                f"you have no edit {missing[0][:20]!r} (there are: {known}); make it again"
            )
        return [own[id] for id in dict.fromkeys(ids)]

    def together(self, visitor: str, ids: Sequence[str]) -> "Edit | None":
        """The sum of some of a visitor's edits; None of none."""
        edits = [made.edit for made in self.chosen(visitor, ids)]
        return reduce(add, edits) if edits else None


def new_name() -> str:
    """A visitor's name, which nobody guesses."""
    return secrets.token_hex(16)


def visitor_in(cookies: str) -> str | None:
    """The visitor that a Cookie header names."""
    found = NAME.search(cookies)
    return found[1] if found else None
