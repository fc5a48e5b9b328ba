"""What tests run in other processes, and the server that forks them.

`python fork_server.py` imports everything once, opens nothing, and then forks a child for each job
that it is told on standard input: a memory is always opened after the fork, and what kills a child
kills it alone.
"""

import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import lmdb._envid  # noqa: F401  (of what is imported when it is first needed, here and below)
import numpy.ma
import numpy.random  # noqa: F401
import torch

from memstore import errors
from memstore.disk.format.document import Document
from memstore.errors import MemstoreError
from memstore.model.landmark.landmark_model import load_model
from memstore.store import transfer  # noqa: F401
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document, publish_memory
from memstore.store.verify import verify_memory
from support import killed_calls, passage_documents, synthetic_documents
from support.paths import ROOT, TESTS
from support.synthetic_documents import BUDGET, CHUNK, check_content, ingest, opened

TOKENS = 40 * CHUNK + 7
PASSAGES = 40
SEVERAL = {text: (25 + 10 * text) * CHUNK + text for text in range(1, 5)}
SEEN = {**vars(synthetic_documents), **vars(errors), "load_model": load_model}
PR_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
RIGHT, NAMED_ERROR, WRONG, CRASHED, KILLED = 0, 10, 20, 30, 40


def ingest_job(path: str) -> int:
    """One document, a few chunks a commit."""
    with opened(path) as store:
        ingest(store, "book", TOKENS, commit_bytes=5000)
    return RIGHT


def read_passages_job(path: str) -> int:
    """Reads a memory of passages and compares it. Keys and values may be missing."""
    return _read_job(path, partial(passage_documents.check_content, whole=False))


def _read_job(path: str, check: Callable[[MemoryStore, Document, int], None]) -> int:
    outcome = RIGHT
    try:
        with opened(path) as store:
            for document in store.documents():
                try:
                    text = int(document.source_hash.split(":")[0])
                    check(store, document, text)
                except MemstoreError:
                    outcome = NAMED_ERROR
                except AssertionError:
                    return WRONG
    except MemstoreError:
        outcome = NAMED_ERROR
    return outcome


def several_job(path: str) -> int:
    """Ingests several documents, one a thread. Each goes on where it was interrupted."""
    with opened(path) as store, ThreadPoolExecutor(len(SEVERAL)) as pool:

        def write(text: int) -> None:
            ingest(store, str(text), SEVERAL[text], text=text, commit_bytes=5000)

        list(pool.map(write, SEVERAL))
    return RIGHT


def changes_job(path: str, export: str) -> int:
    """All other kinds of changes to a memory, in order; run again, it does what is left."""
    with opened(path) as store:
        names = {document.name for document in store.documents()}
        ingest(store, "grows", 40 * CHUNK + 9, text=2, mode="replace", commit_bytes=5000)
        ingest(store, "changes", 25 * CHUNK + 3, text=3, mode="replace", commit_bytes=5000)
        import_document(store, export, "comes")
        if "goes" in names:
            store.forget("goes")
        store.compact()
    return RIGHT


