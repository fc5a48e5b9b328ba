"""BM25 over scopes: equal to bm25s over the same texts, whatever came and went before."""

import random

import bm25s
import numpy as np
import pytest
import torch

from memstore.disk.format.block_words import BlockWords
from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index.word_index import HeldPostings, WordIndex, count_words, keys_of, split_words
from support.rounding import assert_same_to_rounding

VOCABULARY = [f"w{number}" for number in range(60)]


def texts(n: int, seed: int) -> list[str]:
    """Blocks of rare and frequent words; some hold none."""
    chance = random.Random(seed)
    return [
        " ".join(
            VOCABULARY[min(59, int(chance.expovariate(0.08)))] for _ in range(chance.randrange(40))
        )
        for _ in range(n)
    ]


def add(index: WordIndex, document: int, first: int, blocks: list[str]) -> None:
    index.add(document, first, BlockWords.of([count_words(text) for text in blocks]))


def by_bm25s(blocks: list[str], question: str) -> np.ndarray:
    """What bm25s scores; a word that no block holds adds nothing."""
    corpus = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    corpus.index([text.split() for text in blocks], show_progress=False)
    there = {word for text in blocks for word in text.split()}
    return corpus.get_scores([word for word in question.split() if word in there])


def check(index: WordIndex, scope: list[tuple[int, int, int]], blocks: list[str]) -> None:
    for question in ("w0 w3 w17", "w55 w1", "w41 nothing"):
        scores = index.scores(dict.fromkeys(split_words(question), 1.0), scope)
        assert scores.dtype == torch.float32 and len(scores) == len(blocks)
        np.testing.assert_allclose(scores.numpy(), by_bm25s(blocks, question), atol=2e-5)


def test_scores_equal_bm25s_over_the_blocks_of_the_scope() -> None:
    index, one, two = WordIndex(), texts(300, 1), texts(90, 2)
    add(index, 1, 0, one[:100])
    add(index, 2, 0, two)
    add(index, 1, 100, one[100:])
    check(index, [(1, 0, 300)], one)
    check(index, [(2, 0, 90), (1, 0, 300)], two + one)
    check(index, [(1, 50, 250), (2, 3, 40)], one[50:250] + two[3:40])


def test_scores_stay_right_while_documents_come_grow_and_go() -> None:
    chance, index, there = random.Random(3), WordIndex(), {}
    for step in range(150):
        document = chance.randrange(1, 8)
        held = there.setdefault(document, [])
        if chance.random() < 0.6:
            more = texts(chance.randrange(1, 30), step)
            add(index, document, len(held), more)
            held += more
        else:
            index.remove(document)
            held.clear()
        if step % 10 == 9:
            scope = [(number, 0, len(blocks)) for number, blocks in there.items()]
            check(index, scope, [text for blocks in there.values() for text in blocks])
            sizes = {number: index.span(number)[1] for number in there}
            assert sizes == {number: len(blocks) for number, blocks in there.items()}


def test_blocks_that_are_not_held_are_named() -> None:
    index = WordIndex()
    add(index, 1, 0, texts(5, 1))
    index.remove(1)
    with pytest.raises(DocumentNotFound, match="document 1"):
        index.scores({1: 1.0}, [(1, 0, 5)])
    assert index.scores({1: 1.0}, []).shape == (0,)
    with pytest.raises(InvalidInput):
        add(index, 1, 0, texts(5, 1))
        add(index, 1, 9, texts(5, 1))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Lighthouse-keeper's 3 lamps_", ["the", "lighthouse", "keeper", "s", "3", "lamps"]),
        ("ΑΒΓ été ЁЛКА 漢字", ["αβγ", "été", "ёлка", "漢字"]),
        ("e\u0301te\u0301 \ufb01ne", ["été", "fine"]),  # composed, and a ligature
        (" \n_-—", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_in_lower_case(text: str, words: list[str]) -> None:
    assert split_words(text) == [hash_ for word in words for hash_ in split_words(word)]
    assert len(split_words(text)) == len(words)


def test_a_words_hash_never_changes() -> None:
    assert split_words("The lamp") == [1098390085, 3733042429]  # stored in memories


@pytest.mark.parametrize(
    "words", [[(1 << 32, 1)], [(-1, 1)], [(5, 0)], [(5, 1 << 16)], [(5, 1)] * 2]
)
def test_what_are_no_words_is_refused(words: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInput):
        BlockWords.of([[(7, 1)], words])


def test_a_spread_is_that_of_the_scope_and_of_nothing_else() -> None:
    """A word that is everywhere in one document and once in another is rare in that one."""
    index = WordIndex()
    for document, words in ((1, [(5, 1)]), (2, [])):
        blocks = [[*words, (100 + at % 9, 1)] for at in range(6000)]
        if document == 2:
            blocks[77] = [(5, 1), (104, 2)]
        index.add(document, 0, BlockWords.of(blocks))
    for scope in ([(2, 0, 6000)], [(1, 0, 6000)], [(1, 0, 6000), (2, 0, 6000)]):
        for words in ({5: 1.0}, {5: 1.0, 104: 0.5}, {9: 1.0}):
            scores = index.scores(words, scope)
            expected = float(scores.mean()), float(scores.std(correction=0))
            rare = index.rare(words, scope)
            assert rare.spread == pytest.approx(expected, rel=0.08, abs=1e-6)
            places = [(*place, place[1] + 1) for place in zip(rare.documents, rare.blocks)]
            assert_same_to_rounding(rare.scores, index.scores(words, places, scope))
            if words == {5: 1.0} and len(scope) == 1 and scope[0][0] == 2:
                assert (2, 77, 78) in places
    assert WordIndex().rare({5: 1.0}, []).spread == (0.0, 0.0)


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
