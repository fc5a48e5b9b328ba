"""A child process that converts one document: the file on stdin, its text or the reason for
refusing it on stdout.

python -m memstore.documents.child DESCRIPTOR FORM LIMITS DIRECTORY...
"""

import os
import resource
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import cast

import msgspec

from memstore.child import end_with_parent
from memstore.documents.converted import (
    DAMAGED,
    LIMITS,
    TOO_LONG,
    TOO_MUCH,
    Converted,
    Kind,
    Limits,
    compose,
)
from memstore.documents.detect import Form, unzipped
from memstore.errors import UnreadableDocument, install_extra

_NOTES, _NOTE = 100, 200  # notes of a document, and characters of one, that are reported
# Where read_KIND is, unless in the module of that name
_MODULES = {**dict.fromkeys(("pptx", "xlsx", "csv", "odf"), "office"), "notebook": "mail"}
_MODULES["text"] = "markdown"


def main() -> None:
    """Convert the document on stdin under limits of memory and processor time."""
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
        content = sys.stdin.buffer.read()
        result = msgspec.msgpack.encode(convert(content, cast(Form, form), bounds))
    except UnreadableDocument as error:
        result = msgspec.msgpack.encode(str(error))
    except MemoryError:
        result = msgspec.msgpack.encode(TOO_MUCH)
    sys.stdout.buffer.write(result)
    sys.stdout.buffer.flush()
    os._exit(0)  # nothing that libraries do at the end


def convert(content: bytes, form: Form, limits: Limits = LIMITS) -> Converted:
    """Text, places and notes of a file. Raises UnreadableDocument; its message lacks the file's
    name.
    """
    limits, notes = limits.of_size(len(content)), list[str]()
    try:
        kind: Kind
        given: bytes | dict[str, bytes]
        if form == "zip":
            kind, given = unzipped(content, limits)
        else:
            kind, given = form, content
        module = import_module(f"memstore.documents.{_MODULES.get(kind, kind)}")
        result = getattr(module, f"read_{kind}")(given, limits, notes)
        if not isinstance(result, Converted):
            result = compose(result, kind, limits, notes)
        if len(result.text) > limits.characters:
            raise UnreadableDocument(TOO_LONG.format(limits.characters))
        return replace(result, notes=tuple(note[:_NOTE] for note in result.notes[:_NOTES]))
    except UnreadableDocument:
        raise
    except ImportError as error:
        raise UnreadableDocument(f"needs {error.name}: {install_extra('documents')}") from None
    except MemoryError:
        raise UnreadableDocument(TOO_MUCH) from None
    except RecursionError:
        raise UnreadableDocument("is nested too deep") from None
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        why = f"{type(error).__name__} {why}".rstrip()
        raise UnreadableDocument(DAMAGED.format(why)) from None


if __name__ == "__main__":
    main()
