"""Preferences: fractions, ratios and intervals by hand, by properties and by simulation."""

import math
import random
from collections.abc import Callable, Iterable
from itertools import product

import numpy as np
import pytest

from factscope.analysis.preferences import (
    T95,
    Vote,
    agreement,
    clustered_variance,
    effective_votes,
    preferences,
    wilson,
)

A, B = "rome", "ft-l"


def vote(rater: int, case: int, chosen: str | None, question: str = "consistent") -> Vote:
    return Vote(
        rater=f"rater {rater}", case=f"case {case}", question=question, pair=(A, B), chosen=chosen,
        left=A,
    )  # fmt: skip


def table(rows: Iterable[str]) -> list[Vote]:
    """A row for each rater, a letter for each case: a, b, - for a tie, a space for no vote."""
    return [
        vote(i, j, {"a": A, "b": B, "-": None}[letter])
        for i, row in enumerate(rows)
        for j, letter in enumerate(row)
        if letter != " "
    ]


# ---- by hand


def test_wilson_by_hand() -> None:
    """Of 10 votes 8: (p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n), z² = 3.8416."""
    found = wilson(0.8, 10)
    assert found.low == pytest.approx(
        (0.8 + 0.19208 - 1.96 * math.sqrt(0.016 + 0.009604)) / 1.38416
    )
    assert found.low == pytest.approx(0.4901, abs=1e-3)
    assert found.high == pytest.approx(0.9433, abs=1e-3)
    assert wilson(0.0, 10).low == 0
    assert wilson(0.0, 10).high == pytest.approx(3.8416 / 13.8416)  # z² / (n + z²)
    assert wilson(1.0, 10).high == 1
    assert (wilson(math.nan, 0).low, wilson(math.nan, 0).high) == (0, 1)


def test_counts_and_ratios_by_hand() -> None:
    (found,) = preferences(table(["aab-", "aaa-", "abab"]))
    assert found.wins == (7, 3)
    assert (found.ties, found.votes, found.raters, found.cases) == (2, 10, 3, 4)
    assert found.fraction == 0.7
    assert found.ratio == pytest.approx(7 / 3)
    assert found.left == 7  # A always stood there
    # pairs of raters on the same case: aaa 3 of 3, aab 1, baa 1, --b 1; of 12
    assert found.agreement == pytest.approx(6 / 12)
    low, high = found.interval.low, found.interval.high
    assert found.ratio_interval.low == pytest.approx(low / (1 - low))
    assert found.ratio_interval.high == pytest.approx(high / (1 - high))
    assert found.ratio in found.ratio_interval


def test_clustered_variance_by_hand() -> None:
    """Two raters, two cases: one always A, the other always B. Residuals are ±½; sums by rater ±1,
    by case 0, by vote ±½: (2·(1+1) + 0 - 4/3·(4·¼)) / 16, and no less than the raters' own part.
    """
    votes = table(["aa", "bb"])
    assert clustered_variance(votes, 0.5) == pytest.approx(4 / 16)
    mixed = table(["ab", "aa"])  # p = ¾; rests: ¼ -¾, ¼ ¼; by rater -½ ½, by case ½ -½
    rater = case = 2 * (0.25 + 0.25)
    single = 4 / 3 * (3 / 16 + 9 / 16)
    assert clustered_variance(mixed, 0.75) == pytest.approx(
        max(rater + case - single, rater, case) / 16
    )


def test_effective_votes_by_hand() -> None:
    assert effective_votes([]) == 0
    assert effective_votes(table(["a"])) == 1
    assert effective_votes(table(["aaaa", "aaaa", "aaaa"])) == 3  # unanimous: one a rater
    assert effective_votes(table(["aaaa"])) == 4  # one rater: one a case
    # one rater, ten cases, no correlation: only t instead of z, with 9 degrees
    alone = effective_votes(table(["aaaaabbbbb"]))
    assert alone == pytest.approx(9 * (1.96 / 2.262) ** 2)  # the sandwich has n/(n-1)
    # raters who always vote the same: each is worth one vote, before t with 3 degrees
    loyal = effective_votes(table(["a" * 50, "a" * 50, "b" * 50, "b" * 50]))
    assert loyal == pytest.approx(3 * (1.96 / 3.182) ** 2, rel=1e-6)


def test_questions_and_pairs_are_counted_separately() -> None:
    other = Vote(
        rater="x", case="y", question="consistent", pair=(A, "none"), chosen="none", left=A
    )
    votes = [vote(0, 0, A), vote(0, 0, B, "fluent"), other]
    found = preferences(votes)
    assert [(one.question, one.pair, one.wins) for one in found] == [
        ("consistent", (A, B), (1, 0)), ("fluent", (A, B), (0, 1)),
        ("consistent", (A, "none"), (0, 1)),
    ]  # fmt: skip


def test_ties_alone_give_no_preference() -> None:
    (found,) = preferences(table(["--", "--"]))
    assert found.votes == 0
    assert math.isnan(found.fraction)
    assert math.isnan(found.ratio)
    assert (found.interval.low, found.interval.high) == (0, 1)
    assert found.ratio_interval.high == math.inf
    assert found.agreement == 1
    assert agreement(table(["a b", " b "])) is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 5, 9, 14, 20, 30])
