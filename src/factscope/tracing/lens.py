"""Logit lens: what each state predicts if the model ended at its layer (nostalgebraist, 2020).

Every state is decoded by the final norm and the head, as if it were the last layer's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from factscope.lm.model import LM
from factscope.records import Lens, as_cell_table

TOP = 5
"""How many of the most likely tokens to record."""


@torch.no_grad()
def logit_lens(
    lm: LM, states: Iterable[Float[Tensor, "sample token width"]], answer: int, at_once: int
) -> Lens:
    """The answer's probability and the most likely tokens at each layer; means over the samples.

    `states` are those of each layer, `answer` is the id of the answer's first token. At most
    `at_once` states are decoded together.
    """
    columns, top = [], []  # of each layer
    for layer in states:
        answers: list[float] = []
        likely: list[tuple[tuple[int, float], ...]] = []
        for tokens in layer.split(at_once, dim=1):
            p = torch.zeros(())
            for sample in tokens:
                p = p.to(sample.device) + lm.decode(sample).float().softmax(-1) / len(tokens)
            best = p.topk(min(TOP, p.shape[-1]))
            answers += p[:, answer].tolist()
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            likely += [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
        columns.append(answers)
        top.append(likely)
    texts = {i: lm.tokenizer.decode([i]) for rows in top for row in rows for i, _ in row}
    named = [[tuple((texts[i], p) for i, p in row) for row in rows] for rows in top]
    return Lens(
        answer=as_cell_table(zip(*columns, strict=True)),
        top=tuple(zip(*named, strict=True)),
    )


def mean_lens(lenses: Sequence[Lens], samples: Sequence[int]) -> Lens:
    """The mean over runs of different samples; the most likely tokens are those of the first."""
    if len(lenses) == 1:
        return lenses[0]
    tables = torch.tensor([lens.answer for lens in lenses], dtype=torch.float64)
    weights = torch.tensor(samples, dtype=torch.float64) / sum(samples)
    return replace(lenses[0], answer=as_cell_table(torch.tensordot(weights, tables, 1).tolist()))
