"""Decoding steps of landmark models in the shapes of large ones, with random weights: without a
memory, with one, and attending to as many tokens.
"""

import argparse
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.common.tables import spread, tokens_text
from benchmarks.gpu.part import Case, Row, Setting
from benchmarks.speed.decode_large import NAMES, report, run


def cases(setting: Setting) -> list[Case]:
    shapes = [("test", 1 << 10, "host"), ("test", 1 << 10, "pool")]
    if not setting.tiny:
        shapes = [
            ("llama-3.2-1b", 1 << 17, "host"),
            ("llama-3.1-8b", 1 << 17, "host"),
            ("llama-3.1-8b", 1 << 20, "pool"),
            ("llama-7b", 1 << 20, "pool"),
        ]
    return [
        (f"{shape}, {tokens_text(tokens)}, {units}", partial(steps, setting, shape, tokens, units))
        for shape, tokens, units in shapes
    ]


def steps(setting: Setting, shape: str, tokens: int, units: str) -> Iterator[Row]:
    """See benchmarks/speed/decode_large.py, of which this is one memory."""
    options = argparse.Namespace(
        shape=shape,
        tokens=tokens,
        device=setting.place,
        dtype=torch.bfloat16 if setting.cuda else torch.float32,
        units=units,
        pool=16 if setting.tiny else 4096,
        host_gib=0.01 if setting.tiny else 4.0,
        device_gib=0.01 if setting.tiny else 8.0,
        steps=2 if setting.tiny else 16,
        repeats=1 if setting.tiny else 5,
        seed=setting.seed,
    )
    found = run(options)
    print(report(found))
    what = f"a step of {shape}, memory of {tokens_text(tokens)}"
    for name, row in found["systems"].items():
        size = row["bytes"]
        note = f"over {row['tokens']:,} tokens"
        if row["to none"] is not None:
            note += f", {spread(row['to none'])} of none"
        if size.get("up"):
            note += f", {size['up'] / 1e6:,.1f} MB up"
        if name in NAMES and units == "pool":
            note += ", units from a pool: content repeats"
        by = NAMES.get(name, name)
        moved = sum(count for part, count in size.items() if part != "up")
        yield Row(what, by, row["seconds"], 0, moved, floor=row["floor"], note=note)
