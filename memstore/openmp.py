"""How long the threads of a computation spin before they sleep, while they wait for each other.

torch's threads, which are OpenMP's, wait for each other at the end of each operator. By default a
thread that waits keeps its core busy for a long time: 300,000 rounds of GNU's OpenMP (20 ms on an
AMD EPYC), 200 ms of LLVM's and Intel's. If other processes want the cores, the thread that is
waited for does not run in the meantime. The runtime reads its settings once, when torch is loaded.
"""

import os
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SPINS_BRIEFLY = {
    "GOMP_SPINCOUNT": "1000",  # GNU: rounds, 0.07 ms; with 3,000 a busy machine is slower
    "KMP_BLOCKTIME": "0",  # LLVM and Intel (macOS, conda): ms; with 1 a busy machine is slower
}
SETTINGS = (*_SPINS_BRIEFLY, "OMP_WAIT_POLICY", "OMP_NUM_THREADS")


def limit_spinning() -> None:
    """Set for this process and its children how long threads spin, unless torch is loaded or the
    user has set GOMP_SPINCOUNT, KMP_BLOCKTIME, OMP_WAIT_POLICY or OMP_NUM_THREADS.
    """
    if "torch" not in sys.modules and not _is_set():
        os.environ.update(_SPINS_BRIEFLY)


def warn_of_spinning(device: "torch.device") -> None:
    """Warn if a model computes on a CPU with several threads, and torch was loaded too early for
    `limit_spinning`.
    """
    if _is_set() or device.type != "cpu":
        return
    import torch

    if torch.get_num_threads() > 1:
        warnings.warn(
            "torch was imported before memstore, so its threads spin while they wait for each "
            "other: very slow if other programs use the CPU. Import memstore first, or set "
            "OMP_WAIT_POLICY=PASSIVE",
            RuntimeWarning,
            stacklevel=2,
        )


def _is_set() -> bool:
    return any(os.environ.get(name) for name in SETTINGS)
