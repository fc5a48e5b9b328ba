"""Exports of a memory with a selector that somebody made to do harm, with right checksums: each is
refused with nothing left behind, or accepted and harmless.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memstore.disk.format.block_words import BlockWords
from memstore.disk.format.runs import RunForm, TokenRun, WordRun
from memstore.disk.format.text_parts import equal_lengths
from memstore.store.memory_store import MemoryStore
from support.crafted import WRONG, Frames, changed, fuzzed, places, write
from support.crafted_imports import accepted
from support.selected_documents import FORM, create, ingest, landmarks, words
from support.synthetic_documents import BLOCK, CHUNK, SIGNATURE

TOKENS = 9 * CHUNK + 2  # more than a run of landmarks
BLOCKS = -(-TOKENS // BLOCK)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MemoryStore]:
    with create(tmp_path_factory.mktemp("hostile") / "memory", codec="raw") as store:
        ingest(store, "kept", 20, text=2)
        yield store


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Frames:
    path = tmp_path_factory.mktemp("from")
    with create(path / "memory", codec="raw") as store:
        ingest(store, "book", TOKENS)
        store.export_document("book", path / "export")
    packed = msgpack.Unpacker((path / "export").open("rb"))
    return [(kind, msgpack.unpackb(payload)) for kind, payload, _ in packed]


def test_an_export_is_unchanged_by_being_taken_apart(
    store: MemoryStore, frames: Frames, tmp_path: Path
) -> None:
    assert accepted(store, write(tmp_path / "file", frames))


def with_runs(frames: Frames, runs: list[Any]) -> Frames:
    """The export with other runs."""
    at = next(at for at, frame in enumerate(frames) if frame[0] == "run")
    rest = [frame for frame in frames if frame[0] != "run"]
    return [*rest[:at], *(("run", run) for run in runs), *rest[at:]]


def token(first: int, end: int, form: Any = FORM) -> list[Any]:
    some = landmarks(1, first * BLOCK, min(end * BLOCK, TOKENS), form)
    run = TokenRun(first, some.numpy(), equal_lengths(len(some), BLOCK))
    return [0, first, RunForm(SIGNATURE.geometry, form).encode(run)]


def word(first: int, end: int, told: BlockWords | None = None) -> list[Any]:
    some = BlockWords.of(words(1, first, end)) if told is None else told
    return [1, first, RunForm(SIGNATURE.geometry, FORM).encode(WordRun(first, some))]


RIGHT = [token(0, 32), token(32, BLOCKS), word(0, BLOCKS)]
ALL = BlockWords.of(words(1, 0, BLOCKS))
MANGLED = [
    RIGHT[:1],
    RIGHT[:2],
    RIGHT[1:],
    [RIGHT[0], RIGHT[2]],
    [*RIGHT, RIGHT[2]],
    [RIGHT[0], RIGHT[0], RIGHT[2]],
    [token(0, 16), token(16, BLOCKS), RIGHT[2]],
    [token(0, BLOCKS), RIGHT[2]],
    [RIGHT[0], token(32, BLOCKS - 1), RIGHT[2]],
    [*RIGHT[:2], word(0, BLOCKS - 1)],
    [*RIGHT[:2], word(0, BLOCKS, ALL._replace(hashes=ALL.hashes[::-1]))],
    [*RIGHT[:2], word(0, BLOCKS, ALL._replace(counts=ALL.counts * 0))],
    [*RIGHT[:2], word(0, BLOCKS, ALL._replace(sizes=ALL.sizes + 1))],
    [*RIGHT[:2], word(0, BLOCKS, ALL._replace(sizes=ALL.sizes.astype("<u4") - 1))],
    [token(0, 32, replace(FORM, digest="x")), *RIGHT[1:]],
]


def test_runs_in_their_places_are_accepted(
    store: MemoryStore, frames: Frames, tmp_path: Path
) -> None:
    assert accepted(store, write(tmp_path / "file", with_runs(frames, RIGHT)))


@pytest.mark.parametrize("number", range(len(MANGLED)))
def test_runs_that_no_document_has_are_refused(
    store: MemoryStore, frames: Frames, tmp_path: Path, number: int
) -> None:
    assert not accepted(store, write(tmp_path / "file", with_runs(frames, MANGLED[number])))


@pytest.mark.parametrize(
    "change",
    [
        lambda head: {**head, "format": 2},
        lambda head: {name: part for name, part in head.items() if name != "selector"},
        lambda head: {**head, "selector": None},
        lambda head: {**head, "selector": {**head["selector"], "heads": 1 << 40}},
        lambda head: {**head, "selector": {**head["selector"], "width": 9}},
        lambda head: {**head, "selector": {**head["selector"], "words": False}},
    ],
)
def test_a_head_that_tells_of_another_selector_is_refused(
    store: MemoryStore, frames: Frames, tmp_path: Path, change: Callable[[Any], Any]
) -> None:
    file = write(tmp_path / "file", [("head", change(frames[0][1])), *frames[1:]])
    assert not accepted(store, file)


@fuzzed
@given(data=st.data())
def test_a_crafted_export_is_refused_or_harmless(
    store: MemoryStore, frames: Frames, tmp_path: Path, data: st.DataObject
) -> None:
    of_selector = [at for at, (kind, _) in enumerate(frames) if kind in ("head", "run")]
    crafted = list(frames)
    at = data.draw(st.sampled_from(of_selector))
    kind, value = crafted[at]
    if kind == "run" and data.draw(st.booleans()):
        packed = msgpack.Unpacker()
        packed.feed(value[2])
        header = packed.unpack()
        rest = value[2][packed.tell() :]
        where = data.draw(st.sampled_from(list(places(header))))
        told = msgpack.packb(changed(header, where, data.draw(st.sampled_from(WRONG))))
        cut = data.draw(st.sampled_from([rest, rest[:-1], rest + b"\0", b"", rest[: 1 << 8]]))
        crafted[at] = kind, [*value[:2], told + cut]
    else:
        part = value if kind == "run" else value["selector"]
        where = data.draw(st.sampled_from(list(places(part))))
        new = changed(part, where, data.draw(st.sampled_from(WRONG)))
        crafted[at] = kind, new if kind == "run" else {**value, "selector": new}
    accepted(store, write(tmp_path / "file", crafted))
