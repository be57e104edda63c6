"""Settings of evaluation. No torch."""

from dataclasses import dataclass

from factscope.errors import BadSetting

__all__ = ["ScoringOptions"]


@dataclass(frozen=True, kw_only=True)
class ScoringOptions:
    """How each case is scored."""

    length: int = 100
    """Length of generated texts in tokens, generation prompt included; 0 to generate none."""
    top_k: int = 5
    """Draw each token of a generated text from the k most likely ones."""
    seed: int = 0
    """Seed of generated texts."""
    attributes: bool = True
    """Also score prompts about subjects that already have the new object."""

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("top_k", 1)):
            value = getattr(self, name)
            if value < least:
                raise BadSetting(f"{name} is {value}; it must be at least {least}")
