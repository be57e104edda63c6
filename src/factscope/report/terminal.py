"""Traces and edits in the terminal: heat maps in characters or colours, and tables."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich import box
from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, ConsoleOptions, Group
from rich.style import Style
from rich.table import Table
from rich.text import Text

from factscope.analysis.attention import head_effects, knockout_changes
from factscope.analysis.attribution import compare_attribution, over_all_layers
from factscope.analysis.effects import cell_table, effect_sign, indirect_effects, total_effect
from factscope.records import ChangedWeight, EditRecord, Generation, TraceRecord
from factscope.report.labels import (
    CELL_NAMES,
    GROUP_NAMES,
    KIND_STYLES,
    PROMPT_HEADINGS,
    RGB,
    attribution_method,
    check_rows,
    display_token,
    flatten_settings,
    mean_change,
    metric_label,
    metric_text,
    old_object_label,
    percent,
    printable,
    restores,
    setting_text,
    token_labels,
    weight_label,
)

# ---- traces

RAMP = " .:-=+*#%@"
"""Shades from light to dark for terminals without colours."""
MAX_LABEL = 16
"""Columns of a token's label."""
MAX_LENS_RANGES = 3
"""The last ranges of layers that the logit lens prints."""
TICK_SPACING = 5
"""Every fifth column of the heat map is labelled with its layer."""


def trace_heatmap(record: TraceRecord, kind: str = "states") -> "TerminalHeatMap":
    """The heat map of a trace, for printing on a rich console."""
    cell_table(record, kind)  # raises BadRecord now, not while printing
    return TerminalHeatMap(record, kind)


def strongest_cells(record: TraceRecord, kind: str = "states", count: int = 5) -> Table:
    """The cells with the highest indirect effects."""
    cells, effects = cell_table(record, kind), indirect_effects(record, kind)
    return _strongest(record, KIND_STYLES[kind].name, cells, effects, count)


def strongest_heads(record: TraceRecord, count: int = 5) -> Table:
    """The heads with the highest indirect effects, by token and layer."""
    cells = np.array(record.heads, dtype=float).transpose(1, 2, 0)  # (token, layer, head)
    effects = head_effects(record).transpose(1, 2, 0)
    return _strongest(record, "heads", cells, effects, count)


def _strongest(
    record: TraceRecord, name: str, cells: np.ndarray, effects: np.ndarray, count: int
) -> Table:
    """The cells with the highest effects; the axes are the token, the layer and maybe the head."""
    table = Table(title=f"Strongest {name}", title_justify="left")
    table.add_column("token")
    columns = [*("layer", "head")[: cells.ndim - 1], metric_label(record), "indirect effect"]
    normalised = record.metric != "probability" and total_effect(record) > 0
    for column in [*columns, "of total effect"] if normalised else columns:
        table.add_column(Text(column), justify="right")
    labels = token_labels(record)
    order = np.argsort(-effects, axis=None, kind="stable")  # NaN is sorted to the end
    for index in order[: min(count, np.count_nonzero(~np.isnan(effects)))]:
        token, *rest = (int(i) for i in np.unravel_index(index, effects.shape))
        score, effect = float(cells.flat[index]), float(effects.flat[index])
        texts = [metric_text(record.metric, score), metric_text(record.metric, effect, sign=True)]
        if normalised:
            texts.append(f"{effect / total_effect(record):.0%}")
        table.add_row(Text(labels[token]), *map(str, rest), *texts)
    return table


def knockout_lines(record: TraceRecord) -> Text:
    """One line per group of tokens: at which layer blocking attention to it changes most."""
    clean, lines = metric_text(record.metric, record.clean_value), []
    for group, changes in knockout_changes(record).items():
        layer = int(abs(changes).argmax())
        value = metric_text(record.metric, record.knockout[group][layer])
        change = f"{metric_label(record)} {clean} → {value} at layer {layer}"
        lines.append(f"attention to {GROUP_NAMES[group]} blocked: {change}")
    return Text("\n".join(lines))


def lens_lines(record: TraceRecord) -> Text:
    """What the last token's states predict in each run, as ranges of layers."""
    lines = []
    for run, lens in record.lens.items():
        best = [display_token(top[0][0]) for top in lens.top[-1]]
        starts = [i for i, token in enumerate(best) if i == 0 or token != best[i - 1]]
        parts = [f"{best[i]} from layer {i}" for i in starts[-MAX_LENS_RANGES:]]
        lines.append(f"logit lens, {run} run, last token: {', '.join(parts)}")
    return Text("\n".join(lines))


