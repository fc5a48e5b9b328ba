"""Training computes what inference does: windows equal chunks, questions equal fresh sessions."""

from functools import partial

import pytest
import torch
from torch import Tensor

from memstore.model.landmark.memory_attention import MemoryAttention
from memstore.model.landmark.open_chunk import SessionBlocks
from memstore.model.landmark.transformer import ModelConfig, Transformer
from memstore.store.memory_store import MemoryStore
from memstore.training.batches import QuestionBatch
from memstore.training.objectives import (
    Negatives,
    encode_windows,
    negatives_of,
    next_token_loss,
    read_memory,
)
from memstore.training.train import orthogonalise
from support.tiny_model import attending

SIZE, TOP_K = 4, 3
assert_same = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)


def model(*, cmt: bool, top_k: int = TOP_K) -> Transformer:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "kv_dtype": "float64"}
    sizes = {"vocab_size": 50, "num_layers": 3, "hidden_size": 32, "mlp_size": 48, **heads}
    lookups = {"block_size": SIZE, "top_k": top_k, "cmt_cutoff": 0.0, "chunk_blocks": 64}
    built = Transformer(ModelConfig(cmt=cmt, **sizes, **lookups))
    generator = torch.Generator().manual_seed(0)
    built.initialise(generator)
    for parameter in built.parameters():
        # larger than at the start of training, so that attention is far from uniform
        if parameter.dim() == 2:
            parameter.data *= 12
    return built.double().requires_grad_(False)


def window(blocks: int, seed: int) -> Tensor:
    ids = torch.randint(0, 48, (blocks, SIZE + 1), generator=torch.Generator().manual_seed(seed))
    ids[:, SIZE] = 48
    return ids.flatten()


def chunks(ids: Tensor, visible: list[list[int]], *, continues: bool) -> QuestionBatch:
    return QuestionBatch(
        ids, torch.zeros(ids.shape), torch.tensor(visible), torch.tensor([continues])
    )


def attach(
    store: MemoryStore, built: Transformer, memory: list, windows: list[int]
) -> list[tuple[int, int]]:
    """Encoded windows as documents of a store."""
    documents = []
    for w in windows:
        scratch = store.retrieval.session_document()
        for layer, blocks in enumerate(memory):
            keys = blocks.keys[w].transpose(0, 1)
            scratch.add(
                layer,
                keys[:, :, :SIZE].contiguous(),
                blocks.values[w].transpose(0, 1).contiguous(),
                keys[:, :, SIZE].contiguous(),
            )
        documents.append((scratch.document, len(memory[0].keys[w][0])))
    return documents


def session(built: Transformer, store: MemoryStore, blocks: SessionBlocks) -> MemoryAttention:
    heads = attending(built.config.shape, built.rope, built.cmt_keys())
    return MemoryAttention(heads, built.config.lookup, store, blocks)


def store_for(config: ModelConfig) -> MemoryStore:
    return MemoryStore.in_memory(config.signature("none", "none"), host_budget=1 << 24)


@pytest.mark.parametrize("cmt", [True, False])
def test_a_window_equals_one_long_chunk(cmt: bool) -> None:
    built = model(cmt=cmt)
    ids = window(9, 1)
    hidden, _ = encode_windows(built, ids[None], cmt=cmt)
    attention = session(built, store_for(built.config), SessionBlocks())
    pieces = []
    # fed in any pieces, the open chunk is the same
    for piece in (ids[:7], ids[7:8], ids[8:30], ids[30:]):
        pieces.append(built.hidden(piece[None], attention.attend)[0])
        attention.chunk.length += len(piece)
    assert_same(torch.cat(pieces), hidden[0])


@pytest.mark.parametrize("top_k", [6, 2])
@pytest.mark.parametrize("cmt", [True, False])
def test_a_question_equals_the_training_forward(cmt: bool, top_k: int) -> None:
    """6: every block of the visible windows is retrieved. 2: every token and head reads its best
    two.
    """
    built = model(cmt=cmt, top_k=top_k)
    windows = torch.stack([window(3, seed) for seed in (1, 2, 3)])
    question = torch.stack([window(2, 9)])
    _, memory = encode_windows(built, windows, cmt=cmt)
    trained = read_memory(
        built, chunks(question, [[0, 2]], continues=False), memory, cmt=cmt, top_k=top_k
    )
    store = store_for(built.config)
    attention = session(built, store, SessionBlocks(attach(store, built, memory, [0, 2])))
    assert_same(built.hidden(question, attention.attend), trained)


@pytest.mark.parametrize("cmt", [True, False])
def test_a_chunk_that_continues_a_window_sees_its_last_blocks_at_their_positions(cmt: bool) -> None:
    """The window was read by the session itself: its blocks are the session's own, all of them
    recent here.
    """
    built = model(cmt=cmt, top_k=6)
    windows = torch.stack([window(6, seed) for seed in (1, 2)])
    question = torch.stack([window(2, 9)])
    _, memory = encode_windows(built, windows, cmt=cmt)
    trained = read_memory(built, chunks(question, [[1]], continues=True), memory, cmt=cmt)
    store = store_for(built.config)
    [(own, blocks)] = attach(store, built, memory, [1])
    attention = session(built, store, SessionBlocks(own_document=own, own_end=blocks))
    for layer, encoded in enumerate(memory):
        attention.chunk.remember(layer, encoded.keys[1, :, :, SIZE].transpose(0, 1))
    attention.start_chunk()
    assert_same(built.hidden(question, attention.attend), trained)


def test_negatives_come_only_from_windows_that_a_chunk_does_not_see() -> None:
    built = model(cmt=True)
    windows = torch.stack([window(3, seed) for seed in (1, 2, 3)])
    question = torch.stack([window(2, 9)])
    _, memory = encode_windows(built, windows)
    arguments = (built, chunks(question, [[0, 2]], continues=False), memory)
    plain = read_memory(*arguments)
    negatives = negatives_of(memory, 1)
    assert not torch.allclose(read_memory(*arguments, negatives), plain)
    # with a huge penalty they vanish; an unseen window's landmarks may be as unlikely as can be
    # without harm
    torch.testing.assert_close(read_memory(*arguments, negatives, bias=-1e9), plain)
    without = [
        Negatives(
            torch.where(torch.arange(9)[None, :, None] // 3 == 1, -1e4 * n.keys.sign(), n.keys),
            n.values,
        )
        for n in negatives
    ]
    assert torch.isfinite(read_memory(*arguments, without)).all()


def test_loss_skips_landmarks_and_predicts_across_them() -> None:
    built = model(cmt=True)
    ids = window(2, 4)[None]
    weights = torch.where(ids == 48, 0.0, 1.0)
    hidden, _ = encode_windows(built, ids)
    loss = next_token_loss(built, hidden, ids, weights)
    logits = built.logits(hidden[0]).log_softmax(-1).float()
    # rows 0..2 and 5..7 predict the next token, 3 (before the landmark) and 4 (the landmark) both
    # predict token 5
    pairs = [(0, 1), (1, 2), (2, 3), (3, 5), (4, 5), (5, 6), (6, 7), (7, 8)]
    expected = -sum(logits[row, ids[0, target]] for row, target in pairs)
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-5)
    assert loss.weight == len(pairs) and loss.lookups == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_orthogonalises(dtype: torch.dtype) -> None:
    gradient = torch.randn(24, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = torch.linalg.svdvals(orthogonalise(gradient).float())
    assert values.min() > 0.6 and values.max() < 1.3
