"""Fifty clients and 300 idle connections for a few seconds: no errors except a full queue."""

import json
import subprocess
import sys
from pathlib import Path

from serve_load import KINDS

from commands import saved_model

BENCH = Path(__file__).parents[2] / "bench" / "serve_load.py"


def test_fifty_clients(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "tiny", spread=0.15)
    # A slow machine needs more than 8 seconds until every kind of response was seen.
    times = ["--seconds", "8", "--at-most", "60"]
    command = [sys.executable, str(BENCH), "--model", str(model), "--json", *times]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == 0, found["first_errors"]
    assert found["clients"] == 50
    assert found["idle_connections_opened"] > 300  # the server closed some
    assert not KINDS - set(found["responses"])
    memory = found["memory_mib"]
    growth = memory["max_second_half"] - memory["max_first_half"]
    assert growth < 40, memory
