"""The paper's metrics of edits (§3.2, §3.3): of each case, then the mean over cases.

ES, PS, NS     success: how often the right one of both objects is the likelier, after the fact's
               own prompt, its paraphrases, its neighbours; a tie fails
EM, PM, NM     magnitude: by how much, P(right) - P(wrong)
S              the harmonic mean of the mean ES, PS and NS
GE, RS         fluency and consistency of the texts that the model writes
efficacy, paraphrase, specificity, drawdown
               zsRE: the share of an answer's tokens that are the likeliest, and what an edit costs
*_correct      how often every token of the right object is the likeliest

What can be said of a text by counting its words: how varied it is, and how like another.

Fluency (the paper's GE) is the entropy of a text's pairs and triples of words. Consistency (RS)
is the cosine between the TF-IDF vectors of two texts. Neither needs a download.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from factscope.analysis.estimate import Estimate, estimate
from factscope.errors import BadRecord
from factscope.records import CaseRecord, CaseScores, Phase, PromptScore, Protocol

__all__ = [
    "METRICS",
    "SUCCESSES",
    "UNEDITED",
    "Summary",
    "case_metrics",
    "fit_idf",
    "fluency",
    "harmonic_mean",
    "idf_of",
    "merge_runs",
    "ngram_entropy",
    "reference_similarity",
    "summaries",
    "tfidf",
    "words",
]

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


def reference_similarity(
    texts: Iterable[str], references: Iterable[str], idf: Mapping[str, float]
) -> float:
    """RS: the cosine between all texts as one and all references as one; 0 if one has no term."""
    ours, theirs = (tfidf(" ".join(some), idf) for some in (texts, references))
    return math.fsum(weight * theirs.get(term, 0.0) for term, weight in ours.items())


def terms(text: str) -> list[str]:
    """The text's words of two or more letters or digits, in small letters."""
    return TERM.findall(text.lower())


UNEDITED = "none"
"""The method of the model as it is."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A method's metrics over the cases of a data set."""

    model: str
    data: str
    method: str
    protocol: Protocol = "single"
    phase: Phase = "edit"
    cases: int
    """How many were tried."""
    failed: int = 0
    """Those of them without an edit: they are in no mean."""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    """By name, those that were measured."""
    published: bool = False
    """Whether these are the paper's numbers."""

    @property
    def edited(self) -> bool:
        """Whether it is of an edit rather than of the model as it is."""
        return self.method != UNEDITED


Metric = Callable[[CaseScores], float]


def _asked(kind: str, of: Callable[[PromptScore], float]) -> Metric:
    """The mean over a kind's prompts."""
    return lambda scores: mean(of(asked) for asked in scores.prompts.get(kind, ()))


def _tokens(kind: str) -> Metric:
    """The share of a kind's tokens that are the likeliest."""
    return lambda scores: mean(map(float, scores.tokens.get(kind, ())))


def margin(asked: PromptScore) -> float:
    """P(new object) - P(true object)."""
    return math.exp(-asked.new) - math.exp(-asked.true)


METRICS: dict[str, Metric] = {
    "ES": _asked("prompt", lambda a: float(a.new < a.true)),
    "EM": _asked("prompt", margin),
    "PS": _asked("paraphrase", lambda a: float(a.new < a.true)),
    "PM": _asked("paraphrase", margin),
    "NS": _asked("neighbour", lambda a: float(a.true < a.new)),
    "NM": _asked("neighbour", lambda a: -margin(a)),
    "GE": lambda scores: mean(map(fluency, scores.texts)),
    "RS": lambda scores: math.nan if scores.reference is None else scores.reference,
    "efficacy": _tokens("prompt"),
    "paraphrase": _tokens("paraphrase"),
    "specificity": _tokens("neighbour"),
    "prompt_correct": _asked("prompt", lambda a: float(a.new_right)),
    "paraphrase_correct": _asked("paraphrase", lambda a: float(a.new_right)),
    "neighbour_correct": _asked("neighbour", lambda a: float(a.true_right)),
}
"""Every metric of one case's scores; NaN where nothing was measured. Attributes have none."""

SUCCESSES = ("ES", "PS", "NS")
"""What S is the mean of."""


def mean(values: Iterable[float]) -> float:
    """The mean; NaN if there is nothing."""
    some = list(values)
    return math.fsum(some) / len(some) if some else math.nan


def case_metrics(scores: CaseScores) -> dict[str, float]:
    """One case's metrics, those that were measured."""
    every = {name: metric(scores) for name, metric in METRICS.items()}
    return {name: value for name, value in every.items() if not math.isnan(value)}


