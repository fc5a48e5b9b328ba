"""Measuring: fresh processes, time, and turns."""

import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """function(*arguments) in a new interpreter, which then ends and leaves only the result."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=end_with_parent) as pool:
        return pool.submit(function, *arguments).result()


def end_with_parent() -> None:
    """Have this process end when the one that started it was killed: it would go on measuring."""

    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def timed(function: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what the function returned."""
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result


def interleaved(runs: Mapping[str, Callable[[int], float]], repeats: int) -> dict[str, list[float]]:
    """Each run's measurements, taken in turns (A B B A ...) so that a change of the machine's speed
    meets all of them.

    A run is called with the number of the repeat.
    """
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats):
        names = list(runs) if repeat % 2 == 0 else list(reversed(list(runs)))
        for name in names:
            measured[name].append(runs[name](repeat))
    return measured


def paired_ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest ratio of measurements taken in the same repeat."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)}
