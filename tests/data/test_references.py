"""Reference texts and TF-IDF tables: the paper's files and a user's own."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from factscope.data.references import References, read_idf, read_references
from factscope.errors import BadFact

SNIPPETS = [
    {
        "relation_id": "P19",
        "target_id": "Q90",
        "samples": [{"text": "Born in Paris.", "name": "A"}],
    },
    {"relation_id": "P19", "target_id": "Q84", "samples": [{"text": "Born in London."}]},
    {"relation_id": "P20", "target_id": "Q90", "samples": [{"text": "Died in Paris."}]},
    {"relation_id": "P19", "target_id": "Q90", "samples": [{"text": "Also of Paris."}]},
]
OWN = {"P19": {"Paris": ["A Parisian."], "London": ["One.", "Two."]}, "P20": {"Paris": ["Late."]}}


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value, indent=1))
    return path


def test_snippets_by_relation_and_id(tmp_path: Path) -> None:
    path = written(tmp_path / "attribute_snippets.json", SNIPPETS)
    found = read_references(path)
    assert found.texts_for("P19", "Paris", "Q90") == ("Born in Paris.", "Also of Paris.")
    assert found.texts_for("P20", "Paris", "Q90") == ("Died in Paris.",)
    assert found.texts_for("P19", "Oslo", "Q585") == ()
    assert found.texts_for("P19", "Paris", None) == ()  # snippets have ids only


def test_gzipped_snippets(tmp_path: Path) -> None:
    path = tmp_path / "attribute_snippets.json.gz"
    path.write_bytes(gzip.compress(json.dumps(SNIPPETS).encode()))
    found = read_references(path)
    assert found.by_id["P19", "Q84"] == ("Born in London.",)
    assert list(found.by_id) == [("P19", "Q90"), ("P19", "Q84"), ("P20", "Q90")]


def test_references_by_object_name(tmp_path: Path) -> None:
    found = read_references(written(tmp_path / "mine.json", OWN))
    assert found.texts_for("P19", " London") == ("One.", "Two.")
    assert found.texts_for("P19", "Paris", "Q90") == ("A Parisian.",)
    assert found.texts_for(None, "Paris") == ("A Parisian.", "Late.")
    assert found.texts_for("P36", "Paris") == ()
    assert References().texts_for(None, "Paris", "Q90") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not JSON"),
        ("nonsense", "is not JSON"),
        ("[ ", "is not JSON"),
        ("[{}]", "record 1 is not a snippet"),
        ("[3]", "record 1 is not a snippet"),
        ('{"P19": ["Paris"]}', "not a table of references"),
        ('{"P19": {"Paris": "text"}}', "must be a list of texts"),
        ('{"P19": {"Paris": [3]}}', "must be a list of texts"),
        ("3", "not a table of references"),
    ],
)
def test_broken_references(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(BadFact, match=words):
        read_references(path)


def test_truncated_snippets(tmp_path: Path) -> None:
    path = tmp_path / "attribute_snippets.json"
    whole = json.dumps(SNIPPETS)
    for end in (1, len(whole) // 2, len(whole) - 1):
        path.write_text(whole[:end])
        with pytest.raises(BadFact, match="not JSON"):
            read_references(path)


# ---- TF-IDF tables


def saved(path: Path, values: Any, *, pickled: bool = False) -> Path:
    np.save(path, values, allow_pickle=pickled)
    return path


def test_read_idf(tmp_path: Path) -> None:
    idf = saved(tmp_path / "idf.npy", np.array([1.5, 2.5, 1.0]))
    vocabulary = written(tmp_path / "tfidf_vocab.json", {"paris": 1, "the": 2, "a": 0})
    table = read_idf(idf, vocabulary)
    assert table.idf[table.vocabulary["paris"]] == 2.5
    packed = tmp_path / "idf.npy.gz"
    packed.write_bytes(gzip.compress(idf.read_bytes()))
    assert (read_idf(packed, vocabulary).idf == table.idf).all()


def test_idf_and_vocabulary_of_different_sizes(tmp_path: Path) -> None:
    idf = saved(tmp_path / "idf.npy", np.ones(3))
    with pytest.raises(BadFact, match=r"belong together.*\(3,\) for 2 words"):
        read_idf(idf, written(tmp_path / "v.json", {"a": 0, "b": 1}))
    for indices in ({"a": 0, "b": 2, "c": 3}, ["a", "b", "c"]):
        with pytest.raises(BadFact, match="from words to indices"):
            read_idf(idf, written(tmp_path / "v.json", indices))


class OnUnpickle:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def test_pickles_are_not_read(tmp_path: Path) -> None:
    vocabulary = written(tmp_path / "v.json", {"a": 0})
    trap = np.array([OnUnpickle(tmp_path / "ran")], dtype=object)
    for values in (trap, np.array(["text"])):
        path = saved(tmp_path / "idf.npy", values, pickled=True)
        with pytest.raises(BadFact, match=r"idf\.npy"):
            read_idf(path, vocabulary)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(BadFact, match="cannot read"):
        read_idf(tmp_path / "lost.npy", vocabulary)
