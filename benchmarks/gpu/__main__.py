"""Everything that is said of a GPU, measured by one command, unattended, in calls of some minutes.

    python -m benchmarks.gpu --out DIR                on a machine with a CUDA device; a second
                                                      call with DIR goes on from the first
    python -m benchmarks.gpu --device cpu --tiny      every part in seconds, to see that it runs

A part runs in a process of its own, with a time of its own; what fails is recorded with its error
and stops nothing else. DIR gets gpu.json (all of it, and what is done), gpu.md (the table) and
gpu.log.
"""

import argparse
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import Setting, State, prepare, work

LEAST = 15.0  # seconds of a call in which something is still begun
PARTS = {  # seconds that a part may take, over all calls; what is worth most comes first
    "correct": 600,  # the device's answers against the CPU's, and this repository's tests
    "softmax": 360,  # grouped softmax compared with SDPA, FlashAttention, FlexAttention
    "retrieval": 150,  # search, attention to blocks, gathering
    "tiers": 160,  # device and page-locked tiers
    "train": 200,  # training steps
    "readers": 320,  # decoding of Hugging Face decoders
    "decode": 400,  # decoding steps of the landmark model
    "index": 200,  # FAISS compared with the exact search
}


def main() -> None:
    options = read_options()
    setting = Setting(options.device, options.tiny, options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    state = State(options.out)
    asked = dict(vars(setting))
    if state.content.setdefault("asked", asked) != asked:
        sys.exit(f"error: {state.json} was begun with {state.content['asked']}; name another --out")
    for name in options.again:
        state.content["parts"].pop(name, None)
    state.content["machines"].append({"begun": time.strftime("%Y-%m-%d %H:%M:%S")})
    state.save()
    if not setting.cuda:  # its processes are forks, which need not import all of it again
        prepare(setting)
    ends = time.monotonic() + options.seconds
    try:
        for name in options.parts:
            while state.left(name) != []:
                if time.monotonic() + LEAST > ends:
                    print(f"no time left for {name}: the next call goes on from here", flush=True)
                    return
                run(name, setting, state, ends)
    finally:
        print(f"\n{state.report()}\nwritten: {state.json}, {state.markdown}")


def run(name: str, setting: Setting, state: State, ends: float) -> None:
    """One process of a part: until it ends, or the time of the part or of the call is over."""
    # a machine that is busy with other things may take its time over what measures nothing
    limit = PARTS[name] * (20 if setting.tiny else 1)
    print(f"{name} ...", flush=True)
    context: Any = multiprocessing.get_context("spawn" if setting.cuda else "fork")
    process = context.Process(target=work, args=(name, setting, state.json.parent))
    began = time.monotonic()
    over = began + limit - state.part(name)["seconds"]
    process.start()
    try:
        process.join(max(0.0, min(over, ends) - began))
        late = process.is_alive()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    begun = len(state.part(name)["found"])
    state.content = State(state.json.parent).content
    part = state.part(name)
    part["seconds"] += time.monotonic() - began
    if late and over > ends:
        print(f"{name}: stopped; the next call goes on from here", flush=True)
        return state.save()
    why = f"no time left of {limit} s" if late else f"the process ended ({process.exitcode})"
    left = state.left(name)
    if left is None or (left and not late and len(part["found"]) == begun):
        part["error"] = f"it did not begin: {why}; see gpu.log"
    for case in left or []:
        if late or case in part["found"]:
            part["found"].setdefault(case, {}).update(seconds=0.0, error=why)
    for case, found in part["found"].items():
        if "error" in found:
            print(f"{name}: {case}: {found['error']}", flush=True)
    state.save()


def read_options() -> argparse.Namespace:
    options = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--out", type=Path, default=Path("gpu-results"), help="(gpu-results)")
    options.add_argument("--device", default="cuda")
    options.add_argument("--tiny", action="store_true", help="sizes that say nothing, in seconds")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--seconds", type=float, default=540, help="of this call (540)")
    some: dict[str, Any] = {"nargs": "+", "choices": list(PARTS), "metavar": "PART"}
    options.add_argument("--parts", default=list(PARTS), help=", ".join(PARTS), **some)
    options.add_argument("--again", default=[], help="run these again", **some)
    return options.parse_args()


if __name__ == "__main__":
    main()
