"""Records in the format of CounterFact."""

from typing import Any

PLACES = ("Rome", "Vienna", "Oslo", "Berlin", "Paris", "Madrid")


def record(number: int) -> dict[str, Any]:
    """A record of CounterFact."""
    true, new = PLACES[number % 5], PLACES[number % 5 + 1]
    subject = f"Tower {number}"
    return {
        "case_id": number,
        "requested_rewrite": {
            "prompt": "{} is in", "subject": subject, "relation_id": "P1",
            "target_new": {"str": new}, "target_true": {"str": true},
        },
        "paraphrase_prompts": [f"One finds {subject} in"],
        "neighborhood_prompts": ["The Louvre is in"],
        "attribute_prompts": [],
        "generation_prompts": [subject],
    }  # fmt: skip
