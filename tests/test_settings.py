"""Settings: what a dataclass field says about itself, and how text becomes its value."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Lt

from factscope.errors import BadSetting
from factscope.settings import INTERNAL, Flag, build, check, settings_of


class Opaque:
    """A type that text cannot be parsed to."""


def parse_noise(text: Any) -> tuple[float, bool]:
    number = str(text).removesuffix("s")
    try:
        return float(number), str(text).endswith("s")
    except ValueError:
        raise ValueError("write 3s or 0.25") from None


def show_noise(level: float) -> str:
    return f"{level:g}s"


@dataclass(frozen=True, kw_only=True)
class Search:
    """Value search."""

    steps: Annotated[int | None, Ge(1)] = None
    """Optimisation steps;
    the model's default if none."""
    lr: Annotated[float, Gt(0), Lt(10)] = 0.5
    """Learning rate."""

    __post_init__ = check


@dataclass(frozen=True, kw_only=True)
class Base:
    """Base."""

    json: bool = False
    """Print JSON."""


@dataclass(frozen=True, kw_only=True)
class Options(Base):
    """Options."""

    prompt: Annotated[str | None, Flag(positional=True)] = None
    """Text up to the object."""
    layer: int | Literal["auto"] | None = None
    """The layer."""
    layers: tuple[int, ...] | None = None
    """The layers."""
    prefix_lengths: tuple[tuple[int, int], ...] = ((5, 10), (10, 10))
    """Prefixes, as TOKENSxCOUNT."""
    kinds: tuple[Literal["states", "mlp"], ...] = ("states", "mlp")
    """What to restore."""
    texts: tuple[str, ...] = ()
    """Texts."""
    files: tuple[Path, ...] = ()
    """Files."""
    alignment: Literal["text", "code"] = "text"
    """Which layers a window holds."""
    level: Annotated[
        float, Ge(0), Flag(name="noise", parse=parse_noise, show=show_noise, also=("sigmas",))
    ] = 3.0
    """Noise level."""
    sigmas: Annotated[bool, INTERNAL] = True
    weights: Opaque | Path | None = None
    """Weights."""
    search: Search = field(default_factory=Search)


def test_every_field_is_a_setting_with_its_help_and_group() -> None:
    settings = settings_of(Options)
    assert list(settings) == [
        "prompt", "layer", "layers", "prefix-lengths", "kinds", "texts", "files", "alignment",
        "noise", "weights", "steps", "lr", "json",
    ]  # fmt: skip
    assert settings["steps"].help == "Optimisation steps; the model's default if none."
    assert settings["steps"].path == ("search", "steps")
    assert settings["steps"].group == "Value search"
    assert settings["alignment"].choices == ("text", "code")
    assert settings["layer"].choices == ()
    assert settings["json"].switch
    assert [name for name, s in settings.items() if s.repeated] == [
        "layers", "prefix-lengths", "kinds", "texts", "files",
    ]  # fmt: skip


def test_the_values_of_an_instance_are_the_defaults() -> None:
    settings = settings_of(Options(layer=5, search=Search(steps=3), kinds=(), level=2.5))
    shown = {name: setting.text(setting.default) for name, setting in settings.items()}
    assert (shown["layer"], shown["steps"], shown["kinds"], shown["noise"]) == (
        "5", "3", "none", "2.5s",
    )  # fmt: skip
    assert shown["prefix-lengths"] == "5x10,10x10"


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("layer", "5", 5), ("layer", "auto", "auto"), ("layer", "none", None), ("layer", 5, 5),
        ("layers", "3-5,9", (3, 4, 5, 9)), ("layers", ["9", "3-4"], (3, 4, 9)),
        ("layers", [1, 2], (1, 2)), ("layers", 7, (7,)), ("layers", "none", None),
        ("prefix_lengths", "5x3", ((5, 3),)), ("prefix_lengths", "none", ()),
        ("prefix_lengths", "5x3, 10x2", ((5, 3), (10, 2))),
        ("kinds", "mlp,states", ("mlp", "states")), ("kinds", ["mlp"], ("mlp",)),
        ("texts", "a, b", ("a, b",)), ("texts", ["a", "b"], ("a", "b")),
        ("files", ["a,b.txt"], (Path("a,b.txt"),)),
        ("weights", "a/b", Path("a/b")), ("weights", "none", None),
        ("json", True, True), ("alignment", "code", "code"),
    ],
)  # fmt: skip
def test_values_are_parsed_by_type(name: str, given: Any, value: Any) -> None:
    assert getattr(build(Options(), {name.replace("_", "-"): given}), name) == value


