"""`factscope serve` as a process of its own, for the benchmarks of the page."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["resident", "server"]


@contextmanager
def server(*words: str, threads: int = 1) -> Iterator[tuple[str, int]]:
    """The address and the process number of a server that is up inside the block."""
    command = [sys.executable, "-m", "factscope", "serve", "--port", "0", *words]
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


def resident(pid: int) -> float:
    """The memory of a process, in MiB."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024
