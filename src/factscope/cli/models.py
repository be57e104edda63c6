"""factscope models: what can be loaded, and what is here already."""

from typing import Any

from factscope.cli.options import Json
from factscope.cli.show import print_json, results

__all__ = ["models"]


def models(json: Json = False) -> None:
    """List the short names, the model families and the converted models in the cache."""
    found = _collect()
    if json:
        print_json(found)
    else:
        _show(found)


def _collect() -> dict[str, Any]:
    from factscope.io import cache_folder
    from factscope.lm.families import FAMILIES
    from factscope.lm.sources import DEFAULT_MODEL, SHORT_NAMES, cached_models, is_converted

    return {
        "default": DEFAULT_MODEL,
        "short_names": [
            {
                "name": name,
                "what": model.what,
                "download_bytes": model.size,
                "licence": model.licence,
                "cached": is_converted(name),
            }
            for name, model in sorted(SHORT_NAMES.items())
        ],
        "families": sorted(FAMILIES),
        "cache": str(cache_folder()),
        "converted": [
            {"name": c.name, "path": str(c.path), "bytes": c.size} for c in cached_models()
        ],
    }


def _show(found: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    short = Table("short name", "model", "download", "licence", "here", box=box.SIMPLE)
    for row in found["short_names"]:
        here = "yes" if row["cached"] else "no"
        short.add_row(
            row["name"], row["what"], _megabytes(row["download_bytes"]), row["licence"], here
        )
    results.print(short)
    results.print(f"families: {', '.join(found['families'])}", soft_wrap=True)
    results.print("also: a folder with safetensors, a .gguf file, a hub id", soft_wrap=True)
    results.print(f"cache: {found['cache']}", soft_wrap=True)
    for row in found["converted"]:
        results.print(f"  {row['name']}  {_megabytes(row['bytes'])}", soft_wrap=True)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
