"""Flags that several commands take."""

from typing import Annotated

import typer

__all__ = ["Device", "DeviceMap", "Dtype", "Json", "Model"]

Model = Annotated[
    str, typer.Option("--model", "-m", help="Short name, hub id, folder or GGUF file.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, or auto for the best there is.")]
DeviceMap = Annotated[
    str | None,
    typer.Option(help="auto spreads a model over several GPUs, as accelerate does."),
]
Dtype = Annotated[str, typer.Option(help="float32, tf32, bfloat16, float16 or auto.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")
]
