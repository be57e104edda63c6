"""Token rows of a fact: its prompt after each context prefix, followed by the new object.

    prefix. The Space Needle is in downtown Paris
                          ▲ edit position ▲ target positions: the token before each target token

Prefixes are short texts that the model generates itself (paper §3.1, App. E.5). With them the key
and value of a fact do not depend on one context.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from factscope.editing.editor import raise_first_error, results_or_errors
from factscope.editing.settings import JOIN, EditToken, KlPosition, PrefixSettings
from factscope.errors import BadFact, BadSetting, FactscopeError, PromptTooLong
from factscope.facts import SUBJECT_SLOT, Fact
from factscope.lm.generate import generate_ids, top_k_choice
from factscope.lm.tokens import Prompt, continuation_ids, encode_each, encode_fact
from factscope.stats.covariance import run_to_layer

if TYPE_CHECKING:
    from factscope.lm.model import LM

KL_PROMPT = "{} is a"
"""Prompt of the KL term: the next-token distribution after it should not change."""
TOKENS_PER_PASS = 16_384
"""Tokens per forward pass when keys are read: with fewer, a GPU is launch-bound."""


@dataclass(frozen=True)
class TokenRow:
    """Token ids, and the tokens that the model should predict at given positions."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    """Positions at which the next token is predicted."""
    labels: tuple[int, ...]
    """The token that should follow each position."""

    def at_last_position(self) -> "TokenRow":
        """The prompt alone, with all labels at its last position."""
        end = self.positions[0]
        return TokenRow(self.ids[: end + 1], (end,) * len(self.labels), self.labels)


@dataclass(frozen=True)
class ContextRow(TokenRow):
    """The prompt of a fact in one context."""

    edit_position: int
    """Position at which the fact is written."""


@dataclass(frozen=True, kw_only=True)
class EditRequest:
    """A fact to write, tokenized."""

    fact: Fact
    target: tuple[int, ...]
    """Tokens of the new object."""
    rows: tuple[ContextRow, ...]
    """The bare prompt with the new object, then the same after each prefix."""


def edit_request(
    lm: "LM", fact: Fact, prefixes: Sequence[str] = (), token: EditToken = "subject-last"
) -> EditRequest:
    """Tokenize a fact in all contexts."""
    target = target_ids(lm, fact)
    rows = raise_first_error(context_rows(lm, with_prefixes(fact, prefixes), target, token))
    return EditRequest(fact=fact, target=target, rows=tuple(rows))


def edit_requests(
    lm: "LM", facts: Sequence[Fact], prefixes: Sequence[str] = (), token: EditToken = "subject-last"
) -> list[EditRequest | FactscopeError]:
    """Tokenize every fact; a fact that cannot be tokenized gives its error."""
    return results_or_errors(lambda fact: edit_request(lm, fact, prefixes, token), facts)


def with_prefixes(fact: Fact, prefixes: Sequence[str]) -> list[Fact]:
    """The fact without target: its bare prompt, then the prompt after each prefix."""
    bare = replace(fact, target=None)
    # A prefix must not contain a second slot for the subject.
    texts = [prefix.replace(SUBJECT_SLOT, "") for prefix in prefixes]
    before, after = bare.prompt[: bare.context_start], bare.prompt[bare.context_start :]
    return [bare, *(replace(bare, prompt=before + text + after) for text in texts)]


def target_ids(lm: "LM", fact: Fact) -> tuple[int, ...]:
    """The tokens of the new object as a continuation of the prompt."""
    if fact.target is None or not fact.target.strip():
        raise BadFact(f"the new object of {fact.text!r} is empty; give a target")
    prompt, _ = encode_fact(lm, fact)
    return continuation_ids(lm, prompt, fact.text, fact.target.strip())


def context_row(lm: "LM", fact: Fact, target: Sequence[int], token: EditToken) -> ContextRow:
    """The prompt and all target tokens but the last, which nothing follows."""
    return raise_first_error(context_rows(lm, [fact], target, token))[0]


def context_rows(
    lm: "LM", facts: Sequence[Fact], target: Sequence[int], token: EditToken
) -> list[ContextRow | FactscopeError]:
    """The row of each fact with the same target, or the error of its prompt."""
    prompts = encode_each(lm, [fact.text for fact in facts])

    def row(fact: Fact, prompt: Prompt | FactscopeError) -> ContextRow | FactscopeError:
        if isinstance(prompt, FactscopeError):
            return prompt
        start, stop = prompt.token_range(fact.subject_span)
        end = len(prompt) - 1
        return ContextRow(
            ids=(*prompt.ids, *target[:-1]),
            positions=tuple(range(end, end + len(target))),
            labels=tuple(target),
            edit_position={
                "subject-last": stop - 1,
                "subject-first": start,
                "after-subject": min(stop, end),
                "last": end,
            }[token],
        )

    return results_or_errors(row, facts, prompts)


def bare_keys(
    lm: "LM", facts: Sequence[Fact], layers: Sequence[int], token: EditToken = "subject-last"
) -> dict[int, Float[Tensor, "fact key"]]:
    """By layer: each fact's key after its bare prompt; facts that are too long are left out."""
    rows: list[ContextRow] = []
    for fact in facts:
        with suppress(PromptTooLong):
            rows.append(context_row(lm, replace(fact, target=None), (), token))
    return keys_of_rows(lm, rows, layers)


