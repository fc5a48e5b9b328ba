"""Decoding of Hugging Face decoders of random weights in the shapes of Llama 3, with passages of a
memory and with the same text in the stock model's prompt. How soon they answer and how fast they
ingest: benchmarks.first_token.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common.random_decoder import SHAPES, made_up_words, random_decoder
from benchmarks.common.stock import Stock
from benchmarks.gpu.part import Case, Row, Setting
from memstore import MemoryStore

CHUNK = 4096  # tokens that the stock model reads at once
TOP_K = 8


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        return [("tiny", partial(decode, setting, "tiny", 200))]
    return [(shape, partial(decode, setting, shape, 1 << 15)) for shape in ("1B", "8B")]


def decode(setting: Setting, shape: str, tokens: int) -> Iterator[Row]:
    """The rows of one shape."""
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.passages.adaptation import Adaptation
    from memstore.model.passages.selector import Selector

    dtype = torch.bfloat16 if setting.cuda else torch.float32
    size = tokens + CHUNK
    model, tokenizer = random_decoder(SHAPES[shape], size, setting.place, dtype, setting.seed)
    adaptation = Adaptation(Selector(), top_k=TOP_K)
    reader = HuggingFacePassageModel(model, tokenizer, adaptation, weights=f"random {shape}")
    stock = Stock(model, CHUNK)
    ids = reader.tokenizer.encode(made_up_words(tokens, setting.seed))[:tokens]
    text = reader.tokenizer.decode(ids)
    question = " ".join(text.split()[len(text.split()) // 2 :][:12])
    decoded = 2 if setting.tiny else 64
    weights = sum(p.nbytes for p in model.parameters())

    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        options: dict[str, Any] = {
            "host_budget": (1 << 24) if setting.tiny else 4 << 30,
            "codec": "raw",
        }
        if setting.cuda or setting.tiny:
            options |= {"device": setting.device, "device_budget": options["host_budget"] // 2}
        store = stack.enter_context(
            MemoryStore.create(
                Path(directory) / "m", reader.signature, selector=reader.keeps, **options
            )
        )
        reader.ingest(text[: len(text) // 8], store, name="book", keep="kv")

        def answered(retrieve: bool) -> float:
            """Seconds a token, of those after the first."""
            with reader.session(
                store, ["book"], retrieve=retrieve, top_k=TOP_K, score_range=1e9
            ) as session:
                state = session.ask(question, lambda: None)
                token = int(session.logits(state[None]).argmax())
                began = time.perf_counter()
                for _ in range(decoded):
                    state = session.read_token(token)
                    token = int(reader.logits(state[None], quantized=True).argmax())
                return (time.perf_counter() - began) / decoded

        asked = reader.tokenizer.encode(question)
        blocks = [*ids[: TOP_K * 64], *asked]
        what = f"{shape}: a decoding step"
        runs: dict[str, Callable[[], float]] = {
            f"memory, {TOP_K} blocks": partial(answered, True),
            "the reader without memory": partial(answered, False),
            f"stock, {TOP_K} blocks as text": partial(stock.decode, blocks, decoded),
            "stock, the text in its cache": partial(stock.decode, [*ids, *asked], decoded),
        }
        for name, run in runs.items():
            times = [run() for _ in range(1 if setting.tiny else 3)]
            moved = weights + (_cached(model, tokens) if "in its cache" in name else 0)
            yield Row(what, name, median(times), 0, moved)
    if shape != "8B":  # it compiles for a minute
        fresh, _ = random_decoder(SHAPES[shape], size, setting.place, dtype, setting.seed)
        compiled = Stock(fresh, CHUNK).compiled_decode(blocks, decoded)
        yield Row(
            what, f"stock, {TOP_K} blocks as text, static cache, compiled", compiled, 0, weights
        )


def _cached(model: Any, tokens: int) -> int:
    """Bytes of a stock cache of `tokens` tokens."""
    config = model.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return each * tokens * int(model.dtype.itemsize)
