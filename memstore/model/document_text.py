"""The text of stored documents, read back from their tokens: of blocks, and of a whole document;
and what is shown of a block: the whole sentences that it is part of, or the one that answers.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from memstore.disk.format.document import Document
from memstore.disk.format.text_parts import Passage
from memstore.index.word_index import split_words
from memstore.model.sentences import Level, Unit, divide, split
from memstore.model.tokenizer import TokenText
from memstore.store.memory_store import MemoryStore

_CUT = 3  # tokens at most in which a character ends that began before them
_AT_ONCE = 64  # blocks


class BlockText(NamedTuple):
    """The text of a block, and where it stands in its document. gap: what stands between the block
    before and it, if anything does.
    """

    block: int
    start: int  # characters of the document before the text
    text: str
    characters: int
    gap: str = ""

    @property
    def end(self) -> int:
        """Characters of the document up to its end."""
        return self.start + self.characters


def block_texts(
    tokenizer: TokenText,
    store: MemoryStore,
    document: Document,
    first: int = 0,
    end: int | None = None,
) -> Iterator[BlockText]:
    """The texts of blocks first .. end - 1 of a document (None: all), in order. Raises
    DocumentNotFound, CorruptMemory.
    """
    end = document.blocks if end is None else min(end, document.blocks)
    of_blocks = _of_grid if document.settings.passage_tokens is None else _of_passages
    for at in range(first, end, _AT_ONCE):
        yield from of_blocks(tokenizer, store, document, at, min(at + _AT_ONCE, end))


def _of_passages(
    tokenizer: TokenText, store: MemoryStore, document: Document, first: int, end: int
) -> Iterator[BlockText]:
    for block, one in enumerate(store.passages(document.id, first, end), first):
        yield BlockText(block, one.start, own_text(tokenizer, one), one.characters, one.gap)


def _of_grid(
    tokenizer: TokenText, store: MemoryStore, document: Document, first: int, end: int
) -> Iterator[BlockText]:
    """Of blocks that all have the same number of tokens, but for the last one."""
    size = store.signature.block_size
    last = min(end * size, document.tokens)
    read = store.tokens(document.id, first * size, last + _CUT)
    ids = read.ids.tolist()
    start = read.char_start + tokenizer.characters(read.before.tolist())
    for block in range(first, end):
        at, to = (block - first) * size, min((block + 1) * size, last) - first * size
        text = tokenizer.whole_characters(ids[at:to], ids[to : to + _CUT])
        yield BlockText(block, start, text, tokenizer.characters(ids[at:to]))
        start += tokenizer.characters(ids[at:to])


def own_text(tokenizer: TokenText, passage: Passage) -> str:
    """The text of a passage."""
    return tokenizer.decode(passage.ids.tolist()).strip()


_BESIDE = 300  # characters at most that are shown on each side of a block
_WORDS = re.compile(r"\w(?:.*\w)?", re.DOTALL)
_MARKS = re.compile(r"\S(?:.*\S)?", re.DOTALL)


def shown_text(
    tokenizer: TokenText, store: MemoryStore, document: Document, block: int
) -> BlockText:
    """The text of a block and where it stands: a passage as it is, of a block that was cut after
    so many tokens `whole_sentences`. Raises DocumentNotFound, CorruptMemory.
    """
    if document.settings.passage_tokens is not None:
        return next(block_texts(tokenizer, store, document, block, block + 1))
    beside = -(-_BESIDE // store.signature.block_size)  # few tokens are less than a character
    near = list(block_texts(tokenizer, store, document, max(0, block - beside), block + beside + 1))
    own = next(one for one in near if one.block == block)
    begins = near[0].start
    text = "".join(one.text for one in near)
    first, end = whole_sentences(text, own.start - begins, own.end - begins, _BESIDE)
    return BlockText(block, begins + first, text[first:end], end - first)


def whole_sentences(text: str, first: int, end: int, most: int) -> tuple[int, int]:
    """Where the sentences begin and end of which characters [first, end) hold a word; whole words
    of a sentence that reaches further than `most` characters beyond them. Without anything but
    white space, first and end themselves.
    """
    inside = _WORDS.search(text, first, end) or _MARKS.search(text, first, end)
    if inside is None:
        return first, end
    units = list(split(text))
    begin = max(unit.start for unit in units if unit.start <= inside.start())
    stop = min(unit.end for unit in units if unit.end >= inside.end())
    least, last = first - most, end + most
    words = list(divide(text, Unit(begin, stop, Level.SENTENCE), Level.WORD))
    if begin < least:
        begin = min((at for at, *_ in words if least <= at <= inside.start()), default=least)
    if stop > last:
        stop = max((at for _, at, *_ in words if inside.end() <= at <= last), default=last)
    return begin, stop


def answer_sentence(passage: str, question: str, answer: str = "") -> str:
    """The sentence of a passage that shares most words with an answer, or else with its question.

    A word counts as much as it is rare in the passage, and a word of the answer counts twice.
    Headings are no sentences. The earliest of equal sentences is returned; the stripped passage if
    it has no sentence.
    """
    units = [unit for unit in split(passage) if not unit.heading]
    sentences = [passage[unit.start : unit.end] for unit in units]
    if not sentences:
        return passage.strip()
    words = [set(split_words(sentence)) for sentence in sentences]
    frequency = Counter(word for own in words for word in own)
    wanted = Counter(dict.fromkeys(split_words(question), 1))
    wanted.update(dict.fromkeys(split_words(answer), 2))

    def score(own: set[int]) -> float:
        return sum(wanted[word] / frequency[word] for word in own if word in wanted)

    return sentences[max(range(len(sentences)), key=lambda at: score(words[at]))]
