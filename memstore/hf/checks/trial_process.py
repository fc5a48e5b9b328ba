"""The process that tries a model's tokenizer or chat template: what is asked comes on stdin, what
is said of it goes to stdout.

python -m memstore.hf.checks.trial_process tokenizer|template MEMORY SECONDS
"""

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

import msgspec

from memstore.hf.checks.trial import TOO_MUCH, Asked, Told


def main() -> None:
    """Try it within its bounds."""
    what, memory, seconds = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to obey, which then ends this
    for kind, most in (
        (resource.RLIMIT_AS, int(memory)),
        (resource.RLIMIT_CPU, int(seconds)),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with suppress(ValueError, OSError):  # it is lower already, or unknown here
            resource.setrlimit(kind, (most, most))
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Asked)
        attempt = _attempt(what)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries say of it is not bounded
        sys.stdout.buffer.write(msgspec.msgpack.encode(attempt(asked)))
        sys.stdout.buffer.flush()
    except MemoryError:
        os._exit(TOO_MUCH)
    os._exit(0)  # without what libraries do at the end


def _attempt(what: str) -> Callable[[Asked], Told]:
    if what == "tokenizer":
        from memstore.hf.checks.tokenizer_file import check_tokenizer

        return lambda asked: Told(refused=check_tokenizer(asked.tokenizer))
    from memstore.hf.checks.template import render

    return render


if __name__ == "__main__":
    main()
