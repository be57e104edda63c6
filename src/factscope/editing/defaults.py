"""Defaults that depend on the model: layers, clamps and limits, with the source of each number.

A calibration (`editing.calibration`) comes first: it was measured on the very model. Otherwise a
model is recognised by its family, number of layers and width. One without a row in a table is
edited at the usual depth, and ROME's clamp is cautious. FT+L then takes its limit relative to the
standard deviation of the weight, because what a change of 5e-4 does depends on the size of the
entries: published limits differ by a factor of 40 between GPT-2 medium and GPT-J.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from factscope.editing.calibration import calibrated_values, find_calibration
from factscope.editing.settings import FineTuneMethod, Layer, SecondMomentSetting
from factscope.errors import BadFact, BadSetting, FactscopeError
from factscope.facts import Fact
from factscope.stats.second_moment import (
    SecondMoment,
    find_second_moment,
    layers_with_second_moments,
)
from factscope.tracing.settings import Tracing
from factscope.tracing.trace import trace

if TYPE_CHECKING:
    from factscope.lm.model import LM

log = logging.getLogger(__name__)

D = TypeVar("D", "RomeDefaults", "MemitDefaults")
Shape = tuple[str, int, int]
"""Model type, number of layers, width."""

PAPER = "the paper's hparams files"
MEMIT_FILES = "MEMIT's hparams files"
EASYEDIT = "EasyEdit's hparams files"
TRIALS = "trials on the default model (docs/results.md)"


def _shape(lm: "LM") -> Shape:
    return lm.model.config.model_type, lm.n_layers, lm.width


# ---- ROME and MEMIT


@dataclass(frozen=True, kw_only=True)
class RomeDefaults:
    """ROME's settings that depend on the model."""

    layer: int
    clamp: float = 4.0
    lr: float = 0.5
    weight_decay: float = 0.01
    contrast_tolerance: float | Literal["inf"] = "inf"
    source: str


ROME: dict[Shape, RomeDefaults] = {
    ("gpt2", 24, 1024): RomeDefaults(layer=8, clamp=3.0, source=PAPER),
    ("gpt2", 36, 1280): RomeDefaults(layer=12, source=PAPER),
    ("gpt2", 48, 1600): RomeDefaults(layer=17, source=PAPER),
    ("gptj", 28, 4096): RomeDefaults(layer=5, source=PAPER),
    ("gpt_neox", 44, 6144): RomeDefaults(layer=15, source=MEMIT_FILES),
    ("llama", 32, 4096): RomeDefaults(layer=5, source=EASYEDIT),
    ("qwen2", 28, 3584): RomeDefaults(layer=5, source=EASYEDIT),
    ("llama", 30, 576): RomeDefaults(layer=5, lr=0.3, contrast_tolerance=3.0, source=TRIALS),
}

DEPTH = 0.18
"""Layer of a model without a row, as a fraction of its depth: between GPT-J's 5 of 28 and what the
trials on the default model favour."""


CAUTIOUS_CLAMP = 1.0
"""Clamp of a model without a row. Models need clamps from below 1 to 4; one that is too large
changes facts about other subjects, one that is too small leaves some edits without effect."""


def rome_defaults(lm: "LM") -> RomeDefaults:
    """The calibrated settings, the model's row, or a layer at the usual depth."""
    by_depth = RomeDefaults(
        layer=min(lm.n_layers - 1, round(DEPTH * lm.n_layers)),
        clamp=CAUTIOUS_CLAMP,
        source=f"{DEPTH:g} of the depth, as in the models that were tried",
    )
    return _calibrated(lm, "rome", ROME.get(_shape(lm), by_depth))


def _calibrated(lm: "LM", method: str, row: D) -> D:
    """The row with the calibrated settings, if the model has a calibration of the method."""
    values = calibrated_values(lm, method)
    if values and hasattr(row, "source"):
        values = {**values, "source": "factscope calibrate"}
    return replace(row, **values)  # pyright: ignore[reportArgumentType]


def has_own_defaults(lm: "LM") -> bool:
    """Whether the defaults were measured for this model: published for it, or calibrated."""
    return _shape(lm) in ROME or find_calibration(lm) is not None


@dataclass(frozen=True, kw_only=True)
class MemitDefaults:
    """MEMIT's settings that depend on the model."""

    layers: tuple[int, ...]
    covariance_weight: float
    """λ"""
    steps: int = 20
    clamp: float = 0.75
    lr: float = 0.1
    """A state is several times as long as a value, so the first step is a smaller part of it."""
    weight_decay: float = 0.01


