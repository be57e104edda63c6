"""Texts about things that have an object already, to compare what an edited model writes with.

The paper takes Wikipedia's articles on such things: attribute_snippets.json, by relation and
Wikidata id. One's own references are a JSON table by relation and the object in words:
`{"P19": {"Paris": ["A text.", "Another."]}}`. How rare a word is comes from a table of its own.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from factscope.data.readers import read_text
from factscope.errors import BadFact

__all__ = [
    "References",
    "WordTable",
    "read_array",
    "read_references",
    "read_snippets",
    "read_words",
]

Key = tuple[str, str]
Texts = Mapping[Key, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class References:
    """Texts by relation and object."""

    by_id: Texts = field(default_factory=dict)
    """(relation, Wikidata id of the object) → texts."""
    by_name: Texts = field(default_factory=dict)
    """(relation, object in words) → texts."""

    def texts_for(
        self, relation: str | None, target: str, target_id: str | None = None
    ) -> tuple[str, ...]:
        """The texts of an object, by its id or else by its words; none where there are none.

        Without a relation, those of the object under any relation.
        """
        by_id = () if target_id is None else _under(self.by_id, relation, target_id)
        return by_id or _under(self.by_name, relation, target.strip())


@dataclass(frozen=True, eq=False)
class WordTable:
    """How rare words are: the inverse document frequency of each."""

    idf: np.ndarray
    vocabulary: Mapping[str, int]
    """Word → its place in `idf`."""


def read_references(path: Path) -> References:
    """References from a file: the paper's snippets, or one's own table."""
    text = read_text(path)
    if text.startswith("[", _next(text, 0)):
        return _snippets(text, path, None)
    table = _parsed(text, path)
    try:
        texts = {
            (relation, target.strip()): _texts(found)
            for relation, objects in table.items()
            for target, found in objects.items()
        }
    except AttributeError as error:
        raise _not_a_table(path) from error
    return References(by_name=texts)


def read_snippets(path: Path, wanted: Container[Key] | None = None) -> References:
    """The paper's attribute_snippets.json, or of it the wanted (relation, Wikidata id) only.

    The file is near 1 GB; entries are read one at a time, so that what is not wanted takes no room.
    """
    return _snippets(read_text(path), path, wanted)


def _snippets(text: str, path: Path, wanted: Container[Key] | None) -> References:
    texts: dict[Key, list[str]] = defaultdict(list)
    for number, entry in enumerate(_elements(text, path), start=1):
        try:
            key = (entry["relation_id"], entry["target_id"])
            if wanted is None or key in wanted:
                texts[key] += _texts([sample["text"] for sample in entry["samples"]])
        except (KeyError, TypeError) as error:
            raise BadFact(
                f"{path}, record {number} is not a snippet ({error!r}); expected relation_id, "
                "target_id and samples with a text each"
            ) from error
    return References(by_id={key: tuple(found) for key, found in texts.items()})


def read_words(idf: Path, vocabulary: Path) -> WordTable:
    """The paper's idf.npy and tfidf_vocab.json, or tables of the same form."""
    values, places = read_array(idf), _parsed(read_text(vocabulary), vocabulary)
    if not isinstance(places, dict) or set(places.values()) != set(range(len(places))):
        raise BadFact(f"{vocabulary} is not a table from words to places 0, 1, 2, …")
    if values.shape != (len(places),):
        raise BadFact(
            f"{idf} and {vocabulary} do not belong together: "
            f"values of shape {values.shape} for {len(places)} words"
        )
    return WordTable(values, places)


def read_array(path: Path) -> np.ndarray:
    """A .npy file, also gzipped, as it is."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # A pickle could run code of its own.
            values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadFact(f"cannot read {path} as an array of numbers: {error}") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise BadFact(f"{path} is not one array of numbers, as idf.npy is")
    return values


def _under(texts: Texts, relation: str | None, target: str) -> tuple[str, ...]:
    if relation is not None:
        return texts.get((relation, target), ())
    return tuple(text for (_, name), found in texts.items() if name == target for text in found)


def _elements(text: str, path: Path) -> Iterator[Any]:
    """The elements of a JSON list, one at a time."""
    decoder = json.JSONDecoder()
    place = _next(text, 0)
    if not text.startswith("[", place):
        raise BadFact(f"{path} is not a JSON list, as attribute_snippets.json is")
    place = _next(text, place + 1)
    while not text.startswith("]", place):
        try:
            element, place = decoder.raw_decode(text, place)
        except ValueError as error:
            raise BadFact(f"{path} is not JSON ({error})") from error
        yield element
        place = _next(text, place)
        place = _next(text, place + 1) if text.startswith(",", place) else place


def _next(text: str, place: int) -> int:
    """The next character that is not blank."""
    while place < len(text) and text[place].isspace():
        place += 1
    return place


def _parsed(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise BadFact(f"{path} is not JSON ({error})") from error


def _texts(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise BadFact(f"references must be a list of texts, not {found!r:.60}")
    return tuple(found)


def _not_a_table(path: Path) -> BadFact:
    return BadFact(f'{path} is not a table of references: {{"P19": {{"Paris": ["A text."]}}}}')
