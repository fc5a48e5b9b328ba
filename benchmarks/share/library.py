"""How much faster do the workers of a Ray cluster read a library in than one of them?

alone      Tokens a second of one worker, of a cluster of this machine with one on every core.
together   The same of all of them.
ratio      Of each round, in which alone and together follow each other; with their order changed
           from round to round.
free       The ratio that cores would give which nobody shares: the number of workers by what they
           took of a processor for a token, alone, and together.

A round reads --documents parts of a book, others than any round before it, publishes them under a
URL of its own, and counts from the first batch to the manifest. All workers have loaded the model
before. torch has one thread in each; `load` is the system's over a minute before a round (other
programs share the cores).

    python -m benchmarks.share.library --text books-test.jsonl.zst --to file:///tmp/libraries
"""

import argparse
import os
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.common.options import add, plain_parser
from benchmarks.common.results import write_part
from benchmarks.common.tables import table
from benchmarks.common.text import CHARACTERS, part
from memstore.compute import Compute
from memstore.documents.folder import find
from memstore.library import ray_engine
from memstore.library.library_ingest import ingest_library
from memstore.library.reading import Job

_WORKERS = (b"ray::IDLE", b"ray::read_batch", b"ray::describe")  # as Ray calls their processes


class Some(ray_engine.RayEngine):
    """Of a cluster a few workers: as many batches are given to it."""

    few: int | None = None

    @property
    def workers(self) -> int:
        """How many read."""
        return self.few or self.workers_at_all

    @property
    def workers_at_all(self) -> int:
        """How many there are."""
        return super().workers


def main() -> None:
    """Measure, print and write."""
    options = plain_parser(__doc__)
    add(options, "--text", required=True, nargs="+")
    add(options, "--to", required=True, about="URL, below which each round has a library")
    add(options, "--model", "smollm2")
    add(options, "--documents", 12)
    add(options, "--characters", 4000, "of a document")
    add(options, "--rounds", 3)
    args = options.parse_args()
    ray_engine._AHEAD = 1  # one of one worker: another would take what waits
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    rounds = _rounds(args)
    ratios = [one["together"] / one["alone"] for one in rounds]
    rows = [
        [
            f"{one['alone']:.0f}",
            f"{one['together']:.0f}",
            f"{ratio:.2f}",
            f"{one['free']:.2f}",
            one["load"],
        ]
        for one, ratio in zip(rounds, ratios)
    ]
    print(table("alone | together | ratio | free | load", rows))
    print(f"median ratio {statistics.median(ratios):.2f}")
    free = statistics.median(one["free"] for one in rounds)
    found = {"rounds": rounds, "median": statistics.median(ratios), "free": free}
    write_part(args, args.to.partition(":")[0], found)


def _rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    most = args.documents * args.characters
    text = part(args.text, (2 * args.rounds + 1) * most / CHARACTERS, args.seed)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as path, Some(gpus=False) as engine:
        folders = iter(range(1 << 30))

        def run(few: int | None, documents: int) -> tuple[float, float]:
            """Tokens a second, and of a second of a processor."""
            number = next(folders)
            folder = Path(path) / str(number)
            folder.mkdir()
            for each in range(documents):
                at = number * most + each * args.characters
                (folder / f"{each}.txt").write_text(text[at : at + args.characters])
            engine.few = few
            job = Job(f"{args.to}/{os.getpid()}-{number}", args.model, Compute())
            files = find([str(folder)]).files
            began = _processor_seconds()
            progress, _ = ingest_library(files, job, engine, lambda progress, told: None)
            assert progress.documents == {"read": documents}, progress
            spent = _processor_seconds() - began
            return progress.tokens_per_second, progress.tokens / spent

        run(None, 2 * engine.workers)  # all have the model
        for number in range(args.rounds):
            load = round(os.getloadavg()[0], 1)
            order = [("alone", 1), ("together", None)]
            found: dict[str, Any] = {"load": load}
            for name, few in order if (number + args.seed) % 2 else order[::-1]:
                found[name], found[f"{name}, of a processor"] = run(few, args.documents)
            by = found["together, of a processor"] / found["alone, of a processor"]
            rounds.append({**found, "free": engine.workers_at_all * by})
            print(rounds[-1], flush=True)
    return rounds


def _processor_seconds() -> float:
    """That the processes of all workers have taken."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cmdline").read_bytes().startswith(_WORKERS):
                said = (process / "stat").read_text().rpartition(")")[2].split()
                ticks += int(said[11]) + int(said[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
