"""An index that took words from lists goes on as any other."""

import numpy as np

from memstore.disk.format.block_words import BlockWords
from memstore.index.word_index import HeldPostings, WordIndex, keys_of


def test_an_index_that_took_words_goes_on_as_any_other() -> None:
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
    index.add(3, 0, words(7, 2))  # what is taken replaces it
    assert index.take(documents, np.concatenate(lengths), held) == set()
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
    # other lists, without document 1, which was added to: what was taken of it is dropped
    first = len(lengths[0])
    kept = held.keys.astype(np.uint32) >= first
    rest = HeldPostings(held.keys[kept] - np.uint64(first), held.counts[kept])
    others = [(2, 40, False), (3, 50, True)]
    assert index.take(others, np.concatenate(lengths[1:]), rest) == {1}
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
    # the same lists again, with most of the words added here dropped
    assert index.take(others, np.concatenate(lengths[1:]), rest) == set()
    expected.add(3, 0, words(3, 50))
    for round in range(5):
        for one in (index, expected):
            one.remove(4)
            one.add(4, 0, words(4, 60 + round))
        check([(4, 0, 60 + round), (3, 0, 50), (1, 2, 30)])
