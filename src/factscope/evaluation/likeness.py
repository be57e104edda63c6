"""Consistency (RS): how like generated texts are to texts about things that have the new object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from factscope.analysis.texts import fit_idf, idf_of, likeness
from factscope.data.references import References, read_references, read_words
from factscope.facts import Case

__all__ = ["Consistency", "consistency_of"]


@dataclass(frozen=True, eq=False)
class Consistency:
    """The reference texts, and how rare words are."""

    references: References
    idf: Mapping[str, float]

    def __call__(self, case: Case, texts: Sequence[str]) -> float | None:
        """The cosine of the TF-IDF vectors; None where the case has no references."""
        fact = case.fact
        found = self.references.texts_for(fact.relation, fact.target or "", case.target_id)
        return likeness(texts, found, self.idf) if found else None


def consistency_of(
    references: Path, idf: Path | None = None, vocabulary: Path | None = None
) -> Consistency:
    """References from a file; without a table of words, rarity is that in the references."""
    found = read_references(references)
    if idf is not None and vocabulary is not None:
        words = read_words(idf, vocabulary)
        return Consistency(found, idf_of(words.vocabulary, words.idf.tolist()))
    every = chain(*found.by_id.values(), *found.by_name.values())
    return Consistency(found, fit_idf(dict.fromkeys(every)))
