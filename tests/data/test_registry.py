"""Data sets by name: the user's folder, the cache, the network; and the `data` commands."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from factscope.data.readers import everyday_cases, read_cases
from factscope.data.registry import DATA_SETS, FoundData, count_records, find_data, find_local
from factscope.errors import BadSetting, DataNotFound, DownloadFailed, HashMismatch

from commands import Run, runner

DATA = b'[{"case_id": 0}, {"case_id": 1}]'
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no FACTSCOPE_DATA."""
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FACTSCOPE_DATA", raising=False)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the authors' server, with two of their files."""
    folder = tmp_path / "server"
    folder.mkdir()
    for name, known in (("counterfact", DIGEST), ("zsre", None)):
        path = folder / DATA_SETS[name].files[0]
        path.write_bytes(DATA)
        row = replace(DATA_SETS[name], url=path.as_uri(), sha256=known, size=len(DATA))
        monkeypatch.setitem(DATA_SETS, name, row)
    return folder


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.setenv("FACTSCOPE_DATA", str(folder))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)


def test_entries_are_complete() -> None:
    for name, data in DATA_SETS.items():
        assert data.files, name
        assert data.sha256 is None or (len(data.sha256) == 64 and data.size and data.url)
        assert data.url is None or data.url.endswith("/" + data.files[0])


def test_the_packages_cases_need_no_download() -> None:
    assert len(read_cases(find_data("everyday")).cases) >= 64
    assert find_local("everyday") == FoundData(find_data("everyday"), "package")


def test_a_path_is_returned_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_bytes(DATA)
    assert find_data(path) == find_data(str(path)) == path
    with pytest.raises(DataNotFound, match=r"no data set or file .*lost"):
        find_data(tmp_path / "lost.json")
    with pytest.raises(DataNotFound, match="did you mean 'counterfact'"):
        find_data("counterfacts")


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("counterfact", "counterfact.json"),
        ("counterfact", "counterfact/counterfact.json.gz"),
        ("counterfact-condensed", "counterfact/condensed-edit.json.gz"),
        ("counterfact-condensed", "counterfact-edit.json"),
        ("zsre", "zsre/zsre_eval.json.gz"),
        ("zsre", "zsre_mend_eval.json"),
        ("zsre-train", "deep/er/zsre_train.json"),
        ("known", "knowns/known_1000.json.gz"),
        ("snippets", "attribute_snippets.json"),
        ("idf", "idf.npy"),
        ("vocabulary", "tfidf_vocab.json.gz"),
    ],
)
def test_files_are_found_in_the_users_folder(own: Path, name: str, file: str) -> None:
    path = own / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(DATA)
    assert find_local(name) == FoundData(path, "FACTSCOPE_DATA")
    assert find_data(name) == path


def test_upper_folders_and_plain_files_take_precedence(own: Path) -> None:
    (own / "a").mkdir()
    for file in ("a/counterfact.json", "counterfact.json.gz", "counterfact.json"):
        (own / file).write_bytes(DATA)
    assert find_data("counterfact") == own / "counterfact.json"
    (own / "counterfact.json").unlink()
    assert find_data("counterfact") == own / "counterfact.json.gz"


