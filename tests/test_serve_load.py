"""Fifty visitors for a few seconds: no errors but refusals, memory flat (bench/serve_load.py)."""

import json
import subprocess
import sys
from pathlib import Path

from commands import saved_model

BENCH = Path(__file__).parents[1] / "bench" / "serve_load.py"


def test_fifty_visitors_are_answered_or_refused(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "tiny", spread=0.15)
    words = [sys.executable, str(BENCH), "--seconds", "8", "--model", str(model), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["errors"] == 0, found["first_errors"]
    assert found["clients"] == 50
    for what in ("read", "traced", "left", "edited", "asked", "nonsense", "refused"):
        assert found["answers"].get(what), f"nobody was {what}"
    memory = found["memory_mib"]
    grown = memory["highest of the second half"] - memory["highest of the first half"]
    assert grown < 40, memory
