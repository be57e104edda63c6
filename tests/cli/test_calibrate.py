"""factscope calibrate: each mistake is one message, and leaves nothing."""

import json
from pathlib import Path

import pytest

from factscope.cli.flags import ModelOptions

from commands import Run
from counterfact import record


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--methods", "none"), "--methods is none; choose from rome, memit, ft-l"),
        (("--methods", "rome,magic"), "--methods is 'magic'; choose from rome"),
        (("--minutes", "nan"), "--minutes is 'nan'; give a number"),
        (("--num-cases", 2), "--num-cases is 2; give 4 or more"),
        (("--facts-per-edit", 0), "--facts-per-edit is 0; give 1 or more"),
        (("--data", "empty"), "empty has no usable fact"),
        (("--data", "binary"), "cannot read binary"),
        (("--text", "lost.txt"), "--text is 'lost.txt'; there is no such file"),
        (("--text", "binary"), "the text file binary is not UTF-8 text"),
        (("--text", "empty"), "the text file empty is empty"),
        (("--out", "empty"), "--out is 'empty', which is a file"),
        (("use", "lost.json"), "there is no file lost.json"),
        (("use", "binary"), "binary is not a calibration"),
        (("show", "cases.json"), "cases.json is not a calibration"),
        (("show",), "there is no calibration yet"),
    ],
)
def test_a_mistake_is_one_message_before_the_model_loads(
    factscope: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple, message: str
) -> None:
    def load(self: ModelOptions, device: str | None = None) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(ModelOptions, "load", load)
    (tmp_path / "cases.json").write_text(json.dumps([record(i) for i in range(3)]))
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    before = {path for path in tmp_path.rglob("*") if path.name != "cache"}
    data = () if "--data" in words or words[0] in ("use", "show") else ("--data", "cases.json")
    done = factscope("calibrate", *words, *data)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"factscope: {message}")
    assert done.err.count("\n") == 1
    assert {path for path in tmp_path.rglob("*") if path.name != "cache"} == before
