"""Settings of evaluation. No torch."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

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
