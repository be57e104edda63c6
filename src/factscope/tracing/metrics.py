"""Metrics of a run: what is measured in the clean, the corrupted and every restored run.

A metric is computed from the last-layer states that predict the answer. The probability and its
logarithm are over all tokens of the answer; the others are of its first token, or of the next-token
distribution after the prompt.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from factscope.lm.forward import answer_log_probability, answer_probability
from factscope.lm.model import LM


@dataclass(frozen=True, kw_only=True, eq=False)
class Metric:
    """A metric of some facts."""

    name: str  # a choice of `Tracing.metric`
    answer: Int[Tensor, "fact token"]  # all answers have the same length
    foil: Int[Tensor, " fact"] | None = None  # for logit-difference: the token to compare with
    clean: Float[Tensor, "fact vocabulary"] | None = None  # for kl: log P in the clean run

    def __call__(
        self, lm: LM, states: Float[Tensor, "row token width"], fact: Int[Tensor, " row"]
    ) -> Float[Tensor, " row"]:
        """The metric of rows of states, each of which belongs to a fact."""
        fact = fact.to(self.answer.device)
        answer = self.answer[fact]
        if self.name == "probability":
            return answer_probability(lm, states, answer)
        if self.name == "log-probability":
            return answer_log_probability(lm, states, answer)
        logits = lm.decode(states[:, 0]).float()
        if self.name == "kl":
            assert self.clean is not None
            clean = self.clean.to(logits.device)[fact.to(logits.device)]
            return (clean.exp() * (clean - logits.log_softmax(1))).sum(1)
        answer_logit = logits.gather(1, answer[:, :1].to(logits.device))
        if self.name == "rank":
            return 1.0 + (logits > answer_logit).sum(1)
        assert self.foil is not None
        foil = self.foil[fact][:, None].to(logits.device)
        return (answer_logit - logits.gather(1, foil))[:, 0]

    def in_parts(
        self,
        lm: LM,
        states: Float[Tensor, "row token width"],
        fact: Int[Tensor, " row"],
        at_once: int,
    ) -> Float[Tensor, " row"]:
        """The metric of many rows, decoding at most about `at_once` states at a time."""
        rows = max(1, at_once // states.shape[1])
        parts = zip(states.split(rows), fact.split(rows), strict=True)
        return torch.cat([self(lm, x, f) for x, f in parts])


@torch.no_grad()
def make_metric(
    lm: LM,
    name: str,
    answers: Sequence[Sequence[int]],
    clean: Float[Tensor, "fact token width"],
    corrupted: Float[Tensor, "fact sample token width"],
    foil: int | None = None,
) -> Metric:
    """The metric of facts, given the last-layer states of both runs that predict the answers.

    The foil is the token that the corrupted run predicts, on average over its samples; if that is
    the answer, the next one.
    """
    answer = torch.tensor(answers, device=lm.device)
    if name == "kl":
        log_p = lm.decode(clean[:, 0]).float().log_softmax(1)
        return Metric(name=name, answer=answer, clean=log_p)
    if name != "logit-difference":
        return Metric(name=name, answer=answer)
    if foil is not None:
        foils = [foil] * len(answers)
    else:
        foils = []
        for states, ids in zip(corrupted, answers, strict=True):
            p = lm.decode(states[:, 0]).float().softmax(1).mean(0)
            p[ids[0]] = -1
            foils.append(int(p.argmax()))
    return Metric(name=name, answer=answer, foil=torch.tensor(foils, device=lm.device))
