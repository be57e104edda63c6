"""Editors by name, their presets and validation, and what a user's own editor must define."""

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import factscope
from factscope.editing.defaults import resolve_second_moment
from factscope.editing.edit import Edit
from factscope.editing.editor import BoundEditor, Editor
from factscope.editing.hypernet.settings import KeConfig, MendConfig, Training
from factscope.editing.settings import (
    EDITORS,
    KN,
    PAPER_KN,
    PAPER_ROME,
    R_ROME,
    FineTune,
    Memit,
    Mend,
    Rome,
    ValueSearch,
    describe_second_moment,
    editor,
)
from factscope.errors import BadFact, BadSetting, BadStats, FactscopeError
from factscope.evaluation.settings import CalibrationSettings, ScoringOptions
from factscope.facts import Fact
from factscope.lm.model import LM
from factscope.progress import Progress
from factscope.runs.calibrate import CalibrateRun
from factscope.runs.evaluate import EvaluateRun
from factscope.runs.trace import TraceRun
from factscope.runs.train import FromCases, FromText, TrainRun
from factscope.serve.limits import ServerLimits
from factscope.settings import build
from factscope.stats.second_moment import file_name, save_second_moment
from factscope.stats.settings import StatsSettings
from factscope.tracing.settings import Corruption, Tracing

from editing_facts import FACTS, random_moment, text_lm


@pytest.mark.parametrize("method", EDITORS)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_presets_have_the_name_of_their_method(method: str, preset: str) -> None:
    assert editor(method, preset) == EDITORS[method][preset]
    assert editor(method, preset).method == method


def test_settings_change_a_preset() -> None:
    assert editor("rome", "paper", layer=3, ridge=None) == replace(PAPER_ROME, layer=3)
    assert editor("kn", "paper", max_neurons=3, context_fraction=None) == replace(
        PAPER_KN, max_neurons=3
    )
    assert replace(PAPER_ROME, key="mean") == R_ROME


@pytest.mark.parametrize("clamp", ["inf", math.inf])
@pytest.mark.parametrize("method", [Rome, Memit])
def test_no_clamp_is_the_text_inf(method: type[Rome | Memit], clamp: Any) -> None:
    settings = method(search=ValueSearch(clamp=clamp))
    assert settings == build(method(), {"clamp": "inf"})
    assert settings.search.max_norm == settings.search.resolve().max_norm == math.inf
    text = json.dumps(settings.to_dict()["search"], allow_nan=False)
    assert ValueSearch(**json.loads(text)) == settings.search


@pytest.mark.parametrize(
    ("given", "settings", "message"),
    [
        (("magic",), {}, "method is 'magic'; choose from rome, r-rome, ft"),
        (("rome", "easy"), {}, "preset is 'easy'; rome has default, paper"),
        (
            ("rome",),
            {"speed": 3},
            "rome has no setting 'speed'; it has context_tolerance, contrast_tolerance",
        ),
        (("rome",), {"facts_per_pass": 0}, "facts_per_pass is 0; give 1 or more"),
    ],
)
def test_bad_names_are_refused(given: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        editor(*given, **settings)


@pytest.mark.parametrize(
    ("settings", "name", "value", "message"),
    [
        (ValueSearch(), "kl_position", "start", "kl_position is 'start'; choose from end, edit-"),
        (Rome(), "token", "first", "token is 'first'; choose from subject-last, subject-first"),
        (Memit(), "key", "bare", "key is 'bare'; choose from mean, half-bare"),
        (FineTune(), "weights", "all", "weights is 'all'; choose from mlp, attn"),
        (
            FineTune(),
            "max_change",
            "much",
            "max_change is 'much'; give a number, default or none",
        ),
        (KN(), "rule", "gauss", "rule is 'gauss'; choose from radau, ends"),
        (Rome(), "key", "x", "key is 'x'; choose from mean-and-bare, mean, bare"),
        (Rome(), "second_moment", "Identity", "second_moment is 'Identity'; give find or identity"),
        (Memit(), "second_moment", "none", "second_moment is 'none'; give find or identity"),
        (Rome(), "layer", "x", "layer is 'x'; give a whole number, auto or none"),
        (Rome(), "prefixes", "abc", r"prefixes is 'abc'; give a tuple such as \('abc',\)"),
        (Memit(), "layers", 3, r"layers is 3; give a tuple such as \(3,\)"),
        (FineTune(), "lr", "fast", "lr is 'fast'; give"),
        (Mend(), "scale", math.inf, "scale is inf; give a number"),
    ],
)
def test_choices_are_checked(settings: Any, name: str, value: Any, message: str) -> None:
    object.__setattr__(settings, name, value)  # in tests, types are checked before __post_init__
    with pytest.raises(BadSetting, match=message):
        settings.__post_init__()


RUN: dict[str, Any] = {"model": "m", "dtype": "float32"}
CASES_RUN: dict[str, Any] = {**RUN, "data": Path("cases.json"), "name": "cases"}
TRAINING = Training(network=MendConfig())
SETTINGS = [
    Corruption(), Tracing(), ValueSearch(), *(editor(method) for method in EDITORS), MendConfig(),
    KeConfig(), TRAINING, ScoringOptions(), CalibrationSettings(), StatsSettings(), ServerLimits(),
    FromText(), FromCases(name="cases", path=Path("cases.json")),
    TraceRun(**RUN, facts=Path("facts.jsonl"), settings=Tracing()),
    EvaluateRun(**CASES_RUN, method="rome", editor=Rome()), CalibrateRun(**CASES_RUN),
    TrainRun(**RUN, source=FromText(), training=TRAINING, steps=1),
]  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda x: type(x).__name__)
def test_every_settings_class_refuses_nan_in_every_field(settings: Any) -> None:
    for name in (field.name for field in fields(settings)):
        bad = copy(settings)
        object.__setattr__(bad, name, math.nan)
        with pytest.raises(BadSetting, match=rf"^{name} is nan; "):
            bad.__post_init__()


