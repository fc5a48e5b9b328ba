"""Which files of memstore does a question to a Hugging Face model cross before its first token?

A file is crossed where one of its functions runs, from `ask` on; what only imports is not. The
model is a random decoder of two layers, asked once before; its memory a few sentences in a
directory that goes at the end.

    python -m benchmarks.house.crossed
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import memstore
from memstore.model.landmark.checkpoint import SHIPPED

_TEXT = "The red fox lives behind the old mill. Its lamp burns all night. The north gate is shut."
_ROOT = Path(memstore.__file__).parent
_QUESTION = "Where does the red fox live?"


class Crossed:
    """The files of memstore whose functions ran between `start` and `stop`, in the order of their
    first calls.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}

    def start(self) -> None:
        sys.setprofile(self._called)

    def stop(self, *told: Any) -> None:
        sys.setprofile(None)

    def _called(self, frame: FrameType, event: str, told: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_name != "<module>" and file.is_relative_to(_ROOT):
            self.files.setdefault(str(file.relative_to(_ROOT.parent)))


def tiny_model() -> Any:
    """A random Llama with the tokenizer of the model that ships, as `wrap` gives it."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return memstore.wrap(LlamaForCausalLM(config).eval(), tokenizer)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    model = tiny_model()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "memory"
        with memstore.MemoryStore.create(path, model.signature, selector=model.keeps) as store:
            model.ingest(_TEXT, store, name="text")
            model.ask(_QUESTION, store, max_new_tokens=1)  # what is done once only is done here
            crossed = Crossed()
            crossed.start()
            model.ask(_QUESTION, store, max_new_tokens=1, on_text=crossed.stop)
    print("\n".join(crossed.files))
    print(f"{len(crossed.files)} files before the first token")


if __name__ == "__main__":
    main()