def test_the_t_quantiles_match_the_density(freedom: int) -> None:
    """The density, integrated numerically between ± the quantile."""
    size = T95[freedom - 1]
    x = np.linspace(-size, size, 200_001)
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2))
    density = scale / math.sqrt(freedom * math.pi) * (1 + x * x / freedom) ** (-(freedom + 1) / 2)
    assert np.trapezoid(density, x) == pytest.approx(0.95, abs=2e-4)


# ---- properties


def random_votes(rng: random.Random) -> list[Vote]:
    p, raters, cases = rng.random(), rng.randint(1, 6), rng.randint(1, 8)
    votes = [
        vote(i, j, None if rng.random() < 0.2 else A if rng.random() < p else B)
        for i, j in product(range(raters), range(cases))
        if rng.random() < 0.8
    ]
    return votes or [vote(0, 0, A)]


@pytest.mark.parametrize("seed", range(60))
def test_properties_of_random_votes(seed: int) -> None:
    rng = random.Random(seed)
    votes = random_votes(rng)
    (found,) = preferences(votes)
    shuffled = rng.sample(votes, len(votes))
    assert preferences(shuffled)[0].effective == pytest.approx(found.effective)
    assert sum(found.wins) + found.ties == len(votes)
    assert 0 <= found.interval.low <= found.interval.high <= 1
    assert 0 <= found.effective <= found.votes
    if not found.votes:
        return
    assert found.fraction in found.interval
    wide, narrow = found.interval, found.independent_interval
    assert wide.low <= narrow.low + 1e-12
    assert wide.high >= narrow.high - 1e-12
    # swapping the pair mirrors everything
    turned = [
        Vote(rater=v.rater, case=v.case, question=v.question, pair=(B, A), chosen=v.chosen,
             left=v.left)
        for v in votes
    ]  # fmt: skip
    (mirror,) = preferences(turned)
    assert mirror.wins == found.wins[::-1]
    assert mirror.interval.low == pytest.approx(1 - wide.high)
    assert mirror.effective == pytest.approx(found.effective)
    if 0 < found.fraction < 1:
        assert mirror.ratio == pytest.approx(1 / found.ratio)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.97, 1.0])
def test_more_votes_make_a_narrower_interval(p: float) -> None:
    widths = [wilson(p, n).high - wilson(p, n).low for n in (0.5, 2, 10, 100.5, 1e6)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.003


# ---- by simulation


def world(rng: np.random.Generator, raters: int, cases: int, rater_sd: float, case_sd: float):
    """Votes with random effects of raters and of cases; p is ½ by symmetry."""
    effects = rng.normal(0, rater_sd, raters)[:, None] + rng.normal(0, case_sd, cases)[None, :]
    return rng.random((raters, cases)) < 1 / (1 + np.exp(-effects))


def as_votes(chosen: np.ndarray) -> list[Vote]:
    return [vote(i, j, A if chosen[i, j] else B) for i, j in np.ndindex(*chosen.shape)]


def test_the_variance_matches_the_spread_over_simulated_studies() -> None:
    """The mean estimate against the spread of the fraction over 200 simulated studies."""
    rng = np.random.default_rng(0)
    fractions, estimates = [], []
    for _ in range(200):
        votes = as_votes(world(rng, 12, 20, 1.0, 1.0))
        p = sum(v.chosen == A for v in votes) / len(votes)
        fractions.append(p)
        estimates.append(clustered_variance(votes, p))
    assert np.mean(estimates) == pytest.approx(np.var(fractions), rel=0.25)


def bootstrap(chosen: np.ndarray, rng: np.random.Generator, draws: int) -> np.ndarray:
    """Fractions with raters and cases resampled (Owen's pigeonhole bootstrap)."""
    raters, cases = chosen.shape
    return np.array([
        chosen[rng.integers(raters, size=raters)][:, rng.integers(cases, size=cases)].mean()
        for _ in range(draws)
    ])  # fmt: skip


def test_the_variance_is_near_the_bootstrap() -> None:
    rng = np.random.default_rng(1)
    ratios = []
    for _ in range(10):
        chosen = world(rng, 15, 25, 1.0, 1.0)
        plain = clustered_variance(as_votes(chosen), float(chosen.mean()))
        ratios.append(plain / bootstrap(chosen, rng, 800).var())
    assert 0.8 < np.median(ratios) < 1.25  # the pigeonhole bootstrap errs on the wide side


Spread = tuple[float, float]


@pytest.mark.parametrize("spread", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("raters", [3, 15])
def test_the_interval_covers_the_true_fraction(spread: Spread, raters: int) -> None:
    """In at least 92 % of simulated studies; assuming independent votes covers less."""
    rng = np.random.default_rng(2)

    def hits(interval: Callable) -> float:
        return sum(0.5 in interval(one) for one in found) / len(found)

    found = [preferences(as_votes(world(rng, raters, 20, *spread)))[0] for _ in range(150)]
    assert hits(lambda one: one.interval) >= 0.92
    if spread == (2.0, 0.5):
        assert hits(lambda one: one.independent_interval) < 0.8
