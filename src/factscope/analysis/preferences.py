"""Human preferences between two methods' texts, with confidence intervals (paper §3.5).

The paper states ratios: ROME's text was called more consistent 1.8 times as often as FT+L's. Here
a ratio is votes for the first by votes for the second method, ties left out: p / (1 - p), where p
is the first one's fraction of the votes.

Votes are not independent: votes of one rater are correlated, and so are votes on one case. The
interval is Wilson's for an *effective* number of votes, which has the uncertainty that p would have
over other raters and other cases:

    n_eff = n / deff · (1.96 / t)²        deff = Var(p) / (p (1 - p) / n), at least 1

Var(p) is the sandwich estimate clustered by both raters and cases (Cameron, Gelbach and Miller
2011), and t the quantile of Student's t with (the smaller number of clusters) - 1 degrees of
freedom. If all votes agree, their correlation is unknown: each rater, or each case if those are
fewer, counts as one vote. With a single rater, or a single case, the interval only generalises over
the other.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from factscope.analysis.estimate import Z95

QUESTIONS = ("consistent", "fluent")
"""Questions about a pair of texts: which agrees better with the fact, which reads better."""

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, Z95.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One rater's answer to one question about one pair of texts."""

    rater: str
    case: str
    question: str
    pair: tuple[str, str]  # the two methods, always in the same order
    chosen: str | None  # the chosen method; None for a tie
    left: str  # the method whose text was shown on the left


@dataclass(frozen=True)
class Interval:
    """A 95 % confidence interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The votes on one pair of methods for one question."""

    question: str
    pair: tuple[str, str]
    wins: tuple[int, int]
    """Votes for each method."""
    ties: int
    raters: int
    cases: int
    effective: float
    """Effective number of votes, ties left out."""
    left: int
    """Votes, ties left out, for the text on the left."""
    agreement: float | None
    """How often two raters gave the same answer on the same case; None if no case has two."""

    @property
    def votes(self) -> int:
        """Number of votes, ties left out."""
        return sum(self.wins)

    @property
    def fraction(self) -> float:
        """The first method's fraction of the votes; NaN without votes."""
        return self.wins[0] / self.votes if self.votes else math.nan

    @property
    def interval(self) -> Interval:
        """Interval of the fraction."""
        return wilson(self.fraction, self.effective)

    @property
    def independent_interval(self) -> Interval:
        """Interval of the fraction if all votes were independent: too narrow."""
        return wilson(self.fraction, self.votes)

    @property
    def ratio(self) -> float:
        """Votes for the first method / votes for the second."""
        return odds(self.fraction)

    @property
    def ratio_interval(self) -> Interval:
        """Interval of the ratio; its upper end can be infinite."""
        return Interval(odds(self.interval.low), odds(self.interval.high))


def preferences(votes: Iterable[Vote]) -> list[Preference]:
    """The preference for each question and pair of methods, in the order of the votes."""
    groups: dict[tuple[str, tuple[str, str]], list[Vote]] = defaultdict(list)
    for vote in votes:
        groups[vote.question, vote.pair].append(vote)
    return [preference(group) for group in groups.values()]


def preference(votes: Sequence[Vote]) -> Preference:
    """The preference from votes on one question and pair."""
    first, second = pair = votes[0].pair
    decided = [vote for vote in votes if vote.chosen is not None]
    return Preference(
        question=votes[0].question,
        pair=pair,
        wins=(sum(v.chosen == first for v in decided), sum(v.chosen == second for v in decided)),
        ties=len(votes) - len(decided),
        raters=len({vote.rater for vote in votes}),
        cases=len({vote.case for vote in votes}),
        effective=effective_votes(decided),
        left=sum(vote.chosen == vote.left for vote in decided),
        agreement=agreement(votes),
    )


def effective_votes(votes: Sequence[Vote]) -> float:
    """n_eff: the effective number of votes, none of which is a tie."""
    if not votes:
        return 0.0
    raters, cases = {v.rater for v in votes}, {v.case for v in votes}
    clusters = [n for n in (len(raters), len(cases)) if n > 1]
    if not clusters:
        return 1.0
    p = sum(v.chosen == v.pair[0] for v in votes) / len(votes)
    if p in (0.0, 1.0):
        return float(min(clusters))
    design_effect = max(1.0, clustered_variance(votes, p) / (p * (1 - p) / len(votes)))
    freedom = min(clusters) - 1
    t = T95[freedom - 1] if freedom <= len(T95) else Z95
    return len(votes) / design_effect * (Z95 / t) ** 2


def clustered_variance(votes: Sequence[Vote], p: float) -> float:
    """Var(p), the sandwich estimate clustered by raters and by cases."""
    residuals = [(vote, (vote.chosen == vote.pair[0]) - p) for vote in votes]

    def between(cluster: Callable[[Vote], Hashable]) -> float:
        sums: dict[Hashable, float] = defaultdict(float)
        for vote, residual in residuals:
            sums[cluster(vote)] += residual
        if len(sums) < 2:  # one cluster says nothing about the variance between clusters
            return 0.0
        return sum(x * x for x in sums.values()) * len(sums) / (len(sums) - 1)

    raters, cases = between(lambda vote: vote.rater), between(lambda vote: vote.case)
    both = between(lambda vote: (vote.rater, vote.case)) if raters and cases else 0.0
    return max(raters + cases - both, raters, cases) / len(votes) ** 2


def wilson(p: float, n: float | int) -> Interval:
    """Wilson's 95 % interval of a fraction p of n votes; n need not be a whole number.

    (p + z²/2n ± z √(p(1 - p)/n + z²/4n²)) / (1 + z²/n)
    """
    if not n or math.isnan(p):
        return Interval(0.0, 1.0)
    squared = Z95**2 / n
    middle = (p + squared / 2) / (1 + squared)
    width = Z95 / (1 + squared) * math.sqrt(p * (1 - p) / n + squared / (4 * n))
    return Interval(max(0.0, middle - width), min(1.0, middle + width))


def odds(p: float) -> float:
    """p / (1 - p)."""
    return math.inf if p == 1 else p / (1 - p)


def agreement(votes: Sequence[Vote]) -> float | None:
    """How often two raters gave the same answer on the same case; None if no case has two."""
    cases: dict[str, list[str | None]] = defaultdict(list)
    for vote in votes:
        cases[vote.case].append(vote.chosen)
    pairs = [a == b for chosen in cases.values() for a, b in combinations(chosen, 2)]
    return sum(pairs) / len(pairs) if pairs else None
