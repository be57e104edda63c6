"""Files: atomic writes, strict JSON, checks of output paths, locks, checked downloads, the cache.

A file written here appears complete or not at all, also when the process is killed. A download is
used only if its SHA-256 is the expected one.
"""

import atexit
import contextlib
import errno
import hashlib
import http.client
import json
import logging
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import platformdirs

from factscope.errors import (
    BadInput,
    BadModelFile,
    BadSetting,
    DownloadFailed,
    FolderInUse,
    HashMismatch,
    RunInterrupted,
)
from factscope.progress import Progress, no_progress

log = logging.getLogger(__name__)

CHUNK = 1 << 20
TIMEOUT = 60  # seconds without data after which a download fails
PARTIAL = ".partial"  # suffix of what is still being written
STALE = 24 * 3600  # age in seconds after which a scratch folder belongs to a killed process


def cache_folder() -> Path:
    """The folder of downloads and converted models: $FACTSCOPE_CACHE, or the user's cache.

    If it cannot be written, a temporary folder with links to its files.
    """
    chosen = os.environ.get("FACTSCOPE_CACHE")
    return _writable_cache(
        Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("factscope"))
    )


@cache
def _writable_cache(folder: Path) -> Path:
    try:
        _try_writing(folder / "file")
        return folder
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="factscope-cache-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        if folder.is_dir():
            shutil.copytree(
                folder.absolute(), temporary, copy_function=os.symlink, dirs_exist_ok=True
            )
        log.warning(
            "The cache %s cannot be written (%s). New files go to a temporary folder, which is "
            "deleted at the end. Set FACTSCOPE_CACHE to a folder that can be written.",
            folder, error.strerror or error,
        )  # fmt: skip
        return temporary


# ---- atomic files and folders


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write the file in one step; text as UTF-8."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode(errors="replace") if isinstance(data, str) else data)


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path of the same name; it replaces `path` unless the block raises."""
    with scratch_folder(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        temporary.replace(path)


@contextlib.contextmanager
def atomic_files(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files are moved to `folder` unless the block raises."""
    existed = folder.exists()
    try:
        with scratch_folder(folder) as temporary:
            yield temporary
            for file in sorted(path for path in temporary.rglob("*") if path.is_file()):
                target = folder / file.relative_to(temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                file.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            if not existed:
                folder.rmdir()
        raise


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a temporary folder within `parent`: on the same disk, so that a rename is atomic."""
    parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=".", suffix=PARTIAL, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache  # once per folder and process: listing a large folder for every write would be slow
def _remove_stale(parent: Path) -> None:
    """Remove the scratch folders of killed processes."""
    for folder in parent.glob(f".*{PARTIAL}"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def resumable_write(path: Path, resumes: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Context in which a failed write, as on a full disk, raises RunInterrupted."""
    try:
        yield
    except OSError as error:
        raise RunInterrupted(
            f"cannot write to {path} ({error.strerror or error}); free some space, then the same "
            f"command {'resumes' if resumes() else 'starts again'}"
        ) from error


# ---- JSON

SUSPECT = re.compile(r"NaN|Infinity|[eE]\+?\d{3}|\d{309}|\\u[dD][89a-fA-F]")
"""May be an infinite number or half a surrogate pair; only then every value is checked."""


def read_json(path: Path) -> Any:
    """The value of a JSON file; raise BadInput with its name if it is not strict JSON."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read {path}: {error}") from error


def parse_json(data: str | bytes, *, allow_nan: bool = False) -> Any:
    """The value of a JSON text. Raise ValueError if it cannot be parsed or written as UTF-8 again.

    Besides bad syntax, that is NaN and infinity, lone surrogates, bytes that are not UTF-8, and
    nesting too deep to parse.
    """
    try:
        text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        where = f"line {line}: " if line > 1 else ""
        byte = error.object[error.start]
        raise ValueError(f"{where}the byte 0x{byte:02x} is not UTF-8 text") from error
    try:
        value = json.loads(text)
        if SUSPECT.search(text) or not text.isascii():
            check_json(value, allow_nan=allow_nan)
        return value
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None


def check_json(value: Any, name: str = "", *, allow_nan: bool = False) -> None:
    """Raise ValueError with the field's name for NaN, infinity and lone surrogates."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_json(key, "a field name")
            check_json(item, f"{name}.{key}" if name else key, allow_nan=allow_nan)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            check_json(item, f"{name}[{i}]", allow_nan=allow_nan)
    elif isinstance(value, float) and not math.isfinite(value) and not allow_nan:
        raise ValueError(f"{name or 'the value'} is {value}")
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name or 'the value'} has a lone surrogate: {value!r}") from error


