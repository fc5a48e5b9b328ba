"""The other memories compared with float64 transcriptions of their papers, and properties that hold
for any weights.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.baselines.config import MEMORIES, MemoryConfig
from benchmarks.baselines.infini import InfiniPast
from benchmarks.baselines.memorizing import MemorizingPast
from benchmarks.baselines.past import Past
from benchmarks.baselines.reading import MEMORY, load_baseline, save_baseline
from benchmarks.baselines.transformer import BaselineTransformer
from memstore import load_model
from memstore.errors import InvalidConfig, InvalidWeights
from memstore.model.landmark.landmark_model import SHIPPED
from memstore.model.landmark.transformer import DecoderLayer, ModelConfig, Transformer
from memstore.model.tokenizer import Tokenizer

CONFIG = ModelConfig(
    vocab_size=40,
    num_layers=3,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_size=24,
    block_size=4,
    chunk_blocks=2,
    kv_dtype="float64",
)
GROUP = 2
SEGMENT = 8


def decoder(memory: str | MemoryConfig, seed: int = 0, **changes: object) -> BaselineTransformer:
    """A float64 decoder whose parameters, and those of its memory, are random."""
    config = MEMORIES[memory] if isinstance(memory, str) else memory
    model = BaselineTransformer(CONFIG, replace(config, **changes)).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.data.normal_(std=0.4, generator=generator)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(38, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def read(model: BaselineTransformer, ids: Tensor, **settings: object) -> Tensor:
    return model.read(ids, model.begin(**settings))


# The papers, transcribed


def turned(x: Tensor, position: int) -> Tensor:
    """One head's query or key [D] under RoPE, pairs (i, i + D / 2)."""
    half = len(x) // 2
    rates = CONFIG.rope_base ** (-torch.arange(0, len(x), 2).float() / len(x))
    angle = position * rates.double()
    pairs = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag])


Score = Callable[[int, int, Tensor, Tensor, int, int], Tensor]


