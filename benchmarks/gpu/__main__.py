"""Everything that is said of a GPU, measured by one command, unattended, in calls of some minutes.

    python -m benchmarks.gpu --out DIR                on a machine with a CUDA device; a second
                                                      call with DIR goes on from the first
    python -m benchmarks.gpu --device cpu --tiny      every part in seconds, to see that it runs

A part runs in a process of its own, with a time of its own; what fails is recorded with its error
and stops nothing else. DIR gets gpu.json (all of it, and what is done), gpu.md (the table) and
gpu.log. For a machine without a network:

    python -m benchmarks.gpu --wheels DIR             download what it lacks, say what is carried
    python -m benchmarks.gpu --install DIR --out DIR  install these wheels first, for this run
"""

import argparse
import os
import sys
from pathlib import Path

from benchmarks.gpu import wheels
from benchmarks.gpu.part import Setting
from benchmarks.gpu.run import PARTS, Run
from benchmarks.gpu.state import State, now


def main() -> None:
    options = read_options()
    if options.wheels is not None:
        print(wheels.download(options.wheels, options.python, options.present))
        return
    if options.install is not None:
        wheels.install(options.install)
    setting = Setting(options.device, options.tiny, options.seed)
    try:
        state = State(options.out, vars(setting).copy())
    except ValueError as error:
        sys.exit(f"error: {error}")
    for name in options.again:
        state.forget(name)
    state.content["machines"].append({"begun": now()})
    log = options.out / "gpu.log"
    # a machine that is busy with other things may take its time over what measures nothing
    run = Run(state, setting, options.seconds, log, patience=20 if setting.tiny else 1)
    try:
        run.parts(options.parts)
    finally:
        print(f"\n{state.report()}\nwritten: {state.json}, {state.markdown}; said: {log}")


def read_options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = Path("gpu-results")
    options.add_argument("--out", type=Path, default=out, help=f"results (default: {out})")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="sizes that say nothing, in seconds")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=540, help="of this call (540)")
    names = list(PARTS)
    options.add_argument("--parts", nargs="+", choices=names, default=names, metavar="PART")
    options.add_argument(
        "--again", nargs="+", choices=names, default=[], metavar="PART", help="run these anew"
    )
    options.add_argument("--wheels", type=Path, help="download wheels to here")
    options.add_argument("--python", default="3.12", help="that the wheels are for (3.12)")
    options.add_argument(
        "--present", nargs="*", default=list(wheels.PRESENT), help="packages that are there already"
    )
    options.add_argument("--install", type=Path, help="install the wheels of here first")
    chosen = options.parse_args()
    if chosen.tiny and chosen.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = "1"
    return chosen


if __name__ == "__main__":
    main()
