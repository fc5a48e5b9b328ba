"""Every character of a document keeps its place: its page and its headings."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore.disk.format.document import PAGE, Place, Places, pack_places, unpack_places
from memstore.model.answer import Source, block_texts
from memstore.model.source_text import Text
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import export_document, import_document
from support import made_documents as made
from support.made_documents import Section, converted

pytest.importorskip("lxml")
pytest.importorskip("pypdfium2")

MAKERS: dict[str, Callable[[Sequence[Section]], bytes]] = {
    "a.html": made.html,
    "a.md": made.markdown,
    "a.docx": made.docx,
    "a.epub": made.epub,
}


# Places


def test_a_span_is_described_by_its_pages_and_by_the_headings_of_its_ends() -> None:
    places = Places(
        [
            Place(0, PAGE, "1"),
            Place(5, 1, "Part"),
            Place(10, 2, "One"),
            Place(15, PAGE, "2"),
            Place(20, 2, "Two"),
            Place(30, 1, "Last"),
            Place(40, PAGE, ""),
            Place(40, 1, ""),
        ]
    )
    assert [
        places.at(*span)
        for span in ((0, 5), (4, 6), (10, 12), (12, 25), (29, 31), (35, 45), (41, 45), (7, 7))
    ] == [
        "page 1",
        "page 1, Part",
        "page 1, Part > One",
        "pages 1-2, Part > One to Two",
        "page 2, Part > Two to Last",
        "page 2, Last",
        None,
        "page 1, Part",
    ]
    assert Places().at(0, 10) is None


NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=120)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 9), NAMES), max_size=20))
def test_places_are_stored_unchanged(given_: list[tuple[int, int, str]]) -> None:
    places = [Place(*place) for place in sorted(given_)]
    assert unpack_places(pack_places(places)) == places


WORDS = ["mill", "fähre", "水車", "😀 smile", "e\u0301tude", "1,234", "O'Hara"]
SECTIONS = st.lists(
    st.tuples(
        st.integers(1, 6),
        st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
        st.lists(st.integers(1, 30), max_size=3),
    ),
    min_size=1,
    max_size=8,
)


def numbered(shape: list[tuple[int, list[str], list[int]]]) -> tuple[list[Section], dict[str, str]]:
    """Sections whose every word is another one, and where each word belongs."""
    sections, where, path, word = [], {}, list[tuple[int, str]](), 0
    for number, (level, title_words, lengths) in enumerate(shape):
        title = " ".join([f"s{number}.", *title_words])
        path = [*(above for above in path if above[0] < level), (level, title)]
        paragraphs = []
        for length in lengths:
            words = [f"w{n}{WORDS[n % len(WORDS)]}." for n in range(word, word + length)]
            where |= dict.fromkeys(words, " > ".join(name for _, name in path))
            word += length
            paragraphs.append(" ".join(words))
        sections.append(Section(level, title, paragraphs))
    return sections, where


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=20)
@given(shape=SECTIONS)
def test_every_word_keeps_its_headings(
    name: str, shape: list[tuple[int, list[str], list[int]]]
) -> None:
    sections, where = numbered(shape)
    document = converted(MAKERS[name](sections), name)
    places = Places(document.places)
    for word, place in where.items():
        at = document.text.index(word)
        assert places.at(at, at + len(word)) == place


def test_every_character_keeps_its_place_after_tokenisation_and_reopening(
    model, tmp_path: Path
) -> None:
    sections, where = numbered([(level, [WORDS[level]], [level, 9]) for level in (1, 2, 3, 2, 1)])
    lines = [[f"p{page}n{n}." for n in range(4 + 3 * page)] for page in range(1, 4)]
    on_pages = {word: f"page {n}" for n, page in enumerate(lines, 1) for word in page}
    texts: dict[str, str] = {}
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        for name, make in {**MAKERS, "a.pdf": lambda _: made.pdf(lines)}.items():
            document = converted(make(sections), name)
            texts[name] = document.text
            model.ingest(Text(document, name), store)
    with MemoryStore.open(tmp_path / "m", model.signature, read_only=True) as store:
        for row in store.ready():
            text = texts[row.name]
            right: list[str | None] = [None] * len(text)  # of the characters of words
            for word, place in (on_pages if row.name == "a.pdf" else where).items():
                at = text.index(word)
                right[at : at + len(word)] = [place] * len(word)
            assert any(right)
            blocks = list(block_texts(model.tokenizer, store, row))
            assert "".join(one.text for one in blocks) == text
            assert all(one.text == text[one.start : one.end] for one in blocks)
            for block in range(row.blocks):
                source = Source.of(model, store, row, block, 0.0)
                first, end = source.span
                assert source.text == text[first:end]
                for at in range(first, end):
                    assert right[at] in (None, row.places.at(at, at + 1))
                ends = [at for at in range(first, end) if not text[at].isspace()]
                if ends and right[ends[0]] == right[ends[-1]] is not None:
                    assert source.place == right[ends[0]]
                elif ends:
                    assert source.place == row.places.at(ends[0], ends[-1] + 1)


# In a memory


def test_sources_of_ask_and_search_name_their_place(model, tmp_path: Path) -> None:
    pages = [["The mill is red."] * 9, ["The ferry is late."] * 9]
    (tmp_path / "a.pdf").write_bytes(made.pdf(pages))
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document = model.ingest(tmp_path / "a.pdf", store)
        assert document.metadata["kind"] == "pdf" and document.told()["metadata"]["places"] == 2
        (found,) = model.search("The ferry is late.", store, top_k=1)
        assert found.place is not None and "2" in found.place
        answer = model.ask("The ferry is", store, max_new_tokens=1)
        assert all(source["place"].startswith("page") for source in answer.to_dict()["sources"])
        text = Text("Plain words.\n", document.name)
        assert model.ingest(text, store, mode="replace").metadata == {}


def test_an_export_keeps_places_but_not_the_folder(model, tmp_path: Path) -> None:
    secret = {"folder": "of my home", "file": "letters/a.md", "hash": ""}
    text = Text(converted(made.markdown(made.BOOK), "a.md"), "a", source=secret)
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        document = model.ingest(text, store)
        assert document.metadata["source"] == secret
        export_document(store, "a", tmp_path / "a.memstore")
    assert b"of my home" not in (tmp_path / "a.memstore").read_bytes()
    assert b"letters" not in (tmp_path / "a.memstore").read_bytes()
    with MemoryStore.create(tmp_path / "other", model.signature) as store:
        imported = import_document(store, tmp_path / "a.memstore")
        assert imported.metadata.keys() == {"kind", "places"}
        assert unpack_places(imported.metadata) == list(text.places)
