"""A setting is one dataclass field with its documentation under it.

`settings_of` lists the fields of a dataclass and of the dataclasses nested in it: flag name, type,
default, documentation, choices and range. The flags of the command line, the keys of recipes and
docs/commands.md derive from that list.

    @dataclass(frozen=True, kw_only=True)
    class Tracing:
        window: Annotated[int, Ge(1)] = 10
        \"\"\"Layers restored together.\"\"\"

    build(Tracing(), {"window": "3"})    # Tracing(window=3)
    build(Tracing(), {"window": "0"})    # BadSetting: --window is 0; give 1 or more

How text is parsed follows from the type: `tuple[int, ...]` takes 5, 3-8 or 3,5,8;
`tuple[tuple[int, int], ...]` takes 5x10,10x10; other tuples take several values, repeated or
separated by commas (paths: repeated only); `none` is None, or an empty tuple. A `Flag` in the
annotation changes the name or the parser; a field marked `INTERNAL` is not a flag.
"""

import ast
import builtins
import difflib
import inspect
import math
import operator
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from factscope.errors import BadSetting

T = TypeVar("T")
Pair = tuple[int, int]

Seed = Annotated[int, Ge(0), Lt(2**32)]
"""A random seed; numpy takes no others."""

KINDS: dict[Any, str] = {
    int: "a whole number", float: "a number", str: "text", Path: "a path", bool: "true or false",
    Pair: "pairs such as 5x10", NoneType: "none",
}  # fmt: skip
"""The types that text can be parsed to, with their names in messages."""


@dataclass(frozen=True)
class Flag:
    """How a field is given as text, where its name and type do not determine it."""

    name: str = ""
    """The flag without dashes, if it is not the field's name."""
    short: str = ""
    """One letter."""
    parse: Callable[[Any], Any] | None = None
    """Text or a TOML value to the field's value. A ValueError says what to write instead."""
    show: Callable[[Any], str] = str
    """The inverse of `parse`, for defaults."""
    also: tuple[str, ...] = ()
    """Further fields that `parse` sets: it then returns a tuple, this field's value first."""
    repeated: bool = False
    """Whether the flag can be given several times; `parse` then takes a list."""
    positional: bool = False
    required: bool = False
    """Whether it must be given though the field has a default."""


