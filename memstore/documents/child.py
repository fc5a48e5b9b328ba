"""The process that reads one document: its bytes come on stdin, its text or the reason of a refusal
goes to stdout.

python -m memstore.documents.child DESCRIPTOR FORM LIMITS DIRECTORY...
"""

import os
import resource
import signal
import sys
from contextlib import suppress
from typing import cast

import msgspec

from memstore.child import end_with_parent
from memstore.documents.conversion import TOO_MUCH, convert
from memstore.documents.converted import Converted, Limits
from memstore.documents.detect import Form
from memstore.errors import UnreadableDocument


def main() -> None:
    """Read the document within its limits."""
    watched, form, limits, *directories = sys.argv[1:]
    end_with_parent(watched)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent obeys it, and ends this
    bounds = msgspec.json.decode(limits, type=Limits)
    for kind, most in (
        (resource.RLIMIT_AS, bounds.memory),
        (resource.RLIMIT_CPU, bounds.seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # it is lower already, or unknown here
            resource.setrlimit(kind, (most, most))
    sys.path += [directory for directory in directories if directory not in sys.path]
    sys.setrecursionlimit(10_000)  # formulas and shapes are nested
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # messages of libraries are not bounded
    try:
        result: Converted | str = convert(sys.stdin.buffer.read(), cast(Form, form), bounds)
    except UnreadableDocument as error:
        result = str(error)
    except MemoryError:
        os._exit(TOO_MUCH)
    sys.stdout.buffer.write(msgspec.msgpack.encode(result))
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing that libraries do at the end


if __name__ == "__main__":
    main()
