"""The paper's metrics by hand and by their properties; text statistics; the published rows."""

import math
import random
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from factscope.analysis.metrics import (
    case_metrics,
    fit_idf,
    fluency,
    idf_by_term,
    merge_runs,
    ngram_entropy,
    pair_runs,
    reference_similarity,
    summarize,
    tfidf,
    words,
)
from factscope.analysis.published import PUBLISHED, published
from factscope.errors import BadRecord
from factscope.facts import Fact
from factscope.records import CaseRecord, CaseScores, PromptScore


def score(
    new: float, true: float, new_correct: bool = False, true_correct: bool = False
) -> PromptScore:
    """A prompt's score from the probabilities of both objects."""
    return PromptScore(
        new=-math.log(new), true=-math.log(true), new_correct=new_correct, true_correct=true_correct
    )


def case(number: int = 0, after: CaseScores | None = None, **fields: Any) -> CaseRecord:
    fact = Fact(subject="Ann", prompt="{} speaks", target="Thai", id=str(number))
    plain = {"true": "Czech", "data": "counterfact", "model": "tiny", "method": "rome"}
    return CaseRecord(**{"fact": fact, "after": after, **plain, **fields})


SCORES = CaseScores(
    prompts={
        "prompt": (score(0.5, 0.1, new_correct=True),),
        "paraphrase": (score(0.4, 0.2, new_correct=True), score(0.1, 0.3)),
        "neighbour": (
            score(0.1, 0.6, true_correct=True), score(0.2, 0.2), score(0.3, 0.1), score(0.1, 0.2),
        ),
        "attribute": (score(0.9, 0.1),),
    },
    texts=("a b a b a", "a b c d"),
    reference_similarity=0.25,
)  # fmt: skip


def test_metrics_of_a_case_by_hand():
    found = case_metrics(SCORES)
    assert found == pytest.approx(
        {
            "ES": 1.0, "EM": 0.4, "PS": 0.5, "PM": 0.0, "NS": 0.5, "NM": (0.5 + 0 - 0.2 + 0.1) / 4,
            "GE": (1.0 + 2 * (math.log2(3) - 2 / 3) + math.log2(3) + 2) / 6, "RS": 0.25,
            "prompt_correct": 1.0, "paraphrase_correct": 0.5, "neighbour_correct": 0.25,
        }
    )  # fmt: skip


def test_a_tie_is_not_a_success():
    tie = (score(0.2, 0.2),)
    kinds = ("prompt", "paraphrase", "neighbour")
    found = case_metrics(CaseScores(prompts=dict.fromkeys(kinds, tie)))
    assert [found[name] for name in ("ES", "PS", "NS", "EM", "PM", "NM")] == [0] * 6


def test_underflowing_probabilities_are_still_compared():
    far = PromptScore(new=1000.0, true=1001.0, new_correct=False, true_correct=False)
    assert case_metrics(CaseScores(prompts={"prompt": (far,)}))["ES"] == 1


def test_zsre_by_hand():
    def tokens(*rows: tuple[bool, ...]) -> CaseScores:
        return CaseScores(
            token_correct=dict(zip(("prompt", "paraphrase", "neighbour"), rows, strict=True))
        )

    before = tokens((False, False), (False,), (True, True))
    after = tokens((True, True), (False,), (True, False))
    plain, edited = summarize([case(before=before, after=after, data="zsre")])
    means = {name: value.mean for name, value in edited.metrics.items()}
    assert means == {"efficacy": 1, "paraphrase": 0, "specificity": 0.5, "drawdown": 0.5}
    assert plain.metrics["specificity"].mean == 1
    assert "drawdown" not in plain.metrics


def one(new: float, true: float) -> CaseScores:
    """The same score after every prompt."""
    answer = (score(new, true),)
    return CaseScores(prompts=dict.fromkeys(("prompt", "paraphrase"), answer))


def test_intervals_use_the_population_standard_deviation():
    records = [case(i, one(*p)) for i, p in enumerate([(0.3, 0.1), (0.1, 0.3), (0.5, 0.1)])]
    (summary,) = summarize(records)
    magnitude, success = summary.metrics["EM"], summary.metrics["ES"]
    assert success.mean == pytest.approx(2 / 3)
    assert success.half_width == pytest.approx(1.96 * math.sqrt(2 / 9) / math.sqrt(3))
    assert magnitude.mean == pytest.approx(0.4 / 3)
    assert magnitude.half_width == pytest.approx(1.96 * np.std([0.2, -0.2, 0.4]) / math.sqrt(3))
    assert "S" not in summary.metrics  # there are no neighbours


