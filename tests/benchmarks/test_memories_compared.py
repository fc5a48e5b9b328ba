"""What the paper's figure 5 counts, on a tiny random model."""

from pathlib import Path

import numpy as np

from benchmarks.paper.figures import distinct_blocks
from support.tiny_model import text, tiny_model


def test_distinct_blocks_are_counted_by_head(tmp_path: Path) -> None:
    """Heads that choose alone for a chunk read top_k blocks, tokens that choose alone many more."""
    model = tiny_model(tmp_path, num_layers=3)
    ids = np.array(model.tokenizer.encode(text(600))[: 8 * 64])
    everything = distinct_blocks(model, ids, 32, top_k=60, cmt_cutoff=0)
    counts = {key: len(read) for key, read in everything.items()}
    assert counts == {(layer, head): 60 for layer in range(3) for head in range(4)}
    most = {}
    for granularity in ("per_token_per_head", "per_token", "per_head", "shared"):
        found = distinct_blocks(model, ids, 32, top_k=4, cmt_cutoff=0, granularity=granularity)
        most[granularity] = len(set.union(*(found[2, head] for head in range(4))))
        if granularity == "per_head":
            assert set(map(len, found.values())) == {4}
    assert most["shared"] == 4
    assert most["shared"] < most["per_head"] <= 8 < most["per_token"]
    assert most["per_token"] <= most["per_token_per_head"] <= 60
