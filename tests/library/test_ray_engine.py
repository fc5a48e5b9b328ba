"""`memstore ingest --to` on a real cluster of two workers. Workers and the command are killed, and
the same command reaches the result of one process.

MEMSTORE_RAY_KILLS (4) sets the number of kills; `make soak` sets more.
"""

import ast
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytest.importorskip("obstore")

from support.commands import Result, start
from support.libraries import clean, content, folder
from support.processes import children_of
from support.services import free_port

KILLS = int(os.environ.get("MEMSTORE_RAY_KILLS", "4"))
pytestmark = [pytest.mark.services, pytest.mark.timeout(2700 if KILLS > 4 else 900)]


_HEAD = (
    "import sys, ray\n"
    "ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)\n"
    "print(ray.get_runtime_context().gcs_address, flush=True)\n"
    "sys.stdin.read()"
)


class Cluster:
    """A cluster of this machine with two workers, which ends with a process of its own."""

    def __init__(self) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        for _ in range(4):  # on a busy machine it gives itself up
            self._head = subprocess.Popen([sys.executable, "-c", _HEAD], **pipes)
            self.address = self._head.stdout.readline().strip()
            if self.address:
                return
            self._head.communicate()
        raise RuntimeError("no cluster of Ray did start")

    def ingest(self, *words: object) -> "subprocess.Popen[str]":
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return start("ingest", *words, "--address", self.address, fresh=True, **pipes)

    def readers(self) -> list[int]:
        """The processes that read batches now."""
        return [one for one in descendants(self._head.pid) if b"read_batch" in title(one)]

    def close(self) -> None:
        self._head.communicate()


def descendants(process: int) -> list[int]:
    found = []
    for child in children_of(process):
        found += [child, *descendants(child)]
    return found


def title(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def ended(process: "subprocess.Popen[str]") -> Result:
    out, err = process.communicate()
    return Result(process.returncode, out, err)


def until(true: Callable[[], object], process: "subprocess.Popen[str]") -> bool:
    """Wait for it, as long as a process runs."""
    while process.poll() is None:
        if true():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")  # which would write a token into the home
        made = Cluster()
        yield made
        made.close()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("read") / "library", 16, lines=40)


@pytest.fixture(scope="module")
def expected(
    cluster: Cluster, library: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[bytes, bytes]]:
    """What is published undisturbed."""
    tmp_path = tmp_path_factory.mktemp("undisturbed")
    url = f"file://{tmp_path}/many"
    told = ended(cluster.ingest(library, "--to", url, "--model", "books-1m", "--json"))
    assert (told.json["read"], told.json["refused"], told.status) == (16, 0, 0), told.err
    return content(url, tmp_path)


def test_killed_workers_and_commands_reach_the_result_of_an_undisturbed_run(
    cluster: Cluster, library: Path, tmp_path: Path, expected: dict[str, dict[bytes, bytes]]
) -> None:
    chance = random.Random(int(os.environ.get("MEMSTORE_SEED", "0")))
    kills, run, where = 0, 0, dict.fromkeys(("reader", "reading", "publishing"), 0)
    while kills < KILLS:
        url, place = f"file://{tmp_path}/{run}", tmp_path / str(run)
        run += 1
        command = library, "--to", url, "--model", "books-1m", "--json"
        for _ in range(3):
            process = cluster.ingest(*command)
            which = min(where, key=lambda one: (where[one], chance.random()))
            if which == "reader" and until(cluster.readers, process):
                time.sleep(chance.uniform(0, 1))
                for one in cluster.readers()[:1]:
                    kill(one)
                    where[which] += 1
            elif which == "reading" and until(cluster.readers, process):
                time.sleep(chance.uniform(0, 3))
            elif which == "publishing":
                least = chance.randrange(1, 8)
                until(partial(has_segments, place, least), process)
                time.sleep(chance.uniform(0, 0.5))
            if which != "reader" and process.poll() is None:
                process.kill()
                where[which] += 1
            if ended(process).status == 0:
                break
        kills = sum(where.values())
        last = ended(cluster.ingest(*command))
        assert last.status == 0, last.err
        assert last.json["read"] + last.json["there"] == 16
        until_idle(cluster)
        assert content(url, tmp_path) == expected, f"kill {kills}: {where}"
        clean(url)
    assert all(where.values())


def has_segments(place: Path, least: int) -> bool:
    return len([*place.glob("segments/*")]) >= least


def until_idle(cluster: Cluster) -> None:
    """Readers of a command that was killed may still write."""
    while cluster.readers():
        time.sleep(0.05)


def test_an_unreachable_cluster_is_reported_at_once(library: Path, tmp_path: Path) -> None:
    address, pipes = f"127.0.0.1:{free_port()}", {"stderr": subprocess.PIPE}
    words = library, "--to", f"file://{tmp_path}/many"
    told = ended(start("ingest", *words, "--address", address, fresh=True, **pipes))
    assert told.status == 2 and f"no cluster of Ray at {address}" in told.err


def test_a_document_that_crashes_its_workers_is_refused(
    cluster: Cluster, library: Path, tmp_path: Path
) -> None:
    """As one whose conversion takes more memory than there is."""
    code = (
        "import os; from pathlib import Path; from memstore.documents.folder import find\n"
        "from memstore.compute import Compute; from memstore.library.reading import Job\n"
        "from memstore.library import reading, ray_engine\n"
        "from memstore.library.library_ingest import ingest_library\n"
        "def read_batch(job, batch, read=reading.read_batch):\n"
        "    if any(one.name == '003.txt' for one in batch): os.kill(os.getpid(), 9)\n"
        "    return read(job, batch)\n"
        "reading.read_batch = read_batch\n"
        "ray_engine._RETRIES = 1\n"
        f"files = find([{str(library)!r}]).files[:6]\n"
        f"engine = ray_engine.RayEngine({cluster.address!r})\n"
        f"job = Job('file://{tmp_path}/many', 'books-1m', Compute())\n"
        "told = []\n"
        "ingest_library(files, job, engine, lambda progress, some: told.extend(some))\n"
        "print({one.name: (one.status, one.error) for one in told})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    # Ray's own lines may come behind it
    (line,) = (one for one in done.stdout.splitlines() if one.startswith("{"))
    told = ast.literal_eval(line)
    assert told.pop("003.txt")[0] == "refused" and len(told) == 5
    assert {status for status, _ in told.values()} == {"read"}
