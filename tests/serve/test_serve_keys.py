"""Several keys work at once on a server that is killed: each sees exactly its own, before and
after, and nobody's use has removed anything of another's.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2

from memstore.serve.api_keys import Keys
from memstore.serve.settings import ServeSettings
from support.diary import QUESTION
from support.fork_server import ForkServer
from support.serving import serving

DEEDS = int(os.environ.get("MEMSTORE_KEY_DEEDS", "40"))  # of all keys; 2,000 in `make soak`
QUOTA = 5  # conversations of a key
MOST = {"conversations": QUOTA, "responses": 16 * QUOTA}
WRITERS = {name: f"key-of-the-{name}-one" for name in ("north", "south", "east")}
CROWD = "key-that-may-only-read-one"
SERVE = """
import signal, threading
from pathlib import Path
signal.alarm(int(arguments[2]))
from support.serving import serving
from memstore.serve.http import app
from memstore.serve.api_keys import Keys
from memstore.serve.settings import ServeSettings
app._BETWEEN = 0.1
keys = Keys.of_file(Path(arguments[0]) / "keys")
settings = ServeSettings(conversations=int(arguments[1]))
with serving(Path(arguments[0]) / "mem", settings, keys=keys) as served:
    print(served.url, flush=True)
    threading.Event().wait()
"""


class Writer:
    """A key that uploads, asks, makes stores and conversations, and deletes: one deed at a time.

    has: paths of what it was told is there. unsure: of what was being deleted, or made ("POST ...")
    when the server was gone.
    """

    def __init__(self, name: str, url: str, deeds: "Deeds") -> None:
        self.name, self.deeds, self.chance = name, deeds, random.Random(name)
        self.http = client(url, WRITERS[name])
        self.has: dict[str, str] = {}  # path: kind
        self.unsure: str | None = None
        self.wrong: list[str] = []

    def run(self) -> None:
        for number in range(10**9):
            with suppress(httpx2.TransportError):  # it was killed
                self.deed(number)
                continue
            break
        self.deeds.enough.set()

    def deed(self, number: int) -> None:
        """Make something, try what is another's, and delete something."""
        kind = ("files", "vector_stores", "conversations", "responses")[number % 4]
        if self.count(kind) == MOST.get(kind):
            self.delete(kind)
        more: dict[str, Any] = {"json": {}}
        if kind == "files":
            text = f"The {self.name} wind blew {number} days.\n".encode()
            more = {
                "files": {"file": (f"{self.name}-{number}", text)},
                "data": {"purpose": "assistants"},
            }
        elif kind == "responses":
            more = {"json": {"model": "memstore", "input": QUESTION, "max_output_tokens": 2}}
        self.unsure = f"POST /v1/{kind}"
        made = self.http.post(f"/v1/{kind}", **more)
        if made.status_code == 200:
            self.has[f"/v1/{kind}/{made.json()['id']}"] = kind
        else:
            self.wrong.append(made.text)
        self.unsure = None
        if kind == "responses":
            read = {one["document"].split("-")[0] for one in made.json()["memstore"]["sources"]}
            if not read <= {self.name}:
                self.wrong.append(f"read {read}")
        self.meddle()
        if number % 3 == 2:
            self.delete(kind)
        self.deeds.done()

    def count(self, kind: str) -> int:
        return list(self.has.values()).count(kind)

    def delete(self, kind: str) -> None:
        path = self.chance.choice([path for path, of in self.has.items() if of == kind])
        self.unsure = path
        status = self.http.delete(path).status_code
        if status not in (200, 409):  # it is being read, and goes soon
            self.wrong.append(f"DELETE {path}: {status}")
        del self.has[path]
        self.unsure = None

    def meddle(self) -> None:
        """Read and delete something of another's."""
        path = self.deeds.of_another(self)
        if path is not None:
            for method in ("GET", "DELETE"):
                status = self.http.request(method, path).status_code
                if status != 404:
                    self.wrong.append(f"{self.name}: {method} {path}: {status}")


