"""The report of a human evaluation: counts, ratios, a figure and the texts, in one folder.

The form that people fill in: one HTML file that works offline and does not know who wrote what.

Texts travel as JSON and are put on the page as text, never as markup. The page's policy allows its
own script, by hash, and no request at all.

Preferences in words and as tables.
"""

import base64
import hashlib
import html
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

from factscope.analysis.metrics import UNEDITED
from factscope.analysis.preferences import Interval, Preference, Vote, preferences
from factscope.errors import BadStudy
from factscope.extras.study.answers import ANSWERS
from factscope.extras.study.pairs import Item, Study
from factscope.io import write_atomic
from factscope.report.figures.studies import preferences_figure
from factscope.report.html import asset, escaped, figure_html, numbers_html, page, scrollable
from factscope.report.labels import ASKED, DATA, editor_name, number, ratio_text, span
from factscope.report.tables import Cell, Table, as_csv, as_latex, as_markdown
from factscope.report.traces import write_figure

__all__ = [
    "every_vote",
    "form_page",
    "preference_table",
    "sentence",
    "study_page",
    "write_study_report",
]

MORE = {"consistent": "more consistent", "fluent": "more fluent"}
NOTE = (
    "The ratio is the votes for A by those for B, without those that saw no difference. Its 95 % "
    "interval is about other people and other cases: votes of one person, or on one case, count "
    "for less than as many independent ones."
)


def sentence(found: Preference) -> str:
    """A preference as the paper states it."""
    first, second = map(_who, found.pair)
    more, ties = MORE[found.question], f"{found.ties} without a difference"
    if not found.votes:
        return f"Nobody called either of {first} and {second} {more}: {ties}."
    wins, ratio, interval = found.wins, found.ratio, found.ratio_interval
    if ratio < 1:
        first, second, wins, ratio = second, first, wins[::-1], _inverse(ratio)
        interval = Interval(_inverse(interval.high), _inverse(interval.low))
    often = "always" if math.isinf(ratio) else f"{number(ratio)} times as often as {second}"
    said = (
        f"{first} was called {more} {often} (95 % interval {span(interval)}): "
        f"{wins[0]} votes against {wins[1]}, {ties}."
    )
    return said[0].upper() + said[1:]


def _who(method: str) -> str:
    return "the unedited model" if method == UNEDITED else editor_name(method)


def _inverse(ratio: float) -> float:
    return math.inf if ratio == 0 else 1 / ratio


def preference_table(found: Sequence[Preference]) -> Table:
    """A row for each question and pair of methods."""
    columns = ("asked", "A", "B", "for A", "for B", "no difference", "ratio (95 %)", "raters",
               "cases", "agreement")  # fmt: skip
    rows = tuple(
        (
            ASKED[one.question], *map(editor_name, one.pair), *one.wins, one.ties, ratio_text(one),
            one.raters, one.cases, _percent(one.agreement),
        )
        for one in found
    )  # fmt: skip
    return Table("Preferences", columns, rows, NOTE)


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def every_vote(found: Sequence[Preference]) -> Table:
    """The same with every number, unrounded; an infinite ratio is left empty."""
    columns = ("asked", "A", "B", "for A", "for B", "no difference", "share of A", "low", "high",
               "ratio", "ratio low", "ratio high", "independent low", "independent high",
               "effective votes", "on the left", "raters", "cases", "agreement")  # fmt: skip
    return Table("Preferences", columns, tuple(map(_numbers, found)))


def _numbers(one: Preference) -> tuple[Cell, ...]:
    ratios = (one.ratio, one.ratio_interval.low, one.ratio_interval.high)
    return (
        one.question, *one.pair, *one.wins, one.ties,
        one.share, one.interval.low, one.interval.high,
        *(None if math.isinf(ratio) else ratio for ratio in ratios),
        one.independent.low, one.independent.high, one.effective,
        one.left, one.raters, one.cases, one.agreement,
    )  # fmt: skip


OPEN = 3
"""How many pairs of texts the page shows at once."""


