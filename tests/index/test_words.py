"""BM25 over scopes equals bm25s over the same texts, after any additions and removals."""

import math
import random

import bm25s
import numpy as np
import pytest
import torch

from memstore.disk.tables.runs import BlockWords
from memstore.errors import DocumentNotFound, InvalidInput
from memstore.index.word_index import (
    HeldPostings,
    WordIndex,
    around,
    by_row,
    count_words,
    split_words,
    weigh_words,
)
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


def add(index: WordIndex, document: int, blocks: list[str]) -> None:
    index.add(document, BlockWords.of([count_words(text) for text in blocks]))


def by_bm25s(blocks: list[str], question: str) -> np.ndarray:
    """What bm25s scores, of the most that is possible; a word that no block holds adds nothing."""
    corpus = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    corpus.index([4 * text.split() for text in blocks], show_progress=False)
    there = {word for text in blocks for word in text.split()}
    scores = corpus.get_scores([word for word in question.split() if word in there])
    held = [sum(word in text.split() for text in blocks) for word in question.split()]
    return scores / sum(math.log(1 + (len(blocks) - n + 0.5) / (n + 0.5)) for n in held)


def check(index: WordIndex, scope: list[tuple[int, int, int]], blocks: list[str]) -> None:
    for question in ("w0 w3 w17", "w55 w1", "w41 gone"):
        scores = index.scores(dict.fromkeys(split_words(question), 1.0), scope)
        assert scores.dtype == torch.float32 and len(scores) == len(blocks)
        np.testing.assert_allclose(scores.numpy(), by_bm25s(blocks, question), atol=2e-5)


def test_scores_equal_bm25s_while_documents_come_change_and_go() -> None:
    """This includes an index of sorted words that knows only some of the documents."""
    some, lengths, keys, first = [], [], [], 0
    for number, size in ((1, 30), (None, 40), (3, 50)):
        blocks = texts(size, 100 + size)
        found = by_row(BlockWords.of([count_words(text) for text in blocks]), first)
        some.append((number, blocks))
        keys.append(found[:2])
        lengths.append(found[2])
        first += size
    held = HeldPostings.of(*map(np.concatenate, zip(*keys)))
    of_sorted = WordIndex.of(
        [(number, len(blocks)) for number, blocks in some], np.concatenate(lengths), held
    )
    known = {number: blocks for number, blocks in some if number is not None}
    for index, there in ((WordIndex(), {}), (of_sorted, known)):
        chance = random.Random(3)
        for step in range(150):
            first = step % 20 // 4  # of whole documents, and of parts of them
            scope = [(n, first, len(blocks)) for n, blocks in there.items() if blocks[first:]]
            if step % 10 == 0 and scope:
                check(index, scope, [text for n, at, _ in scope for text in there[n][at:]])
            document = chance.randrange(1, 8)
            if chance.random() < 0.6:
                there[document] = texts(chance.randrange(1, 60), step)
                add(index, document, there[document])
            else:
                index.remove(document)
                there.pop(document, None)


def test_a_scope_with_unknown_blocks_is_refused() -> None:
    index = WordIndex()
    add(index, 1, texts(5, 1))
    index.remove(1)
    with pytest.raises(DocumentNotFound, match="document 1"):
        index.scores({1: 1.0}, [(1, 0, 5)])
    assert index.scores({1: 1.0}, []).shape == (0,)


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
    assert len(split_words(text)) == len(words) + sum(len(word) > 5 for word in words)


def test_a_words_hash_never_changes() -> None:
    assert split_words("The lamp") == [1098390085, 3733042429]  # stored in memories


def test_forms_of_a_word_count_as_one_and_codes_do_not() -> None:
    assert set(split_words("refunded")) & set(split_words("refunds"))
    assert split_words("été Straße") == split_words("ETE STRASSE")
    assert not set(split_words("E12345 1234567")) & set(split_words("E12346 1234568"))
    assert [*weigh_words("code E7").values()] == [1.0, 3.0]


def test_words_around_a_block_count_a_quarter() -> None:
    text = "a" * 400 + " red fox " + "b" * 400
    assert around(text, 401, 408) == "a" * 299 + "  " + "b" * 299
    [fox], [red], [blue] = map(split_words, ("fox", "red", "blue"))
    assert dict(count_words("fox red fox", "red blue")) == {fox: 8, red: 5, blue: 1}


def test_words_around_a_block_do_not_count_for_the_rarity_of_a_word() -> None:
    lines = [f"The bolt of shelf {word} is {word}" for word in "abcdefgh"]
    text = "\n".join(lines)
    index = WordIndex()
    near = [around(text, text.index(line), text.index(line) + len(line)) for line in lines]
    index.add(1, BlockWords.of(list(map(count_words, lines, near))))
    for number, word in enumerate("abcdefgh"):
        scores = index.scores(weigh_words(f"Which bolt is on shelf {word}?"), [(1, 0, 8)])
        assert int(scores.argmax()) == number


@pytest.mark.parametrize(
    "words", [[(1 << 32, 1)], [(-1, 1)], [(5, 0)], [(5, 1 << 16)], [(5, 1)] * 2]
)
def test_crafted_words_are_refused(words: list[tuple[int, int]]) -> None:
    with pytest.raises(InvalidInput):
        BlockWords.of([[(7, 1)], words])


def test_a_word_that_is_everywhere_in_one_document_may_be_rare_in_another() -> None:
    index = WordIndex()
    for document, words in ((1, [(5, 4)]), (2, [])):
        blocks = [[*words, (100 + at % 9, 4)] for at in range(6000)]
        if document == 2:
            blocks[77] = [(5, 4), (104, 8)]
        index.add(document, BlockWords.of(blocks))
    for scope in ([(2, 0, 6000)], [(1, 0, 6000)], [(1, 0, 6000), (2, 0, 6000)]):
        for words in ({5: 1.0}, {5: 1.0, 104: 0.5}, {9: 1.0}):
            rare = index.rare(words, scope)
            places = [(*place, place[1] + 1) for place in zip(rare.documents, rare.blocks)]
            assert_same_to_rounding(rare.scores, index.scores(words, places, scope))
            if words == {5: 1.0} and len(scope) == 1 and scope[0][0] == 2:
                assert (2, 77, 78) in places
    assert not len(WordIndex().rare({5: 1.0}, []).scores)