INTERNAL = Flag(name="-")
"""Marks a field that is not a flag."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of a dataclass, or of one nested in it, as users give it."""

    path: tuple[str, ...]
    """Attribute names from the root: ("search", "steps")."""
    type: Any
    default: Any
    group: str
    """First line of the docstring of the dataclass that the field is in."""
    help: str = ""
    flag: Flag = Flag()
    limits: tuple[Any, ...] = ()
    required: bool = False

    @property
    def name(self) -> str:
        """The flag without dashes, and the key in a recipe."""
        return self.flag.name or self.path[-1].replace("_", "-")

    @property
    def display_name(self) -> str:
        """The name in messages."""
        return self.name.upper() if self.flag.positional else f"--{self.name}"

    @property
    def types(self) -> tuple[Any, ...]:
        """The types that one value can have."""
        return _members(self.type if self.element is None else self.element)

    @property
    def element(self) -> Any | None:
        """The type of the elements of a tuple; None for a single value."""
        if self.flag.parse is not None:
            return None
        tuples = [t for t in _members(self.type) if get_origin(t) is tuple and t != Pair]
        return get_args(tuples[0])[0] if tuples else None

    @property
    def repeated(self) -> bool:
        """Whether the flag can be given several times."""
        return self.element is not None or self.flag.repeated

    @property
    def switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool and self.flag.parse is None

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words, if only these are allowed."""
        literal = [t for t in self.types if t is not NoneType]
        if self.flag.parse is not None or any(get_origin(t) is not Literal for t in literal):
            return ()
        return tuple(str(word) for t in literal for word in get_args(t))

    def text(self, value: Any) -> str:
        """A value as the user would write it."""
        if value is None or value == ():
            return "none"
        if self.flag.parse is not None:
            return self.flag.show(value)
        if isinstance(value, tuple) and self.element is not None:
            return ",".join(map(_text, value))
        return _text(value)

    def parse(self, given: Any) -> Any:
        """A value from text, several texts, or TOML."""
        if given in (None, "none") and NoneType in _members(self.type):
            return None
        if self.flag.parse is not None:
            try:
                value = self.flag.parse(given)
            except ValueError as error:
                raise self.bad(given, str(error)) from None
        elif self.element is None:
            value = self._value(given)
        else:
            value = self._values(given)
        number = value[0] if self.flag.also else value
        if not _within(number, self.limits):
            raise self.bad(number, _range_advice(self.limits))
        return value

    def bad(self, given: Any, advice: str) -> BadSetting:
        """The error for a value that cannot be used."""
        value = ", ".join(map(repr, given)) if isinstance(given, list | tuple) else repr(given)
        return BadSetting(f"{self.display_name} is {value}; {advice}")

    def _values(self, given: Any) -> Any:
        words = list(given) if isinstance(given, list | tuple) else [given]
        if self.element not in (Path, str):  # a comma may be part of a file name or a prompt
            words = [w.strip() for word in words for w in str(word).split(",") if w.strip()]
        if words in (["none"], [None]) and not self.required:
            return None if NoneType in _members(self.type) else ()
        if not words and given not in ([], ()):
            raise self.bad(given, self.expected)
        if self.element is int:
            return tuple(sorted({layer for word in words for layer in self._range(word)}))
        return tuple(self._value(word) for word in words)

    def _range(self, word: str) -> range:
        """The integers of "5" or "3-8"."""
        ends = re.fullmatch(r"(\d{1,9})(?:\s*-\s*(\d{1,9}))?", word)
        if ends is None:
            raise self.bad(word, "write 5, 3-8 or 3,5,8")
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if last < first:
            raise self.bad(word, f"write {last}-{first}")
        if last > MAX_INDEX:
            raise self.bad(word, f"give numbers up to {MAX_INDEX}")
        return range(first, last + 1)

    def _value(self, given: Any) -> Any:
        if NoneType in self.types and given in (None, "none"):
            return None
        for kind in self.types:
            try:
                return _convert(given, kind)
            except (TypeError, ValueError):
                continue
        raise self.bad(given, self.expected)

    @property
    def expected(self) -> str:
        """What to give, for a message."""
        if self.choices:
            return "choose from " + ", ".join(self.choices)
        words: list[str] = []
        for kind in self.types:
            if get_origin(kind) is Literal:
                words += map(str, get_args(kind))
            elif kind in KINDS:
                words.append(KINDS[kind])
            elif isinstance(kind, type) and is_dataclass(kind):
                words.append(f"a {kind.__name__}")
        if not words:  # only types that cannot be parsed, such as an editor
            return "give a value of its documented type"
        return "give " + ", ".join(words[:-1]) + (" or " if words[1:] else "") + words[-1]


def settings_of(kind: Any) -> dict[str, Setting]:
    """Flag name to setting, for a dataclass, or an instance whose values are the defaults."""
    by_name: dict[str, Setting] = {}
    for setting in _flatten(kind, ()):
        if setting.name in by_name:
            raise TypeError(f"--{setting.name} would be the flag of two fields of {kind}")
        by_name[setting.name] = setting
    return by_name


def build(base: T | type[T], given: Mapping[str, Any]) -> T:
    """The base, or a new instance of a class, with the given settings parsed and set."""
    known = settings_of(base)
    changes: dict[tuple[str, ...], Any] = {}
    for name, text in given.items():
        if name not in known:
            raise BadSetting(unknown_flag(name, known))
        setting = known[name]
        value = setting.parse(text)
        if setting.flag.also:
            value, *others = value
            for other, x in zip(setting.flag.also, others, strict=True):
                changes[(*setting.path[:-1], other)] = x
        changes[setting.path] = value
    for name, setting in known.items():
        if setting.required and name not in given:
            raise BadSetting(f"{setting.display_name} is required: {setting.help}")
    return _replace(base, changes)


def unknown_flag(name: str, known: Mapping[str, Setting]) -> str:
    """The message for a flag that does not exist."""
    close = difflib.get_close_matches(name, known, n=1)
    flags = ", ".join(setting.display_name for setting in known.values())
    advice = f"did you mean --{close[0]}?" if close else f"the flags are {flags}"
    return f"--{name} is not known; {advice}"


def check(value: Any) -> None:
    """Raise BadSetting for a field of a wrong type, choice or range; for `__post_init__`.

    Lists become tuples, and text becomes a path where a path is the only possibility.
    """
    for setting in _fields(type(value)):
        name = setting.path[-1]
        x = getattr(value, name)
        kinds = _members(setting.type)
        if isinstance(x, list | range) and any(get_origin(kind) is tuple for kind in kinds):
            x = tuple(tuple(item) if isinstance(item, list) else item for item in x)
            object.__setattr__(value, name, x)
        elif isinstance(x, str) and set(kinds) <= {Path, NoneType}:
            x = Path(x)
            object.__setattr__(value, name, x)
        if not _fits(x, setting.type):
            plain = replace(setting, flag=Flag())  # the type of the value, not of its text
            wrong, advice = x, plain.expected
            if plain.element is not None and isinstance(x, tuple):
                wrong = next(item for item in x if not _fits(item, plain.element))
            elif plain.element is not None:
                advice = f"give a tuple such as ({x!r},)"
            raise BadSetting(f"{name} is {wrong!r}; {advice}")
        if not _within(x, setting.limits):
            raise BadSetting(f"{name} is {x}; {_range_advice(setting.limits)}")


# ---- reading the fields


def _flatten(kind: Any, path: tuple[str, ...]) -> Iterator[Setting]:
    """The settings of a dataclass and of those nested in it; `path` leads to it from the root."""
    instance, cls = (None, kind) if isinstance(kind, type) else (kind, type(kind))
    docs = _docs(cls)
    for setting in _fields(cls):
        if setting.flag is INTERNAL:
            continue
        name = setting.path[-1]
        default = setting.default if instance is None else getattr(instance, name)
        if is_dataclass(default) and setting.flag.parse is None:
            yield from _flatten(default, (*path, name))
        else:
            yield replace(
                setting, path=(*path, name), default=default, help=docs.get(name, ""),
                required=setting.flag.required or (setting.required and instance is None),
            )  # fmt: skip


@cache
def _fields(kind: Any) -> tuple[Setting, ...]:
    """The fields of one dataclass, its own before those that it inherits."""
    hints: dict[str, Any] = {}
    scopes: dict[str, Mapping[str, Any]] = {}
    for base in kind.__mro__:
        # Names that are imported for type checkers only become `object`, which cannot be parsed.
        names = defaultdict(lambda: object, vars(builtins) | vars(sys.modules[base.__module__]))
        for name, hint in inspect.get_annotations(base).items():
            if name not in hints:
                hints[name] = eval(hint, {}, names) if isinstance(hint, str) else hint
                scopes[name] = names
    by_name = {field.name: field for field in fields(kind)}
    settings = []
    for name, hint in hints.items():
        if name not in by_name:  # a class variable
            continue
        notes: Sequence[Any] = ()
        if get_origin(hint) is Annotated:
            hint, *notes = get_args(hint)
        if isinstance(hint, ForwardRef):
            hint = eval(hint.__forward_arg__, {}, scopes[name])
        factory = by_name[name].default_factory
        default = by_name[name].default if factory is MISSING else factory()
        required = default is MISSING
        setting = Setting(
            path=(name,), type=hint, default=None if required else default, required=required,
            group=(kind.__doc__ or "").split("\n")[0].rstrip("."),
            flag=next((note for note in notes if isinstance(note, Flag)), Flag()),
            limits=tuple(note for note in notes if isinstance(note, Ge | Gt | Le | Lt)),
        )  # fmt: skip
        settings.append(setting)
    return tuple(settings)


@cache
def _docs(kind: type) -> dict[str, str]:
    """Field name to the string under it; a class's own strings before those of its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            match node, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def _members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _replace(value: Any, changes: Mapping[tuple[str, ...], Any]) -> Any:
    """`dataclasses.replace` along paths; a class is called instead."""
    values: dict[str, Any] = {}
    for name in dict.fromkeys(path[0] for path in changes):
        nested = {path[1:]: x for path, x in changes.items() if path[0] == name}
        if () in nested:
            values[name] = nested[()]
        elif isinstance(value, type):
            default = next(setting.default for setting in _fields(value) if setting.path == (name,))
            values[name] = _replace(default, nested)
        else:
            values[name] = _replace(getattr(value, name), nested)
    return value(**values) if isinstance(value, type) else replace(value, **values)


