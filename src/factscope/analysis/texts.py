"""What can be said of a text by counting its words: how varied it is, and how like another.

Fluency (the paper's GE) is the entropy of a text's pairs and triples of words. Consistency (RS)
is the cosine between the TF-IDF vectors of two texts. Neither needs a download.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["fit_idf", "fluency", "idf_of", "likeness", "ngram_entropy", "tfidf", "words"]

TITLES = "Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|Gen|Col|Capt|Lt|Sgt|Rev|Inc|Ltd|Corp"
"""Abbreviations that keep their full stop in the middle of a text."""
INSIDE = r"(?:(?!--)[^\s.,:;?!@#$%&()\[\]{}<>\"“”„«»‘’'`…])"
"""What can stand in a word whatever is beside it."""
TOKEN = re.compile(
    rf"""
    \.{{2,}} | --+                                    # dots and dashes
  | (?<!\w)(?:{TITLES})\.(?=\s)
  | (?<!\w)(?:[^\W\d_]\.){{2,}}                       # U.S.
  | (?<!\w)[A-Z]\.(?=\s+[A-Z])                        # J. Doe
  | {INSIDE}+(?:(?:[.']|[,:](?=\d)){INSIDE}+)*        # words, 3.5, 1,000, 10:30, isn't
  | \S                                                # any other sign alone
    """,
    re.VERBOSE,
)
ENDING = re.compile(r"(?i)^(.+?)(n't|'(?:s|m|d|ll|re|ve))$|^(can)(not)$")
"""Words that count as two: "is" + "n't", "it" + "'s", "can" + "not"."""
TERM = re.compile(r"\b\w\w+\b")


def words(text: str) -> list[str]:
    """The words and signs of a text, cut as in the Penn treebank.

    Nearly those of `nltk.word_tokenize`, which the paper's code takes. That one finds sentences
    first, with a trained model that has to be downloaded, to tell a full stop from the dot of an
    abbreviation; here a short list of abbreviations does. It also writes opening and closing
    quotes differently and cuts a few more contractions ("gonna").
    """
    found: list[str] = []
    for token in TOKEN.findall(text):
        cut = ENDING.match(token)
        found += [part for part in cut.groups() if part] if cut else [token]
    return found


def ngram_entropy(tokens: Sequence[str], n: int) -> float:
    """H = -Σ f log₂ f over the text's n-grams, f being their frequencies; 0 if there are none."""
    counts = Counter(zip(*(tokens[i:] for i in range(n)), strict=False))
    total = counts.total()
    return math.fsum(c / total * math.log2(total / c) for c in counts.values())


def fluency(text: str) -> float:
    """GE of one text, in bits: (H₂ + 2·H₃) / 3. It drops where a text repeats itself."""
    tokens = words(text)
    return (ngram_entropy(tokens, 2) + 2 * ngram_entropy(tokens, 3)) / 3


def fit_idf(texts: Iterable[str]) -> dict[str, float]:
    """Each term's inverse document frequency, ln((1 + n) / (1 + df)) + 1 over n texts."""
    every = [set(terms(text)) for text in texts]
    found = Counter(term for document in every for term in sorted(document))
    return {term: math.log((1 + len(every)) / (1 + df)) + 1 for term, df in found.items()}


def idf_of(vocabulary: Mapping[str, int], idf: Sequence[float]) -> dict[str, float]:
    """The same from a stored vocabulary (term → place) and the values by place."""
    return {term: float(idf[place]) for term, place in vocabulary.items()}


def tfidf(text: str, idf: Mapping[str, float]) -> dict[str, float]:
    """How often each term with an idf occurs × that idf, scaled to length 1."""
    counts = Counter(term for term in terms(text) if term in idf)
    weights = {term: count * idf[term] for term, count in counts.items()}
    length = math.hypot(*weights.values())
    return {term: weight / length for term, weight in weights.items()}


def likeness(texts: Iterable[str], references: Iterable[str], idf: Mapping[str, float]) -> float:
    """RS: the cosine between all texts as one and all references as one; 0 if one has no term."""
    ours, theirs = (tfidf(" ".join(some), idf) for some in (texts, references))
    return math.fsum(weight * theirs.get(term, 0.0) for term, weight in ours.items())


def terms(text: str) -> list[str]:
    """The text's words of two or more letters or digits, in small letters."""
    return TERM.findall(text.lower())