def shared_job(path: str, export: str) -> int:
    """Change documents that share passages; run again, it does what is left."""
    write = passage_documents.ingest
    with opened(path) as store:
        names = {document.name for document in store.documents()}
        write(store, "copy", PASSAGES, commit_bytes=1500)
        write(store, "changes", PASSAGES // 2, mode="replace", commit_bytes=1500)
        import_document(store, export, "comes")
        for name, erase in (("goes", False), ("erased", True)):
            if name in names:
                store.forget(name, erase=erase)
        store.compact()
    return RIGHT


def leave_job(path: str, file: str, url: str) -> int:
    """Exports one document, publishes all of them, then removes one of the publication."""
    from memstore.share.open_object_store import open_object_store
    from memstore.share.publish import prune, unpublish

    with opened(path, read_only=True) as store:
        export_document(store, "goes", file)
        publish_memory(store, url, replace=True)
    unpublish(open_object_store(url), ["stays"])
    prune(open_object_store(url), grace=-10.0)
    return RIGHT


def crowd_job(path: str, seconds: str, processes: str) -> int:
    """Several processes that write, read and forget documents of the same passages."""
    signal.alarm(2 * int(seconds) + 300)
    pids = []
    for seed in range(int(processes)):
        pid = os.fork()
        if not pid:
            code = CRASHED
            try:
                code = _crowd(path, time.monotonic() + float(seconds), seed)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return max(ends, key=abs)


def _crowd(path: str, until: float, seed: int) -> int:
    rng = random.Random(seed)
    options = {"device": "cpu", "device_budget": BUDGET // 2} if seed % 2 else {}
    with MemoryStore.open(path, host_budget=BUDGET, **options) as store:
        while time.monotonic() < until:
            name, text = rng.choice("abcdef"), rng.randint(1, 2)
            try:
                what = rng.random()
                if what < 0.3:
                    count, mode = rng.randint(3, 30), "replace" if store.has(name) else "new"
                    passage_documents.ingest_known(store, name, count, text=text, mode=mode)
                elif what < 0.4:
                    store.forget(name)
                else:
                    document = store.document(name)
                    if document.state != "ready":  # another is at it
                        continue
                    text = int(document.source_hash.split(":")[0])
                    if what < 0.7:
                        block = min(int(rng.expovariate(0.2)), document.blocks - 1)
                        passage_documents.ask(store, document, text, block)
                    else:
                        passage_documents.check_content(store, document, text, whole=False)
            except (errors.DocumentNotFound, errors.DocumentExists, errors.MemoryLocked):
                continue  # another process was there before, or is at it
            except AssertionError:
                return WRONG
            except MemstoreError:
                return NAMED_ERROR
    return RIGHT


def killed_job(told: str, last: str, name: str, *arguments: str) -> int:
    """Runs another job and kills it at the call number `last` that changes a file.

    told: the file to write the number of such calls to.
    """
    code, calls = killed_calls.run_to_call(lambda: JOBS[name](*arguments), int(last))
    Path(told).write_text(str(calls))
    return code if code >= 0 else KILLED


def index_job(path: str) -> int:
    """Build the files of an index."""
    with opened(path) as store:
        store.build_index()
    return RIGHT


def repair_job(path: str) -> int:
    """Repair."""
    report = verify_memory(path, repair=True)
    return RIGHT if report.dropped else NAMED_ERROR


def read_all_job(path: str) -> int:
    """Read everything that a memory says it holds and compare it with what was written."""
    return _read_job(path, check_content)


def verify_job(path: str) -> int:
    """Verify."""
    try:
        return RIGHT if verify_memory(path).clean else NAMED_ERROR
    except MemstoreError:
        return NAMED_ERROR


def python_job(output: str, code: str, *arguments: str) -> int:
    """Run code that sees `arguments`, MemoryStore, load_model, errors and the deterministic
    ingest; it prints to a file.
    """
    with open(output, "w", encoding="utf-8") as out, contextlib.redirect_stdout(out):
        exec(code, {**SEEN, "arguments": arguments})
    return RIGHT


JOBS = {name: job for name, job in globals().items() if name.endswith("_job") and name[0] != "_"}


def serve() -> None:
    """For each line [job, arguments...]: fork, say the child's pid; when asked, its exit code
    and the seconds of a processor that it had.
    """
    torch.set_num_threads(1)
    if sys.platform == "linux":  # what a job began is this process's child when the job has ended
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for text in (1, 2):
        passage_documents.passages(text, 0, 2 * PASSAGES)  # which every child would make
    gc.freeze()  # a child's collector would touch, and so copy, all that was imported
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        pid = os.fork()
        if not pid:
            signal.alarm(300)  # a child that hangs ends by SIGALRM
            outcome = CRASHED
            try:
                outcome = JOBS[name](*arguments)
            except BaseException:
                traceback.print_exc()  # pytest shows it with the test that fails
            finally:
                os._exit(outcome)
        print(pid, flush=True)
        # not reaped before it is asked for: until then the pid is its own, and may be killed
        sys.stdin.readline()
        _, status, used = os.wait4(pid, 0)
        with contextlib.suppress(ChildProcessError):
            while True:  # nor is it over before all that it began has ended
                os.wait()
        print(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, flush=True)


class ForkServer:
    """Client of the fork server. processor_seconds: CPU time of the last job."""

    def __init__(self) -> None:
        self.processor_seconds = 0.0
        paths = os.pathsep.join(map(str, (TESTS, ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )

    def start(self, name: str, *arguments: object) -> int:
        """Starts a job. Returns its pid, which no other process gets until `end`."""
        return int(self._ask(json.dumps([name, *map(str, arguments)])))

    def end(self) -> int:
        """Wait for the job that was begun, and all that it began; its exit code."""
        code, self.processor_seconds = map(float, self._ask("").split())
        return int(code)

    def run(self, name: str, *arguments: object) -> int:
        """Do a job; its exit code."""
        self.start(name, *arguments)
        return self.end()

    def kill(self, seconds: float, name: str, *arguments: object) -> bool:
        """Begin a job and SIGKILL it when it has used so much of a processor, which is as far as on
        any other machine; False if it was done before.
        """
        pid = self.start(name, *arguments)
        state = Path(f"/proc/{pid}/stat")
        # the clock of another process: MAKE_PROCESS_CPUCLOCK of <linux/posix-timers.h>
        while time.clock_gettime(~pid << 3 | 2) < seconds and ") Z" not in state.read_text():
            time.sleep(0.0005)
        os.kill(pid, signal.SIGKILL)
        code = self.end()
        assert code in (RIGHT, -signal.SIGKILL)
        return code != RIGHT

    def close(self) -> None:
        """End the server."""
        self._process.communicate()

    def _ask(self, line: str) -> str:
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server ended"
        return answer


if __name__ == "__main__":
    serve()
