"""Reference texts that generated texts are compared with, and TF-IDF tables for the comparison.

The paper's reference texts are Wikipedia articles about subjects that have the new object:
attribute_snippets.json, by relation and Wikidata id of the object. A user's own are a JSON table
by relation and object: `{"P19": {"Paris": ["A text.", "Another."]}}`.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from factscope.data.readers import parse_json, read_text
from factscope.errors import BadFact

Key = tuple[str, str]
Texts = Mapping[Key, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class References:
    """Reference texts by relation and object."""

    by_id: Texts = field(default_factory=dict)
    """(relation, Wikidata id of the object) → texts."""
    by_name: Texts = field(default_factory=dict)
    """(relation, object) → texts."""

    def texts_for(
        self, relation: str | None, target: str, target_id: str | None = None
    ) -> tuple[str, ...]:
        """The texts of an object, by id or else by name; without a relation, of all relations."""
        by_id = () if target_id is None else _lookup(self.by_id, relation, target_id)
        return by_id or _lookup(self.by_name, relation, target.strip())


def _lookup(texts: Texts, relation: str | None, target: str) -> tuple[str, ...]:
    if relation is not None:
        return texts.get((relation, target), ())
    return tuple(text for (_, name), group in texts.items() if name == target for text in group)


def read_references(path: str | Path) -> References:
    """Read the paper's snippets or a user's own table."""
    path = Path(path)
    text = read_text(path)
    if text.startswith("[", _skip_spaces(text, 0)):
        return _parse_snippets(text, path)
    try:
        texts = {
            (relation, target.strip()): _texts(values)
            for relation, objects in parse_json(text, f"{path} is ").items()
            for target, values in objects.items()
        }
    except AttributeError as error:
        raise BadFact(
            f'{path} is not a table of references: {{"P19": {{"Paris": ["A text."]}}}}'
        ) from error
    return References(by_name=texts)


def _parse_snippets(text: str, path: Path) -> References:
    texts: dict[Key, list[str]] = defaultdict(list)
    for number, entry in enumerate(_json_elements(text, path), start=1):
        try:
            key = (entry["relation_id"], entry["target_id"])
            texts[key] += _texts([sample["text"] for sample in entry["samples"]])
        except (KeyError, TypeError) as error:
            raise BadFact(
                f"{path}, record {number} is not a snippet ({error!r}); expected relation_id, "
                "target_id and samples with a text each"
            ) from error
    return References(by_id={key: tuple(snippets) for key, snippets in texts.items()})


def _json_elements(text: str, path: Path) -> Iterator[Any]:
    """The elements of a JSON list, parsed one at a time: the snippets are almost 1 GB."""
    decoder = json.JSONDecoder()
    position = _skip_spaces(text, text.index("[") + 1)
    while not text.startswith("]", position):
        try:
            element, position = decoder.raw_decode(text, position)
        except ValueError as error:
            raise BadFact(f"{path} is not JSON ({error})") from error
        yield element
        position = _skip_spaces(text, position)
        position = _skip_spaces(text, position + 1) if text.startswith(",", position) else position


def _skip_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise BadFact(f"references must be a list of texts, not {value!r:.60}")
    return tuple(value)


# ---- TF-IDF tables


@dataclass(frozen=True, eq=False)
class IdfTable:
    """The inverse document frequency of each word."""

    idf: np.ndarray
    vocabulary: Mapping[str, int]
    """Word → its index in `idf`."""


def read_idf(idf: str | Path, vocabulary: str | Path) -> IdfTable:
    """Read the paper's idf.npy and tfidf_vocab.json, or files of the same format."""
    values = read_array(Path(idf))
    indices = parse_json(read_text(Path(vocabulary)), f"{vocabulary} is ")
    if not isinstance(indices, dict) or set(indices.values()) != set(range(len(indices))):
        raise BadFact(f"{vocabulary} is not a table from words to indices 0, 1, 2, …")
    if values.shape != (len(indices),):
        raise BadFact(
            f"{idf} and {vocabulary} do not belong together: "
            f"values of shape {values.shape} for {len(indices)} words"
        )
    return IdfTable(values, indices)


def read_array(path: Path) -> np.ndarray:
    """Read a .npy file of numbers, plain or .gz."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            # A pickle could execute code.
            values = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BadFact(f"cannot read {path} as an array of numbers: {error}") from error
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "fiu":
        raise BadFact(f"{path} is not one array of numbers, as idf.npy is")
    return values
