"""The passage model under test, by the directory of a Hugging Face decoder."""

from pathlib import Path

from benchmarks.real.prompting import DTYPES
from memstore.hf.load import load_reader
from memstore.hf.passage_adapter import HuggingFacePassageModel


def passage_model(directory: Path | str, dtype: str = "float32") -> HuggingFacePassageModel:
    """The model, its weights in this dtype; ends the command for one that is trained with
    landmarks. Raises as `load_reader` does.
    """
    reader = load_reader(directory, dtype=DTYPES[dtype])
    if not isinstance(reader, HuggingFacePassageModel):
        raise SystemExit(f"{directory} is trained with landmarks: it chooses no passages")
    return reader
