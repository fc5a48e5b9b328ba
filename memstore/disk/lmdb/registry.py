"""Which environments this process has open: one a directory, shared by all who open it, and none of
the parent's in a forked child.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from memstore.disk.files import named_os_errors
from memstore.disk.lmdb.environment import Environment
from memstore.errors import MemoryClosed, MemoryExists

_registry_lock = threading.Lock()
_registry: dict[tuple[int, int], Environment] = {}  # by device and inode of the directory
# A forked child's: kept, and not to be opened anew, for closing them would end the parent's
# reading.
_inherited: dict[tuple[int, int], Environment] = {}


def acquire(path: Path, create: Callable[[Environment], None] | None = None) -> Environment:
    """The process's environment for a directory; if it has none yet, a new one that is opened, or
    created by `create`.
    """
    with _registry_lock:
        with named_os_errors(path):
            status = os.stat(path)
        key = (status.st_dev, status.st_ino)
        environment = _registry.get(key)
        if key in _inherited:
            raise MemoryClosed(
                f"{path} was open when this process was forked; open it in one that is spawned "
                "instead"
            )
        if environment is not None and not environment.lies_at(path):
            environment = None  # of a directory that was removed: its inode was given out again
        if environment is None:
            environment = Environment(path)
            environment.open() if create is None else create(environment)
            _registry[key] = environment
        elif create is not None:
            raise MemoryExists(f"{path} already holds a memory; open it, or name another directory")
        environment.users += 1
        return environment


def release(environment: Environment) -> None:
    with _registry_lock:
        environment.users -= 1
        if not environment.users:
            for key in [key for key, other in _registry.items() if other is environment]:
                del _registry[key]
            environment.close()


def _forget_parent() -> None:
    """In a forked child: let go of the parent's locks, which the child would otherwise keep alive
    after it.
    """
    global _registry_lock
    _registry_lock = threading.Lock()
    _inherited.update(_registry)
    for environment in _registry.values():
        for file in (environment.data_file, environment.lock.file):
            if file is not None:
                os.close(file)
        environment.data_file = environment.lock.file = None
    _registry.clear()


os.register_at_fork(after_in_child=_forget_parent)
