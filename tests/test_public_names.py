"""The names that `factscope` exports."""

import pytest

import factscope


def test_public_names_exist() -> None:
    assert {n for names in factscope._MODULES.values() for n in names} == set(factscope.__all__)
    for name in factscope.__all__:
        assert getattr(factscope, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        factscope.__getattr__("nothing")
