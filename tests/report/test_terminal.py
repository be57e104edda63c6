"""Traces and edits in the terminal."""

import io
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from factscope.errors import BadRecord
from factscope.records import EditRecord, TraceRecord
from factscope.report import terminal
from factscope.report.terminal import strongest_cells, trace_heatmap

from edit_records import CHECKS, ODD, odd, record
from trace_records import ODD_TOKENS, trace


def printed(thing: Any, width: int = 80, color: Any = None) -> str:
    console = Console(
        width=width, file=io.StringIO(), color_system=color, force_terminal=color is not None
    )
    console.print(thing)
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


# ---- traces


def step(layers: int) -> TraceRecord:
    """Only the last token's last layer restores the answer."""
    flat = (0.1,) * layers
    return trace(restored={"states": (flat,) * 5 + ((*flat[1:], 0.6),)}, severed={}, gradients={})


def test_heatmap_without_colour_uses_characters():
    lines = printed(trace_heatmap(step(6))).splitlines()
    assert lines[1].startswith("Space* ")
    assert lines[5] == "    in " + " " * 10 + "@@"
    assert "60.0% clean" in lines[-1]


def test_heatmap_pools_layers_that_do_not_fit_by_their_maximum():
    text = printed(trace_heatmap(step(100)), width=40)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[5].endswith("@")


def test_heatmap_with_colour_uses_coloured_blocks():
    text = printed(trace_heatmap(step(6)), color="truecolor")
    assert "48;2;63;0;125m" in text  # the darkest purple
    assert "@" not in text


@pytest.mark.parametrize("width", [12, 40, 200])
def test_heatmap_prints_unusual_tokens(width: int):
    odd = trace(tokens=(*ODD_TOKENS[:2], " [bold]東京" * 9, *ODD_TOKENS[3:]))
    assert "東京" in printed(trace_heatmap(odd, "mlp"), width)


def test_strongest_cells_are_sorted():
    text = printed(strongest_cells(step(6), count=2))
    assert re.search(r"in .* 5 .* 60\.0% .* \+50\.0%", text)
    with pytest.raises(BadRecord, match="no table 'attn'"):
        trace_heatmap(step(6), "attn")


# ---- edits


def test_edit_tables_fit_eighty_columns() -> None:
    text = printed(terminal.scores_table(record()))
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"P\(Rome\) .* P\(Paris\)", text)
    assert re.search(r"The Eiffel Tower is in .* 1\.0% → +98\.0% .* Paris → Rome", text)
    assert re.search(r"The Louvre is in .* 70\.0% → +70\.0% .* Paris ", text)
    side = printed(terminal.generations_table(record()))
    assert re.search(r"in Paris is +in Rome is", side)
    assert "The Eiffel Tower is in Paris → Rome" in printed(terminal.fact_text(record()))
    assert "rank 1 of 4 × 8" in printed(terminal.changed_weights_text(record().changed_weights))


def test_facts_table_has_one_line_per_fact() -> None:
    text = printed(terminal.facts_table([record(), record(prompts=record().prompts[:1])]))
    assert text.count("98.0%") == 3
    assert "–" in text


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("made", [odd(), odd(None)])
def test_edit_tables_print_unusual_texts(made: EditRecord, width: int) -> None:
    for thing in (
        terminal.fact_text(made), terminal.scores_table(made), terminal.generations_table(made),
        terminal.facts_table([made]), terminal.settings_table({"a": ODD}),
    ):  # fmt: skip
        text = printed(thing, width)
        assert "\x00" not in text
    assert "[red]" in printed(terminal.fact_text(made), 80)


def test_checks_that_are_not_finite_are_printed() -> None:
    broken = CHECKS | {"division_factor": 0.001, "update_norm": 3.0, "perplexity_growth": None}
    assert "not finite" in printed(terminal.checks_table(broken))


def test_terminal_output_does_not_load_matplotlib() -> None:
    probe = "import sys, factscope.report.terminal; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)
