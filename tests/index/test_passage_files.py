"""A stored index is read as it was made, and nothing else is taken for one."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.index import passage_files
from memstore.index.index_file import Unusable, decode_file, encode_file
from memstore.index.passage_files import Covered, PassageLists, covered_by, decode, encode
from memstore.index.token_lists import build
from memstore.index.word_index import HeldPostings, keys_of
from support.crafted import WRONG, changed, fuzzed, places

pytest.importorskip("faiss")
PASSAGES, TOKENS, WIDTH = 600, 10, 32


def joined(pieces: list[bytes | memoryview]) -> np.ndarray:
    return np.frombuffer(b"".join(pieces), np.uint8)


@pytest.fixture(scope="module")
def made() -> PassageLists:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((PASSAGES * TOKENS, WIDTH))
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    landmarks = (127 * units).round().astype(np.int8)
    halves = [(half, np.full(PASSAGES // 2, TOKENS)) for half in np.split(landmarks, 2)]
    lists = build(landmarks, len(landmarks), 1, halves)
    keys = keys_of(np.repeat(np.arange(7, 9), PASSAGES), np.tile(np.arange(PASSAGES), 2))
    words = HeldPostings.of(keys, np.ones(len(keys), np.uint16))
    covered = [Covered("a", 200, b"1"), Covered("b", PASSAGES - 200, b"2")]
    return PassageLists(lists, (np.full(PASSAGES, 2, np.float32), words), covered, "selector")


def question(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(seed).standard_normal((3, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), np.array([0.5, 0.3, 0.2])


def test_a_stored_index_proposes_what_the_one_in_memory_proposes(made: PassageLists) -> None:
    content = joined(encode(made))
    stored = decode(content, "selector", WIDTH)
    assert stored.covered == covered_by(content, "selector") == made.covered
    for seed in range(8):
        here, there = (one.lists.propose(*question(seed), (40, 40), None) for one in (made, stored))
        assert here is not None and there is not None and there[1] == here[1]
        assert np.array_equal(here[0], there[0])
    assert stored.lists.bytes == made.lists.bytes
    assert stored.words is not None and made.words is not None
    for word in (7, 8, 9):
        found, expected = (words.find(word) for _, words in (stored.words, made.words))
        assert np.array_equal(found, expected)


def test_an_index_of_another_selector_is_unusable(made: PassageLists) -> None:
    content = joined(encode(made))
    for digest, width in (("another", WIDTH), ("selector", 2 * WIDTH)):
        with pytest.raises(Unusable):
            decode(content, digest, width)


@fuzzed
@given(data=st.data())
def test_crafted_index_is_unusable_or_consistent(made: PassageLists, data: st.DataObject) -> None:
    header, arrays = decode_file("file", joined(encode(made)), passage_files._Header)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    number = data.draw(st.integers(-1, len(arrays) - 1))
    if number < 0:
        way = data.draw(st.sampled_from([way for way in places(fields) if way]))
        fields = changed(fields, way, data.draw(st.sampled_from(WRONG)))
    elif number in (6, 7) and data.draw(st.booleans()):  # centroids and codebook
        arrays[number] = arrays[number].copy()
        arrays[number].view("<f4")[1] = data.draw(st.sampled_from([np.nan, np.inf]))
    elif len(arrays[number]):
        arrays[number] = arrays[number][: data.draw(st.integers(0, len(arrays[number]) - 1))]
    else:
        return
    content = joined(encode_file(fields, [np.ascontiguousarray(array) for array in arrays]))
    try:
        stored = decode(content, "selector", WIDTH)
    except Unusable:
        return
    assert number < 0  # a name or a state may be any
    found = stored.lists.propose(*question(0), (40, 40), None)
    assert found is None or (found[0] < PASSAGES).all()


def test_passage_numbers_beyond_the_last_are_unusable(made: PassageLists) -> None:
    header, arrays = decode_file("file", joined(encode(made)), passage_files._Header)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    for number, kind in ((1, "<u8"), (9, "<u4")):  # words, landmarks
        some = [array.copy() for array in arrays]
        some[number].view(kind)[-1] += PASSAGES
        with pytest.raises(Unusable, match="contradict"):
            decode(joined(encode_file(fields, some)), "selector", WIDTH)