def rotary(layer: int, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
    return turned(q, i) @ turned(k, j) / math.sqrt(len(q))


def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, score: Score) -> Tensor:
    """Attention of q [H, n, D], the last n positions, over k, v [Hkv, S, D], computed in loops."""
    before = k.shape[1] - q.shape[1]
    output = torch.zeros_like(q)
    for head in range(q.shape[0]):
        own_k, own_v = k[head // GROUP], v[head // GROUP]
        for row in range(q.shape[1]):
            i = before + row
            s = [score(layer, head, q[head, row], own_k[j], i, j) for j in range(i + 1)]
            output[head, row] = torch.stack(s).softmax(0) @ own_v[: i + 1]
    return output


@torch.no_grad()
def transformer_xl(
    model: Transformer, ids: Tensor, segment: int, cache: int, score: Score
) -> Tensor:
    """Dai et al., section 3.2, for one text [T]: [SG(H_{t-1}); H_t] in every layer."""
    kept: list[Tensor] = [torch.zeros(0, CONFIG.hidden_size).double()] * CONFIG.num_layers
    states = []
    for start in range(0, len(ids), segment):
        x = model.embedding.weight[ids[start : start + segment]]
        for layer, block in enumerate(model.blocks):
            assert isinstance(block, DecoderLayer)
            seen = torch.cat([kept[layer], x])
            kept[layer] = seen[max(0, len(seen) - cache) :]
            q, _, _ = (part[0] for part in block.project(x[None]))
            _, k, v = (part[0] for part in block.project(seen[None]))
            mixed = attention(layer, q, k, v, score).transpose(0, 1).flatten(1)
            x = block.mlp(x + block.o_proj(mixed))
        states.append(model.norm(x))
    return torch.cat(states)


def infini(
    segments: list[tuple[Tensor, Tensor, Tensor]], share: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Munkhdalai et al., equations 1 to 10, for one text and layer: q [H, n, D], k, v [Hkv, n, D]
    of each segment, sigmoid(beta) [H]; outputs [H, T, D], and the matrices after every segment.
    """

    def s(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    dim = segments[0][0].shape[-1]
    matrices = [torch.zeros(dim, dim).double() for _ in range(CONFIG.num_kv_heads)]
    norms = [torch.zeros(dim).double() for _ in range(CONFIG.num_kv_heads)]
    outputs, after = [], []
    for number, (q, k, v) in enumerate(segments):
        local = attention(0, q, k, v, rotary)
        mixed = torch.zeros_like(q)
        for head in range(q.shape[0]):
            matrix, z = matrices[head // GROUP], norms[head // GROUP]
            for row in range(q.shape[1]):
                sigma = s(q[head, row])
                memory = sigma @ matrix / (sigma @ z) if number else torch.zeros(dim).double()
                gate = share[head]
                mixed[head, row] = gate * memory + (1 - gate) * local[head, row]
        outputs.append(mixed)
        for head in range(len(matrices)):
            old, old_z = matrices[head].clone(), norms[head].clone()
            for row in range(k.shape[1]):
                sigma, value = s(k[head, row]), v[head, row]
                if number:
                    value = value - sigma @ old / (sigma @ old_z)
                matrices[head] = matrices[head] + torch.outer(sigma, value)
                norms[head] = norms[head] + sigma
        after.append(torch.stack(matrices))
    return torch.cat(outputs, 1), after


def memorized(q: Tensor, k: Tensor, v: Tensor, top_k: int) -> Tensor:
    """Wu et al., section 3.2, for one text: of k, v [Hkv, M, D] the top_k nearest of each row of q
    [H, n, D] under a softmax of their own.
    """
    output = torch.zeros_like(q)
    for head in range(q.shape[0]):
        for row in range(q.shape[1]):
            s = k[head // GROUP] @ q[head, row]
            near = sorted(range(len(s)), key=lambda j: -float(s[j]))[:top_k]
            output[head, row] = s[near].softmax(0) @ v[head // GROUP, near]
    return output


def projections(seed: int, segments: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v [1, ..] of segments."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, SEGMENT, CONFIG.head_dim) for heads in (4, 2, 2)]
    return [
        tuple(torch.randn(shape, generator=generator).double() for shape in shapes)
        for _ in range(segments)
    ]  # type: ignore[misc]


def attended(past: Past, layer: int, segments: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """What a layer attends to, [H, T, D]; other layers attend to the same."""
    outputs = []
    for q, k, v in segments:
        outputs.append(past.attend(layer, q, k, v)[0])
        past.advance(SEGMENT)
        past.end_segment()
    return torch.cat(outputs, 1)


# Transformer-XL, no memory, full attention


@pytest.mark.parametrize("cache", [3, 8, 20])
def test_transformer_xl_equals_its_paper_with_rotary_positions(cache: int) -> None:
    model, ids = decoder("transformer-xl", cache=cache), tokens(2, 2 * SEGMENT + 3)
    found = read(model, ids)
    for row, text in zip(found, ids):
        torch.testing.assert_close(row, transformer_xl(model, text, SEGMENT, cache, rotary))


def test_full_attention_equals_one_long_segment_and_an_unlimited_cache() -> None:
    ids = tokens(2, 3 * SEGMENT + 2)
    full = read(decoder("full"), ids)
    whole = read(decoder("none", segment=1000), ids)
    torch.testing.assert_close(full, whole)
    torch.testing.assert_close(full, read(decoder("transformer-xl"), ids, cache=1000))


# Infini-attention


def test_infini_attention_equals_its_paper() -> None:
    model, segments = decoder("infini"), projections(3, 4)
    past = model.begin()
    assert isinstance(past, InfiniPast)
    share = model.get_parameter("memory.gate").detach()[4:8].sigmoid()
    one_text = [(q[0], k[0], v[0]) for q, k, v in segments]
    expected, matrices = infini(one_text, share)
    with torch.no_grad():
        torch.testing.assert_close(attended(past, 1, segments), expected)
    torch.testing.assert_close(past.held[1][0][0], matrices[-1])


# Memorizing Transformers


@pytest.mark.parametrize("top_k", [1, 3, 100])
def test_memorizing_attends_to_the_nearest_and_gates_each_head(top_k: int) -> None:
    """With at least as many retrieved as remembered, all of the memory is attended to."""
    model = decoder("memorizing", top_k=top_k, cache=0)
    past, segments = model.begin(), projections(7, 4)
    assert isinstance(past, MemorizingPast) and past.layer == 1
    gate = model.get_parameter("memory.gate").detach().sigmoid()
    scale = model.get_parameter("memory.log_scale").detach().exp()
    assert len(set(gate.tolist())) == 4
    with torch.no_grad():
        found = attended(past, past.layer, segments)
    unit = [
        (
            q[0] / q[0].norm(dim=-1, keepdim=True) * scale[:, None, None],
            k[0] / k[0].norm(dim=-1, keepdim=True),
            v[0],
        )
        for q, k, v in segments
    ]

    def score(layer: int, head: int, q: Tensor, k: Tensor, i: int, j: int) -> Tensor:
        return turned(q, i) @ turned(k, j)

    keys, values = torch.zeros(2, 0, 6).double(), torch.zeros(2, 0, 6).double()
    for number, (q, k, v) in enumerate(unit):
        local = attention(1, q, k, v, score)
        near = memorized(q, keys, values, top_k) if number else torch.zeros_like(local)
        if top_k == 100 and number:  # a full softmax over the memory
            of_head = torch.arange(4) // GROUP
            every = (q @ keys[of_head].transpose(1, 2)).softmax(-1) @ values[of_head]
            torch.testing.assert_close(near, every)
        expected = gate[:, None, None] * near + (1 - gate)[:, None, None] * local
        torch.testing.assert_close(found[:, number * SEGMENT : (number + 1) * SEGMENT], expected)
        keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)


# Every one of them


@pytest.mark.parametrize("name", MEMORIES)
def test_a_text_read_in_pieces_gives_the_same_states(name: str) -> None:
    model, ids = decoder(name), tokens(2, 3 * SEGMENT + 3)
    whole, past = read(model, ids), model.begin()
    with torch.no_grad():
        pieces = [model.read(part, past) for part in ids.split([1, 5, 9, 1, 1, 7, 3], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


@pytest.mark.parametrize("name", MEMORIES)
def test_gradients_reach_the_past_in_infini_and_full_attention_alone(name: str) -> None:
    """The loss of the second segment by the first one's states."""
    model = decoder(name)
    first, second = tokens(1, SEGMENT) % 10, tokens(1, SEGMENT, seed=2) % 10 + 20
    past = model.begin()
    model.read(first, past)
    model.read(second, past).square().sum().backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None and gradient[20:30].any()
    assert bool(gradient[:10].any()) is (name == "full" or name.startswith("infini"))


@pytest.mark.parametrize(
    ("name", "per_token", "size"),
    [
        ("none", 4.5, 0),
        ("full", 16.5, 3 * 2 * 2 * 32 * 6 * 8),
        ("transformer-xl", 4.5 + 6, 3 * 8 * 16 * 8),
        ("memorizing", 4.5 + 6 + 5 / 4, 3 * 8 * 16 * 8 + 2 * 2 * 32 * 6 * 8),
        ("infini", 4.5, 3 * 2 * (6 * 6 + 6) * 8),
    ],
)
def test_attended_keys_and_state_bytes_are_counted(name: str, per_token: float, size: int) -> None:
    """Four segments of 8: inside one 4.5 tokens on the average, in a cache 8 of three segments in
    four; retrieved in one layer of three 5 tokens, from the second segment on.
    """
    model = decoder(name, top_k=5)
    past = model.begin()
    with torch.no_grad():
        model.read(tokens(1, 4 * SEGMENT), past)
    assert past.attended.per_token == pytest.approx(per_token)
    assert past.bytes == size


def test_a_checkpoint_stores_which_memory_it_has(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(SHIPPED / "tokenizer.json")
    config = replace(CONFIG, vocab_size=tokenizer.vocab_size)
    for name, memory in MEMORIES.items():
        save_baseline(BaselineTransformer(config, memory), tokenizer, tmp_path / name)
        assert load_baseline(tmp_path / name).transformer.memory_config == memory.of(config)
    with pytest.raises(InvalidWeights, match=r"Unexpected key.*memory\.\w+"):
        load_model(tmp_path / "infini")
    for content in ('{"kind": "hopfield"}', "[]", "{", '{"top_k": 1}'):
        (tmp_path / "none" / MEMORY).write_text(content)
        with pytest.raises(InvalidConfig) as refused:
            load_baseline(tmp_path / "none")
        assert "\n" not in str(refused.value)
    with pytest.raises(InvalidConfig, match=r"layer 3 must lie in 0..2"):
        BaselineTransformer(CONFIG, MemoryConfig("memorizing", layer=3))
