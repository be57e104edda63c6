"""Human evaluation: the form that raters fill in, and the report of their preferences.

The form is one HTML file that works offline and does not contain which method wrote which text.
"""

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from factscope.analysis.metrics import UNEDITED
from factscope.analysis.preferences import Interval, Preference, Vote, preferences
from factscope.errors import BadStudy
from factscope.extras.study import ANSWERS_KIND, Study
from factscope.report.figures.evaluation import preferences_figure
from factscope.report.html import asset, embed_figure, render, table_files, write_files
from factscope.report.labels import (
    QUESTION_LABELS,
    dataset_name,
    editor_name,
    interval_text,
    ratio_number,
    ratio_text,
)
from factscope.report.tables import Table

FORM_TITLE = "Which text is better?"
COMPARATIVES = {"consistent": "more consistent", "fluent": "more fluent"}
NOTE = (
    "The ratio is the number of votes for A divided by the number of votes for B, without ties. "
    "Its 95 % confidence interval accounts for the choice of raters and cases: votes by one rater, "
    "or on one case, are correlated and count for less than independent votes."
)


# ---- the form


def form_page(study: Study, title: str = FORM_TITLE) -> str:
    """The form of a study. Its content security policy allows the form's script by its hash."""
    digest = hashlib.sha256(asset("study_form.js").encode()).digest()
    script_hash = base64.b64encode(digest).decode()
    return render("study_form.html", title=title, data=form_data(study), script_hash=script_hash)


def form_data(study: Study) -> dict[str, Any]:
    """The study as the form's script reads it, without the methods."""
    return {
        "kind": ANSWERS_KIND,
        "study": study.id,
        "per_rater": study.per_rater or len(study.items),
        "items": [
            {"id": item.id, "statement": item.statement, "texts": item.texts}
            for item in study.items
        ],
    }


# ---- the report


def write_study_report(study: Study, votes: Sequence[Vote], folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    results = preferences(votes)
    if not results:
        raise BadStudy("nobody answered a question; there is nothing to count")
    tables = table_files(
        "preferences", preference_table(results), full=all_preferences_table(results)
    )
    figure = ("preferences", preferences_figure(results))
    return write_files(folder, [("index.html", study_page(study, votes)), *tables, figure])


def study_page(study: Study, votes: Sequence[Vote]) -> str:
    """The page: the preferences as sentences, figure and table, then the rated texts."""
    results = preferences(votes)
    decided, left = sum(result.votes for result in results), sum(result.left for result in results)
    items = []
    for item in study.items:
        cast = [v for v in votes if v.case == item.case and set(v.pair) == set(item.methods)]
        texts = [
            {"method": editor_name(method), "votes": _count(cast, method), "text": text}
            for method, text in zip(item.methods, item.texts, strict=True)
        ]
        items.append({"item": item, "ties": _count(cast, None), "texts": texts})
    return render(
        "study.html",
        title=f"Human evaluation: {', '.join(map(editor_name, study.methods))}",
        model=study.model,
        data=dataset_name(study.data),
        study_id=study.id,
        numbers={
            "raters": len({vote.rater for vote in votes}),
            "cases": len({vote.case for vote in votes}),
            "pairs of texts": len(study.items),
            "answers": len(votes),
            "preferred text on the left": f"{100 * left / decided:.0f} %" if decided else "–",
        },
        sentences=[preference_sentence(result) for result in results],
        figure=embed_figure(preferences_figure(results), "Votes for each method"),
        table=preference_table(results),
        items=items,
    )


def _count(votes: Sequence[Vote], chosen: str | None) -> str:
    counts = Counter(vote.question for vote in votes if vote.chosen == chosen)
    return ", ".join(f"{counts[question]} for {name}" for question, name in QUESTION_LABELS.items())


def preference_sentence(preference: Preference) -> str:
    """A preference in the form in which the paper states it."""
    first, second = (
        "the unedited model" if method == UNEDITED else editor_name(method)
        for method in preference.pair
    )
    comparative = COMPARATIVES[preference.question]
    if not preference.votes:
        return f"No rater found {first} or {second} {comparative} ({preference.ties} ties)."
    wins, ratio, interval = preference.wins, preference.ratio, preference.ratio_interval
    if ratio < 1:
        first, second, wins, ratio = second, first, wins[::-1], _inverse(ratio)
        interval = Interval(_inverse(interval.high), _inverse(interval.low))
    often = f"{ratio_number(ratio)} times as often as {second}"
    sentence = (
        f"{first} was rated {comparative} {'in every vote' if math.isinf(ratio) else often} "
        f"(95 % confidence interval of the ratio: {interval_text(interval)}): "
        f"{wins[0]} votes against {wins[1]}, {preference.ties} ties."
    )
    return sentence[0].upper() + sentence[1:]


def _inverse(ratio: float) -> float:
    return math.inf if ratio == 0 else 1 / ratio


def preference_table(results: Sequence[Preference]) -> Table:
    """A row for each question and pair of methods."""
    columns = ("question", "A", "B", "votes for A", "votes for B", "ties", "ratio (95 %)",
               "raters", "cases", "agreement")  # fmt: skip
    rows = tuple(
        (
            QUESTION_LABELS[result.question], *map(editor_name, result.pair), *result.wins,
            result.ties, ratio_text(result), result.raters, result.cases,
            "–" if result.agreement is None else f"{100 * result.agreement:.0f} %",
        )
        for result in results
    )  # fmt: skip
    return Table("Preferences", columns, rows, NOTE)


def all_preferences_table(results: Sequence[Preference]) -> Table:
    """The same with all numbers unrounded, for CSV; infinite ratios are empty."""
    columns = ("question", "A", "B", "votes for A", "votes for B", "ties", "fraction for A", "low",
               "high", "ratio", "ratio low", "ratio high", "independent low", "independent high",
               "effective votes", "chosen on the left", "raters", "cases", "agreement")  # fmt: skip
    rows = []
    for result in results:
        ratios = (result.ratio, result.ratio_interval.low, result.ratio_interval.high)
        rows.append((
            result.question, *result.pair, *result.wins, result.ties,
            result.fraction, result.interval.low, result.interval.high,
            *(None if math.isinf(ratio) else ratio for ratio in ratios),
            result.independent_interval.low, result.independent_interval.high, result.effective,
            result.left, result.raters, result.cases, result.agreement,
        ))  # fmt: skip
    return Table("Preferences", columns, tuple(rows))
