"""Memory bounds."""

import pytest

from factscope.errors import BadSetting
from factscope.lm.memory import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("500M", 500 * 2**20), ("1.5 kb", 1536), ("77", 77)]
)
def test_sizes_are_parsed(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "lots", "0"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(BadSetting, match="4GiB"):
        parse_bytes(text)
