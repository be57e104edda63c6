"""Settings of evaluations and calibrations. No torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from factscope.errors import BadSetting
from factscope.settings import Flag, Seed, check


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """How each case is scored."""

    length: Annotated[int, Ge(0), Flag(name="text-length")] = 100
    """Length of generated texts in tokens, generation prompt included; 0 to generate none."""
    top_k: Annotated[int, Ge(1)] = 5
    """Draw each token of a generated text from the k most likely ones."""
    seed: Seed = 0
    """Seed of generated texts."""
    attributes: bool = True
    """Also score prompts about subjects that already have the new object; --no-attributes leaves
    them out."""

    __post_init__ = check


MIN_CASES = 4
"""Fewer known cases than this in each part of a calibration are an error."""


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """Calibration."""

    minutes: Annotated[float | None, Gt(0)] = None
    """Time to search and report in minutes; none for 5 on a GPU and 30 on a CPU. The defaults and
    the result are always evaluated, so a slow model may take longer."""
    cases: Annotated[int | None, Ge(MIN_CASES), Flag(name="num-cases")] = None
    """Cases to choose settings by, and as many others to report on; none for 64 on a GPU and 16 on
    a CPU. At most half of the cases that the model knows."""
    methods: tuple[Literal["rome", "memit", "ft-l"], ...] = ("rome", "memit", "ft-l")
    """Methods to calibrate."""
    facts_per_edit: Annotated[int, Ge(1)] = 10
    """Facts that MEMIT writes at once."""

    def __post_init__(self) -> None:
        check(self)
        if not self.methods:
            raise BadSetting("methods is none; choose from rome, memit, ft-l")
