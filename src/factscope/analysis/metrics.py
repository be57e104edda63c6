"""The paper's metrics of edits (§3.2, §3.3): first of each case, then the mean over cases.

`DEFINITIONS` says what each metric means. For CounterFact, "new" is the new object o*, "true" the
true object oc, and P the geometric mean over an object's tokens; each rate is a mean over a case's
prompts. In addition, prompt_correct, paraphrase_correct and neighbour_correct say how often every
token of the right object (o* for edits, oc for neighbours) is the most likely one. For zsRE, the
accuracy is the fraction of the answer's tokens that are the most likely ones.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from jaxtyping import Float

from factscope.analysis.estimate import Estimate, estimate
from factscope.errors import BadRecord
from factscope.facts import Fact
from factscope.records import CaseRecord, CaseScores, Phase, PromptScore, Protocol

UNEDITED = "none"  # method name of the unedited model


# ---- one case

Metric = Callable[[CaseScores], float]


def _over_prompts(kind: str, value: Callable[[PromptScore], float]) -> Metric:
    """The mean over the prompts of a kind."""
    return lambda scores: _mean(value(prompt) for prompt in scores.prompts.get(kind, ()))


def _accuracy(kind: str) -> Metric:
    """The fraction of correct tokens over the answers of a kind."""
    return lambda scores: _mean(map(float, scores.token_correct.get(kind, ())))


def _difference(prompt: PromptScore) -> float:
    """P(o*) - P(oc)."""
    return math.exp(-prompt.new) - math.exp(-prompt.true)


# Scores are negative log-likelihoods: the smaller one is the more likely object. A tie fails.
METRICS: dict[str, Metric] = {
    "ES": _over_prompts("prompt", lambda prompt: prompt.new < prompt.true),
    "EM": _over_prompts("prompt", _difference),
    "PS": _over_prompts("paraphrase", lambda prompt: prompt.new < prompt.true),
    "PM": _over_prompts("paraphrase", _difference),
    "NS": _over_prompts("neighbour", lambda prompt: prompt.true < prompt.new),
    "NM": _over_prompts("neighbour", lambda prompt: -_difference(prompt)),
    "GE": lambda scores: _mean(map(fluency, scores.texts)),
    "RS": lambda scores: (
        math.nan if scores.reference_similarity is None else scores.reference_similarity
    ),
    "efficacy": _accuracy("prompt"),
    "paraphrase": _accuracy("paraphrase"),
    "specificity": _accuracy("neighbour"),
    "prompt_correct": _over_prompts("prompt", lambda prompt: prompt.new_correct),
    "paraphrase_correct": _over_prompts("paraphrase", lambda prompt: prompt.new_correct),
    "neighbour_correct": _over_prompts("neighbour", lambda prompt: prompt.true_correct),
}
"""Every metric of one case's scores; NaN if nothing was measured. Attributes have none."""

SUCCESS_RATES = ("ES", "PS", "NS")  # S is their harmonic mean

DEFINITIONS = {
    "S": "Score: harmonic mean of ES, PS and NS.",
    "ES": "Efficacy score: how often the new object is likelier than the true one after the edited "
    "prompt.",
    "EM": "Efficacy magnitude: P(new) - P(true) after the edited prompt.",
    "PS": "Paraphrase score: how often the new object is likelier than the true one after "
    "paraphrases.",
    "PM": "Paraphrase magnitude: P(new) - P(true) after paraphrases.",
    "NS": "Neighbourhood score: how often the true object stays likelier than the new one after "
    "prompts about other subjects.",
    "NM": "Neighbourhood magnitude: P(true) - P(new) after prompts about other subjects.",
    "GE": "Generation entropy (fluency): entropy of the words and word pairs of generated texts.",
    "RS": "Reference score (consistency): similarity of generated texts to texts about subjects "
    "that have the new object.",
    "efficacy": "Fraction of the answer's tokens that are predicted after the edited question.",
    "paraphrase": "The same after paraphrases of the question.",
    "specificity": "The same after unrelated questions.",
    "drawdown": "Accuracy drawdown: specificity before the edit minus specificity after it.",
}
"""What a metric means, in one sentence."""


