"""The statistics that an edit from the command line needs: found, or collected on the way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from factscope.cli.show import doing, notes, working
from factscope.cli.stats import ENOUGH
from factscope.errors import BadSetting, FactscopeError

if TYPE_CHECKING:
    from factscope.editing.editor import Editor
    from factscope.facts import Fact
    from factscope.lm.model import LM

__all__ = ["each_with_statistics", "with_statistics"]


def with_statistics(lm: "LM", editor: "Editor", facts: "Sequence[Fact]") -> "Editor":
    """The editor with its layers settled, and statistics of them collected where there are none."""
    from factscope.editing.editor import raise_first_error

    return raise_first_error(each_with_statistics(lm, [editor], facts))[0]


def each_with_statistics(
    lm: "LM", editors: "Sequence[Editor]", facts: "Sequence[Fact]"
) -> "list[Editor | FactscopeError]":
    """The same for several editors, or why one cannot be had; what is missing comes in one pass."""
    from factscope.stats.second_moment import find_second_moment

    resolve: list[Editor | FactscopeError] = []
    layers: set[int] = set()
    known: dict[Any, int] = {}
    for editor in editors:
        if getattr(editor, "second_moment", None) != "find":
            resolve.append(editor)
            continue
        try:
            made, mine = _settled(lm, editor, facts, known)
            layers |= set(mine)
            resolve.append(made)
        except BadSetting as error:
            resolve.append(error)
    missing = [layer for layer in sorted(layers) if find_second_moment(lm, layer) is None]
    if missing:
        _collect(lm, missing)
    return resolve


def _settled(
    lm: "LM", editor: Any, facts: "Sequence[Fact]", known: dict[Any, int]
) -> "tuple[Editor, Sequence[int]]":
    """The layers that the editor will write into, and the editor that says so.

    `known` keeps the layers found, since a trace for each editor would be dear.
    """
    from factscope.editing.defaults import check_layer, resolve_layer, memit_defaults

    if hasattr(editor, "layers"):
        layers = tuple(check_layer(lm, n) for n in editor.layers or memit_defaults(lm).layers)
        return replace(editor, layers=layers), layers
    if editor.layer not in known:
        with doing("finding the layer"):
            known[editor.layer] = resolve_layer(lm, editor.layer, facts)
    layer = known[editor.layer]
    return replace(editor, layer=layer), [layer]


def _collect(lm: "LM", layers: Sequence[int]) -> None:
    """Second moments of text that the model writes itself, kept in the cache."""
    from factscope.stats.covariance import collect
    from factscope.stats.second_moment import cached_path, save_second_moment
    from factscope.stats.settings import StatsSettings
    from factscope.stats.text import open_text

    named = ",".join(map(str, layers))
    tokens = ENOUGH * lm.mlp_weight(layers[0]).shape[1]
    notes.print(
        f"There are no statistics of layer {named} of {lm.name} yet. They are collected now, once, "
        f"from {tokens:,} tokens that the model writes itself, and kept in the cache. Ordinary "
        f"text is better: factscope stats --model {lm.name} --layer {named} --text FILE",
        style="yellow",
        soft_wrap=True,
    )
    settings = StatsSettings(tokens=tokens)
    sequences, corpus = open_text(lm, settings)
    paths = [cached_path(lm, layer) for layer in layers]
    partial = paths[0].with_name(paths[0].name + ".partial")
    with working("collecting statistics") as done:
        moments = collect(
            lm, layers, sequences, settings, corpus=corpus, partial=partial, progress=done
        )
    for moment, path in zip(moments, paths, strict=True):
        save_second_moment(moment, path)
    partial.unlink(missing_ok=True)
