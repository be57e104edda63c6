"""factscope stats: second moments of the keys of a layer, which ROME and MEMIT need."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from factscope.cli.flags import Command, ModelOptions, Options
from factscope.cli.output import check_suffix, note, say, working
from factscope.errors import BadSetting, BadStats, FactscopeError, FolderInUse
from factscope.io import check_output_file, check_output_folder, locked, resumable_write
from factscope.settings import Flag
from factscope.stats.settings import StatsSettings

if TYPE_CHECKING:
    from factscope.editing.editor import Editor
    from factscope.facts import Fact
    from factscope.lm.model import LM
    from factscope.stats.second_moment import SecondMoment

POLL_INTERVAL = 0.5
"""Seconds between attempts to lock a file that another process writes."""


@dataclass(frozen=True, kw_only=True)
class CollectOptions(Options):
    """Options."""

    layers: Annotated[tuple[int, ...], Flag(short="l")]
    """Layers, e.g. 5, 3-8 or 3,5,8. Repeatable."""
    text: Path | None = None
    """Text file, also .gz; a blank line separates articles. By default the data set wikipedia if
    it is in the folder FACTSCOPE_DATA, or else the built-in text of about 400,000 tokens."""
    hf_dataset: str | None = None
    """Hugging Face data set, as NAME,CONFIG:SPLIT#COLUMN; needs the package datasets."""
    generated: bool = False
    """Text that the model generates: slower, and less varied than human text."""
    out: Annotated[Path | None, Flag(short="o")] = None
    """Folder, or .safetensors file; the user's cache if not given."""
    figure: Path | None = None
    """Draw the convergence (.png .svg .pdf)."""
    model: ModelOptions = field(default_factory=ModelOptions)
    settings: StatsSettings = field(default_factory=StatsSettings)

    def check(self) -> None:
        """Check the paths and combinations of flags before the model is loaded."""
        if (self.text is not None) + (self.hf_dataset is not None) + self.generated > 1:
            raise BadSetting("give one of --text, --hf-dataset and --generated")
        if self.text is not None:
            from factscope.stats.text import check_text

            check_text(self.text)
        if self.out is not None and self.out.suffix and not self.out.is_dir():
            check_suffix(self.out, "out", ".safetensors")
            if len(self.layers) > 1:
                raise BadSetting(f"--out is a file, for {len(self.layers)} layers; give a folder")
            check_output_file(self.out, "--out")
            _check_replaceable(self.out)
        elif self.out is not None:
            check_output_folder(self.out)
        check_suffix(self.figure, "figure", ".png", ".svg", ".pdf")
        if self.figure is not None:
            check_output_file(self.figure, "--figure")

    def paths(self, lm: "LM") -> list[Path]:
        """The file of each layer."""
        from factscope.stats.second_moment import SUFFIX, cached_path, file_name

        out, settings = self.out, self.settings
        if out is not None and out.suffix == SUFFIX and not out.is_dir():
            return [out]
        paths = [cached_path(lm, n) if out is None else out / file_name(n) for n in self.layers]
        if settings.n_shards == 1:
            return paths
        shard = f"shard-{settings.shard_index + 1}-of-{settings.n_shards}"
        return [path.with_stem(f"{path.stem}-{shard}") for path in paths]


@Command
def collect(options: CollectOptions) -> None:
    """Collect the second moments of layers. The word "collect" can be left out."""
    options.check()
    from factscope.stats.covariance import TOKENS_PER_DIMENSION

    settings, lm = options.settings, options.model.load()
    text = options.text
    if text is None and options.hf_dataset is None and not options.generated:
        text, name = _default_text()
        note(f"No --text, --hf-dataset or --generated: the text is {name}.")
    paths = options.paths(lm)
    moments = _collect(lm, options.layers, settings, paths, text, options.hf_dataset)
    can_stop = settings.convergence is not None or settings.movement is not None
    if moments[0].tokens < settings.tokens // settings.n_shards and not can_stop:
        note(f"The text has only {moments[0].tokens:,} tokens.")
    enough = TOKENS_PER_DIMENSION * moments[0].width
    if moments[0].tokens < enough:
        note(
            f"{moments[0].tokens:,} tokens are few for keys of {moments[0].width:,} dimensions: "
            f"edits will need a --ridge. Use {enough:,} tokens or more."
        )
    _print(paths, moments, options)
    if not options.json and settings.n_shards > 1:
        say("Next, when all shards are complete: factscope stats merge FILES -o FILE")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Options):
    """Options."""

    files: Annotated[tuple[Path, ...], Flag(positional=True)]
    """Files that `factscope stats` wrote."""
    figure: Path | None = None
    """Draw the convergence (.png .svg .pdf)."""


@Command
def show(options: ShowOptions) -> None:
    """Show what statistics files contain."""
    from factscope.stats.second_moment import load_second_moment

    check_suffix(options.figure, "figure", ".png", ".svg", ".pdf")
    if options.figure is not None:
        check_output_file(options.figure, "--figure")
    _print(options.files, [load_second_moment(file) for file in options.files], options)


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Options):
    """Options."""

    files: Annotated[tuple[Path, ...], Flag(positional=True)]
    """Files of one layer that `factscope stats` wrote."""
    out: Annotated[Path, Flag(short="o")]
    """Merged file (.safetensors)."""
    half_precision: bool = False
    """Store the matrix in half precision: a quarter of the file size."""