def summaries(records: Iterable[CaseRecord]) -> list[Summary]:
    """A summary for each model, data set, method, protocol and moment.

    They come in the order of the records, before each model's methods the model as it is, over all
    of its cases.
    """
    everyone = list(records)
    found: list[Summary] = []
    for (model, data), some in grouped(everyone, lambda r: (r.model, r.data)).items():
        edits = [record for record in some if record.method != UNEDITED]
        found += unedited(model, data, some)
        for group in grouped(edits, setting_of).values():
            found.append(summary_of(group))
    return found


def grouped(records: Iterable[CaseRecord], key: Callable) -> dict[tuple, list[CaseRecord]]:
    """The records by key, in order of appearance."""
    groups: dict[tuple, list[CaseRecord]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups


def setting_of(record: CaseRecord) -> tuple[str, Protocol, Phase]:
    """What tells the rows of a table apart."""
    return record.method, record.protocol, record.phase


def summary_of(records: Sequence[CaseRecord]) -> Summary:
    """The metrics of one method's cases after their edits."""
    first = records[0]
    _each_once(records)
    done = [record for record in records if not record.failed and record.after is not None]
    after = [record.after for record in done if record.after is not None]
    lost = [drawdown(record) for record in done]
    return Summary(
        model=first.model,
        data=first.data,
        method=first.method,
        protocol=first.protocol,
        phase=first.phase,
        cases=len(records),
        failed=len(records) - len(done),
        metrics=measured({**averages(after), "drawdown": estimate(lost, ddof=0)}),
    )


def unedited(model: str, data: str, records: Iterable[CaseRecord]) -> list[Summary]:
    """The model as it is, over every case that any method was tried on; none if not measured."""
    best: dict = {}
    for record in records:
        scores = record.before
        if scores is None and record.method == UNEDITED:
            scores = record.after
        if scores is not None and fullness(scores) > fullness(best.get(record.fact)):
            best[record.fact] = scores
    if not best:
        return []
    metrics = measured(averages(list(best.values())))
    return [Summary(model=model, data=data, method=UNEDITED, cases=len(best), metrics=metrics)]


def fullness(scores: CaseScores | None) -> int:
    """How much was measured: one run may have written texts, another not."""
    if scores is None:
        return -1
    parts = (scores.prompts, scores.tokens, scores.texts, scores.reference is not None)
    return sum(map(bool, parts))


def drawdown(record: CaseRecord) -> float:
    """Specificity before - after; NaN where one of them is missing."""
    if record.before is None or record.after is None:
        return math.nan
    of = METRICS["specificity"]
    return of(record.before) - of(record.after)


def averages(cases: Sequence[CaseScores]) -> dict[str, Estimate]:
    """Mean ± 1.96·σ/√N of every metric, σ being that of the population, and S."""
    every = [case_metrics(scores) for scores in cases]
    means = {
        name: estimate((case.get(name, math.nan) for case in every), ddof=0) for name in METRICS
    }
    return {"S": score([means[name] for name in SUCCESSES]), **means}


def measured(metrics: Mapping[str, Estimate]) -> dict[str, Estimate]:
    """Those of at least one case."""
    return {name: value for name, value in metrics.items() if value.n}


def score(successes: Sequence[Estimate]) -> Estimate:
    """S, without an interval: the harmonic mean of the mean success rates."""
    fewest = min(success.n for success in successes)
    value = harmonic_mean([success.mean for success in successes]) if fewest else math.nan
    return Estimate(value, math.nan, fewest)


def harmonic_mean(values: Sequence[float]) -> float:
    """It is 0 as soon as one of the values is."""
    return len(values) / math.fsum(1 / x for x in values) if all(values) else 0.0


def merge_runs(runs: Mapping[str, Sequence[CaseRecord]]) -> list[CaseRecord]:
    """The records of several runs, by name. Where two of them try the same method on the same
    case, as with other settings, the methods of both get the run's name.
    """
    owners: dict[tuple, set[str]] = {}
    for name, records in runs.items():
        for record in records:
            owners.setdefault(_identity(record), set()).add(name)
    mixed = {
        (key[:5], name) for key, names in owners.items() if len(names) > 1 for name in names
    }  # fmt: skip

    def named(record: CaseRecord, name: str) -> CaseRecord:
        if (_identity(record)[:5], name) not in mixed or record.method == UNEDITED:
            return record
        return replace(record, method=f"{record.method} ({name})")

    return [named(record, name) for name, records in runs.items() for record in records]


def _identity(record: CaseRecord) -> tuple:
    setting = setting_of(record)
    return record.model, record.data, *setting, record.fact, record.step


def _each_once(records: Sequence[CaseRecord]) -> None:
    seen: set[tuple] = set()
    for record in records:
        case = _identity(record)
        if case in seen:
            raise BadRecord(
                f"{record.method} on {record.model} has two records of the case "
                f"{record.fact.id or record.fact.text!r}; report on one run of a method at a time"
            )
        seen.add(case)
