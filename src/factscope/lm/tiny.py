"""A tiny random model built in memory: checks an installation without a download."""

import torch
from torch import nn

from factscope.lm.accel import best_device
from factscope.lm.load import from_model
from factscope.lm.model import LM


def tiny_lm(device: str = "auto") -> LM:
    """A GPT-2 with 4 layers of width 64, whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    # With the usual 0.02 all tokens are equally likely and no edit changes that.
    config = GPT2Config(
        vocab_size=len(alphabet), n_positions=1024, n_embd=64, n_layer=4, n_head=4,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model = GPT2LMHeadModel(config)
    nn.Module.to(model, best_device() if device == "auto" else device)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    return from_model(model, tokenizer, name="tiny", check=False)  # no check: it is random
