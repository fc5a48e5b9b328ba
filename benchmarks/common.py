"""What the benchmarks share: fresh processes, timing, intervals, tables, the text they read, and
writing down what was found.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
import torch

from memstore import LandmarkModel, load_model
from memstore.model.tokenizer import Tokenizer
from memstore.training.corpus import is_held_out, read_documents

Z95 = 1.959964
T = TypeVar("T")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; the module's docstring is its help."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--text",
        nargs="+",
        required=True,
        help="files to read from: .jsonl.zst (one book a line) or .txt",
    )
    options.add_argument("--model", help="directory of a model (default: the one that ships)")
    options.add_argument(
        "--out", type=Path, help="write the results here as JSON, and a plot beside it as PNG"
    )
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=1, help="threads of torch")
    options.add_argument(
        "--work", type=Path, help="keep memories in this directory (default: a temporary one)"
    )
    return options


def prepare(threads: int) -> None:
    """Settings of a measuring process."""
    torch.set_num_threads(threads)


def load(options: argparse.Namespace) -> LandmarkModel:
    """The model under test."""
    prepare(options.threads)
    return load_model(options.model)


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """function(*arguments) in a newly started interpreter, which then ends: nothing stays in memory
    but what it returns.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# Text


@dataclass(frozen=True)
class Books:
    """The books of some files as token ids, and words held out from training that occur in them."""

    books: list[np.ndarray]
    words: tuple[str, ...]

    @classmethod
    def read(cls, paths: Sequence[str], tokenizer: Tokenizer, cache: Path) -> "Books":
        """Tokenise the files, or take what was tokenised into the directory `cache` before."""
        named = [
            f"{Path(path).name} {Path(path).stat().st_size}"
            for path in paths
            if Path(path).exists()
        ]
        digest = hashlib.blake2b(
            "\n".join([tokenizer.fingerprint, *named]).encode(), digest_size=8
        ).hexdigest()
        file = cache / f"books-{digest}.npz"
        if not file.exists():
            counts: Counter[str] = Counter()
            books = []
            for text in read_documents(paths):
                counts.update(re.findall(r"\b[a-z]{4,10}\b", text))
                books.append(np.asarray(tokenizer.encode(text), dtype=np.uint16))
            # Frequent to middling words, those alone that training keeps for evaluation.
            words = sorted(word for word, _ in counts.most_common(6000)[150:] if is_held_out(word))
            cache.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.npz")
            arrays: dict[str, Any] = {f"book{n}": book for n, book in enumerate(books)}
            np.savez(
                partial, words=np.array(words), lengths=np.array(list(map(len, books))), **arrays
            )
            partial.replace(file)
        stored = np.load(file)
        books = [stored[f"book{n}"].astype(np.int64) for n in range(len(stored["lengths"]))]
        return cls(books, tuple(str(word) for word in stored["words"]))

    @property
    def tokens(self) -> int:
        """Tokens in all books."""
        return sum(len(book) for book in self.books)

    def place(self, rng: Random, length: int) -> np.ndarray:
        """`length` consecutive tokens of one book, from a random place; books weighed by their
        length.
        """
        room = [max(0, len(book) - length + 1) for book in self.books]
        if not any(room):
            raise SystemExit(f"no book has {length:,} tokens; give longer texts")
        book = rng.choices(self.books, room)[0]
        start = rng.randrange(len(book) - length + 1)
        return book[start : start + length]

    def run(self, rng: Random, length: int) -> np.ndarray:
        """`length` tokens: books in a random order, from a random place of the first, begun again
        at their end.
        """
        order = list(self.books)
        rng.shuffle(order)
        skip = rng.randrange(max(1, len(order[0]) // 2))
        pieces, total = [order[0][skip:]], len(order[0]) - skip
        turn = 1
        while total < length:
            book = order[turn % len(order)]
            pieces.append(book)
            total += len(book)
            turn += 1
        return np.concatenate(pieces)[:length]


# Measuring


def wilson(right: int, trials: int) -> tuple[float, float]:
    """The 95% Wilson interval of a proportion."""
    if trials == 0:
        return 0.0, 1.0
    p, z2 = right / trials, Z95 * Z95
    centre = (p + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * math.sqrt(p * (1 - p) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """Mean and its 95% interval by Student's t (normal beyond 100 values)."""
    x = np.asarray(values, dtype=np.float64)
    if len(x) < 2:
        return float(x.mean()), -math.inf, math.inf
    # first terms of the expansion of t in 1 / degrees of freedom
    t = Z95 * (1 + (Z95 * Z95 + 1) / (4 * (len(x) - 1)))
    half = t * float(x.std(ddof=1)) / math.sqrt(len(x))
    return float(x.mean()), float(x.mean()) - half, float(x.mean()) + half


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


# Reporting


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in cells
    ]
    return "\n".join(
        [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]
    )


def tokens_text(tokens: int) -> str:
    """2048 -> "2K", 1048576 -> "1M"."""
    if tokens >= 1 << 20 and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    if tokens >= 1024:
        return f"{tokens / 1024:g}K"
    return str(tokens)


def tokens_number(text: str) -> int:
    """The inverse: "32K" -> 32768."""
    scale = {"k": 1024, "m": 1024**2}.get(text[-1:].lower(), 1)
    return round(float(text[:-1] if scale > 1 else text) * scale)


def machine() -> dict[str, Any]:
    """Where the numbers come from."""
    try:
        names = [
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
    except OSError:
        names = []
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "commit": commit,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def write_results(
    options: argparse.Namespace, model: LandmarkModel, results: dict[str, Any]
) -> None:
    """Write --out, if asked for: the results with options, machine and the model's hash."""
    if options.out is None:
        return
    given = {
        name: value.name if isinstance(value, Path) else value
        for name, value in vars(options).items()
    }
    given["text"] = [Path(text).name for text in options.text]
    given["out"] = options.out.name
    content = {
        "options": given,
        "machine": machine(),
        "weights": model.signature.weights,
        **results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1))
    print(f"\nwritten: {options.out}")


def plot(
    options: argparse.Namespace, draw: Callable[[Any], None], size: tuple[float, float] = (7, 4)
) -> None:
    """Draw a figure beside --out as PNG, where matplotlib is installed."""
    if options.out is None:
        return
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no plot")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=size, layout="constrained")
    draw(figure)
    path = options.out.with_suffix(".png")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    print(f"written: {path}")