def test_a_users_folder_that_does_not_exist(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FACTSCOPE_DATA", str(tmp_path / "lost"))
    with pytest.raises(DataNotFound, match="not a folder"):
        find_data("counterfact")


def test_a_data_set_is_downloaded_once(server: Path, tmp_path: Path) -> None:
    fractions: list[float] = []
    path = find_data("counterfact", progress=fractions.append)
    assert path == tmp_path / "cache" / "data" / "counterfact.json"
    assert path.read_bytes() == DATA
    assert sum(fractions) == pytest.approx(1)
    (server / "counterfact.json").unlink()
    assert find_data("counterfact") == path
    assert find_local("counterfact") == FoundData(path, "cache")


def test_the_users_folder_takes_precedence_over_the_cache(server: Path, own: Path) -> None:
    find_data("counterfact")
    (own / "counterfact.json").write_bytes(b"[]")
    assert find_data("counterfact") == own / "counterfact.json"


def test_a_file_with_the_wrong_hash_is_deleted(server: Path, tmp_path: Path) -> None:
    (server / "counterfact.json").write_bytes(b"forged")
    with pytest.raises(HashMismatch, match=DIGEST):
        find_data("counterfact")
    assert find_local("counterfact") is None


def test_a_download_needs_a_hash(server: Path) -> None:
    with pytest.raises(
        DataNotFound, match=r"SHA-256 is not known.*zsre_mend_eval.*FACTSCOPE_DATA.*--sha"
    ):
        find_data("zsre")
    assert find_local("zsre") is None
    with pytest.raises(HashMismatch):
        find_data("zsre", sha256="0" * 64)
    assert find_data("zsre", sha256=DIGEST.upper()).read_bytes() == DATA


def test_an_invalid_hash(server: Path) -> None:
    with pytest.raises(BadSetting, match="64 hexadecimal digits"):
        find_data("zsre", sha256="abc")


def test_a_given_hash_also_checks_the_cached_file(server: Path, tmp_path: Path) -> None:
    path = find_data("counterfact")
    path.write_bytes(b"changed")
    assert find_data("counterfact", sha256=DIGEST).read_bytes() == DATA


def test_a_failed_download(server: Path) -> None:
    (server / "counterfact.json").unlink()
    with pytest.raises(DownloadFailed, match="could not fetch"):
        find_data("counterfact")


def test_a_data_set_without_a_url() -> None:
    with pytest.raises(DataNotFound, match=r"counterfact-edit\.json from EasyEdit"):
        find_data("counterfact-condensed", sha256=DIGEST)


def test_count_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    files = {"list.json": DATA, "lines.jsonl": b'{"a": 1}\n\n{"a": 2}\n{"a": 3}',
             "words.json": b'{"a": 0, "b": 1}', "one.jsonl": b'{"a": 1}\n', "bad.json": b"[",
             "packed.json.gz": gzip.compress(DATA)}  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    np.save(tmp_path / "idf.npy", np.ones(5))
    counted = {name: count_records(tmp_path / name) for name in [*files, "idf.npy"]}
    assert counted == {"list.json": 2, "lines.jsonl": 3, "words.json": 2, "one.jsonl": 1,
                       "bad.json": None, "packed.json.gz": 2, "idf.npy": 5}  # fmt: skip
    monkeypatch.setattr("factscope.data.registry.LARGE", 10)
    assert count_records(tmp_path / "list.json") is None


# ---- the commands


def test_data_list(run: Run, server: Path, own: Path) -> None:
    (own / "known_1000.json").write_bytes(DATA)
    done = run("data", "list", "--json")
    assert done.code == 0
    rows = {row["name"]: row for row in json.loads(done.out)["data_sets"]}
    assert list(rows) == list(DATA_SETS)
    assert (rows["known"]["from"], rows["known"]["records"]) == ("FACTSCOPE_DATA", 2)
    assert rows["known"]["path"] == str(own / "known_1000.json")
    assert [rows[name]["from"] for name in ("everyday", "counterfact", "zsre")] == [
        "package",
        "to fetch",
        "by hand",
    ]
    shown = run("data", "list").out
    assert all(name in shown for name in DATA_SETS)
    assert str(own / "known_1000.json") in shown


def test_data_get(run: Run, server: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "data" / "counterfact.json"
    assert run("data", "get", "counterfact")[:2] == (0, f"{path}\n")
    assert json.loads(run("data", "get", "counterfact", "--json").out)["path"] == str(path)
    failed = run("data", "get", "zsre")
    assert failed.code == 2
    assert "FACTSCOPE_DATA" in failed.err
    assert run("data", "get", "zsre", "--sha256", DIGEST).code == 0


def test_data_show(run: Run) -> None:
    shown = run("data", "show", "everyday", "--cases", "1,0")
    cases = everyday_cases()
    flat = "".join(shown.out.split())
    for case in cases[:2]:
        texts = (case.fact.text, *case.paraphrases, *case.neighbours, *case.generations)
        for words in (" ".join(texts)).split():
            assert words in flat
    shown = json.loads(run("data", "show", "everyday", "--limit", "2", "--json").out)
    assert [one["fact"]["id"] for one in shown["cases"]] == [case.fact.id for case in cases[:2]]
    assert shown["cases"][1]["neighbours"] == list(cases[1].neighbours)


def test_data_show_with_an_unknown_case(run: Run) -> None:
    refused = run("data", "show", "everyday", "--cases", "0,nope")
    assert refused.code == 2
    assert "no case 'nope'" in refused.err
