"""Hugging Face decoders of random weights in the shapes of Llama 3: reading in, the first token of
an answer, and decoding, from a memory and with the same text in the stock model's prompt.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch

from benchmarks.common.stock import Stock
from benchmarks.common.tables import tokens_text
from benchmarks.gpu.part import Case, Row, Setting
from memstore import MemoryStore
from memstore.model.landmark.checkpoint import SHIPPED

_LLAMA = {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}
SHAPES: dict[str, dict[str, Any]] = {
    "1B": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128_256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128_256, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 2100,
    },
}  # fmt: skip
CHUNK = 4096  # tokens that the stock model reads at once
TOP_K = 8


def cases(setting: Setting) -> list[Case]:
    if setting.tiny:
        return [("tiny", partial(read, setting, "tiny", 200, 200))]
    # the prompt's tokens, and how many of them the memory reads in
    return [
        ("1B", partial(read, setting, "1B", 1 << 15, 1 << 14)),
        ("8B", partial(read, setting, "8B", 1 << 15, 1 << 13)),
    ]


def made(setting: Setting, shape: dict[str, Any], tokens: int) -> tuple[Any, Any]:
    """A decoder where it computes, and a tokenizer whose ids it has."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    config = AutoConfig.for_model(
        "llama",
        max_position_embeddings=tokens + CHUNK,
        **shape | _LLAMA,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(setting.seed)
    with setting.place:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if setting.cuda else torch.float32
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    return model.to(setting.place).eval(), tokenizer


def words(count: int, seed: int) -> str:
    """Text of made-up words, each its own question."""
    rng = Random(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u")]
    return " ".join("".join(rng.choices(syllables, k=rng.randint(2, 4))) for _ in range(count))


def read(setting: Setting, shape: str, tokens: int, part: int) -> Iterator[Row]:
    """The rows of one shape. part: tokens whose reading in is timed by itself, before the rest."""
    from memstore.hf.passage_adapter import HuggingFacePassageModel
    from memstore.model.passages.adaptation import Adaptation
    from memstore.model.passages.selector import Selector

    model, tokenizer = made(setting, SHAPES[shape], tokens)
    began = time.perf_counter()
    adaptation = Adaptation(Selector(), top_k=TOP_K)
    reader = HuggingFacePassageModel(model, tokenizer, adaptation, weights=f"random {shape}")
    yield Row(f"{shape}: a reader over the model", "ours", time.perf_counter() - began)
    stock = Stock(model, CHUNK)
    text = words(tokens, setting.seed)
    ids = reader.tokenizer.encode(text)[:tokens]
    text = reader.tokenizer.decode(ids)
    question = " ".join(text.split()[len(text.split()) // 2 :][:12])
    repeats, decoded = (1, 2) if setting.tiny else (5, 64)
    weights = sum(p.nbytes for p in model.parameters())
    layers = model.get_decoder().layers  # logits are of one token
    matrices = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    size = f"memory of {tokens_text(tokens)} tokens"

    def timed(work: Callable[[], object], times: int = repeats) -> float:
        """Median seconds, after once that does not count."""
        taken = []
        for _ in range(times + 1):
            setting.meter.wait()
            began = time.perf_counter()
            work()
            setting.meter.wait()
            taken.append(time.perf_counter() - began)
        return median(taken[1:])

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
        first = reader.tokenizer.decode(ids[:part])
        reader.ingest(first[: len(first) // 8], store, name="warm up")
        began = time.perf_counter()
        reader.ingest(first, store, name="first")
        taken = time.perf_counter() - began
        operations = 2.0 * matrices * part
        note = f"{part / taken:,.0f} tokens/s, onto the disk, raw"
        yield Row(f"{shape}: reading {tokens_text(part)} in", "ours", taken, operations, note=note)
        prefill = timed(partial(stock.read, ids[:part]), 2)
        note = f"{part / prefill:,.0f} tokens/s, stored nowhere"
        what = f"{shape}: reading {tokens_text(part)} in"
        yield Row(what, "stock, prefill", prefill, operations, note=note)
        reader.ingest(text, store, name="book")

        def answered(retrieve: bool, then: int) -> float:
            """Seconds a token, of those after the first."""
            with reader.session(
                store, ["book"], retrieve=retrieve, top_k=TOP_K, score_range=1e9
            ) as session:
                state = session.ask(question, lambda: None)
                token = int(session.logits(state[None]).argmax())
                began = time.perf_counter()
                for _ in range(then):
                    state = session.read_token(token)
                    token = int(reader.logits(state[None], quantized=True).argmax())
                return (time.perf_counter() - began) / max(1, then)

        what = f"{shape}: first token, {size}"
        ours = timed(partial(answered, True, 0))
        tiers = {
            t: f"{c['hits']:,} hits, {c['misses']:,} misses" for t, c in store.tier_stats().items()
        }
        yield Row(what, f"memory, {TOP_K} blocks", ours, note=f"{tiers}")
        asked = reader.tokenizer.encode(question)
        blocks = [*ids[: TOP_K * 64], *asked]
        for name, prompt in (
            ("stock, the text in its prompt", [*ids, *asked]),
            (f"stock, {TOP_K} blocks as text", blocks),
        ):
            taken = timed(partial(stock.read, prompt), 2 if len(prompt) > CHUNK else repeats)
            note = f"{taken / ours:.2f} of the memory's"
            yield Row(what, name, taken, 2.0 * matrices * len(prompt), note=note)
        what = f"{shape}: a decoding step"
        runs: dict[str, Callable[[], float]] = {
            f"memory, {TOP_K} blocks": partial(answered, True, decoded),
            "the reader without memory": partial(answered, False, decoded),
            f"stock, {TOP_K} blocks as text": partial(stock.decode, blocks, decoded),
            "stock, the text in its cache": partial(stock.decode, [*ids, *asked], decoded),
        }
        for name, run in runs.items():
            times = [run() for _ in range(1 if setting.tiny else 3)]
            moved = weights + (_cached(model, tokens) if "in its cache" in name else 0)
            yield Row(what, name, median(times), 0, moved)
    if shape != "8B":  # it compiles for a minute
        fresh, _ = made(setting, SHAPES[shape], tokens)
        compiled = Stock(fresh, CHUNK).compiled_decode(blocks, decoded)
        yield Row(
            what, f"stock, {TOP_K} blocks as text, static cache, compiled", compiled, 0, weights
        )


def _cached(model: Any, tokens: int) -> int:
    """Bytes of a stock cache of so many tokens."""
    config = model.config
    each = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return each * tokens * int(model.dtype.itemsize)