def test_s_is_the_harmonic_mean_of_the_means():
    rates = {"prompt": (1, 1), "paraphrase": (1, 0), "neighbour": (0, 1)}
    cases = [
        CaseScores(
            prompts={
                kind: (score(0.2, 0.1) if (right[i] == (kind != "neighbour")) else score(0.1, 0.2),)
                for kind, right in rates.items()
            }
        )
        for i in range(2)
    ]
    (summary,) = summarize([case(i, scores) for i, scores in enumerate(cases)])
    assert summary.metrics["S"].mean == pytest.approx(3 / (1 + 2 + 2))
    assert math.isnan(summary.metrics["S"].half_width)


def test_s_is_zero_if_one_rate_is_zero():
    (summary,) = summarize([case(0, CaseScores(prompts={
        "prompt": (score(0.2, 0.1),), "paraphrase": (score(0.2, 0.1),),
        "neighbour": (score(0.2, 0.1),),
    }))])  # fmt: skip
    assert summary.metrics["S"].mean == 0


def test_failed_cases_are_counted_and_left_out():
    failed = case(1, None, error="no progress", before=one(0.1, 0.3))
    plain, edited = summarize([case(0, one(0.3, 0.1), before=one(0.1, 0.3)), failed])
    assert (edited.cases, edited.failed, edited.metrics["ES"].n) == (2, 1, 1)
    assert (plain.cases, plain.failed, plain.metrics["ES"].n) == (2, 0, 2)
    (nothing,) = summarize([case(1, None, error="no progress")])
    assert (nothing.failed, nothing.metrics) == (1, {})


def test_a_failed_case_with_scores_is_left_out():
    (edited,) = summarize([case(0, one(0.9, 0.1), error="undone")])
    assert (edited.failed, edited.metrics) == (1, {})


def test_summaries_of_no_record_and_of_one():
    assert summarize([]) == []
    (summary,) = summarize([case(0, one(0.3, 0.1))])
    assert summary.metrics["ES"].mean == 1
    assert math.isnan(summary.metrics["ES"].half_width)  # one case has no interval


def test_groups_come_in_order_the_unedited_model_first():
    before = one(0.1, 0.3)
    records = [
        case(0, one(0.3, 0.1), before=before, method="rome"),
        case(0, one(0.3, 0.1), before=before, method="ft"),
        case(1, one(0.3, 0.1), before=before, method="rome"),
        case(0, one(0.3, 0.1), method="rome", protocol="sequential", step=0),
        case(0, one(0.1, 0.3), method="rome", protocol="sequential", step=0, phase="end"),
        case(0, one(0.3, 0.1), model="other"),
    ]
    rows = [(s.model, s.method, s.protocol, s.phase, s.cases) for s in summarize(records)]
    assert rows == [
        ("tiny", "none", "single", "edit", 2),
        ("tiny", "rome", "single", "edit", 2),
        ("tiny", "ft", "single", "edit", 1),
        ("tiny", "rome", "sequential", "edit", 1),
        ("tiny", "rome", "sequential", "end", 1),
        ("other", "rome", "single", "edit", 1),
    ]


def test_the_unedited_row_takes_the_most_complete_scores_of_a_case():
    texts = CaseScores(prompts=one(0.1, 0.3).prompts, texts=("a b c",))
    plain, *_ = summarize(
        [case(before=one(0.1, 0.3), after=SCORES), case(method="ft", before=texts, after=SCORES)]
    )
    assert (plain.cases, plain.metrics["GE"].n) == (1, 1)
    (alone,) = summarize([case(method="none", after=SCORES)])
    assert not alone.edited
    assert alone.metrics["ES"].mean == 1


def random_run(seed: int, cases: range, **fields: Any) -> list[CaseRecord]:
    """Cases whose probabilities are random."""
    numbers = random.Random(seed)

    def prompts(count: int) -> tuple[PromptScore, ...]:
        return tuple(score(numbers.uniform(0.1, 0.9), 0.4) for _ in range(count))

    kinds = {"prompt": 1, "paraphrase": 2, "neighbour": 3}
    return [
        case(i, CaseScores(prompts={kind: prompts(n) for kind, n in kinds.items()}), **fields)
        for i in cases
    ]