# ---- values


def _convert(given: Any, kind: Any) -> Any:
    """A value of one type; ValueError or TypeError if the text does not fit."""
    if get_origin(kind) is Literal:
        return get_args(kind)[get_args(kind).index(given)]
    if kind == Pair:
        pair = re.fullmatch(r"(\d+)x(\d+)", str(given))
        if pair is None:
            raise ValueError
        return int(pair[1]), int(pair[2])
    if kind is bool:
        if isinstance(given, bool):
            return given
        raise ValueError
    if kind not in KINDS or kind is NoneType or isinstance(given, bool | list | tuple):
        raise ValueError
    if kind is int and isinstance(given, float):
        raise ValueError  # int(3.7) would be 3
    if kind is float and not math.isfinite(float(given)):
        raise ValueError
    if kind is Path and (not given or "\0" in str(given)):
        raise ValueError
    return kind(given)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fits(x: Any, kind: Any) -> bool:
    """Whether a Python value has the annotated type; unknown types fit all but plain values."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(x, member) for member in args)
    if origin is Literal:
        return x.__class__ is str and x in args
    if origin is tuple:
        kinds = args[:1] * len(x) if args[1:] == (...,) and isinstance(x, tuple) else args
        return isinstance(x, tuple) and len(x) == len(kinds) and all(map(_fits, x, kinds))
    if origin is Sequence:
        several = isinstance(x, Sequence) and not isinstance(x, str)
        return several and all(_fits(item, args[0]) for item in x)
    if kind in (int, float):
        number = Integral if kind is int else Real
        return isinstance(x, number) and not isinstance(x, bool) and math.isfinite(x)
    if isinstance(kind, type) and (kind in KINDS or is_dataclass(kind)):
        return isinstance(x, kind)
    return kind is Any or not isinstance(x, str | Real | NoneType)


MAX_INDEX = 9999
"""Largest number in a range such as 3-8: no model has more layers."""

LIMITS = {Ge: "{} or more", Gt: "more than {}", Le: "{} or less", Lt: "less than {}"}


def _bound(limit: Any) -> tuple[str, Any]:
    """The name of the comparison, as in `operator`, and the number to compare with."""
    name = type(limit).__name__.lower()
    return name, getattr(limit, name)


def _within(x: Any, limits: Sequence[Any]) -> bool:
    """Whether a number, or every number of a tuple, is finite and in its range."""
    if isinstance(x, tuple):
        return all(_within(item, limits) for item in x)
    if not isinstance(x, Real):
        return True
    compared = [getattr(operator, name)(x, bound) for name, bound in map(_bound, limits)]
    return math.isfinite(x) and all(compared)


def _range_advice(limits: Sequence[Any]) -> str:
    """The allowed range: "give 1 or more"."""
    bounds = [LIMITS[type(x)].format(_bound(x)[1]) for x in limits]
    return "give " + (" and ".join(bounds) or "a finite number")
