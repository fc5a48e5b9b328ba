"""Runs of token landmarks have the size that is reckoned from what is in them."""

import numpy as np

from memstore.block import Geometry
from memstore.disk.format.index_spec import IndexSpec
from memstore.disk.format.runs import TokenRun, token_run_bytes
from memstore.disk.tables.run_table import RunTable


def test_the_size_of_a_value_follows_from_its_blocks_and_tokens() -> None:
    spec = IndexSpec("a name", "ab" * 16, 64, words=True)
    table = RunTable(Geometry(1, 8, 16, "float16"), spec)
    lengths = [[1], [127], [128], [255], [256], [60] * 32, [1] * 127, [1] * 128, [3000] * 22]
    sizes = token_run_bytes(
        spec, np.array([len(each) for each in lengths]), np.array([sum(each) for each in lengths])
    )
    for each, size in zip(lengths, sizes.tolist(), strict=True):
        numbers = np.zeros((sum(each), 64), np.int8)
        assert len(table.encode(TokenRun(0, numbers, np.array(each)))) == size