@torch.no_grad()
def keys_of_rows(
    lm: "LM", rows: Sequence[ContextRow], layers: Sequence[int]
) -> dict[int, Float[Tensor, "row key"]]:
    """By layer: the key at each row's edit position. Later tokens are not run."""
    rows = [replace(row, ids=row.ids[: row.edit_position + 1]) for row in rows]
    longest_first = sorted(range(len(rows)), key=lambda i: -len(rows[i].ids))
    keys: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    start = 0
    while start < len(rows):
        size = max(1, TOKENS_PER_PASS // len(rows[longest_first[start]].ids))
        part = [rows[i] for i in longest_first[start : start + size]]
        at = torch.arange(len(part)), torch.tensor([row.edit_position for row in part])
        ids = pad_rows(part, lm.device)
        run_to_layer(lm, ids, layers, lambda layer, k, at=at: keys[layer].append(k[at].float()))
        start += size
    in_order = torch.tensor(longest_first).argsort()
    return {layer: torch.cat(parts)[in_order] for layer, parts in keys.items()}


def kl_row(lm: "LM", fact: Fact, token: EditToken, position: KlPosition) -> ContextRow:
    """The prompt of the KL term, read at its end or, as in the paper's code, at the edit token."""
    row = context_row(lm, replace(fact, prompt=KL_PROMPT, target=None), (), token)
    end = len(row.ids) - 1
    return replace(row, positions=(row.edit_position if position == "edit-token" else end,))


def pad_rows(
    rows: Sequence[TokenRow], device: torch.device, length: int = 0
) -> Int[Tensor, "row token"]:
    """The rows' ids, padded on the right to the longest row, or to `length` if that is longer.

    The padding is 0; a causal model never attends to it.
    """
    return _padded([row.ids for row in rows], device, length)


def _padded(
    lists: Sequence[Sequence[int]], device: torch.device, length: int = 0
) -> Int[Tensor, "row column"]:
    length = max(length, *map(len, lists))
    table = [[*x, *[0] * (length - len(x))] for x in lists]
    return torch.tensor(table, dtype=torch.long).to(device)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Token rows padded on the right to one length.

    With several rows only the real positions are decoded. A single row decodes its padded positions
    as well and masks them afterwards: its tensor shapes then do not depend on the data, which
    `captured` passes require.
    """

    ids: Int[Tensor, "row token"]
    positions: Int[Tensor, "row slot"]
    labels: Int[Tensor, "row slot"]
    mask: Bool[Tensor, "row slot"]
    """False where `positions` and `labels` are padding."""
    lengths: Int[Tensor, " row"]

    @classmethod
    def of(
        cls, rows: Sequence[TokenRow], device: torch.device, tokens: int = 0, labels: int = 0
    ) -> "TokenBatch":
        """The rows as tensors with at least this many tokens and labels."""
        return cls(
            ids=pad_rows(rows, device, tokens),
            positions=_padded([row.positions for row in rows], device, labels),
            labels=_padded([row.labels for row in rows], device, labels),
            mask=_padded([[1] * len(row.labels) for row in rows], device, labels).bool(),
            lengths=torch.tensor([len(row.ids) for row in rows], device=device),
        )

    @property
    def single(self) -> bool:
        """Whether there is only one row."""
        return len(self.ids) == 1

    def _select(self, table: Int[Tensor, "row slot"]) -> Int[Tensor, " label"]:
        """The entries that are decoded: all of a single row, the real ones of several."""
        return table[0] if self.single else table[self.mask]

    def log_probs(
        self, lm: "LM", hidden: Float[Tensor, "row token width"]
    ) -> Float[Tensor, "label vocabulary"]:
        """log P of the next token at each position, from the last layer's hidden states."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        row, position = self._select(rows.expand_as(self.labels)), self._select(self.positions)
        logits = lm.decode(hidden[row.to(hidden.device), position.to(hidden.device)])
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return logits.to(dtype).log_softmax(-1).to(self.ids.device)

    def losses(self, log_probs: Float[Tensor, "label vocabulary"]) -> Float[Tensor, " row"]:
        """Each row's mean of -log P over its labels."""
        return self.row_means(-log_probs.gather(1, self._select(self.labels)[:, None])[:, 0])

    def all_correct(self, log_probs: Float[Tensor, "label vocabulary"]) -> Bool[Tensor, " row"]:
        """Whether every label of a row is the most likely token at its position."""
        correct = (log_probs.argmax(-1) == self._select(self.labels)).float()
        return self.row_means(correct) == 1

    def row_means(self, numbers: Float[Tensor, " label"]) -> Float[Tensor, " row"]:
        """Each row's mean over its real positions."""
        zeros = numbers.new_zeros(self.mask.shape)
        if self.single:
            table = torch.where(self.mask, numbers, zeros)
        else:
            table = zeros.masked_scatter(self.mask, numbers)
        return table.sum(1) / self.mask.sum(1)

    def roll(self, shift: int) -> "TokenBatch":
        """The batch with its rows rotated."""
        return TokenBatch(**{name: x.roll(shift, 0) for name, x in vars(self).items()})

    def only(self, rows: Int[Tensor, " selected"]) -> "TokenBatch":
        """The batch of the selected rows."""
        return TokenBatch(**{name: x[rows.to(x.device)] for name, x in vars(self).items()})


# ---- prefixes

TOP_K = 5
"""Prefixes are sampled from the five most likely tokens at each step."""


def resolve_prefixes(lm: "LM", settings: PrefixSettings) -> tuple[str, ...]:
    """The given prefixes, or texts that the model generates from an empty context.

    A generated prefix ends in a separator.
    """
    if settings.prefixes is not None:
        return settings.prefixes
    choose = top_k_choice(TOP_K, settings.seed)
    special = (lm.tokenizer.bos_token_id, lm.tokenizer.eos_token_id)
    start = next((token for token in special if token is not None), 0)
    texts: list[str] = []
    for tokens, count in settings.prefix_lengths:
        new = tokens - 1 if settings.prefix_bos_counts else tokens
        if lm.context is not None and new >= lm.context:
            raise BadSetting(
                f"prefix_lengths is {tokens}x{count}, but {lm.name} reads at most {lm.context} "
                "tokens, prefix and prompt together; give shorter prefixes"
            )
        rows = generate_ids(lm, [[start]] * count, new, choose, stop=False)
        texts += [lm.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]
    # Braces would be taken for the subject's slot.
    no_braces = str.maketrans("", "", "{}")
    return tuple(text.replace("\n\n", " ").translate(no_braces) + JOIN for text in texts)
