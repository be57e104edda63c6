"""The paper's published numbers: Tables 1 and 4, and the tables of App. F and G for other models.

CounterFact over 7,500 cases for GPT-2 and 2,000 for GPT-J, zsRE over 10,000 cases; each number
with the half width of its 95 % interval, in percent as printed. S has no interval.
"""

import math
from pathlib import PurePosixPath

from factscope.analysis.estimate import Estimate
from factscope.analysis.metrics import Summary

COUNTERFACT = ("ES", "EM", "PS", "PM", "NS", "NM", "GE", "RS")
ZSRE = ("efficacy", "paraphrase", "specificity")

# method, S, then the mean and half width of each metric
COUNTERFACT_ROWS = {
    "gpt2-xl": """
none     30.5 22.2 0.9 -4.8 0.3 24.7 0.8 -5.0 0.3 78.1 0.6 5.0 0.2 626.6 0.3 31.9 0.2
ft       65.1 100.0 0.0 98.8 0.1 87.9 0.6 46.6 0.8 40.4 0.7 -6.2 0.4 607.1 1.1 40.5 0.3
ft-l     66.9 99.1 0.2 91.5 0.5 48.7 1.0 28.9 0.8 70.3 0.7 3.5 0.3 621.4 1.0 37.4 0.3
kn       35.6 28.7 1.0 -3.4 0.3 28.0 0.9 -3.3 0.2 72.9 0.7 3.7 0.2 570.4 2.3 30.3 0.3
ke       52.2 84.3 0.8 33.9 0.9 75.4 0.8 14.6 0.6 30.9 0.7 -11.0 0.5 586.6 2.1 31.2 0.3
ke-cf    18.1 99.9 0.1 97.0 0.2 95.8 0.4 59.2 0.8 6.9 0.3 -63.2 0.7 383.0 4.1 24.5 0.4
mend     57.9 99.1 0.2 70.9 0.8 65.4 0.9 12.2 0.6 37.9 0.7 -11.6 0.5 624.2 0.4 34.8 0.3
mend-cf  14.9 100.0 0.0 99.2 0.1 97.0 0.3 65.6 0.7 5.5 0.3 -69.9 0.6 570.0 2.1 33.2 0.3
rome     89.2 100.0 0.1 97.9 0.2 96.4 0.3 62.7 0.8 75.4 0.7 4.2 0.2 621.9 0.5 41.9 0.3
""",
    "gpt-j-6b": """
none     23.6 16.3 1.6 -7.2 0.7 18.6 1.5 -7.4 0.6 83.0 1.1 7.3 0.5 621.8 0.6 29.8 0.5
ft       25.5 100.0 0.0 99.9 0.0 96.6 0.6 71.0 1.5 10.3 0.8 -50.7 1.3 387.8 7.3 24.6 0.8
ft-l     68.7 99.6 0.3 95.0 0.6 47.9 1.9 30.4 1.5 78.6 1.2 6.8 0.5 622.8 0.6 35.5 0.5
mend     63.2 97.4 0.7 71.5 1.6 53.6 1.9 11.0 1.3 53.9 1.4 -6.0 0.9 620.5 0.7 32.6 0.5
rome     91.5 99.9 0.1 99.4 0.3 99.1 0.3 74.1 1.3 78.9 1.2 5.2 0.5 620.1 0.9 43.0 0.6
""",
    "gpt2-medium": """
none     33.4 25.0 1.0 -3.3 0.2 27.4 0.9 -3.0 0.2 74.9 0.7 3.6 0.2 625.8 0.3 31.4 0.2
ft-l     68.0 100.0 0.1 94.9 0.3 68.5 0.9 6.1 0.4 51.3 0.8 -1.7 0.3 626.1 0.4 39.3 0.3
rome     87.4 100.0 0.0 94.9 0.3 96.4 0.3 56.9 0.8 71.8 0.7 2.8 0.2 625.0 0.4 41.7 0.3
""",
    "gpt2-large": """
none     32.8 23.9 1.0 -4.0 0.3 27.4 0.9 -3.5 0.2 75.7 0.7 4.3 0.2 625.4 0.3 31.8 0.2
ft-l     71.2 100.0 0.1 96.3 0.2 63.0 0.9 5.1 0.4 61.5 0.7 1.1 0.3 625.2 0.3 39.3 0.3
rome     88.2 99.9 0.1 98.2 0.1 96.3 0.3 60.4 0.8 73.4 0.7 3.5 0.2 622.5 0.4 41.9 0.3
""",
}

# method, then the mean and half width of each metric
ZSRE_ROWS = {
    "gpt2-xl": """
none       22.2 0.5 21.3 0.5 24.2 0.5
ft         99.6 0.1 82.1 0.6 23.2 0.5
ft-l       92.3 0.4 47.2 0.7 23.4 0.5
ke         65.5 0.6 61.4 0.6 24.9 0.5
ke-zsre    92.4 0.3 90.0 0.3 23.8 0.5
mend       75.9 0.5 65.3 0.6 24.1 0.5
mend-zsre  99.4 0.1 99.3 0.1 24.1 0.5
rome       99.8 0.0 88.1 0.5 24.2 0.5
""",
    "gpt2-medium": """
none       18.8 0.5 18.1 0.5 21.3 0.4
ft-l       97.2 0.2 59.4 0.7 20.9 0.4
rome       96.6 0.2 79.8 0.6 21.3 0.4
""",
    "gpt2-large": """
none       20.6 0.5 19.8 0.5 22.5 0.5
ft-l       98.3 0.2 56.8 0.7 22.4 0.5
rome       99.6 0.1 84.7 0.6 22.5 0.5
""",
}


def published(model: str, data: str) -> list[Summary]:
    """The paper's rows for a model and a data set, the unedited model first; may be empty.

    The model's name may have its owner on the hub in front ("EleutherAI/gpt-j-6b").
    """
    name = PurePosixPath(model).name.lower()
    return [row for row in PUBLISHED if (row.model, row.data) == (name, data)]


def _rows(data: str, metrics: tuple[str, ...], tables: dict[str, str]) -> list[Summary]:
    """Parse tables of "method [S] mean half_width mean half_width …"."""
    rows = []
    for model, lines in tables.items():
        cases = 10_000 if data == "zsre" else 2000 if model == "gpt-j-6b" else 7500
        for line in lines.strip().splitlines():
            method, *numbers = line.split()
            values = [round(float(number) / 100, 5) for number in numbers]
            estimates: dict[str, Estimate] = {}
            if data == "counterfact":
                estimates["S"] = Estimate(values.pop(0), math.nan, cases)
            for name, mean, half_width in zip(metrics, values[::2], values[1::2], strict=True):
                estimates[name] = Estimate(mean, half_width, cases)
            rows.append(
                Summary(
                    model=model, data=data, method=method, cases=cases, metrics=estimates,
                    published=True,
                )
            )  # fmt: skip
    return rows


PUBLISHED: tuple[Summary, ...] = (
    *_rows("counterfact", COUNTERFACT, COUNTERFACT_ROWS),
    *_rows("zsre", ZSRE, ZSRE_ROWS),
)
"""Every row; models are named without their owner."""