def case_metrics(scores: CaseScores) -> dict[str, float]:
    """The metrics of one case, those that were measured."""
    values = {name: metric(scores) for name, metric in METRICS.items()}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _mean(values: Iterable[float]) -> float:
    """The mean; NaN without values."""
    values = list(values)
    return math.fsum(values) / len(values) if values else math.nan


# ---- means over cases


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A method's metrics over the cases of a data set: one row of a table."""

    model: str
    data: str
    method: str
    protocol: Protocol = "single"
    phase: Phase = "edit"
    cases: int  # number of cases
    failed: int = 0  # cases whose edit failed; no mean includes them
    broken: int = 0  # cases whose edited model is broken; the means include those with scores
    metrics: Mapping[str, Estimate] = field(default_factory=dict)  # those that were measured
    published: bool = False  # whether these are the paper's numbers

    @property
    def edited(self) -> bool:
        """False for the unedited model."""
        return self.method != UNEDITED


def summarize(records: Iterable[CaseRecord]) -> list[Summary]:
    """A summary for each model, data set, method, protocol and phase, in the order of the records.

    The unedited model comes before its edits and counts every case.
    """
    groups: dict[tuple[str, str], list[CaseRecord]] = {}
    for record in records:
        groups.setdefault((record.model, record.data), []).append(record)
    rows: list[Summary] = []
    for (model, data), of_model in groups.items():
        if scores := _unedited_scores(of_model):
            metrics = _averages(scores)
            rows.append(
                Summary(model=model, data=data, method=UNEDITED, cases=len(scores), metrics=metrics)
            )
        rows += map(summary_of, group_by_row(of_model))
    return rows


def group_by_row(records: Iterable[CaseRecord]) -> list[list[CaseRecord]]:
    """The records of edits by method, protocol and phase: each group is a row of a table."""
    groups: dict[tuple[str, Protocol, Phase], list[CaseRecord]] = {}
    for record in records:
        if record.method != UNEDITED:
            groups.setdefault((record.method, record.protocol, record.phase), []).append(record)
    return list(groups.values())


def summary_of(records: Sequence[CaseRecord]) -> Summary:
    """The metrics of one method's cases after their edits."""
    seen: set[tuple] = set()
    for record in records:
        identity = _identity(record)
        if identity in seen:
            raise BadRecord(
                f"{record.method} on {record.model} has two records of the case "
                f"{record.fact.id or record.fact.text!r}; report on one run of a method at a time"
            )
        seen.add(identity)
    first = records[0]
    done = [(r.before, r.after) for r in records if not r.failed and r.after is not None]
    metrics = _averages([after for _, after in done])
    specificity = METRICS["specificity"]
    drawdown = estimate(
        (specificity(before) - specificity(after) for before, after in done if before), ddof=0
    )
    return Summary(
        model=first.model,
        data=first.data,
        method=first.method,
        protocol=first.protocol,
        phase=first.phase,
        cases=len(records),
        failed=len(records) - len(done),
        broken=sum(record.broken is not None for record in records),
        metrics={**metrics, "drawdown": drawdown} if drawdown.n else metrics,
    )


def _averages(cases: Sequence[CaseScores]) -> dict[str, Estimate]:
    """S, and mean ± 1.96·σ/√N of every metric that was measured.

    As in the paper's code, σ is that of the population.
    """
    values = [case_metrics(scores) for scores in cases]
    means = {
        name: estimate((case.get(name, math.nan) for case in values), ddof=0) for name in METRICS
    }
    rates = [means[name] for name in SUCCESS_RATES]
    fewest = min(rate.n for rate in rates)
    overall = harmonic_mean([rate.mean for rate in rates]) if fewest else math.nan
    metrics = {"S": Estimate(overall, math.nan, fewest), **means}
    return {name: value for name, value in metrics.items() if value.n}


def harmonic_mean(values: Sequence[float]) -> float:
    """n / Σ 1/x; 0 if one of the values is 0."""
    return len(values) / math.fsum(1 / x for x in values) if all(values) else 0.0


