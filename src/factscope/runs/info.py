"""By what a run was made: versions, the device, the model's fingerprint."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from factscope.lm.model import LM

__all__ = ["info"]


def info(lm: LM) -> dict[str, Any]:
    """What a run's info.json says."""
    return {
        "factscope": _version("factscope"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
        "device": lm.device.type,
        "model_fingerprint": lm.fingerprint,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
