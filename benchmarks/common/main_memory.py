"""What a process has in main memory, as Linux tells it."""

from pathlib import Path


def status_bytes(field: str, process: int | str = "self") -> int:
    """A field of /proc/PROCESS/status, in bytes: VmHWM (the most so far), VmRSS, RssAnon (its own),
    RssFile (of mapped files). Raises OSError, KeyError where the system does not tell it.
    """
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return 1024 * int(fields[field].split()[0])