def test_every_class_of_the_settings_modules_is_among_these() -> None:
    modules = [sys.modules[f"factscope.{x}.settings"] for x in ("tracing", "stats", "evaluation")]
    modules += [sys.modules[f"factscope.{x}.settings"] for x in ("editing", "editing.hypernet")]
    defined = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and is_dataclass(kind)
    }
    checked = {kind for settings in SETTINGS for kind in type(settings).__mro__}
    assert defined <= checked
    assert len(defined) > 12


def test_second_moments_are_described_by_their_source() -> None:
    lm = text_lm("gpt2")
    moment = random_moment(lm, 1)
    described = {"layer": 1, "tokens": moment.tokens, "corpus": "noise"}
    assert describe_second_moment(moment) == described
    assert describe_second_moment([moment]) == [described]
    assert describe_second_moment([Path("a")]) == ["a"]
    assert [describe_second_moment(x) for x in (None, "find")] == ["identity", "find"]
    rome = Rome(layer=1, prefixes=(), second_moment=moment)
    assert rome.to_dict()["second_moment"] == described
    assert rome.resolve(lm) == replace(rome, contrast_tolerance="inf", context_tolerance="inf")


def test_settings_need_no_torch() -> None:
    code = "import sys; from factscope import Rome; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
    assert factscope.Rome is Rome


# ---- a user's own editor


class NoEdits(BoundEditor):
    """Refuses every fact."""

    def edit(self, facts: Sequence[Fact], progress: Progress) -> Edit:
        raise BadFact("no")

    def attempt(self, facts: Sequence[Fact], progress: Progress) -> list[Edit | FactscopeError]:
        return [BadFact("no") for _ in facts]


@dataclass(frozen=True)
class Stubborn(Editor):
    """An editor that never edits."""

    scale: float = 1.0

    @property
    def method(self) -> str:
        return "stubborn"

    def bind(self, lm: LM, facts: Sequence[Fact]) -> NoEdits:
        return NoEdits()

    def resolve(self, lm: LM) -> "Stubborn":
        return self


def test_facts_must_be_a_list_of_facts() -> None:
    lm, own = text_lm("gpt2"), Stubborn()
    for wrong, message in (
        (FACTS[0], "facts is one fact, 'The Eiffel Tower is in'; give a list"),
        ("The Eiffel Tower is in", "'T' is not a Fact; give a list of facts"),
        (["The Eiffel Tower"], "'The Eiffel Tower' is not a Fact"),
    ):
        for call in (Stubborn.__call__, Stubborn.attempt):
            # Without the type checks of the tests.
            with pytest.raises(BadFact, match=message):
                inspect.unwrap(call)(own, lm, wrong)


def test_a_users_editor_inherits_the_calls() -> None:
    lm, own = text_lm("gpt2"), Stubborn()
    assert own.to_dict() == {"scale": 1.0}
    assert [str(error) for error in own.attempt(lm, FACTS)] == ["no"] * 3
    for call in (own, own.each):
        with pytest.raises(BadFact, match="no"):
            call(lm, FACTS)
    with pytest.raises(BadFact, match="no facts to write"):
        own(lm, [])


@pytest.mark.parametrize("name", ["method", "bind", "resolve"])
def test_a_missing_method_is_an_error(name: str) -> None:
    methods = {"method": Stubborn.method, "bind": Stubborn.bind, "resolve": Stubborn.resolve}
    del methods[name]
    with pytest.raises(TypeError, match=f"abstract method '?{name}"):
        type("Incomplete", (Editor,), methods)()


@pytest.mark.parametrize("name", ["edit", "attempt"])
def test_a_missing_method_of_the_bound_editor_is_an_error(name: str) -> None:
    methods = {"edit": NoEdits.edit, "attempt": NoEdits.attempt}
    del methods[name]
    with pytest.raises(TypeError, match=f"abstract method '?{name}"):
        type("Incomplete", (BoundEditor,), methods)()


def test_statistics_may_be_given_as_text_paths(tmp_path: Path) -> None:
    lm = text_lm("gpt2")
    moment, path = random_moment(lm, 1), tmp_path / file_name(1)
    save_second_moment(moment, path)
    for given in ([str(path)], [path], [str(tmp_path)]):
        found = resolve_second_moment(lm, 1, given)
        assert found is not None
        assert torch.equal(found.matrix, moment.matrix)
    with pytest.raises(BadStats):  # and no other statistics are used instead
        resolve_second_moment(lm, 0, [str(path)])
