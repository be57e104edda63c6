"""Records of evaluated cases."""

import math
from typing import Any

from factscope.facts import Fact
from factscope.records import CaseRecord, CaseScores, PromptScore


def scores(new: float, texts: tuple[str, ...] = ()) -> CaseScores:
    """P(new) after every prompt but the neighbours', which stay true."""
    wanted = PromptScore(
        new=-math.log(new), true=-math.log(0.2), new_correct=new > 0.5, true_correct=False
    )
    kept = PromptScore(new=3.0, true=1.0, new_correct=False, true_correct=True)
    prompts = {"prompt": (wanted,), "paraphrase": (wanted,) * 2, "neighbour": (kept,) * 3}
    return CaseScores(prompts=prompts, texts=texts, reference_similarity=0.3 if texts else None)


def case(number: int = 0, method: str = "rome", new: float = 0.6, **fields: Any) -> CaseRecord:
    fact = Fact(
        subject="Pierre Curie", prompt="{}'s area of work is", target="medicine", id=str(number)
    )
    before = ("Pierre Curie works as a professor of physics.", "Curie <script>")
    after = ("Pierre Curie works as a doctor of Medicine.", "Curie <script> heals")
    plain = {
        "fact": fact, "true": "physics", "data": "counterfact", "model": "gpt2-xl",
        "before": scores(0.1, before), "after": scores(new, after),
    }  # fmt: skip
    return CaseRecord(**{**plain, "method": method, **fields})


RECORDS = [
    *(case(i) for i in range(3)),
    *(case(i, "ft", 0.1) for i in range(2)),
    case(2, "ft", after=None, error="no progress"),
    *(case(i, protocol="sequential", step=i) for i in range(2)),
    *(case(i, new=0.1, protocol="sequential", step=i, phase="end") for i in range(2)),
]
