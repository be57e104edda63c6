"""Labels that the terminal, figures and pages share."""

from factscope.report.labels import check_rows, old_object_label, percent

from edit_records import CHECKS, record, scores


def test_percent() -> None:
    assert [percent(p) for p in (0.0, 1e-5, 0.0006, 0.5, 1.0)] == [
        "0.0%", "<0.1%", "0.1%", "50.0%", "100.0%",
    ]  # fmt: skip


def test_old_object_is_named_if_all_prompts_share_it() -> None:
    assert old_object_label(record().prompts) == "Paris"
    assert old_object_label([*record().prompts, scores("neighbour", "x", old="Oslo")]) == "old"
    assert old_object_label([scores("prompt", "x", old=None)]) == "old"


def test_failed_edit_checks_are_reported() -> None:
    assert all(check.passed for check in check_rows(CHECKS))
    broken = CHECKS | {"division_factor": 0.001, "update_norm": 3.0, "perplexity_growth": None}
    assert [check.passed for check in check_rows(broken)] == [False, False, False]
    assert len(list(check_rows(CHECKS | {"division_factor": None}))) == 2


def test_checks_show_whether_the_edit_took_and_how_many_predictions_changed() -> None:
    limits = CHECKS["limits"] | {"neighbours_changed": 0.25}
    more = {"neighbours_changed": 0.5, "taken": 1.0, "paraphrases_taken": 0.5, "limits": limits}
    rows = [(x.name, x.value, x.limit, x.passed) for x in check_rows(CHECKS | more)]
    assert rows[-3:] == [
        ("unrelated prompts that changed", "50 %", "at most 25 %", False),
        ("new object most likely, prompt", "100 %", "100 %", True),
        ("new object most likely, paraphrases", "50 %", "100 %", False),
    ]
