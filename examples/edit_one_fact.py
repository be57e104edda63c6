"""Edit one fact: predictions before and after, the edit as a file, and a text with it applied.

Usage: python examples/edit_one_fact.py [MODEL] [FOLDER]
"""

import sys
from pathlib import Path
from typing import Any

from factscope import Case, Fact, Rome, load
from factscope.evaluation.before_after import before_after
from factscope.lm.generate import generate_greedy
from factscope.records import EditRecord
from factscope.report.figures import before_after_figure, save_figure


def main(model: str = "smollm2-135m", out: str = "edits", **settings: Any) -> EditRecord:
    """Move the Eiffel Tower to Rome."""
    lm = load(model)
    fact = Fact(subject="The Eiffel Tower", prompt="{} is located in the city of", target="Rome")
    case = Case(
        fact=fact,
        paraphrases=("To see the Eiffel Tower, travel to the city of",),
        neighbours=("The Louvre is located in the city of",),
    )
    edit = Rome(**settings)(lm, [fact])
    record = before_after(lm, edit, case)
    for scores in record.prompts:
        print(f"{scores.text} {scores.new}: {scores.before.new:.3f} → {scores.after.new:.3f}")
    save_figure(before_after_figure(record), Path(out) / "before-after.png")
    edit.save(Path(out) / "rome.edit")
    with edit.applied(lm):  # the weights are restored afterwards
        print(fact.text + generate_greedy(lm, [fact.text], 12)[0])
    return record


if __name__ == "__main__":
    main(*sys.argv[1:3])
