"""How fast do batches of records come from a Valkey or Redis server, beside its fastest client with
the same batch?

ours     The tiers below the host tier read a batch of 32 records, all of them in the server, into
         slots: every checksum taken, every record known for the one that was asked for.
client   redis-py alone asks for the same 32 keys in one MGET, and keeps what it gets as it came; by
         the parser hiredis where that is installed, and without.
lmcache  The client of LMCache's Redis adapter (C++, as many threads and connections as it takes by
         itself) with the same keys, into buffers of its caller; where its wheel is installed:
         `pip install --no-deps lmcache==0.5.6`.
read     The same by a socket alone, into a buffer that is there already: what the server gives.

A server of its own on this machine (valkey-server or redis-server), random bytes, codec raw. In
turns, A B B A, so that whatever else the machine does meets all alike; ratios within a repeat.

    python -m benchmarks.share.valkey_reads
"""

import argparse
import select
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.memories import workplace
from benchmarks.common.options import add
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.common.timing import interleaved, paired_ratio
from benchmarks.storage.records import (
    BATCH,
    SHAPES,
    Memory,
    Shape,
    begin,
    gigabytes,
    number,
    reading_parser,
)
from memstore.block import BlockKey, RecordKey
from memstore.disk.format.keys import record_key
from memstore.share.caches.valkey import Valkey
from memstore.share.caches.write_behind import record_name
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.read.published_source import SharedSource
from memstore.share.read.remote import Remote


@contextmanager
def server() -> Iterator[int]:
    """A server of its own; yields its port."""
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        raise SystemExit("install valkey-server or redis-server")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        given = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        with subprocess.Popen([binary, *given], stdout=subprocess.DEVNULL) as process:
            try:
                for _ in range(100):
                    try:
                        socket.create_connection(("127.0.0.1", port), timeout=5).close()
                        break
                    except OSError:
                        time.sleep(0.05)
                yield port
            finally:
                process.kill()


def clients(port: int) -> dict[str, Any]:
    """redis-py by its parsers that are there."""
    import redis

    found = {}
    for name, parser in (("client", "_RESP2Parser"), ("client, hiredis", "_HiredisParser")):
        kind = getattr(redis._parsers, parser)
        try:
            pool = redis.ConnectionPool(host="127.0.0.1", port=port, parser_class=kind)
            found[name] = redis.Redis(connection_pool=pool)
            found[name].ping()
        except redis.RedisError:
            found.pop(name, None)
    return found


class Lmcache:
    """The native client of LMCache."""

    WORKERS = 8  # what its adapter takes by itself

    def __init__(self, port: int, record_bytes: int) -> None:
        from lmcache.lmcache_redis import LMCacheRedisClient

        self._client = LMCacheRedisClient("127.0.0.1", port, self.WORKERS, "", "")
        self._buffers = [memoryview(bytearray(record_bytes)) for _ in range(BATCH)]
        self._done = select.poll()
        self._done.register(self._client.event_fd(), select.POLLIN)

    def read(self, names: list[str]) -> list[memoryview]:
        """The values of the keys, in buffers that the next call fills again."""
        self._client.submit_batch_get(names, self._buffers)
        while True:
            self._done.poll()
            for _, good, error, _ in self._client.drain_completions():
                if not good:
                    raise RuntimeError(error)
                return self._buffers


def lmcache(port: int, record_bytes: int) -> "Lmcache | None":
    """It, or None where its wheel is not installed."""
    return Lmcache(port, record_bytes) if find_spec("lmcache") is not None else None


def raw_read(connection: socket.socket, names: list[str], buffer: memoryview) -> int:
    """MGET by hand; how many bytes came."""
    parts = [f"*{len(names) + 1}\r\n$4\r\nMGET\r\n"]
    parts += [f"${len(name)}\r\n{name}\r\n" for name in names]
    connection.sendall("".join(parts).encode())
    at, wanted = 0, None
    while wanted is None or at < wanted:
        got = connection.recv_into(buffer[at:])
        if wanted is None:  # all values are of one size
            head = bytes(buffer[: at + got]).split(b"\r\n", 2)
            size = int(head[1][1:])
            wanted = len(head[0]) + 2 + len(names) * (len(head[1]) + 2 + size + 2)
        at += got
    return at


