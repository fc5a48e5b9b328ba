"""How the threads of a computation wait for each other, settled before torch is loaded.

GNU OpenMP's spin for a while before they sleep. Where other processes want the cores, the one
that is waited for does not run meanwhile: two threads took 4 to 7 times as long for a chunk of
SmolLM2 as one. On an idle machine spinning is a fifth to two fifths faster.
"""

import os
import statistics
import time
from pathlib import Path

_RUNNING = Path("/proc/loadavg")
_SAMPLES, _BETWEEN = 5, 0.002  # seconds
_BUSY = 0.25  # of the cores that others want


def sleep_where_busy() -> None:
    """Have threads sleep at once if others compute on this machine. Nothing where somebody has
    settled it (OMP_WAIT_POLICY, GOMP_SPINCOUNT), or where it cannot be seen.
    """
    if os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        return
    if others_running() >= _BUSY * (os.cpu_count() or 1):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def others_running() -> float:
    """How many threads of other processes run or want to; 0 where that cannot be seen."""
    try:
        found = []
        for _ in range(_SAMPLES):
            # "0.52 0.48 0.40 3/712 4711": three of 712 threads, one of them this one
            found.append(int(_RUNNING.read_text().split()[3].partition("/")[0]) - 1)
            time.sleep(_BETWEEN)
        return statistics.median(found)
    except (OSError, ValueError, IndexError):
        return 0
