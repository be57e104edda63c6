"""How often people choose one method's text over another's, and how sure that is.

The paper states ratios: ROME's text was called more consistent 1.8 times as often as FT+L's. Here a
ratio is the votes for the one by the votes for the other, ties left out, which is p / (1 - p) for p
the one's share of them.

Votes are not independent: a person's votes resemble each other, and so do those on one case. The
interval is Wilson's, of as many *effective* votes as would make p as uncertain as it is when other
people were asked about other cases:

    n_eff = n / deff · (1.96 / t)²        deff = Var(p) / (p (1 - p) / n), at least 1

Var(p) is the sandwich estimate that is clustered by both people and cases (Cameron, Gelbach and
Miller 2011), and t the quantile of Student's t for the smaller number of the two, less one. Where
all votes are the same nothing is known of their resemblance, and every person, or every case if
those are fewer, counts as one vote. With one person, or one case, the interval is about others of
the other kind only.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from factscope.analysis.estimate import Z95

__all__ = [
    "QUESTIONS",
    "Interval",
    "Preference",
    "Vote",
    "effective_votes",
    "preferences",
    "wilson",
]

QUESTIONS = ("consistent", "fluent")
"""What is asked of a pair of texts: which agrees better with the fact, which reads better."""

# The 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; beyond, the normal one's.
T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Vote:
    """What one person said of one pair of texts, to one question."""

    rater: str
    case: str
    question: str
    pair: tuple[str, str]
    """The two methods, always in the same order."""
    chosen: str | None
    """The method; None where there was no difference."""
    left: str
    """The method whose text stood on the left."""


@dataclass(frozen=True)
class Interval:
    """A 95 % interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, kw_only=True)
class Preference:
    """The votes on one pair of methods, to one question."""

    question: str
    pair: tuple[str, str]
    wins: tuple[int, int]
    """Votes for each."""
    ties: int
    raters: int
    cases: int
    effective: float
    """As how many independent votes those for either count."""
    left: int
    """How many of the votes for either went to the text on the left."""
    agreement: float | None
    """How often two people gave the same answer on the same case; None if none was asked twice."""

    @property
    def votes(self) -> int:
        """Those for either of the two."""
        return sum(self.wins)

    @property
    def share(self) -> float:
        """The first one's share of the votes for either; NaN if there are none."""
        return self.wins[0] / self.votes if self.votes else math.nan

    @property
    def interval(self) -> Interval:
        """That of the share."""
        return wilson(self.share, self.effective)

    @property
    def independent(self) -> Interval:
        """The same if every vote were somebody else's on another case: too narrow."""
        return wilson(self.share, self.votes)

    @property
    def ratio(self) -> float:
        """How many times as often the first one was chosen as the second."""
        return odds(self.share)

    @property
    def ratio_interval(self) -> Interval:
        """That of the ratio; its upper end can be infinite."""
        return Interval(odds(self.interval.low), odds(self.interval.high))


def preferences(votes: Iterable[Vote]) -> list[Preference]:
    """Each question and pair of methods that was voted on, in the order of the votes."""
    groups: dict[tuple[str, tuple[str, str]], list[Vote]] = defaultdict(list)
    for vote in votes:
        groups[vote.question, vote.pair].append(vote)
    return [preference(group) for group in groups.values()]


def preference(votes: Sequence[Vote]) -> Preference:
    """The preference of votes that are all on the same question and pair."""
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
    """As how many independent votes these count; none of them is a tie."""
    if not votes:
        return 0.0
    raters, cases = {v.rater for v in votes}, {v.case for v in votes}
    clusters = [n for n in (len(raters), len(cases)) if n > 1]
    if not clusters:
        return 1.0
    share = sum(v.chosen == v.pair[0] for v in votes) / len(votes)
    if share in (0.0, 1.0):
        return float(min(clusters))
    plain = share * (1 - share) / len(votes)
    design = max(1.0, clustered_variance(votes, share) / plain)
    return len(votes) / design * (Z95 / student(min(clusters) - 1)) ** 2


def clustered_variance(votes: Sequence[Vote], share: float) -> float:
    """The variance of the share, with votes alike within raters and within cases."""
    rest = [(vote, (vote.chosen == vote.pair[0]) - share) for vote in votes]

    def between(cluster: Callable[[Vote], Hashable]) -> float:
        sums: dict[Hashable, float] = defaultdict(float)
        for vote, residual in rest:
            sums[cluster(vote)] += residual
        if len(sums) < 2:  # a single rater, or a single case, tells nothing of others
            return 0.0
        return sum(x * x for x in sums.values()) * len(sums) / (len(sums) - 1)

    raters, cases = between(lambda vote: vote.rater), between(lambda vote: vote.case)
    both = between(lambda vote: (vote.rater, vote.case)) if raters and cases else 0.0
    return max(raters + cases - both, raters, cases) / len(votes) ** 2


def student(freedom: int) -> float:
    """Half the width of Student's central 95 %."""
    return T95[freedom - 1] if freedom <= len(T95) else Z95


def wilson(share: float, votes: float | int) -> Interval:
    """Wilson's 95 % interval of a share of so many votes, which need not be a whole number."""
    if not votes or math.isnan(share):
        return Interval(0.0, 1.0)
    squared = Z95**2 / votes
    middle = (share + squared / 2) / (1 + squared)
    width = Z95 / (1 + squared) * math.sqrt(share * (1 - share) / votes + squared / (4 * votes))
    return Interval(max(0.0, middle - width), min(1.0, middle + width))


def odds(share: float) -> float:
    """p / (1 - p)."""
    return math.inf if share == 1 else share / (1 - share)


def agreement(votes: Sequence[Vote]) -> float | None:
    """How often two people gave the same answer on the same case."""
    cases: dict[str, list[str | None]] = defaultdict(list)
    for vote in votes:
        cases[vote.case].append(vote.chosen)
    pairs = [a == b for chosen in cases.values() for a, b in combinations(chosen, 2)]
    return sum(pairs) / len(pairs) if pairs else None
