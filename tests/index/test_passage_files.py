"""What lists are kept as is read as it was made, and nothing else is taken for it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from memstore.errors import CorruptMemory
from memstore.index import passage_files
from memstore.index.index_file import FilePart, Unusable, decode_file, encode_file
from memstore.index.passage_files import Covered, Encoding, Kept, ListsHead, Made, PassageWords
from memstore.index.token_lists import Building, list_bytes
from memstore.index.word_index import HeldPostings, keys_of
from support.crafted import WRONG, changed, fuzzed, places

pytest.importorskip("faiss")
PASSAGES, TOKENS, WIDTH = 600, 10, 32


class Held:
    """A place in memory."""

    name, stamp = "here", 1

    def __init__(self, made: Made) -> None:
        parts = Encoding(made)
        self.content = np.concatenate([*parts])
        self.start = np.frombuffer(b"".join(parts.head()), np.uint8)

    def head(self) -> np.ndarray:
        return self.start

    def parts(self, size: int) -> "Held":
        if size != len(self.content):
            raise Unusable("it is of another size")
        return self

    def read(self, parts: list[FilePart]) -> list[np.ndarray]:
        found = [self.content[part.start : part.start + part.length] for part in parts]
        if any(xxh3_64_intdigest(one.data) != part.digest for one, part in zip(found, parts)):
            raise CorruptMemory("damaged")
        return found

    def write(self, made: Made) -> int:
        raise NotImplementedError


def kept_in(place: Held) -> Kept:
    return ListsHead(place.head(), "selector").kept(place, WIDTH)


@pytest.fixture(scope="module")
def made() -> Made:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((PASSAGES * TOKENS, WIDTH))
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    landmarks = (127 * units).round().astype(np.int8)
    building = Building(landmarks, len(landmarks), PASSAGES)
    building.add(landmarks, np.full(PASSAGES, TOKENS))
    keys = keys_of(np.repeat(np.arange(7, 9), PASSAGES), np.tile(np.arange(PASSAGES), 2))
    words = HeldPostings.of(keys, np.ones(len(keys), np.uint16))
    covered = [Covered("a", 200, b"1"), Covered("b", PASSAGES - 200, b"2")]
    lengths = np.full(PASSAGES, 2, np.float32)
    return Made(building.end(), PassageWords(lengths, words), covered, "selector")


def question(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(seed).standard_normal((3, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), np.array([0.5, 0.3, 0.2])


def test_it_proposes_what_the_lists_in_memory_propose(made: Made) -> None:
    kept = kept_in(Held(made))
    assert kept.covered == made.covered
    before = kept.lists.bytes
    for seed in range(8):
        here, there = (
            one.propose(*question(seed), (40, 40), None) for one in (made.lists, kept.lists)
        )
        assert here is not None and there is not None and there.spread == here.spread
        assert np.array_equal(here.rows, there.rows)
    assert before < kept.lists.bytes <= made.lists.bytes
    assert kept.words is not None and made.words is not None
    for word in (7, 8, 9):
        for found, expected in zip(
            kept.words.postings.find(word), made.words.postings.find(word), strict=True
        ):
            assert np.array_equal(found, expected)


@fuzzed
@given(data=st.data())
def test_crafted_head_is_unusable_or_consistent(made: Made, data: st.DataObject) -> None:
    place = Held(made)
    header, arrays = decode_file("head", place.head(), passage_files._Header)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    number = data.draw(st.integers(-1, len(arrays) - 1))
    if number < 0:
        way = data.draw(st.sampled_from([way for way in places(fields) if way]))
        fields = changed(fields, way, data.draw(st.sampled_from(WRONG)))
    elif number in (3, 4) and data.draw(st.booleans()):
        arrays[number] = arrays[number].copy()
        arrays[number].view("<f4")[1] = data.draw(st.sampled_from([np.nan, np.inf]))
    else:
        arrays[number] = arrays[number][: data.draw(st.integers(0, len(arrays[number]) - 1))]
    pieces = encode_file(fields, [np.ascontiguousarray(array) for array in arrays])
    place.start = np.frombuffer(b"".join(pieces), np.uint8)
    try:
        kept = kept_in(place)
    except Unusable:
        return
    assert number < 0 or kept.words is None  # a name or a checksum may be any; words may lack
    found = kept.lists.propose(*question(0), (40, 40), None)
    assert found is None or (found.rows < PASSAGES).all()


def test_parts_that_name_passages_that_there_are_not_are_told(made: Made) -> None:
    covered = [Covered("a", PASSAGES, b"1")]
    assert made.words is not None
    keys = made.words.postings.keys + np.uint64(1)  # the last is of a passage behind the last
    words = PassageWords(made.words.lengths, HeldPostings(keys, made.words.postings.counts))
    place = Held(Made(made.lists, words, covered, "selector"))
    kept = kept_in(place)
    assert kept.words is not None
    with pytest.raises(CorruptMemory, match="passages that there are not"):
        kept.words.postings.find(8)
    (size,) = made.lists.sizes[:1].tolist()
    assert size
    place.content[: 4 * size].view("<u4")[0] = PASSAGES
    header, arrays = decode_file("head", place.head(), passage_files._Header)
    arrays[6] = arrays[6].copy()
    arrays[6].view("<u8")[0] = xxh3_64_intdigest(place.content[: list_bytes(size)].data)
    told = {name: getattr(header, name) for name in header.__struct_fields__}
    place.start = np.frombuffer(b"".join(encode_file(told, arrays)), np.uint8)
    kept = kept_in(place)
    with pytest.raises(CorruptMemory, match="passages that there are not"):
        for seed in range(30):
            kept.lists.propose(*question(seed), (40, 40), None)
