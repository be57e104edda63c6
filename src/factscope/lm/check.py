"""Check a family's entry and the tokenizer against a loaded model, so that wrong ones fail at once.

`check_family`:

1. Every name refers to a module of the right kind and shape.
2. The last hidden state, decoded, gives the model's logits.
3. The blocks, called one by one, reproduce every layer's hidden states.
4. The MLP's output projection returns W k + b.

`check_merges`: the merges of a BPE tokenizer lead to the tokens of its vocabulary.

`check_likelihood`: the context helps to predict English. With wrong tokens it does not.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from tokenizers import models
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from factscope.errors import BadModelFile
from factscope.lm.forward import forward, mlp_keys
from factscope.lm.gguf import GO_ON
from factscope.lm.model import LM
from factscope.lm.replay import Replay
from factscope.lm.tokens import encode

BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte in a SentencePiece vocabulary."""
SENTENCES = (
    "The little dog was very happy and ran to the big tree in the garden.",
    "She opened the door, walked into the kitchen and made herself a cup of tea.",
    "If you have any questions, please do not hesitate to contact us.",
    "I went to the store with my mother to buy some bread and milk.",
    "The Eiffel Tower is a famous landmark in Paris, the capital of France.",
    "The company said on Monday that its profits had risen by more than ten percent.",
    "The heart pumps blood through the body and supplies it with oxygen.",
    "He was born in London in 1962 and studied history at the University of Oxford.",
)
"""Ordinary English of several domains."""
MAX_RATIO = 0.8
"""Bound on bits per byte, relative to the unigram baseline. Three models of 0.1 to 0.5 billion
parameters have 0.32 to 0.42 with their own tokens, and 1.1 to 1.5 without BOS, with shifted ids,
without merges or with another model's tokenizer (`bench/tokenizer_check.py`)."""
UNTRAINED = 0.75
"""Entropy of the predictions, relative to uniform ones, above which a model is untrained. Random
weights have 0.98 or more; these models have at most 0.55, even with wrong tokens."""
MIN_PARAMETERS = 1_000_000
"""Smaller models are not asked: they are made for tests, often with large random weights, which
predict other tokens than English with certainty."""
MIN_REACHABLE = 0.8
"""Fraction of a BPE vocabulary that its merges must lead to. Three real tokenizers (SmolLM2, Qwen
2.5, Gemma 3) have 0.998 or more, and 0.45 to 0.50 without the second half of their merges."""
SAMPLED_TOKENS = 2000
"""About as many tokens of the vocabulary are tried."""


def check_family(lm: LM) -> None:
    """Raise BadModelFile if the family's entry does not fit the model."""
    _check_modules(lm)
    # Eight tokens, spread over the vocabulary by a prime step.
    ids = torch.arange(1, 9, device=lm.device)[None] * 7919 % lm.embed.weight.shape[0]
    run = forward(lm, ids, keep=("attn", "mlp"))
    with torch.no_grad():
        logits = lm.model(ids).logits
    _check_equal(lm, "decode", lm.decode(run.states[-1]), logits)
    states, replay = run.inputs, Replay.whole(lm, run)
    for layer in range(lm.n_layers):
        states = replay(layer, states)
        _check_equal(lm, f"blocks.{layer}", states, run.states[layer])
    value = mlp_keys(lm, ids, layer=0) @ lm.mlp_weight(0).T
    bias = getattr(lm.mlp_out(0), "bias", None)
    value = value if bias is None else value + bias
    _check_equal(lm, "mlp_out (W k)", value, run.contributions["mlp"][0])


def _check_modules(lm: LM) -> None:
    if _module(lm, lm.model, "embed") is not lm.model.get_input_embeddings():
        raise _field_error(lm, "embed", "is not the model's input embedding")
    blocks = _module(lm, lm.model, "blocks")
    if not isinstance(blocks, nn.ModuleList):
        raise _field_error(lm, "blocks", f"is a {type(blocks).__name__}, not a list of blocks")
    block = blocks[0]
    outputs = {field: _module(lm, block, field) for field in ("attn_out", "mlp_out")}
    if outputs["attn_out"] is outputs["mlp_out"]:
        raise _field_error(lm, "mlp_out", "is the attention's output projection")
    _module(lm, block, "mlp_act")
    for field in ("attn_in", "mlp_in"):
        for name in getattr(lm.family, field):
            if not hasattr(_module(lm, block, field, name), "weight"):
                raise _field_error(lm, field, f"has no weight at {name}")
    for field, module in outputs.items():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            raise _field_error(lm, field, "is not a module with a weight matrix")
        if lm.width != weight.shape[1 if lm.family.transposed else 0]:
            raise _field_error(
                lm,
                field,
                f"has a weight of shape {tuple(weight.shape)}, whose output is not a hidden state "
                f"of width {lm.width}; or `transposed` is wrong",
            )


def _module(lm: LM, parent: nn.Module, field: str, name: str | None = None) -> nn.Module:
    try:
        return parent.get_submodule(name or getattr(lm.family, field))
    except AttributeError as error:
        raise _field_error(lm, field, f"does not exist ({error})") from error