class Deeds:
    """Counts what all writers did, and knows what they have."""

    def __init__(self) -> None:
        self.writers: list[Writer] = []
        self.left, self.enough = threading.Semaphore(DEEDS - 1), threading.Event()

    def done(self) -> None:
        if not self.left.acquire(blocking=False):
            self.enough.set()

    def of_another(self, writer: Writer) -> str | None:
        paths = [path for one in self.writers if one is not writer for path in list(one.has)]
        return writer.chance.choice(paths) if paths else None


def client(url: str, key: str) -> httpx2.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.Client(base_url=url, headers=headers, timeout=60, verify=False)


def crowd(url: str) -> None:
    """Make conversations until the server is gone."""
    with client(url, CROWD) as http, suppress(httpx2.TransportError):
        while True:
            assert http.post("/v1/conversations", json={}).status_code == 200


def of_kind(http: httpx2.Client, writer: Writer, kind: str) -> Iterator[str]:
    """The paths of what a key has of a kind, as the server says."""
    if kind in ("files", "vector_stores"):
        page: dict[str, Any] = {"has_more": True}
        while page["has_more"]:
            after = {"after": page["last_id"]} if "last_id" in page else {}
            page = http.get(f"/v1/{kind}", params={"limit": 100, **after}).json()
            yield from (f"/v1/{kind}/{one['id']}" for one in page["data"])
    else:
        known = [path for path, of in writer.has.items() if of == kind]
        yield from (path for path in known if http.get(path).status_code == 200)


def test_each_key_has_exactly_its_own_while_others_work_and_after_a_kill(
    tmp_path: Path, children: ForkServer
) -> None:
    lines = [f"{key} write only={name}-*" for name, key in WRITERS.items()]
    (tmp_path / "keys").write_text("\n".join([*lines, f"{CROWD} read only=none"]))
    output = tmp_path / "said"
    seconds = 90 + DEEDS  # a hang, and not a slow machine, takes more
    children.imports("support.serving")
    pid = children.start("python_job", output, SERVE, tmp_path, QUOTA, seconds)
    while not (output.exists() and output.read_text().endswith("\n")):
        time.sleep(0.05)
    url, deeds = output.read_text().strip(), Deeds()
    deeds.writers = [Writer(name, url, deeds) for name in WRITERS]
    threads = [threading.Thread(target=writer.run) for writer in deeds.writers]
    threads.append(threading.Thread(target=crowd, args=(url,)))
    for thread in threads:
        thread.start()
    assert deeds.enough.wait(seconds)
    os.kill(pid, signal.SIGKILL)
    assert children.end() == -signal.SIGKILL
    for thread in threads:
        thread.join()
    assert [writer.wrong for writer in deeds.writers] == [[], [], []]

    keys = Keys.of_file(tmp_path / "keys")
    settings = ServeSettings(conversations=QUOTA)
    with serving(tmp_path / "mem", settings, keys=keys) as served:
        served.service.collect_garbage()
        for writer in deeds.writers:
            with client(served.url, WRITERS[writer.name]) as http:
                seen = {path for kind in set(writer.has.values())
                        for path in of_kind(http, writer, kind)}  # fmt: skip
                unsure = writer.unsure or ""
                assert set(writer.has) - seen <= {unsure}
                more = seen - set(writer.has)
                assert len(more) <= unsure.startswith("POST ")
                assert all(unsure == f"POST {path.rpartition('/')[0]}" for path in more)
                for one in http.get("/v1/files").json()["data"]:
                    assert one["filename"].startswith(writer.name)
                other = deeds.of_another(writer)
                assert other is not None and http.get(other).status_code == 404
        owner = keys.access(CROWD)
        assert owner is not None
        rows = served.service.database.rows(
            "SELECT id FROM conversations WHERE owner = ?", (owner.name,)
        )
        assert len(rows) <= QUOTA
