"""Do many readers of one published memory stay small, and right, while somebody publishes?

Sixteen processes open the memory by its URL, with one local cache for all of them, and look blocks
up without end: of a random document its blocks at random, each compared with what it must be. One
more process publishes documents, appends to them, takes them out and prunes, a change every second.
Every process tells what it holds every ten seconds: memory (resident, in MB) and open descriptors.

    python -m benchmarks.share.fleet --seconds 300

prints of the readers the median and the most of both, a tenth into the time and at its end, the
blocks that were read, those that were wrong, and the errors by name (a document that was taken out
while it was asked for is one).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common.memories import workplace
from benchmarks.common.options import add, plain_parser, prepare
from benchmarks.common.results import write_part
from memstore import MemoryStore
from memstore.block import BlockKey
from memstore.disk.format.document import IngestSettings
from memstore.disk.format.signature import Signature
from memstore.errors import MemstoreError
from memstore.share.objects.open_object_store import open_object_store
from memstore.share.publish.garbage_collection import prune
from memstore.share.publish.publish import unpublish

HEADS, BLOCK, DIM, CHUNK = 2, 16, 32, 4
SIGNATURE = Signature("ab" * 20, "cd" * 20, {}, "float16", 1, (0,), HEADS, DIM, BLOCK)
SETTINGS = IngestSettings(CHUNK, 0)
BUDGET = 1 << 20  # of the host tier: most blocks are read from below it
AT_ONCE = 16  # blocks of a lookup
EVERY = 10.0  # seconds between two reports


def content(document: int, block: int) -> tuple[float, float]:
    """Every value of K and of V of a block."""
    return float(document % 1000), float(block % 2000)


def write(store: MemoryStore, document: int, chunks: int) -> None:
    """A document, or more of it."""
    name = f"document {document:04}"
    mode: Any = "append" if store.has(name) else "new"
    tag = os.urandom(8).hex()
    writer = store.write_document(name, source_hash=tag, settings=SETTINGS, mode=mode)
    assert writer is not None
    with writer:
        for _ in range(chunks):
            first = writer.tokens // BLOCK
            shape = (CHUNK, HEADS, BLOCK, DIM)
            k, v = torch.empty(shape).half(), torch.empty(shape).half()
            for at in range(CHUNK):
                k[at], v[at] = content(document, first + at)
            ids = np.zeros(CHUNK * BLOCK, dtype=np.int64)
            writer.add_chunk(ids, first * BLOCK, {0: (k, v, k[:, :, 0])})
        writer.finish()


def held() -> dict[str, int]:
    """Resident bytes and open descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {"bytes": pages * os.sysconf("SC_PAGE_SIZE"), "files": len(os.listdir("/proc/self/fd"))}


def read(url: str, cache: str, seconds: float, seed: int) -> None:
    """A reader: reports as lines of JSON."""
    chance, blocks, wrong, errors = random.Random(seed), 0, 0, Counter[str]()
    until = time.monotonic() + seconds
    told = time.monotonic()
    with MemoryStore.open(
        url, host_budget=BUDGET, local_cache=cache, local_budget=8 << 20
    ) as store:
        while time.monotonic() < until:
            try:
                row = chance.choice(store.ready())
                some = [chance.randrange(row.blocks) for _ in range(AT_ONCE)]
                units = [
                    BlockKey(row.id, 0, block, head) for block in some for head in range(HEADS)
                ]
                with store.lease(units) as lease:
                    for unit, slot in zip(units, lease.slots.tolist()):
                        k, v = content(int(row.name[-4:]), unit.block)
                        right = bool((lease.k[slot] == k).all() and (lease.v[slot] == v).all())
                        blocks, wrong = blocks + 1, wrong + (not right)
            except MemstoreError as error:
                errors[type(error).__name__] += 1
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                print(json.dumps({**held(), "blocks": blocks, "wrong": wrong, "errors": errors}),
                      flush=True)  # fmt: skip
            time.sleep(0.05)