def measure(work: Path, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """One row: a shape."""
    memory = Memory(work / "memory", shape)
    memory.write(options.megabytes << 20)
    write = memory.document.write_of(0)
    assert write is not None
    names = [
        record_name(shape.signature.digest, write, RecordKey(1, block, 0))
        for block in range(memory.records)
    ]
    count = BATCH * shape.heads
    slab = torch.zeros(count, 2, shape.rows, shape.dim, dtype=torch.float16)
    buffer = memoryview(bytearray(BATCH * (shape.record + 4096)))
    with server() as port:
        valkey = Valkey(f"redis://127.0.0.1:{port}")
        with memory.database.read() as txn:
            for block, name in enumerate(names):
                view = txn.view("blocks", record_key(RecordKey(1, block, 0)))
                assert view is not None
                valkey.put([(name, bytes(view))])
        place = open_object_store("memory://valkey-reads", make=True)
        remote = Remote(place, deadline=20.0)

        def find(wanted: Any, until: float) -> Any:
            raise AssertionError("the server has all of them")

        source = SharedSource(memory.catalog, remote, find, shared=valkey)
        connection = socket.create_connection(("127.0.0.1", port))

        def ours(_: int) -> float:
            blocks = memory.sample(1)[0]
            units = [BlockKey(1, 0, block, head) for block in blocks for head in range(shape.heads)]
            return gigabytes(BATCH * shape.record, lambda: source.read(units, slab, range(count)))

        def client(kind: Any) -> Callable[[int], float]:
            def run(_: int) -> float:
                wanted = [names[block] for block in memory.sample(1)[0]]
                return gigabytes(BATCH * shape.record, lambda: kind.mget(wanted))

            return run

        def read(_: int) -> float:
            wanted = [names[block] for block in memory.sample(1)[0]]
            return gigabytes(BATCH * shape.record, lambda: raw_read(connection, wanted, buffer))

        runs = {"ours": ours, **{name: client(kind) for name, kind in clients(port).items()}}
        other = lmcache(port, memory.catalog.blocks.form.raw_record_bytes)
        if other is not None:
            check = [memory.sample(1)[0] for _ in range(2)]
            with memory.database.read() as txn:  # it reads what is there
                for blocks in check:
                    values = other.read([names[block] for block in blocks])
                    for block, value in zip(blocks, values):
                        assert value == txn.view("blocks", record_key(RecordKey(1, block, 0)))

            def native(_: int) -> float:
                wanted = [names[block] for block in memory.sample(1)[0]]
                return gigabytes(BATCH * shape.record, lambda: other.read(wanted))

            runs["lmcache"] = native
        runs["read"] = read
        for run in runs.values():
            for _ in range(5):
                run(0)
        found: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(options.repeats):
            for name, rates in interleaved(runs, options.batches).items():
                found[name].append(statistics.median(rates))
        source.close()
        connection.close()
    memory.close()
    shutil.rmtree(memory.path)
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    best = max((name for name in runs if name.startswith("client")), key=medians.__getitem__)
    ratio = paired_ratio(found["ours"], found[best])
    row = {"record": shape.name, "gb_s": medians, "best": best, "to_best": ratio}
    if "lmcache" in found:
        row["to_lmcache"] = paired_ratio(found["ours"], found["lmcache"])
    return row


def spread(ratio: dict[str, float]) -> str:
    """A ratio with its least and greatest."""
    return f"{ratio['median']:.2f} ({ratio['least']:.2f}-{ratio['greatest']:.2f})"


def main() -> None:
    arguments = reading_parser(__doc__)
    add(arguments, "--batches", 15, "of a repeat")
    options = arguments.parse_args()
    begin(options)
    rows = []
    with workplace(options) as work:
        for shape in SHAPES:
            rows.append(measure(work, shape, options))
            names = list(rows[0]["gb_s"])
            head = ["record", *(f"{name} GB/s" for name in names), "ours to the fastest client"]
            head += ["to lmcache"] if "to_lmcache" in rows[0] else []
            cells = [
                [
                    row["record"],
                    *(number(row["gb_s"][name]) for name in names),
                    f"{spread(row['to_best'])}, {row['best']}",
                    *([spread(row["to_lmcache"])] if "to_lmcache" in row else []),
                ]
                for row in rows
            ]
    print(table(head, cells))
    write_part(options, "valkey_reads", rows)


if __name__ == "__main__":
    main()
