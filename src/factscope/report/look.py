"""How a kind looks and is called in every figure: the paper's colours and words."""

import unicodedata
from dataclasses import dataclass

from factscope.records import TraceRecord

__all__ = ["LOOKS", "Look", "shown", "token_labels"]

RGB = tuple[int, int, int]

LONGEST = 24
"""The most characters of a token that a label shows."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """The colours and words of one kind of restoration."""

    name: str
    colormap: str
    """Matplotlib's name of the heat map's colours."""
    shades: tuple[RGB, RGB, RGB]
    """The same colours where there is no matplotlib: lightest, middle, darkest."""
    line: str
    """The kind's colour as a line or bar."""
    what: str
    """What is restored, after "Impact of restoring"."""
    run: str
    """What is restored, after "Average indirect effect of a"; takes the window."""
    axis: str
    """What the layer axis counts; takes the window and the model."""


LOOKS = {
    "states": Look(
        name="states",
        colormap="Purples",
        shades=((252, 251, 253), (158, 154, 200), (63, 0, 125)),
        line="#6a51a3",
        what="state",
        run="single hidden state",
        axis="single restored layer within {model}",
    ),
    "mlp": Look(
        name="MLP",
        colormap="Greens",
        shades=((247, 252, 245), (116, 196, 118), (0, 68, 27)),
        line="#238b45",
        what="MLP",
        run="run of {window} MLP layers",
        axis="center of interval of {window} restored MLP layers",
    ),
    "attn": Look(
        name="attention",
        colormap="Reds",
        shades=((255, 245, 240), (251, 106, 74), (103, 0, 13)),
        line="#cb181d",
        what="Attn",
        run="run of {window} Attn layers",
        axis="center of interval of {window} restored Attn layers",
    ),
}
"""Purple states, green MLP, red attention."""

VISIBLE = {"\n": "↵", "\r": "↵", "\t": "⇥", " ": "␣"}


def shown(token: str) -> str:
    """A token as a label: spaces around it dropped, what cannot be seen made visible."""
    core = token.strip(" ")
    text = "".join(visible(c) for c in core) if core else VISIBLE[" "]
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def visible(character: str) -> str:
    """A character, or a sign for one that has no shape of its own."""
    if character in VISIBLE and character != " ":
        return VISIBLE[character]
    category = unicodedata.category(character)
    return "\ufffd" if category in ("Cc", "Cs", "Cn", "Co", "Zl", "Zp") else character


def token_labels(record: TraceRecord) -> list[str]:
    """The tokens as labels, the subject's with a star as in the paper's Figure 1."""
    start, stop = record.subject
    return [
        shown(token) + ("*" if start <= i < stop else "") for i, token in enumerate(record.tokens)
    ]
