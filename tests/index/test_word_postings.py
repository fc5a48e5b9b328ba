"""Postings in a file are those in memory, whatever pieces they are checked in, and none that is
damaged is used.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.block_words import BlockWords
from memstore.errors import CorruptMemory
from memstore.index import word_postings
from memstore.index.word_index import WordIndex
from memstore.index.word_postings import HeldPostings, MappedPostings, keys_of


def postings(seed: int, words: int, rows: int) -> HeldPostings:
    rng = np.random.default_rng(seed)
    pairs = {(int(word), int(row)) for word, row in rng.integers(0, (words, rows), (rows * 4, 2))}
    hashes, at = np.array(sorted(pairs, key=lambda pair: pair[1])).T
    counts = rng.integers(1, 9, len(pairs)).astype(np.uint16)
    return HeldPostings.of(keys_of(hashes.astype(np.uint32) * 97_000_001, at), counts)


def mapped(held: HeldPostings) -> MappedPostings:
    firsts = held.keys[:: word_postings.PIECE].copy()
    return MappedPostings(held.keys.copy(), held.counts.copy(), firsts, held.digests())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 60), st.integers(1, 90), st.integers(1, 40))
def test_every_word_is_found_in_a_file_as_in_memory(
    seed: int, words: int, rows: int, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_postings, "PIECE", piece)
        held = postings(seed, words, rows)
        there = mapped(held)
        for word in range(words + 1):
            hashed = word * 97_000_001 & 0xFFFF_FFFF
            for found, expected in zip(there.find(hashed), held.find(hashed)):
                assert np.array_equal(found, expected)
        assert all(map(np.array_equal, there.all(), held))


def test_a_damaged_piece_is_told_and_the_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_postings, "PIECE", 16)
    held = postings(0, 20, 200)
    for damage in ("keys", "counts"):
        there = mapped(held)
        getattr(there, damage)[-1] ^= 1
        last = int(held.keys[-1] >> np.uint64(32))
        with pytest.raises(CorruptMemory, match="memstore index"):
            there.find(last)
        with pytest.raises(CorruptMemory):
            there.all()
        assert len(there.find(int(held.keys[0] >> np.uint64(32)))[0]) > 3


def test_an_index_that_began_with_a_file_goes_on_as_any_other() -> None:
    def words(document: int, n: int) -> BlockWords:
        return BlockWords.of([[(5, 1 + at % 3), (100 + document, 1)] for at in range(n)])

    keys, counts, lengths, first = [], [], [], 0
    for document, n in ((1, 30), (2, 40), (3, 50)):
        some = words(document, n)
        block = np.repeat(np.arange(n), some.sizes)
        keys.append(keys_of(some.hashes, block + first))
        counts.append(some.counts)
        lengths.append(np.bincount(block, some.counts).astype(np.float32))
        first += n
    held = HeldPostings.of(np.concatenate(keys), np.concatenate(counts))
    index, expected = WordIndex(), WordIndex()
    documents = [(1, 30, True), (2, 40, False), (3, 50, True)]
    assert index.take(documents, np.concatenate(lengths), mapped(held))
    assert not index.take(documents, np.concatenate(lengths), mapped(held))
    for document, n in ((1, 30), (3, 50)):
        expected.add(document, 0, words(document, n))

    def check(scope: list[tuple[int, int, int]]) -> None:
        asked = {5: 1.0, 101: 0.5, 102: 1.0, 103: 2.0}
        assert np.allclose(index.scores(asked, scope), expected.scores(asked, scope))

    check([(3, 0, 50), (1, 4, 30)])
    for one in (index, expected):
        one.add(2, 0, words(2, 44))
        one.add(1, 30, words(1, 3))
    check([(1, 0, 33), (2, 0, 44), (3, 5, 50)])
    for one in (index, expected):
        one.remove(3)
        one.remove(2)
        one.add(4, 0, words(4, 10))  # more is gone by now than there is: rows are numbered anew
    check([(4, 0, 10), (1, 0, 33)])
