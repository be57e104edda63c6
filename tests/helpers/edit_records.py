"""Records of edits."""

from dataclasses import replace
from typing import Any

from factscope.facts import Fact
from factscope.records import (
    ChangedWeight,
    EditRecord,
    Generation,
    Prediction,
    PromptChange,
)

CHECKS = {
    "division_factor": 0.31, "update_norm": 0.05, "perplexity_before": 20.0,
    "perplexity_after": 21.0, "perplexity_growth": 1.05, "complaints": [],
    "limits": {"division_factor": 0.02, "update_norm": 0.5, "perplexity": 1.5},
}  # fmt: skip


ODD = "<b>[red]東京 $5$</b>\n\x00"


def scores(kind: str, text: str, new: str = "Rome", old: str | None = "Paris") -> PromptChange:
    before = Prediction(new=0.01, old=0.7, top=f" {old}", top_probability=0.7)
    after = Prediction(new=0.98, old=0.0001, top=f" {new}", top_probability=0.98)
    if old is None:
        before, after = replace(before, old=None), replace(after, old=None)
    stays = kind == "neighbour"
    return PromptChange(
        kind=kind, text=text, new=new, old=old, before=before, after=before if stays else after
    )


def record(**fields: Any) -> EditRecord:
    defaults: dict[str, Any] = {
        "fact": Fact(subject="The Eiffel Tower", prompt="{} is in", target="Rome", id="7"),
        "true": "Paris",
        "model": "tiny",
        "method": "rome",
        "changed_weights": (ChangedWeight(name="h.5.weight", shape=(4, 8), rank=1, norm=0.5),),
        "prompts": (
            scores("prompt", "The Eiffel Tower is in"),
            scores("paraphrase", "To see the Eiffel Tower, go to"),
            scores("neighbour", "The Louvre is in"),
        ),
        "generations": (
            Generation(text="The Eiffel Tower", before=" in Paris is", after=" in Rome is"),
        ),
        "checks": CHECKS,
        "settings": {"layer": 5, "search": {"steps": 20}, "prefixes": ["a"] * 40},
    }
    return EditRecord(**(defaults | fields))


def odd(old: str | None = ODD) -> EditRecord:
    """A record whose every text is odd."""
    prompts = tuple(scores(kind, ODD, ODD, old) for kind in ("prompt", "paraphrase", "neighbour"))
    fact = Fact(subject=ODD, prompt="{} is $x$", target=ODD)
    said = (Generation(text=ODD, before=ODD * 2, after=f"</script>{ODD}"),)
    return record(fact=fact, true=old, prompts=prompts, generations=said, model=ODD, method="[/b]")


def neurons_record(*layers: int, **fields: Any) -> EditRecord:
    """A record of an edit by Knowledge Neurons."""
    neurons = [
        {"layer": i, "neuron": 10 * i, "attribution": n / 10 - 0.1, "context_fraction": 0.8}
        for n, i in enumerate(layers)
    ]
    found = {"neurons": [neurons], "coarse": [[0.5] * 6], "answers": [" Paris"]}
    return record(method="kn", settings=found, **fields)
