"""Stored lists read back unchanged, and damaged or foreign ones are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.disk.tables.runs import BlockWords, IndexSpec, Run
from memstore.index import token_lists
from memstore.index.index_file import Unusable, decode_file, encode_file
from memstore.index.token_lists import Covered, PassageLists, build, covered_by, decode
from support.crafted import WRONG, changed, fuzzed, places

pytest.importorskip("faiss")
PASSAGES, TOKENS, WIDTH = 600, 10, 32
ALL = np.ones(PASSAGES, bool)


def joined(pieces: list[bytes | memoryview]) -> np.ndarray:
    return np.frombuffer(b"".join(pieces), np.uint8)


@pytest.fixture(scope="module")
def made() -> PassageLists:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((PASSAGES * TOKENS, WIDTH))
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    landmarks = (127 * units).round().astype(np.int8)
    documents, first = [], 0
    for name, blocks in (("a", 200), ("b", PASSAGES - 200)):
        some = landmarks[TOKENS * first : TOKENS * (first + blocks)]
        run = Run.of_tokens(0, some, np.full(blocks, TOKENS))
        words = BlockWords.of([[(7, 1), (8, 1)]] * blocks)
        documents.append((Covered(name, blocks, name.encode()), run, words))
        first += blocks
    spec = IndexSpec("many", "selector", WIDTH, words=True)
    return build(lambda whole: documents, PASSAGES, len(landmarks), spec)


def question(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.random.default_rng(seed).standard_normal((3, WIDTH)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), np.array([0.5, 0.3, 0.2])


def test_a_stored_index_proposes_what_the_one_in_memory_proposes(made: PassageLists) -> None:
    content = joined(made.encode())
    stored = decode(content, "selector", WIDTH)
    assert stored.covered == covered_by(content, "selector") == made.covered
    for seed in range(8):
        here, there = (one.propose(*question(seed), (40, 40), ALL) for one in (made, stored))
        assert here is not None and there is not None and there[1] == here[1]
        assert np.array_equal(here[0], there[0])
    assert stored.bytes == made.bytes
    for word in (7, 8, 9):
        found, expected = (words.find(word) for _, words in (stored.words, made.words))
        assert np.array_equal(found, expected)


def test_an_index_of_another_selector_is_unusable(made: PassageLists) -> None:
    content = joined(made.encode())
    for digest, width in (("another", WIDTH), ("selector", 2 * WIDTH)):
        with pytest.raises(Unusable):
            decode(content, digest, width)


@fuzzed
@given(data=st.data())
def test_crafted_index_is_unusable_or_consistent(made: PassageLists, data: st.DataObject) -> None:
    header, arrays = decode_file("file", joined(made.encode()), token_lists._Header)
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    number = data.draw(st.integers(-1, len(arrays) - 1))
    if number < 0:
        way = data.draw(st.sampled_from([way for way in places(fields) if way]))
        fields = changed(fields, way, data.draw(st.sampled_from(WRONG)))
    elif number in (6, 7) and data.draw(st.booleans()):  # centroids and codebook
        arrays[number] = arrays[number].copy()
        arrays[number].view("<f4")[1] = data.draw(st.sampled_from([np.nan, np.inf]))
    elif number in (1, 9) and data.draw(st.booleans()):  # rows of words and of landmarks
        arrays[number] = arrays[number].copy()
        arrays[number].view({1: "<u8", 9: "<u4"}[number])[-1] += PASSAGES
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
    found = stored.propose(*question(0), (40, 40), ALL)
    assert found is None or (found[0] < PASSAGES).all()
