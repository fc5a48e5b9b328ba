"""The passage model under test, by the directory of a Hugging Face decoder, and the options that
benchmarks of one share.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from benchmarks.common.options import add, plain_parser
from benchmarks.real.prompting import DTYPES
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.lookup_settings import CAUTION


def passage_model(
    directory: Path | str,
    dtype: str = "float32",
    caution: float = CAUTION,
    weights: str = "auto",
    device: str = "cpu",
) -> HuggingFacePassageModel:
    """The model, its weights in this dtype; ends the command for one that is trained with
    landmarks. caution: of its lookups. weights: that tokens are generated with. Raises as
    `load_reader` does.
    """
    reader = load_reader(directory, device=device, dtype=DTYPES[dtype], weights=weights)
    if not isinstance(reader, HuggingFacePassageModel):
        raise SystemExit(f"{directory} is trained with landmarks: it chooses no passages")
    reader.lookup = replace(reader.lookup, caution=caution)
    return reader


def parser(doc: str | None, dtype: str = "float32") -> argparse.ArgumentParser:
    """A parser with --text, --model and --dtype. dtype: of the weights, where none is given."""
    options = plain_parser(doc)
    options.add_argument("--text", nargs="+", required=True, help="books: .jsonl.zst or .txt")
    options.add_argument("--model", required=True, help="a directory of Hugging Face's make")
    add(options, "--dtype", dtype, "of the weights", choices=DTYPES)
    return options
