"""Which files of memstore does a question to a Hugging Face model cross before its first token,
asked in Python and asked of a server that streams its answer?

A file is crossed if one of its functions runs, in any thread, after `ask` was called or after the
request was sent; a file that is only imported is not. The model is a random decoder of two layers
that has answered once before, and its memory holds a few sentences in a temporary directory.

    python -m benchmarks.crossed
"""

import argparse
import http.client
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch
import uvicorn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import memstore
from memstore.hf.passage_adapter import HuggingFacePassageModel
from memstore.model.landmark.landmark_model import SHIPPED
from memstore.serve.app import configured
from memstore.serve.service import Service

_TEXT = "The red fox lives behind the old mill. Its lamp burns all night. The north gate is shut."
_ROOT = Path(memstore.__file__).parent
_QUESTION = "Where does the red fox live?"


class Crossed:
    """The files of memstore whose functions ran between `start` and `stop`, in the order of their
    first calls: in this thread, and in threads started after this object was made.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._on = False
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def start(self) -> None:
        self.files, self._on = {}, True

    def stop(self, *ignored: Any) -> None:
        self._on = False

    def report(self, until: str) -> str:
        """The crossed files, one a line, and their number."""
        return "\n".join([*self.files, f"{len(self.files)} files before {until}"])

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._on or event != "call" or frame.f_code.co_name == "<module>":
            return
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_ROOT):
            self.files.setdefault(str(file.relative_to(_ROOT.parent)))


def tiny_model() -> HuggingFacePassageModel:
    """A random Llama with the tokenizer of the model that ships, as `memstore.wrap` returns it."""
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
    model = memstore.wrap(LlamaForCausalLM(config).eval(), tokenizer)
    assert isinstance(model, HuggingFacePassageModel)
    return model


@contextmanager
def served(service: Service) -> Iterator[int]:
    """The port of a server in a thread of this process."""
    config = configured(service)
    config.port = 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def stream(port: int) -> Iterator[dict[str, Any]]:
    """The chunks of one streamed answer."""
    messages = [{"role": "user", "content": _QUESTION}]
    body = {"model": "memstore", "messages": messages, "stream": True, "max_tokens": 16}
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(response.read().decode())
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    model, crossed = tiny_model(), Crossed()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "memory"
        with memstore.MemoryStore.create(path, model.signature, selector=model.keeps) as store:
            model.ingest(_TEXT, store, name="text")
            model.ask(_QUESTION, store, max_new_tokens=1)  # does what happens once a process
            crossed.start()
            model.ask(_QUESTION, store, max_new_tokens=1, on_text=crossed.stop)
            print(crossed.report("the first token of an answer"))
            with closing(Service(model, store)) as service, served(service) as port:
                for _ in stream(port):
                    pass
                crossed.start()
                for chunk in stream(port):
                    if any(choice["delta"].get("content") for choice in chunk["choices"]):
                        crossed.stop()
    print("\n" + crossed.report("the first token of a streamed answer"))


if __name__ == "__main__":
    main()
