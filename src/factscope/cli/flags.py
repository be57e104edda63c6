"""Commands whose flags are the fields of a dataclass, and the flags that many commands share.

A command is a function of one value, its options. cyclopts parses flags and renders the help;
`factscope.settings` parses the values, so that flags and recipes have the same names and messages.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args, get_origin

from annotated_types import Ge
from cyclopts import Group, Parameter
from rich.console import RenderableType

from factscope.cli.output import doing, note, print_json, say
from factscope.errors import BadFact, BadSetting
from factscope.facts import Fact, occurrences, strip_end
from factscope.settings import Flag, Setting, build, settings_of, unknown_flag

if TYPE_CHECKING:
    from factscope.lm.model import LM

# ---- options

Dtype = Literal["float32", "tf32", "bfloat16", "float16", "auto"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options."""

    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    chosen_by: ClassVar[tuple[str, ...]] = ()
    """Flags that the defaults and the other flags depend on, such as the method."""
    chosen_first: ClassVar[bool] = False
    """Whether the only such flag is the first positional argument."""

    def __init_subclass__(cls) -> None:
        """Without a docstring of its own, a class has "Options" as the heading of its flags."""
        cls.__doc__ = cls.__doc__ or Options.__doc__

    @classmethod
    def defaults(cls, given: Mapping[str, Any]) -> Any:
        """Default options, given the flags of `chosen_by`; a class if some are required."""
        return cls

    @classmethod
    def explain(cls, flags: Sequence[str], base: Any) -> str | None:
        """A specific message about unknown flags; None for the usual one."""
        return None

    def print_result(self, value: Any, *lines: RenderableType) -> None:
        """Print the value as JSON, or the lines and tables."""
        if self.json:
            print_json(value)
            return
        for line in lines:
            say(line)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Model."""

    model: Annotated[str, Flag(short="m")] = "smollm2-135m"
    """Short name, hub id, folder or GGUF file."""
    device: str = "auto"
    """Device as torch names it, e.g. cpu; auto for the best available."""
    device_map: str | None = None
    """auto spreads the model over several GPUs, as accelerate does."""
    dtype: Dtype = "float32"
    """Number format of the weights; auto for that of the file."""
    check_model: bool = True
    """Check that the tokenizer and the entry of the model's family fit the model."""

    def load(self, device: str | None = None) -> "LM":
        """The model, with a spinner while it loads."""
        from factscope.lm.load import load

        if not self.model:
            raise BadSetting("--model is empty; give a short name, a hub id, a folder or a file")
        with doing(f"loading {self.model}"):
            return load(
                self.model, device=device or self.device, dtype=self.dtype,
                device_map=self.device_map, check=self.check_model,
            )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FactSource:
    """Options."""

    prompt: Annotated[str | None, Flag(positional=True)] = None
    """Text up to the object."""
    subject: str | None = None
    """The words of the prompt that name the subject."""
    occurrence: Annotated[int | None, Ge(1)] = None
    """Which occurrence of the subject in the prompt, from 1; the last if not given."""
    facts: str | None = None
    """Instead of a prompt: all facts of a file or data set, e.g. known."""
    limit: Annotated[int | None, Ge(1)] = None
    """Use only the first N facts."""

    def fact(self, target: str | None) -> Fact:
        """The fact of the prompt; a note if it ends in a space or has the subject twice."""
        assert self.prompt is not None
        assert self.subject is not None
        fact = Fact.from_text(self.prompt, self.subject, self.occurrence, target=target)
        if strip_end(self.prompt) != self.prompt:
            note(f"The space at the end of the prompt is removed: {fact.text!r}.")
        count = len(occurrences(self.prompt, self.subject))
        if count > 1 and self.occurrence is None:
            note(f"The subject occurs {count} times; the last is used. Choose with --occurrence.")
        return fact


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Options."""

    chat: bool = False
    """Put each prompt into the model's chat template, as a user's message; the model replies."""


# ---- commands


class Command:
    """A function of one value, whose fields are the flags; its docstring is the help text."""

    def __init__(self, run: Callable[[Any], None]) -> None:
        self.run = run
        self.name = run.__name__.rstrip("_").replace("_", "-")
        self.help = inspect.getdoc(run) or ""
        self.kind: type[Options] = inspect.get_annotations(run)["options"]

    def settings(self, given: Mapping[str, Any]) -> dict[str, Setting]:
        """The flags of the command; they may depend on some of those given, such as the method."""
        return settings_of(self.kind.defaults(given))

    def options(self, given: Mapping[str, Any]) -> Any:
        """The options that flags or the keys of a recipe describe, checked."""
        with self.naming_flags(given):
            base = self.kind.defaults(given)
            unknown = [name for name in given if name not in settings_of(base)]
            if unknown:
                raise BadSetting(self.unknown(unknown, base))
            return build(base, given)

    def __call__(self, given: Mapping[str, Any]) -> None:
        """Run the command."""
        options = self.options(given)
        with self.naming_flags(given):
            self.run(options)

    @contextmanager
    def naming_flags(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Context in which an error about a field, such as "window is 0; …", names its flag."""
        try:
            yield
        except (BadSetting, BadFact) as error:
            match = re.match(r"(\w+) is ", str(error))
            if match is None:
                raise
            chosen = {name: x for name, x in given.items() if name != match[1].replace("_", "-")}
            flags = {s.path[-1]: s.display_name for s in self.settings(chosen).values()}
            if match[1] not in flags:
                raise
            raise type(error)(f"{flags[match[1]]}{str(error)[len(match[1]) :]}") from error

    def unknown(self, names: Sequence[str], base: Any) -> str:
        """The message for flags that the command does not have."""
        return self.kind.explain(names, base) or unknown_flag(names[0], settings_of(base))

    def function(
        self, words: Sequence[str], *, for_completion: bool = False
    ) -> Callable[..., None]:
        """What cyclopts calls: a function with a parameter for each flag."""
        # These values must be read before the other flags of the command are known.
        chosen: dict[str, str] = {}
        for word, after in zip(words, [*words[1:], ""], strict=False):
            flag, equals, value = word.partition("=")
            if flag.startswith("--") and flag[2:] in self.kind.chosen_by:
                chosen[flag[2:]] = value if equals else after
        if self.kind.chosen_first and words and not words[0].startswith("-"):
            chosen = {self.kind.chosen_by[0]: words[0]}
        with self.naming_flags(chosen):
            base = self.kind.defaults(chosen)
        known = {s.name.replace("-", "_"): s for s in settings_of(base).values()}
        order = sorted(known, key=lambda name: not known[name].flag.positional)
        panels = dict.fromkeys(s.group for s in known.values())
        groups = {panel: Group(panel, sort_key=i) for i, panel in enumerate(panels)}
        parameters = [
            _parameter(name, known[name], groups, for_completion=for_completion) for name in order
        ]
        signature = inspect.Signature(parameters)

        def command(*values: Any, **given: Any) -> None:
            bound = signature.bind(*values, **given).arguments
            self({known[name].name: x for name, x in bound.items() if x is not None})

        def unknown_flags(words: Sequence[str]) -> str | None:
            flags = [word[2:].partition("=")[0] for word in words if word.startswith("--")]
            unknown = [flag for flag in flags if flag.replace("-", "_") not in known]
            return self.unknown(unknown, base) if unknown else None

        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__doc__ = self.help
        vars(command).update(__signature__=signature, unknown_flags=unknown_flags)
        return command


