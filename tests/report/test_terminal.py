"""Traces and edits in the terminal."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from factscope.errors import BadRecord
from factscope.records import EditRecord, TraceRecord
from factscope.report import terminal
from factscope.report.terminal import (
    knockout_lines,
    lens_lines,
    strongest_cells,
    strongest_heads,
    trace_heatmap,
)

from edit_records import CHECKS, ODD, odd, record
from trace_records import KL, ODD_TOKENS, attention_trace, trace


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


def test_heatmap_of_a_metric_that_effects_lower():
    cells = ((2.0, 2.0),) * 5 + ((0.5, 2.5),)
    record = trace(**KL, restored={"states": cells}, severed={}, gradients={})
    lines = printed(trace_heatmap(record)).splitlines()
    assert lines[5] == "    in @@  "
    assert lines[-1] == (
        "states: KL(clean ‖ run) 0.00 clean, 2.00 corrupted, down to 0.50 restored"
    )
    table = printed(strongest_cells(record, count=1))
    assert re.search(r"in +│ +0 │ +0.50 │ +\+1.50 │ +75%", table)


def test_strongest_heads_name_token_layer_and_head():
    flat = ((0.1,) * 6,) * 6
    strong = (*flat[1:], (0.1, 0.1, 0.5, 0.1, 0.1, 0.1))
    text = printed(strongest_heads(trace(heads=(flat, strong)), count=1))
    assert re.search(r"in +│ +2 │ +1 │ +50.0% │ +\+40.0%", text)


def test_knockout_and_lens_in_a_few_lines():
    record = attention_trace(knockout={"subject": (0.6, 0.15, 0.5), "last": (0.6, 0.6, 0.9)})
    assert printed(knockout_lines(record)).splitlines() == [
        "attention to subject tokens blocked: p(Seattle) 60.0% → 15.0% at layer 1",
        "attention to last token blocked: p(Seattle) 60.0% → 90.0% at layer 2",
    ]
    top = [(((" x", 0.5),),) * 2, (((" Seattle", 0.9),),) * 3, (((" Rome", 0.9),),)]
    rows = (sum(top, ()),) * 6
    lens = {"clean": replace(record.lens["clean"], top=rows)}
    assert printed(lens_lines(replace(record, lens=lens)), 120).strip() == (
        "logit lens, clean run, last token: x from layer 0, Seattle from layer 2, Rome from layer 5"
    )


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


def test_the_verdict_is_printed_before_the_checks() -> None:
    text = printed(terminal.checks_table(CHECKS | {"verdict": "did not take"}))
    assert text.startswith("The edit did not take.")
    assert "The edit" not in printed(terminal.checks_table(CHECKS))


def test_terminal_output_does_not_load_matplotlib() -> None:
    probe = "import sys, factscope.report.terminal; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", probe], check=True)
