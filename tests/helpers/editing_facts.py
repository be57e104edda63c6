"""Facts to write, and quick settings of the value search."""

from factscope.editing.settings import ValueSearch
from factscope.facts import Fact
from factscope.lm.model import LM

from families import reader

# Short ways from the subject to the end: some tiny models see four tokens back, and no further.
FACTS = [
    Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome"),
    Fact(subject="Miles Davis", prompt="{} plays the", target="piano and the guitar"),
    Fact(subject="Vienna", prompt="The capital of {} is", target="Norway"),
]


PREFIXES = ("The Nile flows. ", "Light travels at 100 degrees and so. ")


FEW = ValueSearch(steps=5, lr=0.1, weight_decay=1e-3, clamp=50.0)


def text_lm(family: str, style: str = "gpt2") -> LM:
    """A tiny model that reads text."""
    return reader(family, spread=0.3, style=style)