@Command
def merge(options: MergeOptions) -> None:
    """Merge files of one layer, e.g. of shards, weighted by their tokens."""
    from factscope.stats.second_moment import (
        load_second_moment,
        merge_second_moments,
        save_second_moment,
    )

    check_suffix(options.out, "out", ".safetensors")
    check_output_file(options.out, "--out")
    _check_replaceable(options.out)
    merged = merge_second_moments([load_second_moment(file) for file in options.files])
    save_second_moment(merged, options.out, options.half_precision)
    _print([options.out], [merged], options)


def _check_replaceable(path: Path) -> None:
    """Refuse to replace a file that is neither statistics nor empty, such as a model's weights."""
    from factscope.stats.second_moment import read_header

    if not path.is_file() or not path.stat().st_size:
        return
    try:
        read_header(path)
    except BadStats as error:
        raise BadStats(
            f"--out is {str(path)!r}, which exists and is not a statistics file; give another "
            "path, or delete the file"
        ) from error


def _default_text() -> tuple[Path, str]:
    """The data set wikipedia, if it is on this machine, or the built-in text; and its name."""
    from factscope.data.registry import find_local
    from factscope.stats.text import BUILT_IN

    found = find_local("wikipedia")
    return (BUILT_IN, "the built-in text") if found is None else (found.path, str(found.path))