MEMIT: dict[Shape, MemitDefaults] = {
    # MEMIT's hparams files
    ("gpt2", 48, 1600): MemitDefaults(layers=(13, 14, 15, 16, 17), covariance_weight=20_000.0),
    ("gptj", 28, 4096): MemitDefaults(
        layers=(3, 4, 5, 6, 7, 8), covariance_weight=15_000.0, steps=25
    ),
    # Trials on the default model (docs/results.md).
    ("llama", 30, 576): MemitDefaults(layers=(4, 5, 6, 7, 8), covariance_weight=100.0),
}


WEIGHT_PER_DIMENSION = 0.1
"""λ of a model without a row, per dimension d of a key. A layer writes the fraction q / (λ + q) of
a fact's residual, with q = kᵀC⁻¹k, whose mean over the keys of ordinary text is d: with λ = d / 10
an ordinary key gets 91 %. Published values are 0.9 d (GPT-J) and 3 d (GPT-2 XL); with 15,000, which
is 7 d in Gemma 3 270M, most facts are not taken there."""


def memit_defaults(lm: "LM") -> MemitDefaults:
    """The calibrated settings, the model's row, or the five layers up to ROME's."""
    last = rome_defaults(lm).layer
    # As in the published settings.
    up_to_rome = tuple(range(max(0, last - 4), last + 1))
    weight = WEIGHT_PER_DIMENSION * lm.mlp_weight(last).shape[1]
    by_depth = MemitDefaults(layers=up_to_rome, covariance_weight=weight)
    return _calibrated(lm, "memit", MEMIT.get(_shape(lm), by_depth))


# ---- fine-tuning


