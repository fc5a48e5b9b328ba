"""Postings in a file are those in memory, whatever pieces they are checked in, and none that is
damaged is used.
"""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from memstore.disk.format.block_words import BlockWords
from memstore.errors import CorruptMemory
from memstore.index import word_index
from memstore.index.index_file import FilePart, StoredParts
from memstore.index.word_index import HeldPostings, StoredPostings, WordIndex, keys_of


def postings(seed: int, words: int, rows: int) -> HeldPostings:
    rng = np.random.default_rng(seed)
    pairs = {(int(word), int(row)) for word, row in rng.integers(0, (words, rows), (rows * 4, 2))}
    hashes, at = np.array(sorted(pairs, key=lambda pair: pair[1])).T
    counts = rng.integers(1, 9, len(pairs)).astype(np.uint16)
    return HeldPostings.of(keys_of(hashes.astype(np.uint32) * 97_000_001, at), counts)


class Held:
    """Parts in memory, as a file of them is read."""

    def __init__(self, content: np.ndarray) -> None:
        self.content = content

    def read(self, parts: Sequence[FilePart]) -> list[np.ndarray]:
        found = [self.content[part.start : part.start + part.length].copy() for part in parts]
        if any(xxh3_64_intdigest(one) != part.digest for one, part in zip(found, parts)):
            raise CorruptMemory("it is damaged; run `memstore index`")
        return found


def stored(held: HeldPostings) -> tuple[StoredPostings, Held]:
    pieces = [*held.pieces()]
    reader = Held(np.concatenate([np.zeros(0, np.uint8), *pieces]))
    sizes = word_index.piece_bytes(len(held.keys))
    assert sizes.tolist() == [len(piece) for piece in pieces]
    digests = np.array([xxh3_64_intdigest(piece) for piece in pieces], np.uint64)
    return StoredPostings(StoredParts(reader, sizes, digests), held.firsts, 1 << 20), reader


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 60), st.integers(1, 90), st.integers(1, 40))
def test_every_word_is_found_in_a_file_as_in_memory(
    seed: int, words: int, rows: int, piece: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_index, "PIECE", piece)
        held = postings(seed, words, rows)
        there, _ = stored(held)
        hashes = [word * 97_000_001 & 0xFFFF_FFFF for word in range(words + 1)]
        for hashed, together in zip(hashes, there.find_each(hashes)):
            for found, expected, again in zip(there.find(hashed), held.find(hashed), together):
                assert np.array_equal(found, expected) and np.array_equal(again, expected)


def test_a_damaged_piece_is_told_and_the_others_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_index, "PIECE", 16)
    held = postings(0, 20, 200)
    for damaged in (-3 * word_index.POSTING, -1):  # in keys, in counts
        there, reader = stored(held)
        reader.content[damaged] ^= 1
        last = int(held.keys[-1] >> np.uint64(32))
        with pytest.raises(CorruptMemory, match="memstore index"):
            there.find(last)
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
    index.add(-1, 0, words(9, 3))  # a session's own
    expected.add(-1, 0, words(9, 3))
    index.add(3, 0, words(7, 2))  # what is stored takes its place
    assert index.take(documents, np.concatenate(lengths), stored(held)[0]) == set()
    for document, n in ((1, 30), (3, 50)):
        expected.add(document, 0, words(document, n))

    def check(scope: list[tuple[int, int, int]]) -> None:
        asked = {5: 1.0, 101: 0.5, 102: 1.0, 103: 2.0, 109: 1.0}
        assert np.allclose(index.scores(asked, scope), expected.scores(asked, scope))

    check([(3, 0, 50), (1, 4, 30), (-1, 0, 3)])
    for one in (index, expected):
        one.add(2, 0, words(2, 44))
        one.add(1, 30, words(1, 3))
    check([(1, 0, 33), (2, 0, 44), (3, 5, 50), (-1, 1, 3)])
    # other files, without document 1, which was added to: what is stored of it is not held any more
    first = len(lengths[0])
    kept = held.keys.astype(np.uint32) >= first
    rest = HeldPostings(held.keys[kept] - np.uint64(first), held.counts[kept])
    others = [(2, 40, False), (3, 50, True)]
    assert index.take(others, np.concatenate(lengths[1:]), stored(rest)[0]) == {1}
    check([(2, 0, 44), (3, 5, 50), (-1, 1, 3)])
    for one in (index, expected):
        one.remove(3)
        one.remove(2)
        one.add(4, 0, words(4, 10))  # more is gone by now than there is: rows are numbered anew
        one.remove(-1)
    expected.remove(1)
    for one in (index, expected):
        one.add(1, 0, words(1, 33))
    check([(4, 0, 10), (1, 0, 33)])
    # once more with what is stored, much of what is held here dropped, then without it
    assert index.take(others, np.concatenate(lengths[1:]), stored(rest)[0]) == set()
    expected.add(3, 0, words(3, 50))
    for round in range(5):
        for one in (index, expected):
            one.remove(4)
            one.add(4, 0, words(4, 60 + round))
        check([(4, 0, 60 + round), (3, 0, 50), (1, 2, 30)])
    assert index.untake() == {3}
    check([(4, 0, 64), (1, 0, 33)])
    assert index.untake() == set()
