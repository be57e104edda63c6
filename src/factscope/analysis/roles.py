"""The part that each token plays in its prompt, so that different prompts can be averaged."""

from factscope.records import TraceRecord

__all__ = ["ROLES", "roles", "tokens_with"]

ROLES = (
    "first subject token",
    "middle subject tokens",
    "last subject token",
    "first subsequent token",
    "further tokens",
    "last token",
)
"""The rows of the paper's Figure 2."""

PRECEDENCE = ("last token", "last subject token", "first subject token", *ROLES)


def roles(record: TraceRecord, *, paper: bool = False) -> tuple[tuple[str, ...], ...]:
    """For every token its roles; none for the tokens before the subject.

    A token has one role. Where several fit, it is the one nearer to the prediction:

    - the prompt's last token is "last token", even where it follows the subject directly or is
      itself the subject's last: at that token the last layers restore the answer whatever the
      subject, and must not count as an effect at the subject;
    - a subject of one token is its own "last subject token".

    With `paper` a token has every role that fits, as in the paper's own figures: a subject of
    one token counts as first and as last, a lone token after the subject as first subsequent and
    as last.
    """
    fitting = [fitting_roles(record, token) for token in range(len(record.tokens))]
    return tuple(names if paper else names[:1] for names in fitting)


def fitting_roles(record: TraceRecord, token: int) -> tuple[str, ...]:
    """Every role that fits a token, the one nearest to the prediction first."""
    start, stop = record.subject
    end = len(record.tokens) - 1
    fits = {
        "first subject token": token == start,
        "middle subject tokens": start < token < stop - 1,
        "last subject token": token == stop - 1,
        "first subsequent token": token == stop,
        "further tokens": stop < token < end,
        "last token": token == end,
    }
    return tuple(role for role in dict.fromkeys(PRECEDENCE) if fits[role])


def tokens_with(record: TraceRecord, role: str, *, paper: bool = False) -> list[int]:
    """The tokens that have a role."""
    return [i for i, names in enumerate(roles(record, paper=paper)) if role in names]
