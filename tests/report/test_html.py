"""Page templates: escaping, and macros."""

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import summarize
from factscope.report.evaluations import evaluation_tables
from factscope.report.html import multiline
from factscope.report.labels import printable
from factscope.report.tables import Table

from case_records import RECORDS
from pages import check_well_formed, render_macro

TABLE = Table("A|B", ("name", "mean"), (("x_1 & $y$", Estimate(0.1234, 0.01, 9)), ("<b>", 3)))


def test_control_characters_are_visible_and_other_text_is_unchanged():
    assert printable("a\tb\n\x00\u2028") == "a⇥b↵\ufffd\ufffd"
    assert printable("a\u202eb\u2066\u200e\ufeff") == "a\ufffdb" + 3 * "\ufffd"
    assert printable("👩\u200d🔬") == "👩\u200d🔬"
    assert printable("東京 é $x$ <b>") == "東京 é $x$ <b>"
    assert multiline("<b>\n\x00") == "&lt;b&gt;\n\ufffd"


def test_macros_escape_every_value():
    numbers = render_macro("numbers", {"<i>": "a\n<b>", "n": 3})
    assert "<dt>&lt;i&gt;</dt><dd>a↵&lt;b&gt;</dd>" in numbers
    assert "<dt>n</dt><dd>3</dd>" in numbers
    segments = [("<i>", "opening"), ("<b>", "new"), ('"', "true"), ("&", "reference"), ("\x00", "")]
    assert render_macro("highlighted", segments) == (
        "<i>&lt;i&gt;</i><mark>&lt;b&gt;</mark>"
        '<mark class="was">&#34;</mark><mark class="reference">&amp;</mark>\ufffd'
    )


def test_settings_are_flattened_with_dotted_names():
    text = render_macro("settings", "Settings", {"a": {"b": [1, "<"]}, "c": None})
    check_well_formed(text)
    assert "<td>a.b</td><td>[1, &#34;&lt;&#34;]</td>" in text
    assert "<td>c</td><td>null</td>" in text
    assert render_macro("settings", "Settings", {}).strip() == ""


def test_table_cells_are_escaped():
    text = render_macro("table", TABLE)
    assert "<td>&lt;b&gt;</td>" in text
    assert '<td class="number">12.3 ± 1.0 %</td>' in text


def test_marked_table_cells_are_coloured():
    text = render_macro("table", evaluation_tables(summarize(RECORDS))[0])
    check_well_formed(text)
    assert '<td class="number best">100.0 (0.0)</td>' in text
    assert '<td class="number failure">0.0 (0.0)</td>' in text
    assert text.count('<tr class="ruled">') == 1
