"""Limits of the server: they bound its memory and the work that one session can request."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from factscope.errors import BadFact, LimitExceeded, PromptTooLong
from factscope.settings import INTERNAL, check


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Limits."""

    max_samples: Annotated[int, Ge(1)] = 10
    """Noise samples in a trace."""
    max_prompt_tokens: Annotated[int, Ge(1)] = 48
    """Tokens of a prompt."""
    max_jobs: Annotated[int, Ge(1)] = 24
    """Jobs that wait or run."""
    max_edits: Annotated[int, Ge(1)] = 12
    """Edits of one session."""
    max_connections_per_address: Annotated[int, Ge(1)] = 128
    """Connections of one IP address. A reverse proxy has one address for all its visitors: behind
    one, give as many as it may open, at most 256."""
    max_connections: Annotated[int, INTERNAL] = 256
    max_jobs_per_session: Annotated[int, INTERNAL] = 3
    max_reports: Annotated[int, INTERNAL] = 24
    """Figures and tables that wait or are drawn."""
    max_sessions: Annotated[int, INTERNAL] = 500
    """Sessions whose edits are stored; the least recently used one is dropped first."""
    max_traces: Annotated[int, INTERNAL] = 64
    """Finished traces in the cache."""
    max_characters: Annotated[int, INTERNAL] = 600
    """Characters of a text field."""
    max_prompts: Annotated[int, INTERNAL] = 12
    """Prompts in a list, such as paraphrases."""
    max_new_tokens: Annotated[int, INTERNAL] = 40
    """Tokens of a continuation."""
    max_body_bytes: Annotated[int, INTERNAL] = 32_768
    """Size of a request body."""

    __post_init__ = check

    def check_text(self, name: str, text: str) -> str:
        """The text; an error if it is too long or not valid Unicode."""
        if len(text) > self.max_characters:
            raise LimitExceeded(
                f"the {name} has {len(text)} characters; shorten it to at most "
                f"{self.max_characters}"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadFact(
                f"the {name} contains the lone surrogate {text[error.start]!r}; remove it"
            ) from error
        return text

    def check_prompts(self, name: str, texts: Sequence[str]) -> tuple[str, ...]:
        """The prompts without empty ones; an error if there are too many."""
        if len(texts) > self.max_prompts:
            raise LimitExceeded(f"there are {len(texts)} {name}; give at most {self.max_prompts}")
        return tuple(self.check_text(name, text).strip() for text in texts if text.strip())

    def check_tokens(self, tokens: int, what: str = "the prompt has") -> None:
        """Raise if a prompt has too many tokens."""
        if tokens > self.max_prompt_tokens:
            raise PromptTooLong(
                f"{what} {tokens} tokens; shorten it to at most {self.max_prompt_tokens}"
            )