def _collect(
    lm: "LM", layers: Sequence[int], settings: StatsSettings, paths: Sequence[Path],
    text: Path | None = None, dataset: str | None = None,
    facts: "Sequence[Fact] | None" = None, seconds: float = math.inf,
) -> "list[SecondMoment]":  # fmt: skip
    """Collect and save the second moments of layers whose files do not have them yet.

    The movement of C⁻¹k is that of the facts, or else of the built-in ones. After `seconds` a
    collection with enough tokens ends. An interrupted collection resumes.
    """
    from factscope.data.readers import everyday_facts
    from factscope.editing.contexts import bare_keys
    from factscope.stats.covariance import collect, find_collected
    from factscope.stats.second_moment import save_second_moment
    from factscope.stats.text import open_text

    sequences, corpus = open_text(lm, settings, text, dataset)
    partial = paths[0].with_name(paths[0].name + ".partial")
    files = dict(zip(layers, paths, strict=True))
    with _wait_for_lock(paths[0]):
        moments: dict[int, SecondMoment] = {}
        if not partial.is_file():  # it has the sums of all layers
            found = {n: find_collected(files[n], lm, n, settings, corpus) for n in layers}
            moments = {layer: moment for layer, moment in found.items() if moment is not None}
        for layer in moments:
            note(f"{files[layer]} has these statistics; delete it to collect them again.")
        missing = [layer for layer in layers if layer not in moments]
        if not missing:
            return list(moments.values())
        for path in (files[layer] for layer in missing if files[layer].is_file()):
            note(f"{path} is of other settings or of an earlier version; it will be replaced.")
        end = time.monotonic() + seconds
        keys = None
        if settings.movement is not None:
            keys = bare_keys(lm, facts or everyday_facts(), missing)
        try:
            with working("statistics: tokens", -(-settings.tokens // settings.n_shards)) as done:
                collected = collect(
                    lm, missing, sequences, settings, corpus=corpus, partial=partial,
                    progress=done, keys=keys, out_of_time=lambda: time.monotonic() > end,
                )  # fmt: skip
        except KeyboardInterrupt:
            advice = "resumes" if partial.is_file() else "starts again"
            raise KeyboardInterrupt(f"the same command {advice}") from None
        for moment in collected:
            moments[moment.layer] = moment
            with resumable_write(files[moment.layer], partial.is_file):
                save_second_moment(moment, files[moment.layer], settings.half_precision)
        partial.unlink(missing_ok=True)
    return [moments[layer] for layer in layers]


@contextmanager
def _wait_for_lock(path: Path) -> Iterator[None]:
    """Lock a file; wait while another process collects into it, maybe the same statistics."""
    with ExitStack() as stack:
        for attempt in count():
            try:
                stack.enter_context(locked(path.parent, path.name))
                break
            except FolderInUse as error:
                if not attempt:
                    owner = str(error).partition(";")[0]
                    note(
                        f"{owner}, which collects statistics. Waiting until it ends (Ctrl-C stops)."
                    )
                time.sleep(POLL_INTERVAL)
        yield


def _print(
    paths: Sequence[Path], moments: "Sequence[SecondMoment]",
    options: CollectOptions | ShowOptions | MergeOptions,
) -> None:  # fmt: skip
    """Print what the files contain, and draw the convergence if a figure is requested."""
    figure = None if isinstance(options, MergeOptions) else options.figure
    if figure is not None:
        from factscope.report.style import save_figure
        from factscope.report.training import convergence_figure

        histories = {moment.layer: moment.convergence_history for moment in moments}
        save_figure(convergence_figure(histories, moments[0].model), figure)
    names = (
        "layer", "model", "fingerprint", "width", "tokens", "corpus", "generated",
        "split_half_difference", "convergence_history", "movement", "movement_history",
    )  # fmt: skip
    values, lines = [], []
    for path, x in zip(paths, moments, strict=True):
        values.append({"file": path, **{name: getattr(x, name) for name in names}})
        difference = x.split_half_difference
        halves = "not measured" if difference is None else f"{difference:.3f}"
        lines.append(
            f"{path}\n  layer {x.layer} of {x.model}, {x.width:,} wide, {x.tokens:,} tokens, "
            f"split-half difference {halves}\n  {x.corpus}"
        )
        lines += [f"  {note}" for note in x.quality()]
    options.print_result(values, *lines)


# ---- the statistics that an edit needs


def with_statistics(lm: "LM", editor: "Editor", facts: "Sequence[Fact]") -> "Editor":
    """The editor with its layers resolved; missing statistics of them are collected."""
    from factscope.editing.editor import raise_first_error

    return raise_first_error(each_with_statistics(lm, [editor], facts))[0]


def each_with_statistics(
    lm: "LM", editors: "Sequence[Editor]", facts: "Sequence[Fact]"
) -> "list[Editor | FactscopeError]":
    """The same for several editors, or an error each; one pass collects all that is missing."""
    resolved: list[Editor | FactscopeError] = []
    layers: set[int] = set()
    for editor in editors:
        if getattr(editor, "second_moment", None) == "find":
            try:
                editor, needed = _with_layers(lm, editor, facts)
                layers |= set(needed)
            except BadSetting as error:
                resolved.append(error)
                continue
        resolved.append(editor)
    collect_statistics(lm, sorted(layers))
    return resolved


MAX_MOVEMENT = 0.1
"""Statistics of a calibration are enough once C⁻¹k moves by at most this when the text doubles."""
MAX_TOKENS_PER_DIMENSION, KEPT_TOKENS_PER_DIMENSION = 200, 50
"""A calibration reads at most the first number of tokens per dimension of a key. Edits collect the
second number, which a calibration keeps even if their movement was not measured."""


def collect_statistics(
    lm: "LM", layers: Sequence[int], text: Path | None = None, *,
    facts: "Sequence[Fact] | None" = None, seconds: float = math.inf,
) -> None:  # fmt: skip
    """Collect the missing statistics of layers into the cache, in one pass; from a given text
    those of all the layers, unless they are of this text already.

    With facts, until the direction C⁻¹k in which they are written stops moving; `seconds` or the
    end of the text may come first. Statistics that may be too few for that count as missing.
    """
    from factscope.stats.second_moment import cached_path, find_second_moment

    width = lm.mlp_weight(0).shape[1]
    missing = list(layers)
    if text is None:
        found = {layer: find_second_moment(lm, layer) for layer in layers}
        kept = {
            layer: x
            for layer, x in found.items()
            if x is not None
            and (
                facts is None or x.movement_history or x.tokens >= KEPT_TOKENS_PER_DIMENSION * width
            )
        }
        missing = [layer for layer in layers if layer not in kept]
        for layer, moment in kept.items():
            if moment.generated:
                note(f"Statistics of layer {layer} of {lm.name}: {moment.quality()[-1]}.")
    if not missing:
        return
    listed = ",".join(map(str, missing))
    if facts is not None:
        settings = StatsSettings(tokens=MAX_TOKENS_PER_DIMENSION * width, movement=MAX_MOVEMENT)
    else:
        settings = StatsSettings(tokens=KEPT_TOKENS_PER_DIMENSION * width)
    if text is None:
        text, name = _default_text()
        amount = f"{settings.tokens:,}" if facts is None else f"up to {settings.tokens:,}"
        note(
            f"There are no statistics of layer {listed} of {lm.name} yet. They are collected now, "
            f"once, from {amount} tokens of {name}, and cached. More text is better: "
            f"factscope stats --model {lm.name} --layers {listed} --text FILE",
            style="yellow",
        )
    paths = [cached_path(lm, layer) for layer in missing]
    _collect(lm, missing, settings, paths, text, facts=facts, seconds=seconds)


def _with_layers(lm: "LM", editor: Any, facts: "Sequence[Fact]") -> "tuple[Editor, Sequence[int]]":
    """The editor with its layers resolved, and the layers that need statistics.

    Layer "auto" stays: each edit has its own. Its layers are traced here, before other work.
    """
    from factscope.editing.defaults import check_layer, memit_defaults, resolve_layer, traced_layers

    if hasattr(editor, "layers"):
        layers = tuple(check_layer(lm, n) for n in editor.layers or memit_defaults(lm).layers)
        return replace(editor, layers=layers), layers
    if editor.layer == "auto":
        with working("finding layers: facts", len(facts)) as done:
            traced = []
            for fact in facts:
                traced += traced_layers(lm, [fact])
                done(1 / len(facts))
        return editor, sorted({layer for layer in traced if isinstance(layer, int)})
    layer = resolve_layer(lm, editor.layer, facts)
    return replace(editor, layer=layer), [layer]
