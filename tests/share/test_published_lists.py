"""A published memory is searched in two stages by published lists, as its directory is."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from memstore.share.manifest import read_newest
from memstore.share.open_object_store import open_object_store
from memstore.share.publish import prune, unpublish
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import publish_memory
from memstore.store.verify import verify_memory
from support.many_passages import PROPOSED, add, create, everything, question, search_by_lists

DOCUMENTS, EACH = 4, 300

pytest.importorskip("faiss")


def make_small(patch: pytest.MonkeyPatch) -> None:
    search_by_lists(patch)
    patch.setattr("memstore.store.retrieve.published_lists.SEGMENT_BYTES", 1 << 14)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory, `m`, and where it is published with lists, `published`."""
    path = tmp_path_factory.mktemp("lists")
    with pytest.MonkeyPatch.context() as patch, create(path / "m") as store:
        make_small(patch)
        for text in range(1, DOCUMENTS + 1):
            add(store, str(text), text, EACH)
        url = f"file://{path}/published"
        publish_memory(store, url)
        with open_(url) as there:
            assert there.update_index()
            built = there.build_index()
            assert built["passages"] == DOCUMENTS * EACH
            assert built["landmarks"] == 12 * DOCUMENTS * EACH
            assert not there.update_index()
    return path


@pytest.fixture
def memory(tmp_path: Path, made: Path) -> Iterator[MemoryStore]:
    shutil.copytree(made / "m", tmp_path / "m")
    with MemoryStore.open(tmp_path / "m", host_budget=1 << 22) as store:
        yield store


@pytest.fixture
def url(tmp_path: Path, made: Path) -> str:
    """Where it is published, with lists."""
    shutil.copytree(made / "published", tmp_path / "published")
    return f"file://{tmp_path}/published"


def open_(url: str, **options: object) -> MemoryStore:
    return MemoryStore.open(url, read_only=True, host_budget=1 << 22, **options)


def by_name(store: MemoryStore, seed: int) -> tuple[list[tuple[str, int]], torch.Tensor] | None:
    """The names and blocks on the shortlist, and their scores."""
    rows, weights = question(1 + seed % DOCUMENTS, seed * 37 % EACH, seed)
    names = {document.id: document.name for document in store.documents()}
    short = store.retrieval.shortlist(rows, weights, everything(store))
    if short is None:
        return None
    blocks = [(names[d], at) for d, first, end in short.scope for at in range(first, end)]
    scores = weights @ short.token_maxima(rows, short.scope)
    words = {7: 1.0, 1004: 0.5, 1 << 31 | 2 << 20 | 17: 1.0}
    return blocks, scores + short.word_scores(words, short.scope)


def lists_of(url: str) -> list[str]:
    """The objects of lists that the newest manifest names."""
    return [place.name for place in read_newest(open_object_store(url)).lists]


def test_a_published_memory_finds_the_same_passages_as_its_directory(
    memory: MemoryStore, url: str, tmp_path: Path
) -> None:
    memory.build_index()
    with open_(url) as there, open_(url, local_cache=tmp_path / "cache") as cached:
        for seed in range(6):
            here = by_name(memory, seed)
            for store in (there, cached):
                found = by_name(store, seed)
                assert found is not None and found[0] == here[0]
                torch.testing.assert_close(found[1], here[1])


def test_readers_of_published_lists_see_new_changed_and_removed_documents(
    memory: MemoryStore, url: str
) -> None:
    with open_(url) as reader, ExitStack() as opened:
        assert by_name(reader, 0) is not None
        memory.forget("2")
        add(memory, "3", 33, EACH - 7, mode="replace")
        add(memory, "1", 1, EACH + 9, mode="replace")
        add(memory, "new", 5, 20)
        publish_memory(memory, url, replace=True)
        unpublish(open_object_store(url), ["2"])
        reader._catalog.database.refresh()
        new = opened.enter_context(open_(url))
        for store in (reader, new):
            names = {document.name for document in store.documents()}
            assert names == {"1", "3", "4", "new"}
            found = by_name(store, 0)
            assert {("new", at) for at in range(20)} <= {*found[0]}
            assert {("3", at) for at in range(EACH - 7)} <= {*found[0]}
            assert {("1", at) for at in range(EACH + 9)} <= {*found[0]}
        with open_(url) as again:
            assert again.build_index()["passages"] == 3 * EACH + 22
        reader._catalog.database.refresh()
        found = by_name(reader, 3)
        assert found is not None and len(found[0]) == PROPOSED
        expected = by_name(opened.enter_context(open_(url)), 3)
        assert expected is not None and found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1])


def test_pruning_keeps_lists_that_a_manifest_names(url: str) -> None:
    objects = open_object_store(url)
    lists = lists_of(url)
    assert len(lists) > 2 and {found.name for found in objects.names("lists")} == {*lists}
    reader = open_(url)
    assert by_name(reader, 0) is not None
    assert prune(objects, grace=0.0).objects == 0
    with open_(url) as there:
        there.build_index()
    assert prune(objects, grace=0.0).objects >= len(lists)
    assert {found.name for found in objects.names("lists")} == {*lists_of(url)}
    # who had begun with the old ones goes on with the new
    for seed in range(8):
        assert by_name(reader, seed) is not None
    reader.close()


@pytest.mark.parametrize("which", [0, 1, -1])
@pytest.mark.parametrize("how", ["flipped", "cut", "zeros", "gone"])
def test_damaged_published_lists_are_ignored_and_named_by_verify(
    which: int, how: str, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without lists, landmarks and words of the documents are read."""
    path = tmp_path / "published" / lists_of(url)[which]
    rows, _ = question(1, 37, 0)
    with open_(url) as there:
        expected = by_name(there, 0)
        maxima = there.retrieval.selected.token_maxima(rows, everything(there))
    with open_(url, deadline=0.5) as there, open_(url, deadline=0.5) as started:
        started.retrieval.shortlist(*question(1, 0, 0), everything(started))  # it holds the lists
        kept = path.read_bytes()
        path.unlink()
        if how != "gone":
            flipped = kept[:-1] + bytes([kept[-1] ^ 1])
            zeros, cut = bytes(len(kept)), kept[: len(kept) // 2]
            path.write_bytes({"zeros": zeros, "flipped": flipped, "cut": cut}[how])
        found = by_name(started, 0)
        assert found is not None and expected is not None and found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1])
        assert by_name(there, 0) is None and "memstore index" in caplog.text
        torch.testing.assert_close(
            there.retrieval.selected.token_maxima(rows, everything(there)), maxima
        )
    (problem,) = verify_memory(url).problems
    assert "memstore index --store file://" in problem.what
    path.write_bytes(kept)
    assert verify_memory(url).clean


def test_a_memory_is_published_with_its_lists(memory: MemoryStore, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/other"
    memory.build_index()
    publish_memory(memory, url, ["1", "2", "3"])
    # they tell of a document that is not published
    assert not lists_of(url)
    here = by_name(memory, 0)
    publish_memory(memory, url)
    newest = read_newest(open_object_store(url))
    assert newest.lists
    publish_memory(memory, url)
    assert read_newest(open_object_store(url)) == newest
    with open_(url) as there:
        found = by_name(there, 0)
        assert here is not None and found is not None and found[0] == here[0]
        torch.testing.assert_close(found[1], here[1])
