"""Processes that write to a publication. Killed at any call, one leaves the old or the new state,
whole, and the same command continues. Overtaken by another, it loses none of the other's changes.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from memstore.errors import StoreUnavailable
from memstore.share.document_file import write_document
from memstore.share.manifest import manifest_number, read_manifest, read_newest
from memstore.share.publish import prune, unpublish
from memstore.store.memory_store import MemoryStore
from memstore.store.transfer import PublishedDocument
from memstore.store.verify import verify_published
from support.places import Killed, WatchedPlace, in_memory
from support.publishing import KINDS, copy_of, segments, send

State = tuple[int, dict[str, int]]
"""Number of the newest manifest, and tokens by document."""


Work = Callable[[MemoryStore, WatchedPlace], object]


def push(store: MemoryStore, place: WatchedPlace) -> None:
    send(store, place, segment_bytes=2500, replace=True)


WRITERS: dict[str, tuple[Work, int]] = {  # and how many calls of the store it makes at least
    "push": (push, 16),
    "unpublish": (lambda store, place: unpublish(place, ["a"]), 4),
    "prune": (lambda store, place: prune(place, grace=-10), 6),
}
OTHERS: dict[str, Work] = {
    "push": lambda store, place: send(store, place, "c"),
    "unpublish": lambda store, place: unpublish(place, ["b"]),
    "prune": lambda store, place: prune(place, grace=-10),
}


@pytest.fixture(scope="module", params=KINDS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[MemoryStore, WatchedPlace]]:
    """A memory whose documents "a" and "b" were published one by one; "a" has grown since, and "c"
    is new.
    """
    path, place = tmp_path_factory.mktemp("crash") / "memory", WatchedPlace(in_memory())
    create, ingest = KINDS[request.param]
    size = 1 if request.param == "passages" else 4  # tokens of a block
    with create(path) as store:
        for text, name in enumerate("ab", 1):
            ingest(store, name, 9 * size, text=text)
            send(store, place, name)
        ingest(store, "a", 13 * size, mode="replace")
        ingest(store, "c", 15 * size, text=3)
        yield store, place


def state_of(place: WatchedPlace) -> State:
    newest = read_newest(place)
    return newest.number, {name: entry.row.tokens for name, entry in newest.entries.items()}


def contents(place: WatchedPlace, file: Path) -> dict[str, bytes]:
    """The exported form of every published document."""
    found, newest = {}, read_newest(place)
    for name, entry in newest.entries.items():
        document = PublishedDocument(place, newest, entry)
        write_document(document.head, document.parts(), file)
        found[name] = file.read_bytes()
    return found


def every_manifest_is_whole(place: WatchedPlace) -> None:
    """Also those before the newest name only objects that are there."""
    there = {found.name for found in place.names("segments")}
    for found in list(place.names("manifests")):
        assert read_manifest(place, manifest_number(found.name)).segments <= there


def nothing_is_left(place: WatchedPlace) -> None:
    """After pruning, the newest manifest names every object."""
    assert {found.name for found in place.names("segments")} == segments(place)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_publisher_killed_at_any_call_leaves_the_old_or_the_new_state(
    writer: str, when: str, made: tuple[MemoryStore, WatchedPlace], tmp_path: Path
) -> None:
    """Kills before or after every second call, since the end of one is the start of the next."""
    (store, base), (work, calls) = made, WRITERS[writer]
    undisturbed = copy_of(base)
    work(store, undisturbed)
    before, done = state_of(base), state_of(undisturbed)
    right = {1: contents(base, tmp_path / "file"), 2: contents(undisturbed, tmp_path / "file")}
    seen: list[State] = []
    for number in count(step=2):
        place = copy_of(base)

        def stop(now: int, call: str, what: object, number: int = number) -> None:
            if now >= number:  # other calls that are running end as well
                raise Killed

        setattr(place, when, stop)
        killed = False
        try:
            work(store, place)
        except Killed:
            killed = True
        after = WatchedPlace(place.inner)
        seen.append(state_of(after))
        assert seen[-1] in (before, done)
        assert contents(after, tmp_path / "file") == right[2 if seen[-1] == done else 1]
        every_manifest_is_whole(after)
        assert verify_published(after.url).clean
        if seen[-1] != done:
            work(store, after)
        prune(after, grace=-10)
        assert state_of(after) == done and contents(after, tmp_path / "file") == right[2]
        assert verify_published(after.url).clean
        nothing_is_left(after)
        if not killed:
            break
    assert number >= calls and before in seen and done in seen


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("writer", WRITERS)
def test_concurrent_publishers_lose_nothing(
    writer: str, other: str, made: tuple[MemoryStore, WatchedPlace], tmp_path: Path
) -> None:
    """The result is the same as if one process had published after the other.

    The second one writes just before the first creates its manifest or deletes anything, or it
    prunes without a grace period when the first has sent everything.
    """
    (store, base), work = made, WRITERS[writer][0]
    place, expected = copy_of(base), copy_of(base)
    for each in (OTHERS[other], work):
        each(store, expected)
    overtaken = []
    moments = ["create", "delete"]
    if other == "prune":  # a push looks at the newest manifest twice
        moments = ["first"] if writer in ("unpublish", "prune") else ["first", "first"]

    def overtake(number: int, call: str, what: object) -> None:
        if call in moments and not overtaken:
            moments.remove(call)
            if other != "prune" or not moments:
                overtaken.append(call)
                OTHERS[other](store, place)

    place.before = overtake
    with suppress(StoreUnavailable):  # what was sent is pruned: the same command again
        work(store, place)
    if writer == "push":
        work(store, place)
    assert overtaken and state_of(place)[1] == state_of(expected)[1]
    assert contents(place, tmp_path / "file") == contents(expected, tmp_path / "file")
    assert verify_published(place.url).clean
    prune(place, grace=-10)
    assert contents(place, tmp_path / "file") == contents(expected, tmp_path / "file")
    nothing_is_left(place)
