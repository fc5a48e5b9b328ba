"""Kill a process just before any one of its system calls that change files. Its parent traces it
(ptrace, Linux) and counts these calls of all its threads and children.
"""

import ctypes
import errno
import os
import platform
import signal
import sys
from collections.abc import Callable

_TRACEME, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_SYSGOOD, _FORK, _VFORK, _CLONE, _EXITKILL = 1, 2, 4, 8, 1 << 20
_WALL = 0x40000000  # of waitpid: children of every kind
_ENTRY = 1

# write, pwrite64, writev, pwritev, pwritev2, msync, fsync, fdatasync, truncate, ftruncate,
# fallocate, sendfile, copy_file_range, rename, renameat, renameat2, mkdir, mkdirat, rmdir, link,
# linkat, unlink, unlinkat
_CALLS = {
    "x86_64": {1, 18, 20, 296, 328, 26, 74, 75, 76, 77, 285, 40, 326, 82, 264, 316, 83, 258, 84, 86}
    | {265, 87, 263},
    "aarch64": {64, 68, 66, 70, 287, 227, 82, 83, 45, 46, 47, 71, 285, 38, 276, 34, 37, 35},
}
SUPPORTED = sys.platform == "linux" and platform.machine() in _CALLS


class _SyscallInfo(ctypes.Structure):
    """The beginning of struct ptrace_syscall_info of <linux/ptrace.h>."""

    _fields_ = [
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("nr", ctypes.c_uint64),
        ("args", ctypes.c_uint64 * 6),
    ]


def run_to_call(job: Callable[[], int], last: int) -> tuple[int, int]:
    """Do a job in a child, and kill it just before its call number `last` (from 1 on; 0: never).

    Returns the child's exit code, negative for a signal, and how many calls there were. The caller
    has one thread.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _ptrace(_TRACEME, 0, 0, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            code = job()
        finally:
            os._exit(code)
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, 0, _SYSGOOD | _FORK | _VFORK | _CLONE | _EXITKILL)
    _ptrace(_SYSCALL, pid, 0, 0)
    return _follow(pid, last)


def _follow(pid: int, last: int) -> tuple[int, int]:
    calls, counted, code = 0, _CALLS[platform.machine()], None
    info = _SyscallInfo()
    while True:
        try:
            stopped, status = os.waitpid(-1, _WALL)
        except ChildProcessError:
            return code, calls
        if not os.WIFSTOPPED(status):
            if stopped == pid:
                code = os.waitstatus_to_exitcode(status)
            continue
        number, given = os.WSTOPSIG(status), 0
        if number == signal.SIGTRAP | 0x80:
            _ptrace(_SYSCALL_INFO, stopped, ctypes.sizeof(info), ctypes.addressof(info))
            if info.op == _ENTRY and info.nr in counted:
                calls += 1
                if calls == last:
                    os.kill(pid, signal.SIGKILL)
                    continue
        elif number not in (signal.SIGTRAP, signal.SIGSTOP):
            given = number
        _ptrace(_SYSCALL, stopped, 0, given)


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    """Raises OSError, but for a thread that has ended meanwhile."""
    call = ctypes.CDLL(None, use_errno=True).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    call.restype = ctypes.c_long
    if call(request, pid, address, data) == -1 and ctypes.get_errno() not in (0, errno.ESRCH):
        raise OSError(ctypes.get_errno(), "ptrace")
