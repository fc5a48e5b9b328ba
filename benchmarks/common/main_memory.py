"""Main memory of a process."""

import resource
import sys
from pathlib import Path


def status_bytes(field: str, process: int | str = "self") -> int:
    """A field of /proc/PROCESS/status in bytes: VmHWM (peak), VmRSS, RssAnon (its own), RssFile (of
    mapped files). Raises OSError or KeyError where the system does not report it.
    """
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(fields[field].split()[0])


def peak_bytes() -> int:
    """Peak resident bytes of this process; by getrusage where /proc is missing, although Linux
    passes that number on from the parent process.
    """
    try:
        return status_bytes("VmHWM")
    except (OSError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
