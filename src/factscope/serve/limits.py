"""How much a server does for one visitor and for all of them; beyond it, a refusal in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from factscope.errors import BadFact, PromptTooLong, TooMuch

__all__ = ["Limits"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The bounds of a server. With them, its memory is bounded too."""

    characters: int = 600
    """The longest text in a field."""
    tokens: int = 48
    """The longest prompt, as the model counts."""
    samples: int = 10
    """The most samples of the noise in a trace."""
    prompts: int = 12
    """The most prompts in a list: paraphrases, neighbours, questions."""
    written: int = 40
    """The most tokens that are written after a prompt."""
    waiting: int = 24
    """The most jobs that wait or run; the next is refused."""
    each: int = 2
    """The same for one visitor."""
    visitors: int = 500
    """How many visitors' edits are remembered; the one longest away is forgotten first."""
    edits: int = 12
    """The most edits of one visitor."""
    traces: int = 64
    """How many finished traces are remembered, to be downloaded or shown again."""
    body: int = 32_768
    """The most bytes of a request."""

    def check_text(self, name: str, text: str) -> str:
        """The text, if it is one that can be read, and not too long."""
        if len(text) > self.characters:
            raise TooMuch(
                f"the {name} has {len(text)} characters, this server reads at most "
                f"{self.characters}; shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadFact(
                f"the {name} holds half a character ({text[error.start]!r}); leave it out"
            ) from error
        return text

    def check_prompts(self, name: str, texts: Sequence[str]) -> tuple[str, ...]:
        """The prompts, if they are not too many; empty ones are left out."""
        if len(texts) > self.prompts:
            raise TooMuch(
                f"there are {len(texts)} {name}, this server takes at most {self.prompts}; "
                "leave some out"
            )
        return tuple(self.check_text(name, text).strip() for text in texts if text.strip())

    def check_samples(self, samples: int) -> int:
        """The samples of a trace, if they are not too many."""
        if samples > self.samples:
            raise TooMuch(
                f"samples is {samples}, this server draws at most {self.samples}; ask for fewer"
            )
        return samples

    def check_tokens(self, tokens: int) -> None:
        """A prompt's tokens, if they are not too many."""
        if tokens > self.tokens:
            raise PromptTooLong(
                f"the prompt has {tokens} tokens, this server reads at most {self.tokens}; "
                "shorten it"
            )