def _check_equal(
    lm: LM, what: str, actual: Float[Tensor, "..."], expected: Float[Tensor, "..."]
) -> None:
    if actual.shape != expected.shape:
        raise _error(
            lm, f"{what} has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    tolerance = 1e-3 if lm.dtype == torch.float32 else 0.1
    scale = expected.float().abs().max().item() or 1.0
    gap = (actual.to(expected.device).float() - expected.float()).abs().max().item() / scale
    if not gap <= tolerance:  # also for NaN
        raise _error(lm, f"{what} has a relative error of {gap:.1e}, more than {tolerance:g}")


def _field_error(lm: LM, field: str, problem: str) -> BadModelFile:
    return _error(lm, f"{field} ({getattr(lm.family, field)}) {problem}")


def _error(lm: LM, problem: str) -> BadModelFile:
    return BadModelFile(
        f"{lm.name}: the family {lm.model.config.model_type!r} does not fit: {problem}; "
        "see CONTRIBUTING.md on families"
    )


# ---- the tokenizer


def check_merges(lm: LM) -> None:
    """Raise BadModelFile if a BPE tokenizer lacks many of its merges: texts are then split into
    more and shorter tokens than the model has learnt."""
    fraction = reachable_tokens(lm.tokenizer)
    if fraction is not None and fraction < MIN_REACHABLE:
        raise BadModelFile(
            f"the merges of {lm.name}'s tokenizer lead to only {100 * fraction:.0f} % of its "
            "vocabulary, so it splits words into too many tokens. Is its tokenizer.json complete? "
            f"{GO_ON}"
        )


def reachable_tokens(tokenizer: Any) -> float | None:
    """The fraction of the vocabulary that the merges of a BPE tokenizer lead to, from a sample;
    None for other tokenizers.

    A token is learnt as the result of a merge, so the merges turn its letters into itself.
    """
    backend = tokenizer.backend_tokenizer
    model: Any = backend.model
    if not isinstance(model, models.BPE):
        return None
    if model.continuing_subword_prefix or model.end_of_word_suffix:
        return None  # their tokens are not spelt as they are in the text
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    merged = sorted(
        (number, token)
        for token, number in vocabulary.items()
        if len(token) > 1 and token not in added and not BYTE_TOKEN.fullmatch(token)
    )
    if not merged:
        return None
    # `ignore_merges` takes every word of the vocabulary as one token, whatever the merges are.
    ignored, model.ignore_merges = model.ignore_merges, False
    try:
        sample = merged[:: math.ceil(len(merged) / SAMPLED_TOKENS)]
        found = [[x.id for x in model.tokenize(token)] == [number] for number, token in sample]
    finally:
        model.ignore_merges = ignored
    return sum(found) / len(found)


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """How well a model predicts English."""

    bits: float  # per byte
    unigram_bits: float  # per byte, from the mean prediction: what is predicted without context
    entropy: float  # of the predictions, relative to uniform ones

    @property
    def trained(self) -> bool:
        """Whether the predictions are far from uniform."""
        return self.entropy <= UNTRAINED

    @property
    def plausible(self) -> bool:
        """Whether the context helps; not if a number is NaN."""
        return self.bits <= MAX_RATIO * self.unigram_bits


def check_likelihood(lm: LM) -> None:
    """Raise BadModelFile if the context does not help the model to predict English.

    A model that is untrained (its predictions are nearly uniform) or tiny passes: nothing can be
    said about its tokenizer.
    """
    if sum(weight.numel() for weight in lm.model.parameters()) < MIN_PARAMETERS:
        return
    found = likelihood(lm)
    if found.trained and not found.plausible:
        raise BadModelFile(
            f"{lm.name} needs {found.bits:.2f} bits per byte of plain English, and "
            f"{found.unigram_bits:.2f} without context; with the right tokens context helps much "
            "more. Is this the model's own tokenizer, and does it add BOS if the model needs it? "
            f"{GO_ON}"
        )


@torch.no_grad()
def likelihood(lm: LM) -> Likelihood:
    """How likely `SENTENCES` are, in the half of them that the model predicts best.

    That half, so that a model of one domain passes. The first token of a sentence is not counted.
    """
    # ASCII has at most as many tokens as letters, apart from BOS and a leading space.
    texts = [text if lm.context is None else text[: lm.context - 2] for text in SENTENCES]
    prompts = [encode(lm, text) for text in texts]
    ids = pad_sequence([torch.tensor(p.ids) for p in prompts], batch_first=True).to(lm.device)
    lengths = torch.tensor([len(p) for p in prompts], device=lm.device)
    logits = lm.model(ids, attention_mask=_before(lengths, ids.shape[1])).logits
    predicted, ids = logits[:, :-1].float().log_softmax(-1), ids[:, 1:].to(logits.device)
    counted = _before(lengths - 1, ids.shape[1]).to(logits.device).bool()
    counted[:, : prompts[0].offsets.count((0, 0))] = False
    bits = -predicted.gather(2, ids[..., None])[..., 0] * counted / math.log(2)
    predicted = predicted[counted]
    probabilities = predicted.exp()
    entropy = -(probabilities * predicted.clamp_min(-1e4)).sum(-1).mean().item()
    unigram_bits = -probabilities.mean(0).clamp_min(1e-30).log2()[ids] * counted
    best = (bits.sum(1) / unigram_bits.sum(1)).argsort()[: len(texts) // 2]
    n_bytes = sum(len(texts[i].encode()) for i in best.tolist())
    return Likelihood(
        bits=bits[best].sum().item() / n_bytes,
        unigram_bits=unigram_bits[best].sum().item() / n_bytes,
        entropy=entropy / math.log(predicted.shape[-1]),
    )


def _before(lengths: Int[Tensor, " row"], width: int) -> Int[Tensor, "row width"]:
    """1 for the first positions of each row, up to its length."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None]).long()
