"""Stored runs of landmarks and words read back whole, cut and joined. Invalid ones are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.block import Geometry
from memstore.disk.tables.runs import BlockWords, IndexSpec, Run, RunTable, joined


def table_of(kind: str, dtype: str = "float16", digest: str = "ab" * 16) -> tuple[RunTable, int]:
    """The table of runs of a kind, and their part."""
    spec = IndexSpec("a name", digest, 64, words=True)
    table = RunTable(Geometry(1, 8, 16, dtype), None if kind == "landmark" else spec)
    return table, 0 if kind == "landmark" else table.part(kind)


def run_of(kind: str, sizes: list[int], first: int = 0) -> Run:
    """A run of random numbers; sizes: tokens, or distinct words, of each block."""
    rng = np.random.default_rng(len(sizes))
    if kind == "landmark":
        bits = rng.integers(-(1 << 15), 1 << 15, (len(sizes), 1, 16)).astype(np.int16)
        return Run.of_keys(first, bits)
    if kind == "token":
        landmarks = rng.integers(-127, 128, (sum(sizes), 64)).astype(np.int8)
        return Run.of_tokens(first, landmarks, np.array(sizes, np.int64))
    words = [[(int(w), 3) for w in rng.choice(1 << 20, size, False)] for size in sizes]
    return Run.of_words(first, BlockWords.of(words))


def check_equal(a: Run, b: Run) -> None:
    assert a[:2] == b[:2] and np.array_equal(a.sizes, b.sizes)
    assert all(map(np.array_equal, a.columns, b.columns))


@settings(max_examples=60)
@given(
    st.sampled_from(["landmark", "token", "words"]),
    st.lists(st.integers(1, 300), min_size=1, max_size=40),
    st.integers(0, 40),
)
def test_runs_read_back_cut_and_joined(kind, sizes, at) -> None:
    run = run_of(kind, sizes, first=64)
    table, part = table_of(kind)
    check_equal(table.decode(part, 64, table.encode(run)), run)
    parts = [run.cut(0, 64 + at), run.cut(64 + at, 200)]
    check_equal(joined(64, parts), run)
    check_equal(parts[0], run_of(kind, sizes, 64).cut(64, 64 + at))


@pytest.mark.parametrize("kind", ["landmark", "token", "words"])
def test_a_run_that_does_not_fit_the_memory_is_refused(kind) -> None:
    table, part = table_of(kind)
    value = table.encode(run_of(kind, [3, 5]))
    more = value[:25] + bytes([4]) + value[26:]
    for wrong in (b"", value[:-1], value + b"\0", value[:20], more):
        with pytest.raises(ValueError):
            table.decode(part, 0, wrong)
    with pytest.raises(ValueError, match="another kind, model or selector"):
        table_of(kind, "bfloat16", "cd" * 16)[0].decode(part, 0, value)
    if kind == "words":
        with pytest.raises(ValueError, match="do not match its blocks"):
            table.decode(part, 0, value[:-2] + b"\0\0")  # a count of 0