def score_influences(rates: Float[np.ndarray, "cases rates"]) -> tuple[float, np.ndarray]:
    """S of cases that have all rates, and how much each case moves it, times the number of cases.

    By linearisation of the harmonic mean: Σ S² / (3 m²) · (x - m), with a case's rates x and their
    means m. NaN if S is 0.
    """
    means = rates.mean(0)
    S = harmonic_mean(means.tolist())
    if S == 0:
        return S, np.full(len(rates), np.nan)
    return S, ((S**2 / (len(means) * means**2)) * (rates - means)).sum(1)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two runs in one phase: their metrics, and the second's minus the first's, case by case."""

    phase: Phase
    summaries: tuple[Summary, Summary]
    shared: int
    """Cases that both runs scored. The summaries are over these; over all if there are none."""
    differences: Mapping[str, Estimate]
    """Mean difference over the shared cases, of every metric that both runs measured."""


def pair_runs(first: Iterable[CaseRecord], second: Iterable[CaseRecord]) -> list[Pair]:
    """Two runs compared, each of one method, for each phase that both have."""
    by_phase = [{group[0].phase: group for group in group_by_row(run)} for run in (first, second)]
    return [
        _pair(by_phase[0][phase], by_phase[1][phase])
        for phase in by_phase[0]
        if phase in by_phase[1]
    ]


def _pair(*runs: Sequence[CaseRecord]) -> Pair:
    scored = [
        {record.fact: record for record in run if not record.failed and record.after is not None}
        for run in runs
    ]
    facts = [fact for fact in scored[0] if fact in scored[1]]
    compared = [[of_run[fact] for fact in facts] for of_run in scored] if facts else runs
    first, second = (summary_of(records) for records in compared)
    values = [[case_metrics(scores) for r in run if (scores := r.after)] for run in compared]
    differences = _paired_differences(*values) if facts else {}
    return Pair(
        phase=runs[0][0].phase,
        summaries=(first, second),
        shared=len(facts),
        differences=differences,
    )


def _paired_differences(
    first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]
) -> dict[str, Estimate]:
    """The mean of second - first in each metric with 95 % interval; the cases are the same."""

    def column(run: Sequence[Mapping[str, float]], name: str) -> np.ndarray:
        return np.array([case.get(name, math.nan) for case in run])

    found = {name: estimate(column(second, name) - column(first, name), ddof=0) for name in METRICS}
    rates = [np.stack([column(run, name) for name in SUCCESS_RATES], 1) for run in (first, second)]
    complete = ~np.isnan(np.concatenate(rates, 1)).any(1)
    if complete.any():
        (S0, influences0), (S1, influences1) = (score_influences(run[complete]) for run in rates)
        spread = estimate(influences1 - influences0, ddof=0)
        found = {"S": Estimate(S1 - S0, spread.half_width, int(complete.sum())), **found}
    return {name: value for name, value in found.items() if value.n}


def _unedited_scores(records: Iterable[CaseRecord]) -> list[CaseScores]:
    """The unedited model's scores of every case that any method edited.

    If several runs scored a case, the most complete scores count: one run may have generated
    texts, another not.
    """
    by_fact: dict[Fact, list[CaseScores]] = {}
    for record in records:
        scores = record.before or (record.after if record.method == UNEDITED else None)
        if scores is not None:
            by_fact.setdefault(record.fact, []).append(scores)

    def measured_parts(scores: CaseScores) -> int:
        similarity = scores.reference_similarity is not None
        return sum(map(bool, (scores.prompts, scores.token_correct, scores.texts, similarity)))

    return [max(found, key=measured_parts) for found in by_fact.values()]


def merge_runs(runs: Mapping[str, Sequence[CaseRecord]]) -> list[CaseRecord]:
    """The records of several runs, by the run's name.

    If two runs evaluated the same method on the same case (with other settings), the run's name is
    added to the method.
    """
    owners: dict[tuple, set[str]] = {}
    for name, records in runs.items():
        for record in records:
            owners.setdefault(_identity(record), set()).add(name)
    ambiguous = {
        (row, name) for (row, *_), names in owners.items() if len(names) > 1 for name in names
    }

    def named(record: CaseRecord, name: str) -> CaseRecord:
        if (_identity(record)[0], name) not in ambiguous or record.method == UNEDITED:
            return record
        return replace(record, method=f"{record.method} ({name})")

    return [named(record, name) for name, records in runs.items() for record in records]


def _identity(record: CaseRecord) -> tuple:
    """The row of the table that a record belongs to, and its case."""
    row = (record.model, record.data, record.method, record.protocol, record.phase)
    return row, record.fact, record.step


# ---- fluency of generated texts (GE)

ABBREVIATIONS = "Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|Gen|Col|Capt|Lt|Sgt|Rev|Inc|Ltd|Corp"
"""Abbreviations that keep their full stop in the middle of a text."""
WORD_CHARACTER = r"(?:(?!--)[^\s.,:;?!@#$%&()\[\]{}<>\"“”„«»‘’'`…])"
"""A character that belongs to a word whatever its neighbours."""
TOKEN = re.compile(
    rf"""
    \.{{2,}} | --+                                    # dots and dashes
  | (?<!\w)(?:{ABBREVIATIONS})\.(?=\s)
  | (?<!\w)(?:[^\W\d_]\.){{2,}}                       # U.S.
  | (?<!\w)[A-Z]\.(?=\s+[A-Z])                        # J. Doe
  | {WORD_CHARACTER}+(?:(?:[.']|[,:](?=\d)){WORD_CHARACTER}+)*  # words, 3.5, 1,000, 10:30, isn't
  | \S                                                # any other character alone
    """,
    re.VERBOSE,
)
CONTRACTION = re.compile(r"(?i)^(.+?)(n't|'(?:s|m|d|ll|re|ve))$|^(can)(not)$")
"""Words that count as two: "is" + "n't", "it" + "'s", "can" + "not"."""


def fluency(text: str) -> float:
    """GE of one text, in bits: (H₂ + 2·H₃) / 3, with the entropies of bigrams and trigrams.

    It drops if a text repeats itself.
    """
    tokens = words(text)
    return (ngram_entropy(tokens, 2) + 2 * ngram_entropy(tokens, 3)) / 3


def ngram_entropy(tokens: Sequence[str], n: int) -> float:
    """H = -Σ f log₂ f over the frequencies f of the text's n-grams; 0 without n-grams."""
    counts = Counter(zip(*(tokens[i:] for i in range(n)), strict=False))
    total = counts.total()
    return math.fsum(c / total * math.log2(total / c) for c in counts.values())


def words(text: str) -> list[str]:
    """The words and punctuation of a text, split as in the Penn treebank.

    Nearly those of `nltk.word_tokenize`, which the paper's code uses. NLTK first finds sentences
    with a downloaded model, to tell a full stop from the dot of an abbreviation; here a short list
    of abbreviations does. NLTK also writes opening and closing quotes differently and splits a few
    more contractions ("gonna").
    """
    tokens: list[str] = []
    for token in TOKEN.findall(text):
        parts = CONTRACTION.match(token)
        tokens += [part for part in parts.groups() if part] if parts else [token]
    return tokens


# ---- similarity to reference texts (RS)

TERM = re.compile(r"\b\w\w+\b")  # scikit-learn's default: two or more letters or digits


def reference_similarity(
    texts: Iterable[str], references: Iterable[str], idf: Mapping[str, float]
) -> float:
    """RS: cosine of the TF-IDF vectors of all texts as one and all references as one.

    0 if one of them has no term.
    """
    text_vector, reference_vector = (tfidf(" ".join(group), idf) for group in (texts, references))
    return math.fsum(
        weight * reference_vector.get(term, 0.0) for term, weight in text_vector.items()
    )


def tfidf(text: str, idf: Mapping[str, float]) -> dict[str, float]:
    """The TF-IDF vector of a text, tf · idf per term, normalised to length 1."""
    counts = Counter(term for term in _terms(text) if term in idf)
    weights = {term: count * idf[term] for term, count in counts.items()}
    length = math.hypot(*weights.values())
    return {term: weight / length for term, weight in weights.items()}


def fit_idf(texts: Iterable[str]) -> dict[str, float]:
    """Inverse document frequency of each term: ln((1 + n) / (1 + df)) + 1 over n texts."""
    documents = [set(_terms(text)) for text in texts]
    counts = Counter(term for document in documents for term in sorted(document))
    return {term: math.log((1 + len(documents)) / (1 + df)) + 1 for term, df in counts.items()}


def idf_by_term(vocabulary: Mapping[str, int], idf: Sequence[float]) -> dict[str, float]:
    """The same from a stored vocabulary (term → index) and the values by index."""
    return {term: float(idf[index]) for term, index in vocabulary.items()}


def _terms(text: str) -> list[str]:
    return TERM.findall(text.lower())