def attribution_lines(record: TraceRecord) -> Text:
    """One line per kind of cell: how well the estimates agree with the measured cells."""
    agreements = over_all_layers(compare_attribution([replace(record, known=True)]))
    lines = [
        f"{attribution_method(record)} of {CELL_NAMES[a.kind]}: correlation {a.pearson.mean:.2f} "
        f"with the measured cells, misses {a.missed.mean:.0%} of the strongest {a.top}"
        for a in agreements
    ]
    return Text("\n".join(lines))


@dataclass(frozen=True)
class TerminalHeatMap:
    """Tokens down, layers across. Where layers do not fit, a column shows their maximum."""

    record: TraceRecord
    kind: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        record, style, labels = self.record, KIND_STYLES[self.kind], token_labels(self.record)
        cells = indirect_effects(record, self.kind)
        tokens, layers = cells.shape
        margin = min(MAX_LABEL, max(map(cell_len, labels))) + 1
        per_column = -(-layers // max(1, options.max_width - margin))
        # -inf loses against every measured cell; a column of unmeasured cells becomes NaN again.
        padding = np.full((tokens, -layers % per_column), -np.inf)
        padded = np.hstack([np.where(np.isnan(cells), -np.inf, cells), padding])
        columns = padded.reshape(tokens, -1, per_column).max(axis=2)
        columns = np.where(np.isinf(columns), np.nan, columns)
        width = 2 if 2 * columns.shape[1] + margin <= options.max_width else 1
        # 0 without an effect or with a negative one, 1 at the highest.
        high = np.max(columns, initial=1e-3, where=~np.isnan(columns))
        shades = np.clip(columns / high, 0, 1)
        colors = style.shades if console.color_system is not None else None
        for label, row in zip(labels, shades, strict=True):
            line = Text(align_right(label, margin - 1) + " ", no_wrap=True)
            for shade in row:
                line.append_text(heatmap_cell(shade, width, colors))
            yield line
        axis = ""
        for column in range(0, columns.shape[1], TICK_SPACING):
            axis = axis.ljust(column * width) + str(column * per_column)
        yield Text(" " * margin + axis, style="dim", no_wrap=True)
        clean, corrupted = (
            metric_text(record.metric, x) for x in (record.clean_value, record.corrupted_value)
        )
        caption = f"{style.name}: {metric_label(record)} {clean} clean, {corrupted} corrupted"
        if not np.isnan(cells).all():
            sign = effect_sign(record)
            best = metric_text(record.metric, record.base_value + sign * np.nanmax(cells))
            changed = "restored" if restores(record) else "with a corrupted cell"
            caption += f", {'up' if sign > 0 else 'down'} to {best} {changed}"
        yield Text(caption, style="dim")


def heatmap_cell(shade: float, width: int, colors: tuple[RGB, RGB, RGB] | None) -> Text:
    """One cell: a coloured block, or a character without colours; blank if not measured."""
    if np.isnan(shade):
        return Text(" " * width)
    if colors is None:
        return Text(RAMP[round(shade * (len(RAMP) - 1))] * width)
    # The colours are those of the shades 0, 0.5 and 1.
    rgb = (round(np.interp(shade, (0, 0.5, 1), channel)) for channel in zip(*colors, strict=True))
    return Text(" " * width, style=Style(bgcolor=Color.from_rgb(*rgb)))


def align_right(label: str, width: int) -> str:
    """The label in exactly `width` columns, of which wide characters take two."""
    if cell_len(label) <= width:
        return " " * (width - cell_len(label)) + label
    star = "*" if label.endswith("*") else ""
    return set_cell_size(label, width - 1 - len(star)) + "…" + star


# ---- edits

NEW, OLD = "bold green", "yellow"
"""Styles of the new and the old object."""
MAX_SETTING = 56
"""Characters of a setting's value."""


def fact_text(record: EditRecord) -> Text:
    """The prompt with its old and new object: "The Eiffel Tower is in Paris → Rome"."""
    return Text.assemble(
        printable(f"{record.fact.text} "),
        (printable(record.true or "?"), OLD),
        " → ",
        (printable(record.fact.target or ""), NEW),
        style="bold",
    )


def scores_table(record: EditRecord) -> Table:
    """Probabilities and predictions before and after the edit, grouped by kind of prompt."""
    table = _full_width_table("prompt")
    new, old = display_token(record.fact_prompt.new), old_object_label(record.prompts)
    table.add_column(Text(f"P({new})"), justify="right", no_wrap=True)
    table.add_column(Text(f"P({old})"), justify="right", no_wrap=True)
    table.add_column("prediction", overflow="fold", max_width=22)
    for kind, heading in PROMPT_HEADINGS.items():
        prompts = record.of_kind(kind)
        if prompts and kind != "prompt":
            table.add_section()
            table.add_row(Text(heading, style="dim italic"))
        for prompt in prompts:
            before, after = prompt.before, prompt.after
            tops = dict.fromkeys((before.top, after.top))  # one if the edit does not change it
            table.add_row(
                Text(printable(prompt.text)),
                _change(before.new, after.new),
                _change(before.old, after.old),
                Text(" → ".join(map(display_token, tops))),
            )
    return table


def facts_table(records: Iterable[EditRecord]) -> Table:
    """One line per fact of an edit, with means over its paraphrases and neighbours."""
    table = _full_width_table("fact", "P(new)", "paraphrases", "neighbours")
    table.caption = "paraphrases: mean P(new); neighbours: mean P(old)"
    means = {"prompt": "new", "paraphrase": "new", "neighbour": "old"}
    for record in records:
        fact = fact_text(record)
        fact.stylize("not bold")
        changes = (mean_change(record.of_kind(kind), which) for kind, which in means.items())
        table.add_row(fact, *(_change(*(change or (None, None))) for change in changes))
    return table


def applied_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """P(new) of facts of several edits: before, with the fact's edit alone, with all edits."""
    columns = ("before", "alone", "together")
    table = _full_width_table("fact", *columns)
    for row in rows:
        fact = Text.assemble(printable(row["text"] + " "), (printable(row["target"] or ""), NEW))
        table.add_row(fact, *(percent(row[name]) for name in columns))
    return table


def _full_width_table(first: str, *numbers: str) -> Table:
    """A table whose first column takes the space that the others leave."""
    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column(first, ratio=1, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _change(before: float | None, after: float | None) -> Text:
    """A probability before → after, padded so that arrows align."""
    if before is None or after is None:
        return Text("–")
    return Text(f"{percent(before)} → {percent(after):>6}")


def generations_table(record: EditRecord) -> Group:
    """Generated texts before and after the edit, with the objects highlighted."""
    new, old = (record.fact_prompt.new,), (record.fact_prompt.old or "",)
    return Group(*(generation_table(generation, new, old) for generation in record.generations))


def generation_table(
    generation: Generation, new: Iterable[str] = (), old: Iterable[str] = ()
) -> Table:
    """A generated text before and after side by side, with new and old objects highlighted."""
    title = Text(printable(generation.text) + " …", style="italic")
    table = Table(title=title, title_justify="left", expand=True, box=box.SIMPLE_HEAD,
                  show_edge=False, padding=(0, 2, 0, 0))  # fmt: skip
    table.add_column("before", ratio=1, overflow="fold")
    table.add_column("after", ratio=1, overflow="fold")
    styles = {**dict.fromkeys(old, OLD), **dict.fromkeys(new, NEW)}
    texts = [Text(printable(text.strip())) for text in (generation.before, generation.after)]
    for word, style in styles.items():
        if word.strip():
            whole_word = rf"(?<!\w){re.escape(printable(word.strip()))}(?!\w)"
            for text in texts:
                text.highlight_regex(whole_word, style)
    table.add_row(*texts)
    return table


def checks_table(checks: Mapping[str, Any]) -> Group | Text:
    """Whether the edit took, and the edit checks with their limits."""
    if not checks:
        return Text("edit checks: not measured", style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for check in check_rows(checks):
        style = "" if check.passed else "bold red"
        table.add_row(
            Text(check.name, style="dim"), Text(check.value, style=style), Text(check.limit),
            Text("" if check.passed else "failed", style=style),
        )  # fmt: skip
    if "verdict" not in checks:  # records of an older version
        return Group(table)
    took = checks["verdict"] == "took"
    return Group(
        Text(f"The edit {checks['verdict']}.", style="bold" if took else "bold red"), table
    )


def changed_weights_text(weights: Sequence[ChangedWeight]) -> Text:
    """One line per changed weight."""
    return Text("\n").join(Text(printable(weight_label(weight))) for weight in weights)


def settings_table(settings: Mapping[str, Any]) -> Table:
    """The settings of an edit; long values are cut, and long lists end with their length."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in flatten_settings(settings):
        text = setting_text(value)
        if len(text) > MAX_SETTING:
            length = f" {len(value)} in all" if isinstance(value, list | tuple) else ""
            text = f"{text[: MAX_SETTING - len(length) - 1]}…{length}"
        table.add_row(Text(name), Text(printable(text)))
    return table
