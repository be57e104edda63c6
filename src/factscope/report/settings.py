"""Settings in words, for pages and the terminal."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["brief", "flat", "setting_text"]

LONGEST = 56
"""The most characters of a value that the terminal shows."""


def flat(settings: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Settings within settings, by their full names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{within}{name}.")
        else:
            yield f"{within}{name}", value


def setting_text(value: Any) -> str:
    """A setting's value in words."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def brief(value: Any) -> str:
    """The same, of a long one only the beginning."""
    text = setting_text(value)
    if len(text) <= LONGEST:
        return text
    count = f" {len(value)} in all" if isinstance(value, list | tuple) else ""
    return f"{text[: LONGEST - len(count) - 1]}…{count}"