# ---- checks of output paths, before the work


def check_output_file(path: str | Path, flag: str = "-o") -> None:
    """Raise BadSetting if the file cannot be written later; leave nothing behind."""
    with _naming_output(path, flag):
        path = Path(path)
        if os.path.lexists(path) and not path.is_file():
            what = "a folder" if path.is_dir() else "not a regular file"
            raise BadSetting(f"{flag} is {str(path)!r}, which is {what}; give a file name")
        if path.is_file() and not os.access(path, os.W_OK):
            raise BadSetting(f"{flag} is {str(path)!r}, which is read-only; give another file")
        _try_writing(path)


def check_output_folder(path: str | Path, flag: str = "--out") -> None:
    """Raise BadSetting if files cannot be written to the folder later; leave nothing behind."""
    with _naming_output(path, flag):
        path = Path(path)
        if os.path.lexists(path) and not path.is_dir():
            what = "a file" if path.is_file() else "not a folder"
            raise BadSetting(f"{flag} is {str(path)!r}, which is {what}; give a folder")
        _try_writing(path / "file")


@contextlib.contextmanager
def _naming_output(path: str | Path, flag: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null byte or a lone surrogate
        reason = error.strerror if isinstance(error, OSError) else error
        raise BadSetting(
            f"{flag} is {str(path)!r}, which cannot be written ({reason}); choose another place"
        ) from error


def _try_writing(path: Path) -> None:
    """Create the file's missing folders and the file in a temporary folder beside them.

    Only an attempt shows whether it works: root may write to read-only modes, and /proc and
    read-only file systems look writable.
    """
    parent = path.parent
    while not os.path.lexists(parent):
        parent = parent.parent
    if not parent.is_dir():
        raise NotADirectoryError(0, f"{parent} is not a folder")
    with tempfile.TemporaryDirectory(prefix=".", suffix=PARTIAL, dir=parent) as temporary:
        trial = Path(temporary) / path.relative_to(parent)
        trial.parent.mkdir(parents=True, exist_ok=True)
        trial.touch()


# ---- locks

LOCK = ".lock"
"""Suffix of a lock file, which names the process that holds the lock."""


@contextlib.contextmanager
def locked(folder: str | Path, name: str = "") -> Iterator[None]:
    """Lock a folder (created if missing), or a file in it; raise FolderInUse if it is locked.

    The operating system releases the lock when the process ends, also when it is killed.
    """
    path = Path(folder) / f"{name}{LOCK}"
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(file)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                break
            os.close(file)  # the last owner deleted the file after this process opened it
        except BaseException as error:
            owner = os.read(file, 200).decode(errors="replace").strip()
            os.close(file)
            if not isinstance(error, BlockingIOError):
                raise
            raise FolderInUse(
                f"{Path(folder) / name} is in use by {owner or 'another process'}; wait until it "
                f"ends, or give another {'file' if name else 'folder'}"
            ) from None
    try:
        os.truncate(file, 0)
        os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        if sys.platform == "win32":  # cannot delete an open file, also not another process's
            os.close(file)
            with contextlib.suppress(OSError):
                path.unlink()
        else:  # delete before the lock is released: afterwards the file may be another process's
            path.unlink(missing_ok=True)
            os.close(file)


def _lock(file: int) -> None:
    """Lock an open file, or raise BlockingIOError."""
    if sys.platform == "win32":
        import msvcrt

        os.lseek(file, 4096, os.SEEK_SET)  # behind the text: a locked byte cannot be read
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError from error
        finally:
            os.lseek(file, 0, os.SEEK_SET)
        return
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        log.warning("This file system has no locks: never run two processes on one folder.")


# ---- downloads


def sha256(path: Path) -> str:
    """The file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_url(url: str, expected: str, path: Path, progress: Progress = no_progress) -> Path:
    """Download to `path` unless it already has the expected SHA-256."""
    if path.is_file() and sha256(path) == expected:
        return path
    with atomic_path(path) as temporary:
        with temporary.open("wb") as file:
            for chunk, total in _chunks(url):
                file.write(chunk)
                if total:
                    progress(len(chunk) / total)
        _check_hash(temporary, expected, url)
    return path


def _chunks(url: str) -> Iterator[tuple[bytes, int | None]]:
    """Chunks of the file, each with the total size where the server sends it."""
    received = 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while chunk := response.read(CHUNK):
                received += len(chunk)
                yield chunk, total
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadFailed(
            f"could not fetch {url}: {error}; check the network, try again"
        ) from error
    if total is not None and received < total:
        raise DownloadFailed(f"{url} broke off after {received} of {total} bytes; try again")


def fetch_wheel(requirement: str, expected: str, folder: Path) -> Path:
    """Download the wheel of a pinned requirement with pip, so that its index and proxy apply."""
    log.info("fetching %s with pip", requirement)
    with scratch_folder(folder) as temporary:
        # Wheels only: pip would run the build script of a source package to read its metadata.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "-d", str(temporary), requirement]
        # pip prints its progress bar to stdout, which is reserved for results: send it to stderr.
        done = subprocess.run(
            command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if done.returncode and "No module named pip" in done.stderr:
            raise DownloadFailed(
                f"{requirement} is fetched with pip, which {sys.executable} lacks; "
                "run `python -m ensurepip` (or `uv pip install pip`) and try again"
            )
        if done.returncode:
            last = "\n".join(done.stderr.strip().splitlines()[-4:])
            raise DownloadFailed(
                f"pip could not fetch {requirement}:\n{last}\n"
                "Check the network, or point pip at a mirror (PIP_INDEX_URL) or at a folder that "
                "has the wheel (PIP_FIND_LINKS)"
            )
        wheels = sorted(temporary.glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadFailed(f"pip left {len(wheels)} wheels for {requirement!r}; expected one")
        _check_hash(wheels[0], expected, requirement)
        return wheels[0].replace(folder / wheels[0].name)


def _check_hash(path: Path, expected: str, origin: str) -> None:
    actual = sha256(path)
    if actual != expected:
        raise HashMismatch(
            f"{origin} has SHA-256 {actual}, expected {expected}; the file was deleted. Try again, "
            "and check where your package index or proxy gets it from"
        )


def unpack_member(wheel: Path, matches: Callable[[str], bool], folder: Path) -> Path:
    """Extract the one member of a wheel whose name matches, directly into the folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if matches(name)]
            if len(names) != 1:
                raise BadModelFile(
                    f"{wheel.name} has {len(names)} matching members, expected one; "
                    f"it holds {', '.join(archive.namelist()[:8])}"
                )
            # Only the last part of the name: no member can be written outside the folder.
            path = folder / Path(names[0].replace("\\", "/")).name
            with (
                archive.open(names[0]) as source,
                atomic_path(path) as temporary,
                temporary.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, CHUNK)
            return path
    except zipfile.BadZipFile as error:
        raise BadModelFile(f"{wheel} is not a wheel ({error}); delete it and try again") from error
