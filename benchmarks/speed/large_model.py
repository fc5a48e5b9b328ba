"""Large models of random weights, and single decoding steps of theirs."""

import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from memstore.model.landmark.byte_tokenizer import Tokenizer
from memstore.model.landmark.checkpoint import SHIPPED
from memstore.model.landmark.config import PRESETS, ModelConfig
from memstore.model.landmark.landmark_model import LandmarkModel
from memstore.model.landmark.landmark_session import LandmarkSession
from memstore.model.landmark.transformer import Transformer
from memstore.store.memory_store import MemoryStore

# of Touvron et al., arXiv 2302.13971, with two more ids; the output matrix is the embedding
_LLAMA = ModelConfig(
    vocab_size=32_002,
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    mlp_size=11_008,
    block_size=63,
    qk_norm=False,
    norm_eps=1e-6,
)
SHAPES = {
    "llama-7b": _LLAMA,
    "llama-3.2-1b": replace(
        _LLAMA,
        vocab_size=128_258,
        num_layers=16,
        hidden_size=2048,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        rope_base=500_000.0,
        norm_eps=1e-5,
        memory_layers=None,
    ),
    "llama-3.1-8b": replace(
        _LLAMA,
        vocab_size=128_258,
        num_kv_heads=8,
        mlp_size=14_336,
        rope_base=500_000.0,
        norm_eps=1e-5,
        memory_layers=None,
    ),
    "test": PRESETS["test"],
}
GIB = 1 << 30
PROMPT = 8  # tokens before the first that is timed


def available(device: torch.device) -> int:
    """Bytes that are free on a device, or of main memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def rates(device: torch.device) -> dict[str, float]:
    """Bytes a second, at best, of a streaming sum on the device and of one large copy from main
    memory to it.
    """
    size, pinned = (GIB, True) if device.type == "cuda" else (GIB // 4, False)
    there = torch.zeros(size // 4, device=device)
    here = torch.zeros(size // 4, pin_memory=pinned)
    found = {}
    for name, work in (
        ("streamed", lambda: there.sum()),
        ("up", lambda: there.copy_(here, non_blocking=True)),
    ):
        times = []
        for _ in range(12):
            wait(device)
            began = time.perf_counter()
            work()
            wait(device)
            times.append(time.perf_counter() - began)
        found[name] = size / min(times)
    return found


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def random_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, seed: int
) -> Transformer:
    """A model that is made where it computes."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = Transformer(config)
    finally:
        torch.set_default_dtype(before)
    model.initialise(torch.Generator(device).manual_seed(seed))
    return model.requires_grad_(False).eval()


class Steps:
    """Steps of sessions over one store, and by name of the run what their lookups found."""

    def __init__(
        self, model: Transformer, store: MemoryStore, documents: list[tuple[int, int]]
    ) -> None:
        self.model = LandmarkModel(model, Tokenizer.load(SHIPPED / "tokenizer.json"))
        self.store, self.documents = store, documents
        self.counts: dict[str, Counter[str]] = defaultdict(Counter)

    def run(self, ids: list[int], name: str = "") -> float:
        """Seconds a token of ids behind their first PROMPT, read one by one in a new session."""
        with LandmarkSession(self.model, self.model.lookup, self.store, self.documents) as session:
            session.feed(ids[:PROMPT])
            tiers, lookups = self.store.tier_stats(), session.attention.lookups.done
            wait(self.model.device)
            began = time.perf_counter()
            for token in ids[PROMPT:]:
                next(session.generate(session.feed([token])[-1], 1))
            seconds = time.perf_counter() - began
            found = {
                "tokens": len(ids) - PROMPT,
                "lookups": session.attention.lookups.done - lookups,
            }
            for tier, counts in self.store.tier_stats().items():
                found |= {
                    f"{tier} {event}": int(counts[event] - tiers[tier][event])
                    for event in ("hits", "misses")
                }
            self.counts[name].update(found)
        return seconds / found["tokens"]


class FullAttention:
    """The same model over a cache of random keys and values, to which every token's are added."""

    def __init__(self, model: Transformer, tokens: int, room: int) -> None:
        config, weight = model.config, model.norm.weight
        shape = (2, 1, config.num_kv_heads, tokens + room, config.head_dim)
        self.model, self.tokens = model, tokens
        self.cache = [weight.new_empty(shape).normal_() for _ in range(config.num_layers)]
        self._read = 0

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, H, 1, D]; a KV head's query heads become rows, so that a key is read once for all
        of them.
        """
        config, end = self.model.config, self.tokens + self._read
        # the cache's keys are random anyway
        cos, sin = self.model.rope.angles(self._read, self._read + 1, q)
        keys, values = self.cache[layer]
        keys[:, :, end : end + 1] = self.model.rope.rotate(k, cos, sin)
        values[:, :, end : end + 1] = v
        rows = self.model.rope.rotate(q, cos, sin).view(1, config.num_kv_heads, -1, config.head_dim)
        output = F.scaled_dot_product_attention(
            rows, keys[:, :, : end + 1], values[:, :, : end + 1]
        )
        return output.reshape(q.shape)

    @torch.no_grad()
    def run(self, ids: list[int]) -> float:
        """As Steps.run."""
        device = self.model.norm.weight.device
        self._read = 0
        began = 0.0
        for n, token in enumerate(ids):
            if n == PROMPT:
                wait(device)
                began = time.perf_counter()
            hidden = self.model.hidden(torch.tensor([[token]], device=device), self._attend)
            int(self.model.logits(hidden[0])[0].argmax())
            self._read += 1
        return (time.perf_counter() - began) / len(ids[PROMPT:])
