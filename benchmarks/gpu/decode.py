"""Decoding steps of landmark models in the shapes of large ones, with random weights: without a
memory and from one.

Every token is given, not sampled, and the gate's cutoff is 0, so that every row of every memory
layer looks up. A step goes through the layers, the logits and the choice of the next token.

no memory       the open chunk only
memory, first   a session over a memory whose units all lie in the host tier and whose landmark keys
                are all searched; the tokens are new, so their units come up from main memory
memory, again   the same tokens in a new session, whose units the device tier has, as far as it kept
                them

A step's floor is its bytes at measured rates: weights, landmark keys, units, and
units that come up from main memory.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median

import torch
from torch import Tensor

from benchmarks.common.tables import tokens_text
from benchmarks.gpu.part import Case, Row, Setting
from memstore.model.landmark.landmark_model import SHIPPED, LandmarkModel
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.model.landmark.transformer import PRESETS, ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer
from memstore.store.memory_store import MemoryStore
from memstore.tiers.raw_bits import torch_dtype

# Llama 3's shapes with two more ids and landmarks; the output matrix is the embedding
_8B = ModelConfig(
    vocab_size=128_258,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=14_336,
    block_size=63,
    rope_base=500_000.0,
    norm_eps=1e-5,
    qk_norm=False,
)
SHAPES = {
    "1B": replace(
        _8B, num_layers=16, hidden_size=2048, head_dim=64, mlp_size=8192, memory_layers=None
    ),
    "8B": _8B,
    "tiny": PRESETS["test"],
}
PROMPT = 8  # tokens before the first that is timed
_AT_ONCE = 512  # blocks drawn at a time


def cases(setting: Setting) -> list[Case]:
    shapes = [("tiny", 1 << 10)] if setting.tiny else [("1B", 1 << 17), ("8B", 1 << 17)]
    return [
        (f"{name}, {tokens_text(tokens)}", partial(steps, setting, name, tokens))
        for name, tokens in shapes
    ]


def steps(setting: Setting, name: str, tokens: int) -> Iterator[Row]:
    """The three kinds of steps of one shape and length of memory."""
    config = replace(SHAPES[name], cmt_cutoff=0.0)
    model = random_model(config, setting)
    signature, layers = config.signature("random", "none"), config.memory_layers or ()
    blocks = -(-tokens // config.block_size)
    unit = 2 * config.block_size * config.head_dim * torch_dtype(config.kv_dtype).itemsize
    own = 2 * (config.chunk_blocks + config.top_k) * config.num_layers * config.num_kv_heads
    units = blocks * len(layers) * config.num_kv_heads
    least = config.top_k * config.num_heads * PROMPT * unit
    count, repeats = (2, 1) if setting.tiny else (16, 5)
    rng = Random(setting.seed)
    rounds = [
        [rng.randrange(config.vocab_size - 2) for _ in range(PROMPT + count)]
        for _ in range(repeats + 1)
    ]
    what = f"a step of {name}, memory of {tokens_text(tokens)}"
    weights = sum(parameter.nbytes for parameter in model.parameters())
    stream, up = setting.meter.stream, setting.meter.load
    with MemoryStore.in_memory(
        signature,
        host_budget=(units + own) * unit,
        device_budget=max(units * unit // 4, least),
        device=setting.device,
        index="packed",
    ) as store:
        attached = fill(store, config, blocks, setting)
        sessions = Sessions(model, store, setting)
        sessions.seconds(rounds[0], [])  # warm up
        alone = [sessions.seconds(ids, []) for ids in rounds[1:]]
        yield Row(what, "no memory", median(alone), 0, weights, floor=weights / stream)
        sessions.seconds(rounds[0], [attached])
        found: dict[str, list[tuple[float, float, float]]] = {"first": [], "again": []}
        for ids in rounds[1:]:
            for times in found.values():
                before = store.tier_stats()["device"]
                taken = sessions.seconds(ids, [attached])
                after = store.tier_stats()["device"]
                missed = (after["misses"] - before["misses"]) / count
                times.append((taken, (after["hits"] - before["hits"]) / count + missed, missed))
        keys = blocks * len(layers) * config.num_kv_heads * config.head_dim * 4.0
        for times_name, times in found.items():
            seconds, wanted, missed = map(median, zip(*times))
            size = weights + keys + wanted * unit
            note = f"{wanted:,.0f} units, {missed * unit / 1e6:,.1f} MB up"
            note += f", {seconds / median(alone):.2f} of no memory"
            floor = size / stream + missed * unit / up
            yield Row(what, f"memory, {times_name}", seconds, 0, size, floor=floor, note=note)


def random_model(config: ModelConfig, setting: Setting) -> Transformer:
    """A model that is made where it computes."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if setting.cuda else torch.float32)
        with setting.place:
            model = Transformer(config)
    finally:
        torch.set_default_dtype(before)
    model.initialise(torch.Generator(setting.place).manual_seed(setting.seed))
    return model.requires_grad_(False).eval()


def fill(store: MemoryStore, config: ModelConfig, blocks: int, setting: Setting) -> tuple[int, int]:
    """Put random blocks into the host tier and their landmark keys into the index; returns the
    (document, blocks) to attach.
    """
    generator = torch.Generator(setting.place).manual_seed(setting.seed)
    dtype = torch_dtype(config.kv_dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=setting.place).to(dtype)

    scratch = store.retrieval.session_document()
    heads, size, dim = config.num_kv_heads, config.block_size, config.head_dim
    for layer in config.memory_layers or ():
        for first in range(0, blocks, _AT_ONCE):
            n = min(_AT_ONCE, blocks - first)
            k, v = (draw(n, heads, size, dim).cpu() for _ in range(2))
            scratch.add(layer, k, v, draw(n, heads, dim))
    return scratch.document, blocks


class Sessions:
    """Steps of sessions over one memory."""

    def __init__(self, model: Transformer, store: MemoryStore, setting: Setting) -> None:
        self.wait = setting.meter.wait
        self.model = LandmarkModel(model, Tokenizer.load(SHIPPED / "tokenizer.json"))
        self.store = store

    def seconds(self, ids: Sequence[int], documents: list[tuple[int, int]]) -> float:
        """Seconds a token of those after PROMPT, read one by one in a new session."""
        given = self.model, self.model.lookup, self.store, documents
        with LandmarkSession(*given) as session:
            session.feed(list(ids[:PROMPT]))
            self.wait()
            began = time.perf_counter()
            for token in ids[PROMPT:]:
                next(session.generate(session.feed([token])[-1], 1))
            return (time.perf_counter() - began) / len(ids[PROMPT:])
