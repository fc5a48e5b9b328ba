"""Train a decoder with another memory than landmarks, by the stages of `memstore train`.

    python -m benchmarks.baselines.train books.jsonl.zst --out xl --memory transformer-xl

Killed or interrupted, it goes on with --resume and the same options. --init takes the layers of a
landmark model, or of a run with a memory that learns nothing itself (none, full, transformer-xl).
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.baselines.config import MEMORIES
from benchmarks.baselines.subject import BaselineSubject
from benchmarks.common.options import add
from benchmarks.common.starting import start
from memstore.model.landmark.landmark_model import read_configuration
from memstore.model.landmark.transformer import PRESETS
from memstore.training.curriculum import default_curriculum, stages_from
from memstore.training.subject import TrainConfig
from memstore.training.train import train


def read_options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("texts", nargs="+", type=Path, metavar="TEXT", help=".txt or .jsonl.zst")
    add(options, "--out", None, "directory of the checkpoint", type=Path, required=True)
    add(options, "--memory", None, choices=list(MEMORIES), required=True)
    add(options, "--preset", "test", "shape, unless --init or --resume say it", choices=[*PRESETS])
    add(options, "--minutes", None, "of the wall clock; default: the whole plan", type=float)
    add(options, "--init", None, "start from these weights", type=Path)
    add(options, "--from-stage", None, "begin the plan at this stage")
    add(options, "--precision", "auto", choices=["auto", "float32", "bfloat16"])
    add(options, "--device", "cpu")
    add(options, "--threads", 1)
    add(options, "--seed", 0)
    options.add_argument("--resume", action="store_true", help="go on from the run in --out")
    return options.parse_args()


def report(line: dict[str, Any]) -> None:
    print(", ".join(f"{name} {value}" for name, value in line.items()), flush=True)


def main() -> None:
    options = read_options()
    resumed = options.resume and (options.out / "config.json").is_file()
    begun = options.out if resumed else options.init
    config = TrainConfig(
        out=options.out,
        model=PRESETS[options.preset] if begun is None else read_configuration(begun),
        stages=stages_from(options.from_stage, default_curriculum()),
        minutes=options.minutes,
        seed=options.seed,
        threads=options.threads,
        device=options.device,
        init=options.init,
        precision=options.precision,
    )
    subject = partial(BaselineSubject, MEMORIES[options.memory])
    train(config, options.texts, resume=options.resume, report=report, subject=subject)
    print(f"trained; python -m benchmarks.quality.recall --model {options.out}")


if __name__ == "__main__":
    start(main)
