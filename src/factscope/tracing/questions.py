"""A fact put to the model: its tokens, its subject's place, and the clean run's answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt, encode_fact, first_token
from factscope.tracing.settings import Tracing

__all__ = ["Question", "ask", "padded"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A fact as the model reads it, with its answer in the clean run."""

    fact: Fact
    prompt: Prompt
    subject: tuple[int, int]
    """The subject's tokens, as [start, stop)."""
    answer: int
    clean: float
    """P[o], the answer's probability."""
    known: bool

    @property
    def restorable(self) -> int:
        """How many tokens a trace can restore: from the subject's first one on."""
        return len(self.prompt) - self.subject[0]

    def tokens(self, rows: str) -> list[int]:
        """The tokens to restore: `all` that can be, or the `last_subject` one."""
        if rows == "last_subject":
            return [self.subject[1] - 1]
        return list(range(self.subject[0], len(self.prompt)))


@torch.no_grad()
def ask(lm: LM, facts: Sequence[Fact], settings: Tracing) -> list[Question]:
    """The clean run's answer to every prompt."""
    coded = [encode_fact(lm, fact) for fact in facts]
    ids = padded(lm, [prompt for prompt, _ in coded])
    ends = torch.tensor([len(prompt) - 1 for prompt, _ in coded])
    states = lm.model.base_model(ids, use_cache=False).last_hidden_state
    last = states[torch.arange(len(ids)), ends]
    best = lm.head(last).float().softmax(-1).max(-1)
    return [
        Question(
            fact=fact,
            prompt=prompt,
            subject=subject,
            answer=int(answer),
            clean=float(clean),
            known=_known(lm, fact, prompt, int(answer), settings),
        )
        for fact, (prompt, subject), answer, clean in zip(
            facts, coded, best.indices, best.values, strict=True
        )
    ]


def _known(lm: LM, fact: Fact, prompt: Prompt, answer: int, settings: Tracing) -> bool:
    if fact.target is None:
        return True
    if settings.known == "whole_word":
        return lm.tokenizer.decode([answer]).strip() == fact.target.strip()
    return answer == first_token(lm, prompt, fact.text, fact.target)


def padded(lm: LM, prompts: Sequence[Prompt]) -> Int[Tensor, "row token"]:
    """Rows of ids, padded on the right; a causal model never looks there."""
    length = max(map(len, prompts))
    return torch.tensor(
        [[*p.ids, *[p.ids[-1]] * (length - len(p))] for p in prompts], device=lm.device
    )
