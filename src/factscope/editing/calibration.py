"""Calibrations: settings of editing methods that were measured on one model, with the evidence.

`factscope calibrate` writes one as a small JSON file into the user's cache. From then on its values
are the model's defaults (`editing.defaults`). The file can be shared: `factscope calibrate use`
checks it and copies it into the cache. No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from factscope.editing.settings import ValueSearch, editor
from factscope.errors import BadCalibration, BadInput, BadSetting
from factscope.io import cache_folder, read_json, write_atomic

if TYPE_CHECKING:
    from factscope.lm.model import LM

KIND = "factscope calibration"
VERSION = 1
CALIBRATED: dict[str, tuple[str, ...]] = {
    "rome": ("layer", "clamp", "lr", "contrast_tolerance", "weight_decay"),
    "memit": ("layers", "clamp", "covariance_weight", "lr"),
    "ft-l": ("layer", "max_change"),
}
"""Method → its settings that a calibration measures."""
CACHE_KEY = "calibration"
"""Key of a model's calibration in `LM.cache`."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured settings of one model."""

    model: str
    """Name of the model."""
    fingerprint: str
    """Fingerprint of its weights."""
    settings: Mapping[str, Mapping[str, Any]]
    """Method → setting → value."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Cases, scores with intervals before and after, traces and statistics."""

    def __post_init__(self) -> None:
        tuples = {  # JSON has lists
            method: {name: tuple(x) if isinstance(x, list) else x for name, x in values.items()}
            for method, values in self.settings.items()
        }
        object.__setattr__(self, "settings", tuples)
        for method, values in tuples.items():
            unknown = [name for name in values if name not in CALIBRATED.get(method, ())]
            if method not in CALIBRATED or unknown:
                known = ", ".join(f"{m} ({', '.join(names)})" for m, names in CALIBRATED.items())
                raise BadCalibration(
                    f"a calibration has {method} {', '.join(unknown)}; known are {known}"
                )
            try:
                editor_with(method, values)
            except BadSetting as error:
                raise BadCalibration(f"a calibration has a bad setting of {method}: {error}") from (
                    error
                )

    def best_method(self, facts: int) -> tuple[str, Mapping[str, Mapping[str, Any]]] | None:
        """The method that scored best with about that many facts in an edit, and the scores of all
        methods; None if that was not measured."""
        best = self.evidence.get("best", {})
        counts = sorted((int(n) for n in best), reverse=True)
        count = next((n for n in counts if n <= facts), None)
        if count is None:
            return None
        return best[str(count)], self.evidence["methods"][str(count)]

    def save(self, path: Path) -> None:
        """Write the file atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        values = {"kind": KIND, "version": VERSION, **asdict(self)}
        write_atomic(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def load_calibration(path: Path) -> Calibration:
    """Read a file and check it."""
    if not path.is_file():
        raise BadCalibration(f"there is no file {path}; `factscope calibrate` writes one")
    try:
        values = dict(read_json(path))
        if values.pop("kind", None) != KIND or values.pop("version", None) != VERSION:
            raise ValueError("it is of another kind or version")
        names = {item.name for item in fields(Calibration)}
        if set(values) != names or not isinstance(values["settings"], dict):
            raise ValueError(f"it must have {', '.join(sorted(names))}")
        return Calibration(**values)
    except BadCalibration as error:
        raise BadCalibration(f"{path}: {error}") from error
    except (BadInput, TypeError, ValueError, AttributeError) as error:
        raise BadCalibration(
            f"{path} is not a calibration ({error}); run `factscope calibrate` again, or delete it"
        ) from error


def calibration_folder(fingerprint: str) -> Path:
    """Folder of a model's calibration in the user's cache."""
    return cache_folder() / "calibrations" / fingerprint[:16]


def calibration_path(fingerprint: str) -> Path:
    """File of a model's calibration in the user's cache."""
    return calibration_folder(fingerprint) / "calibration.json"


def find_calibration(lm: "LM") -> Calibration | None:
    """The model's calibration, if there is one; read once for each loaded model."""
    if CACHE_KEY not in lm.cache:
        path = calibration_path(lm.fingerprint)
        lm.cache[CACHE_KEY] = load_calibration(path) if path.is_file() else None
    return lm.cache[CACHE_KEY]


def calibrated_values(lm: "LM", method: str) -> Mapping[str, Any]:
    """The calibrated settings of a method; empty without a calibration."""
    calibration = find_calibration(lm)
    return {} if calibration is None else calibration.settings.get(method, {})


def editor_with(method: str, values: Mapping[str, Any]) -> Any:
    """The default editor of a method with some settings, those of its value search included."""
    searched = {item.name for item in fields(ValueSearch)} & set(CALIBRATED[method])
    base: Any = editor(method)
    own = {name: x for name, x in values.items() if name not in searched}
    search = {name: x for name, x in values.items() if name in searched}
    return replace(base, **own, **({"search": replace(base.search, **search)} if search else {}))
