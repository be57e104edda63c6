"""factscope serve: what is noticed before the model loads."""

import socket
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from commands import runner


@pytest.mark.parametrize("package", ["fastapi", "uvicorn"])
def test_a_missing_package_is_noticed_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    package: str,
) -> None:  # fmt: skip
    def load(*_: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("factscope.cli.flags.ModelOptions.load", load)
    importers = (package, "factscope.serve.app", "factscope.serve.routes")
    for name in [name for name in sys.modules if name.startswith(importers)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)("serve")
    assert (result.code, result.out) == (2, "")
    assert result.err == (
        f"factscope: the page needs the package '{package}'; install it with "
        "`pip install 'factscope[serve]'`\n"
    )


def test_a_taken_port_is_noticed_before_the_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*_: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("factscope.cli.flags.ModelOptions.load", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serve = runner(tmp_path, tmp_path / "cache", monkeypatch, capsys)
        result = serve("serve", "--port", port)
    assert (result.code, result.out) == (2, "")
    assert f"cannot listen on 127.0.0.1:{port} (" in result.err
    assert "choose another --host or --port" in result.err