@dataclass(frozen=True)
class FineTuneDefaults:
    """Layer and limit of a fine-tuning method in one model."""

    layer: int
    max_change: float | None
    """Largest change of an entry; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class FineTuneByDepth:
    """Layer and limit of a fine-tuning method in a model without a row."""

    depth: float
    """The layer, as a fraction of the number of layers."""
    max_change_in_stds: float | None
    """Largest change of an entry, in standard deviations of the weight; None for no limit."""


FINETUNE: dict[Shape, dict[FineTuneMethod, FineTuneDefaults]] = {
    # kmeng01/rome, hparams/FT: gpt2-{medium,large,xl}_{constr,unconstr,attn}.json
    ("gpt2", 24, 1024): {"ft-l": FineTuneDefaults(0, 2e-3)},
    ("gpt2", 36, 1280): {"ft-l": FineTuneDefaults(0, 1e-3)},
    ("gpt2", 48, 1600): {
        "ft": FineTuneDefaults(1, None),
        "ft-l": FineTuneDefaults(0, 5e-4),
        "attn": FineTuneDefaults(33, 1e-3),
    },
    # kmeng01/rome, hparams/FT: EleutherAI_gpt-j-6B_{unconstr,constr}.json
    ("gptj", 28, 4096): {"ft": FineTuneDefaults(21, None), "ft-l": FineTuneDefaults(0, 5e-5)},
    # Chosen on CounterFact cases other than those reported (docs/results.md).
    ("llama", 30, 576): {
        "ft": FineTuneDefaults(0, None),
        "ft-l": FineTuneDefaults(0, 5e-3),
        "attn": FineTuneDefaults(15, 1e-2),
    },
}

FINETUNE_BY_DEPTH: dict[FineTuneMethod, FineTuneByDepth] = {
    # The published layers disagree (1 of 48 in GPT-2 XL, 21 of 28 in GPT-J). In SmolLM2-135M, early
    # layers generalise to paraphrases and spare neighbours; above two thirds, neighbours change.
    "ft": FineTuneByDepth(depth=0.0, max_change_in_stds=None),
    # Layer 0 as in every published file; limit by trial on SmolLM2-135M.
    "ft-l": FineTuneByDepth(depth=0.0, max_change_in_stds=0.01),
    # The depth of the paper's layer, 33 of 48 in GPT-2 XL; limit by trial on SmolLM2-135M.
    "attn": FineTuneByDepth(depth=33 / 48, max_change_in_stds=0.03),
}


def finetune_layer(lm: "LM", method: FineTuneMethod) -> int:
    """The layer that a method trains in this model."""
    if "layer" in (calibrated := calibrated_values(lm, method)):
        return calibrated["layer"]
    if row := FINETUNE.get(_shape(lm), {}).get(method):
        return row.layer
    return int(FINETUNE_BY_DEPTH[method].depth * lm.n_layers)


def finetune_max_change(lm: "LM", method: FineTuneMethod, weight_std: float) -> float | None:
    """The limit of a method in this model, given the standard deviation of the trained weight."""
    if limit := calibrated_values(lm, method).get("max_change"):
        return limit
    if row := FINETUNE.get(_shape(lm), {}).get(method):
        return row.max_change
    in_stds = FINETUNE_BY_DEPTH[method].max_change_in_stds
    return None if in_stds is None else in_stds * weight_std


# ---- layers


def resolve_layer(
    lm: "LM", layer: Layer, facts: Sequence[Fact], second_moment: SecondMomentSetting = "find"
) -> int:
    """The index of ROME's layer; with "auto" the median of the facts' traced layers.

    With statistics of some layers only, one of these layers is chosen. Facts without a clear effect
    are left out; if none has one, that is an error.
    """
    if layer is None:
        return rome_defaults(lm).layer
    if layer != "auto":
        return check_layer(lm, layer)
    traced = traced_layers(lm, facts, second_moment)
    found = sorted(x for x in traced if isinstance(x, int))
    if not found:
        raise next((x for x in traced if isinstance(x, FactscopeError)), BadFact("no facts"))
    return found[len(found) // 2]


def check_layer(lm: "LM", layer: int) -> int:
    """The layer, if the model has it."""
    if not 0 <= layer < lm.n_layers:
        raise BadSetting(f"layer is {layer}; {lm.name} has layers 0 to {lm.n_layers - 1}")
    return layer


MIN_TOTAL_EFFECT = 0.01
"""A trace with a smaller total effect P[o] - P*[o] chooses no layer."""


def traced_layers(
    lm: "LM", facts: Sequence[Fact], second_moment: SecondMomentSetting = "find"
) -> list[int | FactscopeError]:
    """The traced layer of each fact, or why there is none. Kept with the model: the layers are
    those of its weights when a fact was first traced."""
    cache: dict[Any, int | FactscopeError] = lm.cache.setdefault("traced layers", {})
    layers = _layers_given(lm, second_moment)
    results = []
    for fact in facts:
        key = fact.text, fact.subject_span, fact.old, layers
        if key not in cache:
            try:
                cache[key] = traced_layer(lm, fact, layers)
            except (BadFact, BadSetting) as error:
                cache[key] = error
        results.append(cache[key])
    return results


def traced_layer(lm: "LM", fact: Fact, layers: Sequence[int] | None = None) -> int:
    """The layer whose restored MLP output at the last subject token recovers the answer best.

    The answer is the object that the edit replaces, or the most likely token if that is not known.
    The last layer is left out: no attention follows that could move a value to the last token.
    """
    candidates = range(lm.n_layers - 1) if layers is None else layers
    if not candidates:
        raise BadSetting(
            f"no layer of {lm.name} below its last one has statistics; give --layer, or --stats of "
            "other layers"
        )
    record = trace(lm, replace(fact, target=None), Tracing(kinds=("mlp",)), answer=fact.old)
    restored = np.asarray(record.restored["mlp"])[record.subject[1] - 1]
    best = max(candidates, key=lambda layer: restored[layer])
    samples = np.asarray(record.corrupted_samples)
    noise = 2 * samples.std(ddof=1) / math.sqrt(len(samples)) if len(samples) > 1 else 0.0
    if record.total_effect < max(MIN_TOTAL_EFFECT, noise) or restored[best] <= record.corrupted:
        raise BadFact(
            f"a trace of {fact.text!r} does not show a layer: P({record.answer!r}) is "
            f"{record.clean:.2g} and {record.corrupted:.2g} with a corrupted subject, "
            f"{max(restored[best], 0):.2g} at best with a restored MLP output; give --layer N"
        )
    return best


def _layers_given(lm: "LM", setting: SecondMomentSetting) -> tuple[int, ...] | None:
    """The layers below the last one that have given statistics; None if none are given."""
    if isinstance(setting, str):
        return None
    given = [setting] if isinstance(setting, SecondMoment) else list(setting)
    layers = {x.layer for x in given if isinstance(x, SecondMoment)}
    if paths := [x for x in given if isinstance(x, str | Path)]:
        layers |= set(layers_with_second_moments(lm, paths))
    return tuple(sorted(layers & set(range(lm.n_layers - 1))))


# ---- C


def resolve_second_moment(
    lm: "LM", layer: int, setting: SecondMomentSetting
) -> SecondMoment | None:
    """C of a layer; None for the identity."""
    if isinstance(setting, SecondMoment):
        setting.check(lm, layer)
        return setting
    if setting == "identity":
        log.warning("C is left out: this is not the paper's method and changes other facts more")
        return None
    given = [] if isinstance(setting, str) else setting
    for moment in given:
        if isinstance(moment, SecondMoment) and moment.layer == layer:
            return resolve_second_moment(lm, layer, moment)
    for wrong in (x for x in given if not isinstance(x, SecondMoment | str | Path)):
        raise BadSetting(f"second_moment has {wrong!r}; give second moments, or files or folders")
    paths = [Path(x) for x in given if isinstance(x, str | Path)]
    found = find_second_moment(lm, layer, paths)
    if found is None:
        raise BadSetting(
            f"there are no statistics of layer {layer} of {lm.name}; collect them once with "
            f"`factscope stats --model {lm.name} --layers {layer}` (--text FILE for your own text)"
        )
    return found
