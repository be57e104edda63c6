"""Fifty clients for a few seconds: no errors except a full queue, no memory growth."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands import saved_model

BENCH = Path(__file__).parents[2] / "bench" / "serve_load.py"
ACTIONS = {"read", "trace", "disconnect", "edit", "predict", "invalid", "busy"}


def run_bench(model: Path, seconds: int) -> dict[str, Any]:
    command = [
        sys.executable,
        str(BENCH),
        "--model",
        str(model),
        "--json",
        "--seconds",
        str(seconds),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == 0, found["first_errors"]
    return found


def test_fifty_clients(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "tiny", spread=0.15)
    found = run_bench(model, 8)
    if ACTIONS - set(found["responses"]):  # a slow machine
        found = run_bench(model, 60)
    assert found["clients"] == 50
    assert not ACTIONS - set(found["responses"])
    memory = found["memory_mib"]
    growth = memory["max_second_half"] - memory["max_first_half"]
    assert growth < 40, memory
