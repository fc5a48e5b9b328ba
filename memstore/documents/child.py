"""The process that reads one document: its bytes come on stdin, what is said of it goes to stdout.

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
from memstore.documents.conversion import TOO_MUCH, Told, convert
from memstore.documents.converted import Limits
from memstore.documents.detect import Form
from memstore.errors import UnreadableDocument


def main() -> None:
    """Read the document within its bounds."""
    watched, form, limits, *directories = sys.argv[1:]
    end_with_parent(watched)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to obey, which then ends this
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
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of a document is not bounded
    try:
        try:
            converted = convert(sys.stdin.buffer.read(), cast(Form, form), bounds)
            told = Told(converted.text, converted.kind, list(converted.places))
        except UnreadableDocument as error:
            told = Told(refused=str(error))
        sys.stdout.buffer.write(msgspec.msgpack.encode(told))
        sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(TOO_MUCH)


if __name__ == "__main__":
    main()