def test_two_runs_are_compared_case_by_case():
    first, second = random_run(1, range(40)), random_run(2, range(30, 100), method="ft")
    second[1] = case(31, None, method="ft", error="no progress")
    (pair,) = pair_runs(first, second)
    both = [30, *range(32, 40)]
    assert pair.shared == len(both)
    found = [
        {int(r.fact.id or 0): case_metrics(r.after) for r in run if r.after is not None}
        for run in (first, second)
    ]
    for name in ("ES", "EM", "PS", "NS", "NM"):
        pairs = [(found[0][i][name], found[1][i][name]) for i in both]
        differences = [b - a for a, b in pairs]
        assert pair.differences[name].mean == pytest.approx(np.mean(differences))
        half_width = 1.96 * np.std(differences) / math.sqrt(len(both))
        assert pair.differences[name].half_width == pytest.approx(half_width)
        for summary, values in zip(pair.summaries, zip(*pairs, strict=True), strict=True):
            assert summary.metrics[name].mean == pytest.approx(np.mean(values))
    S = [summary.metrics["S"].mean for summary in pair.summaries]
    assert pair.differences["S"].mean == pytest.approx(S[1] - S[0])


def test_the_interval_of_a_difference_of_s_is_that_of_the_bootstrap():
    first, second = random_run(3, range(400)), random_run(4, range(400), method="ft")
    (pair,) = pair_runs(first, second)
    values = np.array(
        [
            [[case_metrics(r.after)[name] for name in ("ES", "PS", "NS")] for r in run if r.after]
            for run in (first, second)
        ]
    )
    draws = np.random.default_rng(0).integers(400, size=(2000, 400))
    means = values[:, draws].mean(2)
    S = 3 / (1 / means).sum(-1)
    assert pair.differences["S"].half_width == pytest.approx(1.96 * (S[1] - S[0]).std(), rel=0.1)


def test_runs_without_a_common_case_have_no_difference():
    first = random_run(1, range(3))
    (pair,) = pair_runs(first, random_run(2, range(5, 9)))
    assert (pair.shared, pair.differences) == (0, {})
    assert [summary.cases for summary in pair.summaries] == [3, 4]
    assert pair_runs(first, random_run(2, range(3), phase="end")) == []


def test_two_records_of_a_case_are_refused():
    with pytest.raises(BadRecord, match="two records of the case '0'"):
        summarize([case(0, SCORES), case(0, SCORES)])


def test_runs_of_the_same_cases_are_named_by_their_run():
    runs = {"a": [case(0, SCORES)], "b": [case(0, SCORES)], "c": [case(1, SCORES, method="ft")]}
    assert [r.method for r in merge_runs(runs)] == ["rome (a)", "rome (b)", "ft"]
    parts = {"a": [case(0, SCORES)], "b": [case(1, SCORES)]}
    assert {r.method for r in merge_runs(parts)} == {"rome"}


@pytest.mark.parametrize("seed", range(20))
def test_metrics_of_random_cases(seed: int):
    """Bounds, mirrored cases, and independence of the order of cases."""
    rng = random.Random(seed)

    def ask() -> PromptScore:
        return score(rng.uniform(0.01, 0.5), rng.choice([0.2, rng.uniform(0.01, 0.5)]))

    kinds = ("prompt", "paraphrase", "neighbour")
    many = [
        CaseScores(prompts={k: tuple(ask() for _ in range(rng.randint(1, 5))) for k in kinds})
        for _ in range(rng.randint(2, 30))
    ]
    (summary,) = summarize(case(i, scores) for i, scores in enumerate(many))
    (shuffled,) = summarize(case(i, s) for i, s in enumerate(rng.sample(many, len(many))))
    means = {name: value.mean for name, value in summary.metrics.items()}
    assert means == pytest.approx({n: v.mean for n, v in shuffled.metrics.items()})
    assert all(0 <= means[name] <= 1 for name in ("S", "ES", "PS", "NS"))
    assert all(-1 <= means[name] <= 1 for name in ("EM", "PM", "NM"))
    rates = [means[name] for name in ("ES", "PS", "NS")]
    assert min(rates) - 1e-9 <= means["S"] <= max(rates) + 1e-9
    turned = [
        CaseScores(prompts={"prompt": s.prompts["neighbour"], "neighbour": s.prompts["prompt"]})
        for s in many
    ]
    (mirror,) = summarize(case(i, scores) for i, scores in enumerate(turned))
    assert mirror.metrics["EM"].mean == pytest.approx(-means["NM"])
    ties = np.mean([np.mean([a.new == a.true for a in s.prompts["prompt"]]) for s in many])
    assert mirror.metrics["NS"].mean == pytest.approx(1 - means["ES"] - ties)