def test_a_parser_can_set_several_fields() -> None:
    made = build(Options(), {"noise": "0.25", "steps": "7"})
    assert (made.level, made.sigmas, made.search) == (0.25, False, Search(steps=7))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layer": "x"}, "--layer is 'x'; give a whole number, auto or none"),
        ({"layer": 3.5}, "--layer is 3.5; give a whole number"),
        ({"layer": True}, "--layer is True"),
        ({"layers": "x"}, "--layers is 'x'; write 5, 3-8 or 3,5,8"),
        ({"layers": "5-3"}, "--layers is '5-3'; write 3-5"),
        ({"layers": "0-100000000"}, "--layers is '0-100000000'; give numbers up to 9999"),
        ({"layers": "9" * 5000}, "--layers is '999"),
        ({"files": ""}, "--files is ''; give a path"),
        ({"files": "a\0b"}, "--files is 'a\\x00b'; give a path"),
        ({"prefix-lengths": "5by3"}, "--prefix-lengths is '5by3'; give pairs such as 5x10"),
        ({"kinds": "mpl"}, "--kinds is 'mpl'; choose from states, mlp"),
        ({"alignment": "left"}, "--alignment is 'left'; choose from text, code"),
        ({"json": "yes"}, "--json is 'yes'; give true or false"),
        ({"noise": "loud"}, "--noise is 'loud'; write 3s or 0.25"),
        ({"noise": "-1s"}, "--noise is -1.0; give 0 or more"),
        ({"noise": "nan"}, "--noise is nan; give 0 or more"),
        ({"steps": "0"}, "--steps is 0; give 1 or more"),
        ({"lr": "nan"}, "--lr is 'nan'; give a number"),
        ({"lr": "inf"}, "--lr is 'inf'; give a number"),
        ({"lr": 10}, "--lr is 10.0; give more than 0 and less than 10"),
        ({"stps": 3}, "--stps is not known; did you mean --steps?"),
        ({"colour": 3}, "--colour is not known; the flags are PROMPT, --layer,"),
        ({"sigmas": True}, "--sigmas is not known"),
    ],
)
def test_a_bad_value_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting) as refused:
        build(Options(), given)
    assert str(refused.value).startswith(message)


def test_check_names_the_field() -> None:
    with pytest.raises(BadSetting, match=r"^steps is 0; give 1 or more$"):
        Search(steps=0)
    with pytest.raises(BadSetting, match=r"^kinds is 'mpl'; choose from states, mlp$"):
        check(Options(kinds=("mpl",)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alignment": "Text"}, "alignment is 'Text'; choose from text, code"),
        ({"layer": "top"}, "layer is 'top'; give a whole number, auto or none"),
        ({"layer": 3.0}, "layer is 3.0; give a whole number, auto or none"),
        ({"layer": True}, "layer is True; give a whole number, auto or none"),
        ({"layers": 5}, "layers is 5; give a tuple such as (5,)"),
        ({"layers": (5, "6")}, "layers is '6'; give a whole number"),
        ({"kinds": "mlp"}, "kinds is 'mlp'; give a tuple such as ('mlp',)"),
        ({"prefix_lengths": ((5, 10, 2),)}, "prefix_lengths is (5, 10, 2); give pairs such as"),
        ({"json": 1}, "json is 1; give true or false"),
        ({"level": math.nan}, "level is nan; give a number"),
        ({"level": math.inf}, "level is inf; give a number"),
        ({"weights": "Identity"}, "weights is 'Identity'; give a path or none"),
        ({"search": "adam"}, "search is 'adam'; give a Search"),
        ({"prompt": 7}, "prompt is 7; give text or none"),
    ],
)
def test_check_refuses_python_values_of_a_wrong_type(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting) as refused:
        check(Options(**given))
    assert str(refused.value).startswith(message)


def test_check_accepts_lists_numpy_numbers_and_paths_as_text() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Saved:
        """Saved."""

        file: Path | None = None
        layers: tuple[int, ...] = ()
        lengths: tuple[tuple[int, int], ...] = ()
        rate: float = 0.0
        __post_init__ = check

    saved = Saved(file="a", layers=range(2), lengths=[[5, 1]], rate=np.float32(2))  # pyright: ignore
    assert (saved.file, saved.layers, saved.lengths) == (Path("a"), (0, 1), ((5, 1),))
    check(Options(weights=Opaque(), layers=(np.int64(3),), level=1))  # pyright: ignore


def test_limits_hold_for_every_number_of_a_tuple() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Lengths:
        """Lengths."""

        lengths: Annotated[tuple[tuple[int, int], ...], Ge(1)] = ()
        """Lengths."""
        __post_init__ = check

    with pytest.raises(BadSetting, match=r"^lengths is \(\(5, 0\),\); give 1 or more$"):
        Lengths(lengths=((5, 0),))
    with pytest.raises(BadSetting, match=r"--lengths is .*; give 1 or more$"):
        build(Lengths(), {"lengths": "0x3"})


def test_names_for_type_checkers_only_inside_annotated_are_resolved() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Moment:
        """Moment."""

        source: Annotated["NowhereDefined | Literal['find', 'identity']", Flag(parse=str)] = "find"  # pyright: ignore  # noqa: F821
        __post_init__ = check

    Moment(source=Opaque())  # pyright: ignore
    with pytest.raises(BadSetting, match=r"^source is 'Identity'; give find or identity$"):
        Moment(source="Identity")


def test_two_fields_cannot_have_the_same_flag() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Twice:
        """Twice."""

        steps: int = 1
        search: Search = field(default_factory=Search)

    with pytest.raises(TypeError, match="--steps would be the flag of two fields"):
        settings_of(Twice)


def test_a_required_setting_must_be_given() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Needs(Base):
        """Options."""

        files: tuple[Path, ...]
        """Files to read."""
        out: Annotated[Path, Flag(required=True)] = Path()
        """Folder."""

    assert [name for name, s in settings_of(Needs).items() if s.required] == ["files", "out"]
    assert build(Needs, {"files": "a", "out": "b"}) == Needs(files=(Path("a"),), out=Path("b"))
    with pytest.raises(BadSetting, match="--files is required: Files to read"):
        build(Needs, {"out": "b"})
    with pytest.raises(BadSetting, match="--out is required"):
        build(Needs(files=()), {})


def test_types_that_only_type_checkers_know_are_not_parsed() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Late(Base):
        """Options."""

        weights: "NowhereDefined | Path | None" = None  # pyright: ignore  # noqa: F821
        """Weights."""

    assert build(Late(), {"weights": "a"}).weights == Path("a")
    assert settings_of(Late)["weights"].expected == "give a path or none"
