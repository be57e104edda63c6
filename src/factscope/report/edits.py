"""Pages of an edit: the edit alone, or the trace of a fact followed by its edit."""

from typing import Any

from factscope.records import EditRecord, TraceRecord
from factscope.report.evaluations import highlight
from factscope.report.figures.edits import before_after_figure, has_neurons, neurons_figure
from factscope.report.html import embed_figure, render
from factscope.report.labels import check_rows, display_token, mean_change, percent, weight_label
from factscope.report.tables import Table
from factscope.report.traces import trace_values


def edit_page(record: EditRecord) -> str:
    """The page of one edit: predictions before and after, generated text, checks, settings."""
    title = f"Edit: {record.fact.text} {record.fact.target}"
    return render("edit.html", title=title, trace=None, edit=edit_values(record))


def trace_and_edit_page(trace: TraceRecord, edit: EditRecord) -> str:
    """The page of a fact's trace, followed by its edit."""
    title = f"Trace and edit: {trace.fact.text}"
    return render("edit.html", title=title, trace=trace_values(trace), edit=edit_values(edit))


def edit_values(record: EditRecord) -> dict[str, Any]:
    """What edit_body.html displays."""
    prompt = record.fact_prompt
    objects = {"new": prompt.new, "true": prompt.old}
    # Mean probabilities before and after, for the kinds of prompts that the record has.
    changes = {
        f"P({display_token(prompt.new)})": mean_change(record.of_kind("prompt"), "new"),
        f"P({display_token(prompt.old or 'old')})": mean_change(record.of_kind("prompt"), "old"),
        "P(new object), paraphrases": mean_change(record.of_kind("paraphrase"), "new"),
        "P(old object), neighbours": mean_change(record.of_kind("neighbour"), "old"),
    }
    neurons = neurons_figure(record) if has_neurons(record) else None
    return {
        "record": record,
        "verdict": record.checks.get("verdict"),
        "numbers": {
            label: f"{percent(change[0])} → {percent(change[1])}"
            for label, change in changes.items()
            if change is not None
        },
        "before_after": embed_figure(
            before_after_figure(record), "Probabilities before and after the edit"
        ),
        "scores": scores_table(record),
        "generations": [
            {
                "prompt": generation.text,
                "before": highlight(generation.before.strip(), **objects),
                "after": highlight(generation.after.strip(), **objects),
            }
            for generation in record.generations
        ],
        "checks": checks_table(record) if record.checks else None,
        "neurons": neurons and embed_figure(neurons, "Selected neurons by layer"),
        "changed_weights": [weight_label(weight) for weight in record.changed_weights],
    }


def scores_table(record: EditRecord) -> Table:
    """The probabilities and the most likely next token of every prompt."""
    columns = (
        "kind", "prompt", "new object", "before", "after", "old object", "before", "after",
        "top token before", "top token after",
    )  # fmt: skip
    rows = []
    for prompt in record.prompts:
        sides = (prompt.before, prompt.after)
        new = [percent(side.new) for side in sides]
        old = ["–" if side.old is None else percent(side.old) for side in sides]
        top = [f"{display_token(side.top)} ({percent(side.top_probability)})" for side in sides]
        rows.append((prompt.kind, prompt.text, prompt.new, *new, prompt.old or "–", *old, *top))
    return Table("All prompts", columns, tuple(rows))


def checks_table(record: EditRecord) -> Table:
    """The edit checks with their limits."""
    rows = tuple(
        (check.name, check.value, check.limit, "passed" if check.passed else "failed")
        for check in check_rows(record.checks)
    )
    return Table("", ("check", "value", "limit", "result"), rows)
