"""Data sets by name.

A data set is searched in the folder $FACTSCOPE_DATA and two levels of its subfolders, also gzipped,
then in the cache. Otherwise it is downloaded, if its SHA-256 is known or given: no download is
used unchecked.
"""

import difflib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from factscope.data.readers import EVERYDAY_CASES, read_text
from factscope.data.references import read_array
from factscope.errors import BadFact, BadSetting, DataNotFound
from factscope.io import cache_folder, fetch_url
from factscope.progress import Progress, no_progress

PAPER_FILES = "https://rome.baulab.info/data/dsets/"
"""The files of the paper's authors."""


@dataclass(frozen=True, kw_only=True)
class DataSetInfo:
    """A data set that is known by name."""

    description: str
    files: tuple[str, ...]
    """Names that the file may have; the first is that of the download."""
    url: str | None = None
    sha256: str | None = None
    """Of the file at `url`, if it is known."""
    size: int | None = None
    """Bytes."""
    source: str = "from EasyEdit's page (github.com/zjunlp/EasyEdit)"
    """Where to get the file if there is no `url`."""


def _paper_file(
    description: str, *files: str, sha256: str | None = None, size: int | None = None
) -> DataSetInfo:
    return DataSetInfo(
        description=description, files=files, url=PAPER_FILES + files[0], sha256=sha256, size=size
    )


DATA_SETS: dict[str, DataSetInfo] = {
    "everyday": DataSetInfo(
        description="cases of well-known facts, included in the package",
        files=(EVERYDAY_CASES.name,),
    ),
    "counterfact": _paper_file(
        "CounterFact: 21,919 cases",
        "counterfact.json",
        sha256="d017056125178a13728594e66a801357a8db9ed7973a7425554bb4271de9fc6f",
        size=45_108_470,
    ),
    "counterfact-condensed": DataSetInfo(
        description="EasyEdit's condensed CounterFact, evaluation split",
        files=("counterfact-edit.json", "condensed-edit.json"),
    ),
    "counterfact-train": DataSetInfo(
        description="EasyEdit's condensed CounterFact, training split",
        files=("counterfact-train.json", "condensed-train.json"),
    ),
    "zsre": _paper_file("zsRE, MEND's evaluation split", "zsre_mend_eval.json", "zsre_eval.json"),
    "zsre-train": _paper_file(
        "zsRE, MEND's training split", "zsre_mend_train.json", "zsre_train.json"
    ),
    "known": _paper_file(
        "1,209 facts that GPT-2 XL knows",
        "known_1000.json",
        sha256="61daca55318bb5260c1e62e133debef9102c7b278bbc7b19dd2ac655543f333a",
        size=343_229,
    ),
    "snippets": _paper_file(
        "Wikipedia articles about entities with a given object (reference texts)",
        "attribute_snippets.json",
        sha256="10b5c1cd105e54d5983c72de1b45bfc88bc7af786f7b99def2557886ff23385b",
        size=926_285_719,
    ),
    "idf": _paper_file(
        "inverse document frequencies of words",
        "idf.npy",
        sha256="c073d642589d4ac6432f467230329b36364a01e72de63a77a3624b745b923dda",
        size=11_042_168,
    ),
    "vocabulary": _paper_file(
        "the words of idf",
        "tfidf_vocab.json",
        sha256="8a78c4f20d8d85dadfd14e283d71af255482ff18aa0eb8a81716024c05ff888b",
        size=31_639_072,
    ),
    "wikipedia": DataSetInfo(
        description="English text for statistics, used if it is there",
        files=("wikipedia.txt",),
        source="from a dump of Wikipedia, as plain text with blank lines between articles",
    ),
}


@dataclass(frozen=True)
class FoundData:
    """A local file of a data set."""

    path: Path
    origin: Literal["given", "package", "FACTSCOPE_DATA", "cache"]


def find_data(
    name: str | Path, *, sha256: str | None = None, progress: Progress = no_progress
) -> Path:
    """The file of a data set, downloaded if needed; a path is returned as it is.

    With `sha256`, a downloaded or cached file must have that hash.
    """
    if sha256 and not re.fullmatch(r"[0-9a-fA-F]{64}", sha256):
        raise BadSetting(f"sha256 is {sha256!r}; a SHA-256 has 64 hexadecimal digits")
    found = find_local(name)
    if found is not None and not (sha256 and found.origin == "cache"):
        return found.path
    data = DATA_SETS[str(name)]
    expected = sha256 or data.sha256
    if data.url and expected:
        return fetch_url(data.url, expected.lower(), _cache_path(data), progress)
    file = data.files[0]
    if data.url:
        how = f"download {data.url} yourself"
        hint = f", or give its hash: `factscope data get {name} --sha256 …`"
    else:
        how, hint = f"get {file} {data.source}", ""
    raise DataNotFound(
        f"{name} is not on this machine and cannot be downloaded, because its SHA-256 is not "
        f"known; {how} and save it as {file} in the folder FACTSCOPE_DATA, or give its path{hint}"
    )


def find_local(name: str | Path) -> FoundData | None:
    """The local file of a data set or path, or None."""
    if name == "everyday":
        return FoundData(EVERYDAY_CASES, "package")
    if isinstance(name, Path) or name not in DATA_SETS:
        path = Path(name).expanduser()
        if path.is_file():
            return FoundData(path, "given")
        similar = difflib.get_close_matches(str(name), DATA_SETS, n=1)
        guess = f"; did you mean {similar[0]!r}?" if similar else "."
        raise DataNotFound(
            f"no data set or file {str(name)!r}{guess} Give a path, or one of "
            + ", ".join(DATA_SETS)
        )
    data = DATA_SETS[name]
    for path in _in_user_folder(data):
        return FoundData(path, "FACTSCOPE_DATA")
    cached = _cache_path(data)
    return FoundData(cached, "cache") if cached.is_file() else None


def _in_user_folder(data: DataSetInfo) -> Iterator[Path]:
    """The matching files in $FACTSCOPE_DATA, upper folders first."""
    setting = os.environ.get("FACTSCOPE_DATA")
    if not setting:
        return
    folder = Path(setting).expanduser()
    if not folder.is_dir():
        raise DataNotFound(f"FACTSCOPE_DATA is {setting!r}, which is not a folder")
    names = [file + suffix for file in data.files for suffix in ("", ".gz")]
    for depth in ("", "*/", "*/*/"):
        for name in names:
            yield from sorted(path for path in folder.glob(depth + name) if path.is_file())


def _cache_path(data: DataSetInfo) -> Path:
    return cache_folder() / "data" / data.files[0]


LARGE = 200_000_000
"""Bytes; counting the records of a larger file would take too long for a list."""


def count_records(path: Path) -> int | None:
    """Records, words or values in a file; None if it is large or broken."""
    if path.stat().st_size > LARGE:
        return None
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".npy"):
            return len(read_array(path))
        text = read_text(path)
        if name.endswith(".jsonl"):
            return sum(1 for line in text.split("\n") if line.strip())
        return len(json.loads(text))
    except (BadFact, ValueError):
        return None
