"""The options that benchmarks share, and the model under test."""

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.reading import MEMORY, AnyModel, load_baseline
from memstore import LandmarkModel, load_model


def add(
    options: argparse.ArgumentParser, name: str, default: Any = None, about: str = "", **more: Any
) -> None:
    """An option of the type that its default has; of a list's items, if that is one."""
    if isinstance(default, list | tuple):
        more = {"nargs": "+"} | more
    kind = type(default[0] if isinstance(default, list | tuple) and default else default)
    if kind in (int, float, bool) and "type" not in more:
        more["type"] = kind
    options.add_argument(name, default=default, help=about or None, **more)


def plain_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; the module's docstring is its help."""
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, help="write the results here as JSON")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--threads", type=int, default=1, help="threads of torch")
    return options


def parser(doc: str | None) -> argparse.ArgumentParser:
    """`plain_parser` with --text, --model and --work, for benchmarks of a landmark model."""
    options = plain_parser(doc)
    options.add_argument(
        "--text",
        nargs="+",
        required=True,
        help="files to read from: .jsonl.zst (one book a line) or .txt",
    )
    options.add_argument("--model", help="directory of a model (default: the one that ships)")
    options.add_argument(
        "--work", type=Path, help="keep memories in this directory (default: a temporary one)"
    )
    return options


def prepare(threads: int) -> None:
    """Settings of a measuring process."""
    torch.set_num_threads(threads)


def load(options: argparse.Namespace) -> LandmarkModel:
    """Load the landmark model under test."""
    prepare(options.threads)
    return load_model(options.model)


def named_model(name: str | None) -> AnyModel:
    """The model that ships (None), one that `memstore train` wrote, or one of another memory."""
    if name and (Path(name) / MEMORY).is_file():
        return load_baseline(name)
    return load_model(name)
