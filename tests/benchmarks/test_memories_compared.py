"""What benchmarks of several memories count and score, on tiny random models."""

from pathlib import Path

import numpy as np
import torch

from benchmarks.common.reading import LONGEST_CHUNK, score_whole
from benchmarks.paper.figure5 import distinct_blocks
from memstore.training.objectives import encode_windows
from support.tiny_model import text, tiny_model


def test_true_positions_without_memory_are_one_long_window(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    size, blocks = model.config.block_size, 11
    ids = np.array(model.tokenizer.encode(text(300))[: size * blocks])
    found = score_whole(model, ids[:-13], ids[-13:])
    landmarks = np.full((blocks, 1), model.landmark_id)
    window = np.concatenate([ids.reshape(blocks, size), landmarks], 1).reshape(-1)
    hidden, _ = encode_windows(model.transformer, torch.tensor(window)[None])
    # the token after a landmark is predicted by it, and others by the token before
    place = [(at // size) * (size + 1) + at % size for at in range(len(ids))]
    rows = [place[at] - 1 for at in range(len(ids) - 12, len(ids))]
    expected = (
        model.logits(hidden[0, rows]).log_softmax(-1).gather(1, torch.tensor(ids[-12:, None]))
    )
    np.testing.assert_allclose(found, expected[:, 0].detach().numpy(), atol=1e-5)
    assert score_whole(model, np.zeros(size * LONGEST_CHUNK, np.int64), ids[-13:]) is None


def test_distinct_blocks_are_counted_by_head_and_layer(tmp_path: Path) -> None:
    """Heads that choose alone for a chunk read top_k blocks, tokens that choose alone many more."""
    model = tiny_model(tmp_path, num_layers=3)
    ids = np.array(model.tokenizer.encode(text(600))[: 8 * 64])
    everything = distinct_blocks(model, ids, 32, top_k=60, cmt_cutoff=0)
    assert everything.by_head == {(layer, head): 60 for layer in (1, 2) for head in range(4)} | {
        (0, head): 60 for head in range(4)
    }
    assert sum(everything.times.values()) == 36 * 12 * 60  # rows with their landmarks
    counts = {}
    for granularity in ("per_token_per_head", "per_token", "per_head", "shared"):
        found = distinct_blocks(model, ids, 32, top_k=4, cmt_cutoff=0, granularity=granularity)
        counts[granularity] = found.by_layer[2]
        if granularity == "per_head":
            assert set(found.by_head.values()) == {4}
    assert counts["shared"] == 4
    assert counts["shared"] < counts["per_head"] <= 8 < counts["per_token"]
    assert counts["per_token"] <= counts["per_token_per_head"] <= 60