def _parameter(
    name: str, s: Setting, groups: Mapping[str, Group], *, for_completion: bool
) -> inspect.Parameter:
    """A flag as a function parameter for cyclopts."""
    # Once pydantic is imported, cyclopts validates converted values against the annotation with
    # it: so the converter returns exactly what is annotated, words except for choices.
    kind: Any = s.type if s.switch or s.choices else list[str] if s.repeated else str
    default = s.text(s.default)

    def convert(kind: Any, tokens: Sequence[Any]) -> Any:
        """Check choices, and pass other text on for `build` to parse."""
        words = [token.value for token in tokens]
        given = words if s.repeated else words[-1]
        return s.parse(given) if s.choices else given

    show_default = not (s.switch or s.required or default == "none")
    details: dict[str, Any] = {
        "help": re.sub(r"\bNone\b", "none", s.help),
        "negative": [f"--no-{s.name}"] if s.switch and s.default else [],
        "negative_iterable": [],
        "consume_multiple": False,
        "allow_repeating": True,  # the last one counts, so that a script can append an override
        "allow_leading_hyphen": not s.flag.positional and not s.switch,
        "converter": None if s.switch else convert,
        "show_default": (lambda _: default) if show_default else False,
    }
    if not s.flag.positional:
        details["group"] = groups[s.group]
        details["metavar"] = None if s.switch else metavar(s)
        details["name"] = [f"--{s.name}", *([f"-{s.flag.short}"] if s.flag.short else [])]
    # None means that the flag is not given. Completion scripts expect a value after a switch that
    # can be None.
    annotation = kind if s.required or (s.switch and for_completion) else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_ONLY if s.flag.positional else inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[annotation, Parameter(**details)],
        default=inspect.Parameter.empty if s.required else None,
    )


def metavar(s: Setting) -> str:
    """The placeholder for a flag's value in help texts."""
    names = {int: "N", float: "X", Path: "PATH", tuple[int, int]: "NxM"}
    parts: list[str] = []
    for kind in s.types:
        if get_origin(kind) is Literal:
            parts += map(str, get_args(kind))
        elif kind not in (NoneType, object) and not (kind is str and Path in s.types):
            parts.append(names.get(kind, "TEXT"))
    name = "CHOICE" if s.choices else "TEXT" if s.flag.parse is not None else "|".join(parts)
    return name + ("…" if s.repeated else "")
