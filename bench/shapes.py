"""Models of known shapes with random weights, and a clock: what the benchmarks share."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from factscope.facts import Fact
from factscope.lm.families import family_of
from factscope.lm.model import LM
from factscope.lm.tokens import Prompt
from factscope.tracing.trace import CleanAnswer

SHAPES = {
    "gpt2": ("gpt2", {}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "gpt-j-6b": ("gptj", {"n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64}),
    "gpt-neox-20b": (
        "gpt_neox",
        {
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 44,
            "num_attention_heads": 64,
        },
    ),
}


class NoTokenizer:
    """Random weights have no words."""

    def decode(self, ids: list[int]) -> str:
        return str(ids)


def shaped(name: str, device: str, dtype: torch.dtype) -> LM:
    """A model of the given dimensions, with random weights, made where it will run."""
    import transformers

    family, dimensions = SHAPES[name]
    config = transformers.AutoConfig.for_model(family, **dimensions)
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    model.requires_grad_(False)
    return LM(model=model, tokenizer=NoTokenizer(), family=family_of(model), name=name)


SUBJECT = (0, 4)
"""The subject comes first, so that every token is restored."""

Place = tuple[int, tuple[int, int]]
"""A prompt's length and its subject's tokens."""


def random_prompts(lm: LM, places: Sequence[Place]) -> list[CleanAnswer]:
    """Prompts of random tokens, of the given lengths."""
    rng = np.random.default_rng(0)
    answers = []
    for i, (tokens, subject) in enumerate(places):
        ids = tuple(int(x) for x in rng.integers(lm.embed.weight.shape[0], size=tokens))
        answers.append(
            CleanAnswer(
                fact=Fact(subject=str(i), prompt="{}"),
                prompt=Prompt(ids=ids, offsets=((0, 0),) * tokens, texts=("?",) * tokens),
                subject=subject,
                answer_ids=(0,),
                probability=0.0,
                known=True,
                replaced=replaced(lm, ids, subject),
            )
        )
    return answers


def replaced(lm: LM, ids: tuple[int, ...], subject: tuple[int, int]) -> tuple[int, ...]:
    """The prompt with other tokens as its subject, for token replacement."""
    start, stop = subject
    changed = (((x + 1) % lm.embed.weight.shape[0]) for x in ids[start:stop])
    return (*ids[:start], *changed, *ids[stop:])


@dataclass
class Clock:
    """Wall time of a call, everything on the device included."""

    cuda: bool

    def __call__(self, function: Callable[[], object]) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begin
