"""The report of a human evaluation: counts, ratios, a figure and the texts, in one folder."""

import html
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from factscope.analysis.preferences import Preference, Vote, preferences
from factscope.errors import BadStudy
from factscope.files import write_whole
from factscope.report.evaluation_words import DATA, editor_name
from factscope.report.page import escaped, numbers_html, page, plate, scrolled
from factscope.report.run import write_figure
from factscope.report.study_figures import preferences_figure
from factscope.report.study_words import ASKED, every_vote, preference_table, sentence
from factscope.report.tables import as_csv, as_latex, as_markdown
from factscope.study.pairs import Item, Study

__all__ = ["study_page", "write_study_report"]

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
        write_whole(folder / name, text)
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
        plate(preferences_figure(found), "Votes for each method"),
        f'<div class="paper">{scrolled(preference_table(found))}</div>',
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
