"""Generated texts side by side."""

import pytest

from factscope.errors import BadSetting
from factscope.report.html import render
from factscope.report.samples import collect_samples, samples_text, shared_opening_length

from case_records import RECORDS, case, scores
from pages import check_well_formed


def test_samples_are_displayed_side_by_side_with_objects_highlighted():
    (one,) = collect_samples(RECORDS, ["1"])
    assert list(one.texts) == [
        "before", "ROME", "FT", "ROME, sequential, after its edit",
        "ROME, sequential, after all edits",
    ]  # fmt: skip
    text = render("samples.html", case=one)
    check_well_formed(text)
    assert "<i>Pierre Curie works as a</i> doctor of <mark>Medicine</mark>." in text
    assert '<mark class="was">physics</mark>' in text
    assert "<script>" not in text
    plain = samples_text(one).plain
    assert "case 1, gpt2-xl: Pierre Curie's area of work is ~physics~ → *medicine*" in plain
    assert "doctor of *Medicine*." in plain
    assert plain.count("before") == 2  # one for each opening


def test_default_samples_are_of_the_first_cases():
    assert [s.fact.id for s in collect_samples(RECORDS, count=2)] == ["0", "1"]
    assert [s.fact.id for s in collect_samples(RECORDS, ["2", "0"])] == ["2", "0"]
    assert collect_samples([case(before=None, after=scores(0.5))]) == []
    with pytest.raises(BadSetting, match="'17'; cases with texts: 0, 1, 2"):
        collect_samples(RECORDS, ["17"])


def test_reference_words_are_highlighted():
    (one,) = collect_samples(RECORDS, ["0"], reference={"0": ["Every Doctor as a"]})
    assert ("doctor", "reference") in one.highlight("A doctor as a")
    assert [kind for _, kind in one.highlight("as a")] == [
        "",
        "",
        "",
    ]  # short words are in any text


def test_known_objects_are_highlighted_as_whole_words():
    (one,) = collect_samples([case(true=None)])
    assert one.highlight("medicine, medicines") == [("medicine", "new"), (", medicines", "")]
    assert one.highlight("physics") == [("physics", "")]


def test_shared_opening_ends_with_a_word():
    assert shared_opening_length(["He works as", "He works at"]) == len("He works")
    assert shared_opening_length(["He is", "He is"]) == 0
    assert shared_opening_length(["alone"]) == 0


def test_further_texts_are_in_details():
    many = case(after=scores(0.5, tuple(f"text {i} here" for i in range(10))))
    assert "7 more texts" in render("samples.html", case=collect_samples([many])[0])
