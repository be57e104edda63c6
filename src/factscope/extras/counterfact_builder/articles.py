"""A collection of text as articles: sentences to draw from, and whom an article is about."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from factscope.data.readers import read_text
from factscope.errors import BadFact

__all__ = ["about", "by_entity", "read_articles", "sentences"]

WORDS = range(5, 21)
"""How many words a sentence may have that is put before a prompt."""
PLAIN = re.compile(r"[A-Z][a-z]*[,;]?( [\w'’,;-]+)*\.")
"""A sentence of words only: no brackets, quotation marks, headings or left-over mark-up."""
END = re.compile(r"(?<=[a-z]{3}[.!?])\s+(?=[A-Z])")
"""Between sentences; initials and most abbreviations are shorter than three letters."""
POINTING = frozenset({
    "i", "me", "my", "we", "us", "our", "you", "your", "he", "him", "his", "she", "her", "hers",
    "they", "them", "their", "it", "its", "this", "that", "these", "those", "such",
})  # fmt: skip
"""Words for somebody or something named before, who might be taken for the subject."""
LINKS = ("see also", "external links", "retrieved", "isbn", "edition")
HEAD = re.compile(
    r"(?P<comma>,)|;|:|\.(?=\s|$)|\s\(|\s-\s|\s(?:is|was|are|were|refers|has|had)\s|$"
)
"""Where the first words of an article stop naming its subject."""
TITLES = re.compile(r"(?:(?:The|A|An|Sir|Dame|Lord|Saint|St|King|Queen|Pope|Emperor|Dr)\.? )+")
LONGEST = 80
"""Characters in a name, at most."""


def read_articles(path: Path) -> tuple[str, ...]:
    """The articles of a text file, plain or .gz, with a blank line between them."""
    articles = (part.strip() for part in re.split(r"\n\s*\n", read_text(path)))
    found = tuple(article for article in articles if article)
    if not found:
        raise BadFact(f"{path} is empty; give articles with a blank line between them")
    return found


def sentences(articles: Iterable[str]) -> tuple[str, ...]:
    """The plain sentences of moderate length that stand by themselves, each once."""
    lines = (line for article in articles for line in article.split("\n"))
    every = (part for line in lines for part in END.split(line))
    return tuple(dict.fromkeys(filter(_is_plain, every)))


def _is_plain(sentence: str) -> bool:
    words = [word.strip(",;.") for word in sentence.casefold().split()]
    if len(words) not in WORDS or not PLAIN.fullmatch(sentence) or len(words[-1]) < 4:
        return False
    return POINTING.isdisjoint(words) and not any(link in sentence.casefold() for link in LINKS)


def about(article: str) -> frozenset[str]:
    """The names that an article may go by: its first line's, or those before its first verb."""
    line = article.split("\n", 1)[0]
    end = HEAD.search(line)
    head = line[: end.start() if end else None].strip()
    name = TITLES.sub("", head, count=1)
    # "Adam Smith, FRSE" is a name; "Australia, New Zealand and" begins a list.
    listed = end is not None and end["comma"] and " " not in name
    names = {line.strip()} if listed else {line.strip(), head, name}
    return frozenset(name for name in names if 0 < len(name) <= LONGEST)


def by_entity(articles: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Name → the articles about it."""
    found: dict[str, list[str]] = defaultdict(list)
    for article in articles:
        for name in about(article):
            found[name].append(article)
    return {name: tuple(texts) for name, texts in found.items()}
