"""Articles from a text file: plain sentences, and the articles about an entity."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from factscope.data.readers import read_text
from factscope.errors import BadFact

WORDS = range(5, 21)
"""Number of words of a plain sentence."""
PLAIN = re.compile(r"[A-Z][a-z]*[,;]?( [\w'’,;-]+)*\.")
"""Words only: no brackets, quotation marks, headings or mark-up."""
SENTENCE_END = re.compile(r"(?<=[a-z]{3}[.!?])\s+(?=[A-Z])")
"""Initials and most abbreviations have fewer than three letters."""
PRONOUNS = frozenset({
    "i", "me", "my", "we", "us", "our", "you", "your", "he", "him", "his", "she", "her", "hers",
    "they", "them", "their", "it", "its", "this", "that", "these", "those", "such",
})  # fmt: skip
"""They could be taken to refer to the subject of the prompt."""
REFERENCES = ("see also", "external links", "retrieved", "isbn", "edition")
END_OF_NAME = re.compile(
    r"(?P<comma>,)|;|:|\.(?=\s|$)|\s\(|\s-\s|\s(?:is|was|are|were|refers|has|had)\s|$"
)
"""What follows the entity's name at the start of an article."""
TITLES = re.compile(r"(?:(?:The|A|An|Sir|Dame|Lord|Saint|St|King|Queen|Pope|Emperor|Dr)\.? )+")
MAX_NAME = 80
"""Characters."""


def read_articles(path: Path) -> tuple[str, ...]:
    """The articles of a text file, plain or .gz, separated by blank lines."""
    parts = (part.strip() for part in re.split(r"\n\s*\n", read_text(path)))
    articles = tuple(article for article in parts if article)
    if not articles:
        raise BadFact(f"{path} is empty; give articles separated by blank lines")
    return articles


def plain_sentences(articles: Iterable[str]) -> tuple[str, ...]:
    """The distinct sentences of moderate length that make sense on their own."""
    lines = (line for article in articles for line in article.split("\n"))
    sentences = (part for line in lines for part in SENTENCE_END.split(line))
    return tuple(dict.fromkeys(filter(_is_plain, sentences)))


def _is_plain(sentence: str) -> bool:
    words = [word.strip(",;.") for word in sentence.casefold().split()]
    if len(words) not in WORDS or not PLAIN.fullmatch(sentence) or len(words[-1]) < 4:
        return False
    return PRONOUNS.isdisjoint(words) and not any(r in sentence.casefold() for r in REFERENCES)


def article_names(article: str) -> frozenset[str]:
    """Possible names of the entity: the first line, and the words before its verb or comma."""
    line = article.split("\n", 1)[0]
    end = END_OF_NAME.search(line)
    head = line[: end.start() if end else None].strip()
    name = TITLES.sub("", head, count=1)
    # "Adam Smith, FRSE" is a name, but "Australia, New Zealand and" starts a list.
    is_list = end is not None and end["comma"] and " " not in name
    names = {line.strip()} if is_list else {line.strip(), head, name}
    return frozenset(name for name in names if 0 < len(name) <= MAX_NAME)


def articles_by_entity(articles: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Name → the articles about that entity."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for article in articles:
        for name in article_names(article):
            by_name[name].append(article)
    return {name: tuple(texts) for name, texts in by_name.items()}
