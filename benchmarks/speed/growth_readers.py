"""Many readers of one memory: what `growth` measures of the model that ships, in processes that
import what a user's would. This module is what each of them runs.
"""

import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.speed.growth_limits import resident
from memstore import MemoryStore, load_model

WORDS = ("barn", "mare", "ferry", "bridge", "river", "gate", "soup", "shepherd")
ANSWER = 8  # tokens


def of_readers(path: Path, count: int, seconds: float) -> dict[str, Any]:
    """A point: so many processes that ask one memory at once."""
    line = [sys.executable, "-m", "benchmarks.speed.growth_readers", str(path), str(seconds)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes: list[Any] = [subprocess.Popen([*line, str(seed)], **pipes) for seed in range(count)]
    for process in processes:  # each has loaded its model, and answered before
        assert process.stdout.readline() == "ready\n", "a reader failed"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.stdout.readline()) for process in processes]
    for process in processes:
        process.communicate("end\n")
    latencies = sorted(one for of in found for one in of["latencies"])
    clock = statistics.median(of["clock"] for of in found)
    core = sum(of["core"] for of in found)
    return {
        "x": count,
        "readers": count,
        "questions": len(latencies),
        "questions_per_second": len(latencies) / clock,
        "core_per_question": core / len(latencies),
        "cores_had": core / clock,
        "latency": {
            "median": statistics.median(latencies),
            "99%": latencies[int(0.99 * (len(latencies) - 1))],
        },
        "resident": statistics.median(of["resident"] for of in found),
        "own_part": statistics.median(of["own_part"] for of in found),
    }


def read(path: Path, seconds: float, seed: int) -> None:
    """A reader: asks until the time is over, tells what it took, and stays until all have told."""
    torch.set_num_threads(1)
    reader = load_model()
    chance, latencies = random.Random(seed), list[float]()
    with MemoryStore.open(path, reader.signature, read_only=True) as store:

        def ask() -> float:
            question = f"What is the price of the {chance.choice(WORDS)} {chance.randrange(99)}?"
            began = time.perf_counter()
            reader.ask(question, store, max_new_tokens=ANSWER)
            return time.perf_counter() - began

        for _ in range(5):
            ask()
        print("ready", flush=True)
        sys.stdin.readline()
        began, busy = time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            latencies.append(ask())
        took = {"clock": time.perf_counter() - began, "core": time.process_time() - busy}
        print(json.dumps({"latencies": latencies, **took, **resident()}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    read(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))
