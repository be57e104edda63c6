"""Data sets by name: in a folder of one's own, in the cache, or fetched and checked.

A name is looked for in the folder $FACTSCOPE_DATA, also gzipped and in folders within it, then in
the user's cache. Where it is in neither it is fetched, if its SHA-256 is known or given: nothing
comes from the network unchecked.

How many records a data file has, for a list of data sets.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from factscope.data.readers import EVERYDAY_CASES, read_text
from factscope.data.references import read_array
from factscope.errors import BadFact, BadSetting, DataNotFound
from factscope.io import DownloadProgress, cache_folder, fetch_url

__all__ = [
    "DATA_SETS",
    "DataSetInfo",
    "FoundData",
    "count_records",
    "find_data",
    "find_local",
]

ORIGINALS = "https://rome.baulab.info/data/dsets/"
"""Where the paper's authors keep their files."""


@dataclass(frozen=True, kw_only=True)
class DataSetInfo:
    """A file that is known by a name."""

    what: str
    files: tuple[str, ...]
    """What the file may be called; first as it is where it is fetched from."""
    url: str | None = None
    sha256: str | None = None
    """Of the file behind `url`, where it is known for sure."""
    size: int | None = None
    """Its bytes."""


def _original(
    what: str, *files: str, sha256: str | None = None, size: int | None = None
) -> DataSetInfo:
    return DataSetInfo(what=what, files=files, url=ORIGINALS + files[0], sha256=sha256, size=size)


DATA_SETS: dict[str, DataSetInfo] = {
    "everyday": DataSetInfo(
        what="well-known facts to rewrite, from this package", files=(EVERYDAY_CASES.name,)
    ),
    "counterfact": _original(
        "CounterFact: 21,919 facts to rewrite",
        "counterfact.json",
        sha256="d017056125178a13728594e66a801357a8db9ed7973a7425554bb4271de9fc6f",
        size=45_108_470,
    ),
    "counterfact-condensed": DataSetInfo(
        what="CounterFact as EasyEdit condenses it, the part for editing",
        files=("counterfact-edit.json", "condensed-edit.json"),
    ),
    "counterfact-train": DataSetInfo(
        what="CounterFact as EasyEdit condenses it, the part to train on",
        files=("counterfact-train.json", "condensed-train.json"),
    ),
    "zsre": _original(
        "zsRE, MEND's questions to evaluate", "zsre_mend_eval.json", "zsre_eval.json"
    ),
    "zsre-train": _original(
        "zsRE, MEND's questions to train on", "zsre_mend_train.json", "zsre_train.json"
    ),
    "known": _original(
        "the 1,209 facts that GPT-2 XL knows",
        "known_1000.json",
        sha256="61daca55318bb5260c1e62e133debef9102c7b278bbc7b19dd2ac655543f333a",
        size=343_229,
    ),
    "snippets": _original(
        "Wikipedia's articles on things that have an object",
        "attribute_snippets.json",
        sha256="10b5c1cd105e54d5983c72de1b45bfc88bc7af786f7b99def2557886ff23385b",
        size=926_285_719,
    ),
    "idf": _original(
        "how rare each word is",
        "idf.npy",
        sha256="c073d642589d4ac6432f467230329b36364a01e72de63a77a3624b745b923dda",
        size=11_042_168,
    ),
    "vocabulary": _original(
        "the words of idf",
        "tfidf_vocab.json",
        sha256="8a78c4f20d8d85dadfd14e283d71af255482ff18aa0eb8a81716024c05ff888b",
        size=31_639_072,
    ),
}


@dataclass(frozen=True)
class FoundData:
    """A file that is here."""

    path: Path
    origin: str
    """given, package, FACTSCOPE_DATA or cache."""


def find_data(
    name: str | Path, *, sha256: str | None = None, progress: DownloadProgress | None = None
) -> Path:
    """The file of a data set, fetched where it is not here; a path stands for itself.

    With a SHA-256, what is fetched must have it.
    """
    if sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise BadSetting(f"{sha256!r} is not a SHA-256; it has 64 hexadecimal digits")
    found = find_local(name)
    if found is not None and not (sha256 and found.origin == "cache"):
        return found.path
    data = DATA_SETS[str(name)]
    expected = sha256 or data.sha256
    if data.url is None or expected is None:
        raise _by_hand(str(name), data)
    return fetch_url(data.url, expected.lower(), _cached(data), progress)


def find_local(name: str | Path) -> FoundData | None:
    """Where a data set is on this disk; None where it is not."""
    if name == "everyday":
        return FoundData(EVERYDAY_CASES, "package")
    if isinstance(name, Path) or name not in DATA_SETS:
        return _given(name)
    data = DATA_SETS[name]
    for path in _in_own_folder(data):
        return FoundData(path, "FACTSCOPE_DATA")
    return FoundData(_cached(data), "cache") if _cached(data).is_file() else None


def _given(name: str | Path) -> FoundData:
    path = Path(name).expanduser()
    if path.is_file():
        return FoundData(path, "given")
    near = difflib.get_close_matches(str(name), DATA_SETS, n=1)
    raise DataNotFound(
        f"no data set or file {str(name)!r}"
        + (f"; did you mean {near[0]!r}?" if near else ".")
        + f" Give a path, or one of {', '.join(DATA_SETS)}"
    )


def _in_own_folder(data: DataSetInfo) -> Iterator[Path]:
    """The files of $FACTSCOPE_DATA that have one of the names: the upper folders first."""
    chosen = os.environ.get("FACTSCOPE_DATA")
    if not chosen:
        return
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise DataNotFound(f"FACTSCOPE_DATA is {chosen!r}, which is not a folder")
    names = [file + packed for file in data.files for packed in ("", ".gz")]
    for depth in ("", "*/", "*/*/"):
        for name in names:
            yield from sorted(path for path in folder.glob(depth + name) if path.is_file())


def _cached(data: DataSetInfo) -> Path:
    return cache_folder() / "data" / data.files[0]


def _by_hand(name: str, data: DataSetInfo) -> DataNotFound:
    """The error for a data set that cannot be fetched as it is."""
    whence = (
        f"download {data.url} yourself"
        if data.url
        else f"get {data.files[0]} from EasyEdit's page (github.com/zjunlp/EasyEdit)"
    )
    checked = f", or give its hash: `factscope data get {name} --sha256 …`" if data.url else ""
    return DataNotFound(
        f"{name} is not here, and its SHA-256 is not known, so it is not fetched; {whence} "
        f"and put it as {data.files[0]} into a folder that FACTSCOPE_DATA names, or give its path"
        f"{checked}"
    )


LARGE = 200_000_000
"""Bytes beyond which counting would take longer than one likes to wait for a list."""


def count_records(path: Path) -> int | None:
    """Elements, lines, words or values, by the kind of file; None where it is large or broken."""
    if path.stat().st_size > LARGE:
        return None
    try:
        name = path.name.removesuffix(".gz")
        if name.endswith(".npy"):
            return len(read_array(path))
        return _in_text(read_text(path), lines=name.endswith(".jsonl"))
    except (BadFact, ValueError):
        return None


def _in_text(text: str, lines: bool) -> int:
    return sum(1 for line in text.split("\n") if line.strip()) if lines else len(json.loads(text))
