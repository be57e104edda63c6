"""`factscope serve` in a separate process, for the benchmarks of the server."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(*flags: str, threads: int = 1) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that runs inside the block."""
    command = [sys.executable, "-m", "factscope", "serve", "--port", "0", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+?(?=/ )", process.stdout.readline())
            if found is None:
                raise RuntimeError("the server did not start")
            yield found[0], process.pid
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise RuntimeError("the server did not stop within 30 seconds") from None


def resident_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