# ---- texts


def test_words_are_split_as_in_the_penn_treebank():
    assert words("Mr. Doe isn't in the U.S. now. He can't, \"it's 3.5\" (or 1,000)... cannot!") == [
        "Mr.", "Doe", "is", "n't", "in", "the", "U.S.", "now", ".", "He", "ca", "n't", ",", '"',
        "it", "'s", "3.5", '"', "(", "or", "1,000", ")", "...", "can", "not", "!",
    ]  # fmt: skip
    assert words("well--yes; co-op at 10:30, $5") == [
        "well", "--", "yes", ";", "co-op", "at", "10:30", ",", "$", "5",
    ]  # fmt: skip
    assert words(" \n") == []


def test_ngram_entropy_by_hand():
    assert ngram_entropy(["a", "b", "a", "b", "a"], 2) == 1  # ab ab, ba ba
    assert ngram_entropy(["a", "b", "c", "d"], 2) == pytest.approx(math.log2(3))
    assert ngram_entropy(["a"], 2) == 0
    assert fluency("a b c d") == pytest.approx((math.log2(3) + 2 * 1) / 3)
    assert fluency("") == fluency("word word word word") == 0


@pytest.mark.parametrize("seed", range(10))
def test_ngram_entropy_is_the_entropy_of_the_frequencies(seed: int):
    rng = random.Random(seed)
    tokens = rng.choices("abc", k=rng.randint(3, 60))
    counts = Counter(pairwise(tokens))
    frequencies = np.array(list(counts.values())) / counts.total()
    assert ngram_entropy(tokens, 2) == pytest.approx(-(frequencies * np.log2(frequencies)).sum())
    assert ngram_entropy(tokens, 2) <= math.log2(len(tokens) - 1) + 1e-9


def test_idf_and_cosine_by_hand():
    idf = fit_idf(["The cat", "the dog, a the", "a bird"])
    assert idf == pytest.approx(
        {"the": math.log(4 / 3) + 1, "cat": math.log(2) + 1, "dog": math.log(2) + 1,
         "bird": math.log(2) + 1}
    )  # fmt: skip
    the, cat = math.log(4 / 3) + 1, math.log(2) + 1
    vector = tfidf("The the CAT unheard", idf)
    length = math.hypot(2 * the, cat)
    assert vector == pytest.approx({"the": 2 * the / length, "cat": cat / length})
    same = reference_similarity(["the cat"], ["the", "dog"], idf)
    assert same == pytest.approx(the**2 / (the**2 + cat**2))


def test_similarity_is_one_for_the_same_terms_and_zero_for_none_in_common():
    idf = fit_idf(["one two", "two three"])
    assert reference_similarity(["one", "two"], ["two one"], idf) == pytest.approx(1)
    assert reference_similarity(["one"], ["three"], idf) == 0
    assert (
        reference_similarity([], ["three"], idf)
        == reference_similarity(["unheard"], ["three"], idf)
        == 0
    )
    assert fit_idf([]) == {}


def test_idf_from_a_stored_vocabulary():
    idf = fit_idf(["one two", "two three"])
    indices = {term: index for index, term in enumerate(idf)}
    assert idf_by_term(indices, np.array(list(idf.values())).tolist()) == idf


# ---- published