def write_study_report(study: Study, votes: Sequence[Vote], folder: Path) -> list[Path]:
    """Write the report and return its files, the page first."""
    found = preferences(votes)
    if not found:
        raise BadStudy("nobody answered a question; there is nothing to count")
    table = preference_table(found)
    files = {
        "index.html": study_page(study, votes),
        "preferences.md": as_markdown(table),
        "preferences.tex": as_latex(table),
        "preferences.csv": as_csv(every_vote(found)),
    }
    for name, text in files.items():
        write_atomic(folder / name, text)
    figures = write_figure(preferences_figure(found), folder / "preferences")
    return [*(folder / name for name in files), *figures]


def study_page(study: Study, votes: Sequence[Vote]) -> str:
    """The page: what people chose in words, as a figure and a table, then what they read."""
    found = preferences(votes)
    title = f"Human evaluation: {', '.join(map(editor_name, study.methods))}"
    body = [
        f"<h1>{escaped(title)}</h1>",
        f'<p class="soft">Texts by {escaped(study.model)}, '
        f"{escaped(DATA.get(study.data, study.data))}; study {study.id}</p>",
        numbers_html(numbers(study, votes, found)),
        *(f"<p>{html.escape(sentence(one))}</p>" for one in found),
        figure_html(preferences_figure(found), "Votes for each method"),
        f'<div class="paper">{scrollable(preference_table(found))}</div>',
        "<h2>What they read</h2>",
        *(item_html(item, votes) for item in study.items[:OPEN]),
    ]
    if more := study.items[OPEN:]:
        rest = "\n".join(item_html(item, votes) for item in more)
        body.append(f"<details><summary>{len(more)} more pairs</summary>\n{rest}</details>")
    return page(title, body, note="")


def numbers(study: Study, votes: Sequence[Vote], found: Sequence[Preference]) -> dict[str, str]:
    """A few numbers for the top."""
    decided, left = sum(one.votes for one in found), sum(one.left for one in found)
    return {
        "people": str(len({vote.rater for vote in votes})),
        "cases": str(len({vote.case for vote in votes})),
        "pairs of texts": str(len(study.items)),
        "answers": str(len(votes)),
        "of those chosen, on the left": f"{100 * left / decided:.0f} %" if decided else "–",
    }


def item_html(item: Item, votes: Sequence[Vote]) -> str:
    """A pair of texts with who wrote them and who was chosen."""
    mine = [v for v in votes if v.case == item.case and set(v.pair) == set(item.methods)]
    columns = (
        f"<div><h3>{escaped(editor_name(method))}: {_counts(mine, method)}</h3>"
        f"{html.escape(text)}</div>"
        for method, text in zip(item.methods, item.texts, strict=True)
    )
    ties = _counts(mine, None)
    return (
        f"<h3>{escaped(item.statement)} "
        f'<span class="tag">case {escaped(item.case)}; no difference: {ties}</span></h3>\n'
        f'<div class="both">{"".join(columns)}</div>'
    )


def _counts(votes: Sequence[Vote], chosen: str | None) -> str:
    counts = Counter(vote.question for vote in votes if vote.chosen == chosen)
    return ", ".join(f"{counts[name]} for {asked}" for name, asked in ASKED.items())


TITLE = "Which text is better?"
FORM = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
style-src 'unsafe-inline'; script-src '$hash'; base-uri 'none'; form-action 'none'">
<title>$title</title>
<style>
$css</style>
</head>
<body>
$body
<script type="application/json" id="study">$data</script>
<script>$js</script>
</body>
</html>
""")


def form_page(study: Study, title: str = TITLE) -> str:
    """The form of a study."""
    script = asset("study_form.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return FORM.substitute(
        hash=f"sha256-{digest}", title=html.escape(title), js=script,
        css=asset("page.css") + asset("study_form.css"), data=embedded(form_data(study)),
        body=Template(asset("study_form.html")).substitute(
            title=html.escape(title), pairs=study.per_rater or len(study.items)
        ),
    )  # fmt: skip


def form_data(study: Study) -> dict[str, Any]:
    """What the form knows."""
    return {
        "kind": ANSWERS,
        "study": study.id,
        "per_rater": study.per_rater or len(study.items),
        "items": [
            {"id": item.id, "statement": item.statement, "texts": item.texts}
            for item in study.items
        ],
    }


def embedded(value: Any) -> str:
    """JSON within a script element, which no text can end."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace("&", "\\u0026")
