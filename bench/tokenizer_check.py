"""How well the checks of merges and likelihood tell right tokenizers from wrong ones.

    python bench/tokenizer_check.py smollm2-135m gemma3-270m.gguf qwen2.5-coder-0.5b.gguf

Prints for each model, with its own tokenizer and with damaged ones, the bits per byte of the
check's sentences, what the model's unigram baseline needs, their ratio, the relative entropy of the
predictions, and the fraction of the vocabulary that the merges lead to. `lm.check.MAX_RATIO`,
`UNTRAINED` and `MIN_REACHABLE` lie between right and wrong. The last rows replace the weights by
random ones of the usual size.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from factscope.lm.check import (
    MAX_RATIO,
    MIN_REACHABLE,
    UNTRAINED,
    likelihood,
    reachable_tokens,
)
from factscope.lm.load import load
from factscope.lm.model import LM


def rebuilt(tokenizer: Any, change: Any) -> PreTrainedTokenizerFast:
    """The tokenizer after a change of its JSON, whose BOS and EOS stay the same."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    change(content)
    names = ("bos_token", "eos_token", "pad_token")
    special = {n: getattr(tokenizer, n) for n in names if getattr(tokenizer, n) is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), **special
    )


def keep_merges(fraction: float) -> Any:
    def change(content: dict[str, Any]) -> None:
        merges = content["model"]["merges"]
        content["model"]["merges"] = merges[: int(fraction * len(merges))]
        content["model"]["ignore_merges"] = False

    return change


def shift_ids(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    special = {token["content"] for token in content["added_tokens"]}
    words = sorted(set(vocabulary) - special, key=vocabulary.__getitem__)
    ids = [vocabulary[word] for word in words]
    vocabulary.update(zip(words, ids[1:] + ids[:1], strict=True))


def cases(lm: LM, others: list[LM]) -> Iterator[tuple[str, LM]]:
    tokenizer = lm.tokenizer
    yield "its own", lm
    without_bos = replace(lm.family, needs_bos=False)
    no_start = rebuilt(tokenizer, lambda content: content.update(post_processor=None))
    if no_start("a")["input_ids"] != tokenizer("a")["input_ids"] or lm.family.needs_bos:
        yield "no BOS", replace(lm, tokenizer=no_start, family=without_bos)
    yield "ids shifted by one", replace(lm, tokenizer=rebuilt(tokenizer, shift_ids))
    for fraction in (0.5, 0.1, 0.02, 0):
        changed = rebuilt(tokenizer, keep_merges(fraction))
        yield f"{fraction:.0%} of the merges", replace(lm, tokenizer=changed)
    for other in others:
        if len(other.tokenizer) <= lm.model.get_input_embeddings().weight.shape[0]:
            yield f"that of {other.name}", replace(lm, tokenizer=other.tokenizer)
    random = lm.model.__class__(lm.model.config).to(lm.device, lm.dtype).eval()
    yield "its own, random weights", replace(lm, model=random)


def main() -> None:
    parser = argparse.ArgumentParser(description="Likelihood with right and wrong tokens")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    models = [load(name, device=args.device) for name in args.models]
    print(f"bounds: ratio {MAX_RATIO}, relative entropy {UNTRAINED}, reachable {MIN_REACHABLE}")
    print("model | tokenizer | bits per byte | unigram | ratio | relative entropy | reachable | ok")
    for lm in models:
        for name, changed in cases(lm, [other for other in models if other is not lm]):
            torch.manual_seed(0)
            found = likelihood(changed)
            reachable = reachable_tokens(changed.tokenizer)
            merged = reachable is None or reachable >= MIN_REACHABLE
            passes = merged and (found.plausible or not found.trained)
            print(
                f"{lm.name} | {name} | {found.bits:.2f} | {found.unigram_bits:.2f} | "
                f"{found.bits / found.unigram_bits:.2f} | {found.entropy:.2f} | "
                f"{'–' if reachable is None else f'{reachable:.3f}'} | "
                f"{'yes' if passes else 'no'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