def publish(memory: Path, url: str, documents: int, seconds: float, seed: int) -> None:
    """The publisher, likewise."""
    chance, changes, told = random.Random(seed), Counter[str](), time.monotonic()
    until = time.monotonic() + seconds
    place, gone = open_object_store(url), set[int]()
    with MemoryStore.open(memory, host_budget=BUDGET) as store:
        while time.monotonic() < until:
            document = chance.randrange(documents)
            name = f"document {document:04}"
            what = chance.choice(["append", "append", "unpublish", "prune"])
            if what == "prune":
                prune(place, grace=30)
            elif what == "unpublish" and document not in gone and len(gone) < documents // 2:
                unpublish(place, [name])
                gone.add(document)
            else:
                what = "append"
                if store.document(name).blocks < 2000:
                    write(store, document, 1)
                store.publish(url, [name])
                gone.discard(document)
            changes[what] += 1
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                print(json.dumps({**held(), "changes": changes}), flush=True)
            time.sleep(1)


def start(options: argparse.Namespace, *arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.share.fleet", "--seconds", str(options.seconds)]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def told(processes: list["subprocess.Popen[str]"]) -> list[list[dict[str, Any]]]:
    """The reports of each."""
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), "a process failed"
    return [[json.loads(line) for line in output.splitlines()] for output in outputs]


def measure(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    memory, url = directory / "memory", f"file://{directory}/published"
    with MemoryStore.create(memory, SIGNATURE, codec="raw", host_budget=BUDGET) as store:
        for document in range(options.documents):
            write(store, document, 20)
        store.publish(url)
    readers = [start(options, "--read", url, "--cache", directory / "cache", "--seed", seed)
               for seed in range(options.readers)]  # fmt: skip
    publisher = start(options, "--publish", memory, "--to", url, "--documents", options.documents)
    reports = told(readers)
    (changed,) = told([publisher])
    early, late = ([report[int(at * (len(report) - 1))] for report in reports] for at in (0.1, 1))
    errors: Counter[str] = sum((Counter(report["errors"]) for report in late), Counter())
    found: dict[str, Any] = {
        "readers": options.readers,
        "seconds": options.seconds,
        "blocks": sum(report["blocks"] for report in late),
        "wrong": sum(report["wrong"] for report in late),
        "errors": dict(errors),
        "changes": changed[-1]["changes"],
        "publisher": {"early": _short(changed[len(changed) // 10]), "late": _short(changed[-1])},
    }
    found["MB by tenths"] = {
        "readers": [
            round(statistics.median(_tenth(report, at)["bytes"] for report in reports) / 1e6, 1)
            for at in range(1, 11)
        ],
        "publisher": [round(_tenth(changed, at)["bytes"] / 1e6, 1) for at in range(1, 11)],
    }
    for name, some in (("early", early), ("late", late)):
        sizes, files = ([report[what] for report in some] for what in ("bytes", "files"))
        found[name] = {
            "MB": round(statistics.median(sizes) / 1e6, 1),
            "most MB": round(max(sizes) / 1e6, 1),
            "files": statistics.median(files),
            "most files": max(files),
        }
    return found


def _tenth(reports: list[dict[str, Any]], tenth: int) -> dict[str, Any]:
    return reports[(len(reports) - 1) * tenth // 10]


def _short(report: dict[str, Any]) -> dict[str, float]:
    return {"MB": round(report["bytes"] / 1e6, 1), "files": report["files"]}


def main() -> None:
    arguments = plain_parser(__doc__)
    add(arguments, "--seconds", 300.0)
    add(arguments, "--readers", 16)
    add(arguments, "--documents", 40)
    add(arguments, "--work", None, "where memories are made (default: temporary)", type=Path)
    for hidden in ("--read", "--cache", "--publish", "--to"):  # of the processes that it starts
        arguments.add_argument(hidden, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    prepare(1)
    if options.read:
        read(options.read, options.cache, options.seconds, options.seed)
    elif options.publish:
        publish(Path(options.publish), options.to, options.documents, options.seconds, options.seed)
    else:
        with workplace(options) as directory:
            found = measure(directory, options)
        print(json.dumps(found, indent=1))
        write_part(options, "share_fleet", found)


if __name__ == "__main__":
    main()
