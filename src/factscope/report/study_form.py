"""The form that people fill in: one HTML file that works offline and does not know who wrote what.

Texts travel as JSON and are put on the page as text, never as markup. The page's policy allows its
own script, by hash, and no request at all.
"""

import base64
import hashlib
import html
import json
from string import Template
from typing import Any

from factscope.report.page import asset
from factscope.study.answers import ANSWERS
from factscope.study.pairs import Study

__all__ = ["form_page"]

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