PAPER = {
    ("gpt2-xl", "none"): (30.5, 22.2, -4.8, 24.7, -5.0, 78.1, 5.0, 626.6, 31.9),
    ("gpt2-xl", "ft"): (65.1, 100.0, 98.8, 87.9, 46.6, 40.4, -6.2, 607.1, 40.5),
    ("gpt2-xl", "ft-l"): (66.9, 99.1, 91.5, 48.7, 28.9, 70.3, 3.5, 621.4, 37.4),
    ("gpt2-xl", "kn"): (35.6, 28.7, -3.4, 28.0, -3.3, 72.9, 3.7, 570.4, 30.3),
    ("gpt2-xl", "ke"): (52.2, 84.3, 33.9, 75.4, 14.6, 30.9, -11.0, 586.6, 31.2),
    ("gpt2-xl", "ke-cf"): (18.1, 99.9, 97.0, 95.8, 59.2, 6.9, -63.2, 383.0, 24.5),
    ("gpt2-xl", "mend"): (57.9, 99.1, 70.9, 65.4, 12.2, 37.9, -11.6, 624.2, 34.8),
    ("gpt2-xl", "mend-cf"): (14.9, 100.0, 99.2, 97.0, 65.6, 5.5, -69.9, 570.0, 33.2),
    ("gpt2-xl", "rome"): (89.2, 100.0, 97.9, 96.4, 62.7, 75.4, 4.2, 621.9, 41.9),
    ("gpt-j-6b", "none"): (23.6, 16.3, -7.2, 18.6, -7.4, 83.0, 7.3, 621.8, 29.8),
    ("gpt-j-6b", "ft"): (25.5, 100.0, 99.9, 96.6, 71.0, 10.3, -50.7, 387.8, 24.6),
    ("gpt-j-6b", "ft-l"): (68.7, 99.6, 95.0, 47.9, 30.4, 78.6, 6.8, 622.8, 35.5),
    ("gpt-j-6b", "mend"): (63.2, 97.4, 71.5, 53.6, 11.0, 53.9, -6.0, 620.5, 32.6),
    ("gpt-j-6b", "rome"): (91.5, 99.9, 99.4, 99.1, 74.1, 78.9, 5.2, 620.1, 43.0),
    ("gpt2-medium", "none"): (33.4, 25.0, -3.3, 27.4, -3.0, 74.9, 3.6, 625.8, 31.4),
    ("gpt2-medium", "ft-l"): (68.0, 100.0, 94.9, 68.5, 6.1, 51.3, -1.7, 626.1, 39.3),
    ("gpt2-medium", "rome"): (87.4, 100.0, 94.9, 96.4, 56.9, 71.8, 2.8, 625.0, 41.7),
    ("gpt2-large", "none"): (32.8, 23.9, -4.0, 27.4, -3.5, 75.7, 4.3, 625.4, 31.8),
    ("gpt2-large", "ft-l"): (71.2, 100.0, 96.3, 63.0, 5.1, 61.5, 1.1, 625.2, 39.3),
    ("gpt2-large", "rome"): (88.2, 99.9, 98.2, 96.3, 60.4, 73.4, 3.5, 622.5, 41.9),
}


def test_published_counterfact_rows():
    rows = {(r.model, r.method): r for r in PUBLISHED if r.data == "counterfact"}
    found = {k: tuple(round(100 * x.mean, 1) for x in r.metrics.values()) for k, r in rows.items()}
    assert found == PAPER
    assert rows["gpt2-xl", "kn"].metrics["GE"].half_width == pytest.approx(0.023)
    assert {r.cases for r in rows.values()} == {2000, 7500}


def test_published_s_is_the_harmonic_mean_of_the_published_rates():
    for row in PUBLISHED:
        if "S" in row.metrics:
            rates = [row.metrics[name].mean for name in ("ES", "PS", "NS")]
            assert 3 / sum(1 / x for x in rates) == pytest.approx(row.metrics["S"].mean, abs=2e-3)


def test_published_zsre_rows():
    rows = {(r.model, r.method): r for r in PUBLISHED if r.data == "zsre"}
    assert len(rows) == 14
    found = {k: tuple(round(100 * x.mean, 1) for x in r.metrics.values()) for k, r in rows.items()}
    assert found["gpt2-xl", "rome"] == (99.8, 88.1, 24.2)
    assert found["gpt2-xl", "mend-zsre"] == (99.4, 99.3, 24.1)
    assert found["gpt2-medium", "ft-l"] == (97.2, 59.4, 20.9)
    assert found["gpt2-large", "none"] == (20.6, 19.8, 22.5)


@pytest.mark.parametrize("name", ["gpt-j-6b", "EleutherAI/gpt-j-6b", "EleutherAI/gpt-j-6B"])
def test_published_rows_are_found_by_common_names_of_the_model(name: str):
    assert [row.method for row in published(name, "counterfact")][:2] == ["none", "ft"]
    assert published(name, "zsre") == published("gpt2", "counterfact") == []
