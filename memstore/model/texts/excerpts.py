"""What is shown of a block: the whole sentences that it is part of."""

import re

from memstore.disk.format.document import Document
from memstore.model.adapter import TextTokenizer
from memstore.model.texts.document_text import BlockText, block_texts
from memstore.model.texts.sentences import Level, Unit, divide, split
from memstore.store.memory_store import MemoryStore

_BESIDE = 300  # characters at most that are shown on each side of a block
_WORDS = re.compile(r"\w(?:.*\w)?", re.DOTALL)
_MARKS = re.compile(r"\S(?:.*\S)?", re.DOTALL)


def shown_text(
    tokenizer: TextTokenizer, store: MemoryStore, document: Document, block: int
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
