"""LMCache's side of whole_records: batches of `lmcache bench l2`, one at a time as asked for.

Run by a python that has LMCache, so it imports nothing of this project: `lmcache_files.py DIR BYTES
KEYS BATCHES WORKERS...` stores the files, says "ready", and answers every line "WORKERS BATCH" with
the seconds that loading that batch took.
"""

import json
import os
import sys
from argparse import Namespace

from lmcache.cli.commands.bench.l2_adapter_bench.data import (
    create_l1_memory_desc,
    make_aligned_tensor,
    make_memory_objects,
    make_object_keys,
)
from lmcache.cli.commands.bench.l2_adapter_bench.runner import bench_load, bench_store
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config


def main() -> None:
    directory = sys.argv[1]
    size, count, batches, *workers = map(int, sys.argv[2:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what LMCache prints is no answer
    buffer = make_aligned_tensor(2 * count * size)
    memory = create_l1_memory_desc(buffer, align_bytes=1)
    stored, loaded = (make_memory_objects(buffer, count, size, at * count * size) for at in (0, 1))
    adapters = {}
    for number in workers:
        spec = {"type": "fs_native", "base_path": directory, "num_workers": number}
        given = parse_args_to_l2_adapters_config(Namespace(l2_adapter=[json.dumps(spec)]))
        adapters[number] = create_l2_adapter(given.adapters[0], l1_memory_desc=memory)

    def keys(batch: int) -> list:
        return [make_object_keys(count, key_offset=batch * count)]

    first = adapters[workers[0]]
    bench_store(first, 1, count, size, batches, keys, lambda _: [stored], lambda _: None)
    print("ready", file=answers)
    for line in sys.stdin:
        number, batch = map(int, line.split())
        found = bench_load(
            adapters[number],
            1,
            count,
            size,
            1,
            lambda _, batch=batch: keys(batch),
            lambda _: [loaded],
            lambda _: None,
        )
        assert found.success_counts == [count], found
        print(found.round_durations[0], file=answers)
    for adapter in adapters.values():
        adapter.close()


if __name__ == "__main__":
    main()
