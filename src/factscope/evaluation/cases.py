"""Raw scores of cases (paper §3.3): likelihoods of both objects, generated texts, their similarity
to reference texts.

Many cases are scored in one batch, each under its own edit; no weight is written.
"""

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

from factscope.analysis.metrics import fit_idf, idf_by_term, reference_similarity
from factscope.data.references import References, read_idf, read_references
from factscope.editing.edit import Edit
from factscope.evaluation.score import Query, edits_by_row, score_queries
from factscope.evaluation.settings import ScoringOptions
from factscope.facts import Case
from factscope.lm.accel import on_gpu
from factscope.lm.generate import sample_texts, uniform_draws
from factscope.lm.memory import Budget, run_in_batches
from factscope.lm.tokens import decode_continuation, encode
from factscope.progress import Progress, no_progress, split
from factscope.records import CaseScores, PromptScore

if TYPE_CHECKING:
    from factscope.lm.model import LM

Similarity = Callable[[Case, Sequence[str]], float | None]
"""How similar a case's generated texts are to its reference texts; None if it has none."""


def score_cases(
    lm: "LM",
    cases: Sequence[Case],
    edits: Sequence[Edit] = (),
    edit_index: Sequence[int | None] | None = None,
    *,
    scoring: ScoringOptions | None = None,
    similarity: Similarity | None = None,
    progress: Progress = no_progress,
) -> list[CaseScores]:
    """The scores of each case i under edits[edit_index[i]]; None is the unedited model."""
    scoring = scoring or ScoringOptions()
    edit_index = [None] * len(cases) if edit_index is None else edit_index
    prompts = [list(_prompts(case, scoring)) for case in cases]
    queries = [
        Query(text, target, edit)
        for case_prompts, edit in zip(prompts, edit_index, strict=True)
        for _, text, new, true in case_prompts
        for target in dict.fromkeys((new, true))  # one query if they are the same
    ]
    # Texts take nearly all of the time: 900 forward passes against a few.
    scored, written = split(progress, [1, scoring.length / 4])
    tokens = 32768 if on_gpu(lm) else 4096
    query_scores = iter(score_queries(lm, queries, edits, tokens=tokens, progress=scored))
    generated = _generate_texts(lm, cases, edits, edit_index, scoring, written)
    results = []
    for case, case_prompts, texts in zip(cases, prompts, generated, strict=True):
        scores: dict[str, tuple[PromptScore, ...]] = {}  # by kind of prompt
        correct: dict[str, tuple[bool, ...]] = {}
        for kind, _, new, true in case_prompts:
            of_new = next(query_scores)
            of_true = of_new if new == true else next(query_scores)
            score = PromptScore(
                new=of_new.nll,
                true=of_true.nll,
                new_correct=all(of_new.correct),
                true_correct=all(of_true.correct),
            )
            scores[kind] = (*scores.get(kind, ()), score)
            correct[kind] = (*correct.get(kind, ()), *of_new.correct)
        results.append(
            CaseScores(
                prompts=scores if case.true is not None else {},
                token_correct=correct if case.true is None else {},
                texts=texts,
                reference_similarity=similarity(case, texts) if similarity and texts else None,
            )
        )
    return results


def _prompts(case: Case, scoring: ScoringOptions) -> Iterator[tuple[str, str, str, str]]:
    """Each prompt's kind, text, new object and true object.

    zsRE has no true object: both are the correct answer, which each neighbour has for itself.
    """
    new = (case.fact.target or "").strip()
    true = new if case.true is None else case.true
    yield "prompt", case.fact.text, new, true
    for text in case.paraphrases:
        yield "paraphrase", text, new, true
    for i, text in enumerate(case.neighbours):
        if case.true is None and case.neighbour_answers:
            yield "neighbour", text, case.neighbour_answers[i], case.neighbour_answers[i]
        else:
            yield "neighbour", text, new, true
    if case.true is not None and scoring.attributes:
        for text in case.attributes:
            yield "attribute", text, new, true


def _generate_texts(
    lm: "LM",
    cases: Sequence[Case],
    edits: Sequence[Edit],
    edit_index: Sequence[int | None],
    scoring: ScoringOptions,
    progress: Progress,
) -> list[tuple[str, ...]]:
    """For each case, a text after each of its generation prompts."""
    if not scoring.length:
        return [()] * len(cases)
    # (case, name, prompt): random numbers depend on the name, not on the batch.
    prompts = [
        (i, f"{case.fact.id}/{n}", text)
        for i, case in enumerate(cases)
        for n, text in enumerate(case.generations)
    ]
    ids = [encode(lm, text).ids for _, _, text in prompts]
    order = sorted(range(len(prompts)), key=lambda j: len(ids[j]))
    length = min(scoring.length, lm.context or scoring.length)

    def generate(batch: Sequence[int], progress: Progress) -> list[str]:
        draws = uniform_draws([prompts[j][1] for j in batch], length, scoring.seed)
        prefixes = [ids[j] for j in batch]
        with edits_by_row(lm, edits, [edit_index[prompts[j][0]] for j in batch]):
            rows = sample_texts(lm, prefixes, draws, k=scoring.top_k, progress=progress)
        return [
            _clean(lm, prompts[j][2] + decode_continuation(lm, ids[j], row[len(ids[j]) :]))
            for j, row in zip(batch, rows, strict=True)
        ]

    # The KV cache of a batch must fit into memory.
    row_bytes = 2 * lm.n_layers * lm.width * length * lm.dtype.itemsize
    max_rows = 640 if on_gpu(lm) else 32
    size = max(1, min(max_rows, Budget.of(lm, None).bytes // row_bytes))
    texts = run_in_batches(order, size, generate, progress) if order else []
    in_order = (text for _, text in sorted(zip(order, texts, strict=True)))
    return [tuple(islice(in_order, len(case.generations))) for case in cases]


def _clean(lm: "LM", text: str) -> str:
    """The text as the paper's code stores it: no end-of-text marker, no blank lines, NFKD."""
    if lm.tokenizer.eos_token:
        text = text.replace(lm.tokenizer.eos_token, "")
    return unicodedata.normalize("NFKD", text).replace("\n\n", " ")


# ---- similarity to reference texts


@dataclass(frozen=True, eq=False)
class ReferenceSimilarity:
    """RS of a case's generated texts: similarity to texts about subjects with the new object."""

    references: References
    idf: Mapping[str, float]

    def __call__(self, case: Case, texts: Sequence[str]) -> float | None:
        """The cosine of the TF-IDF vectors; None if the case has no reference texts."""
        fact = case.fact
        found = self.references.texts_for(fact.relation, fact.target or "", case.target_id)
        return reference_similarity(texts, found, self.idf) if found else None


def load_reference_similarity(
    references: Path, idf: Path | None = None, vocabulary: Path | None = None
) -> ReferenceSimilarity:
    """Read reference texts; without an idf table, idf is computed from the references."""
    loaded = read_references(references)
    if idf is not None and vocabulary is not None:
        table = read_idf(idf, vocabulary)
        return ReferenceSimilarity(loaded, idf_by_term(table.vocabulary, table.idf.tolist()))
    texts = chain(*loaded.by_id.values(), *loaded.by_name.values())
    return ReferenceSimilarity(loaded, fit_idf(dict.fromkeys(texts)))
