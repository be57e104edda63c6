"""The names that `factscope` exports."""

import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

import factscope

API = (Path(__file__).parents[1] / "docs" / "api.md").read_text("utf-8")


def test_public_names_exist() -> None:
    assert {n for names in factscope._MODULES.values() for n in names} == set(factscope.__all__)
    for name in factscope.__all__:
        assert getattr(factscope, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        factscope.__getattr__("nothing")


def documented_functions() -> dict[str, Any]:
    """The functions and methods of docs/api.md and of run folders, by name."""
    found: dict[str, Any] = {}
    for name in ["factscope.runs.folder.RunFolder", *re.findall(r"^::: (.+)$", API, re.M)]:
        value = pkgutil.resolve_name(name)
        methods = inspect.getmembers(value, inspect.isroutine) if isinstance(value, type) else []
        found |= {name: value} | {f"{name}.{n}": x for n, x in methods if n[0] != "_"}
    return {name: x for name, x in found.items() if inspect.isroutine(x) and callable(x)}


def test_every_documented_function_takes_paths_as_text() -> None:
    parameters = [
        (name, parameter)
        for name, function in documented_functions().items()
        for parameter in inspect.signature(function).parameters.values()
        if "Path" in str(parameter.annotation)
    ]
    assert len(parameters) > 8
    assert not [x for x in parameters if not re.search(r"\bstr\b", str(x[1].annotation))]
