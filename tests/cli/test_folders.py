"""Folders, patterns and standard input: changed files replace their documents, unchanged ones are
skipped, --sync forgets deleted ones, and a bad file does not stop the others.
"""

import os
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from memstore.documents.folder import find
from memstore.model import source_text as model_text
from memstore.store.memory_store import MemoryStore
from support import made_documents as made
from support.commands import Result, intact, refused, run
from support.made_documents import Section

PNG = b"\x89PNG\r\n\x1a\n"
pytestmark = pytest.mark.usefixtures("the_model")


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """A folder of texts."""
    for name in ("a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt"):
        write(tmp_path / "notes" / name, f"This is {name}. " * 5)
    return tmp_path / "notes"


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def read_in(store: Path, *arguments: object, status: int = 0) -> dict[str, str]:
    """What became of the files, by document; what failed, by "failed"."""
    done = run("ingest", *arguments, "--store", store, "--json")
    assert done.status == status, done.err
    told = done.json
    states = {document["name"]: document["status"] for document in told["documents"]}
    states |= dict.fromkeys(told.get("forgotten", ()), "forgotten")
    return states | {error["message"]: "failed" for error in told.get("failed", ())}


def lines(result: Result) -> list[str]:
    """The errors."""
    return [line for line in result.err.splitlines() if line.startswith("error: ")]


def test_documents_of_a_folder_are_named_by_relative_paths(notes: Path, tmp_path: Path) -> None:
    write(notes / ".hidden.txt", "no")
    write(notes / ".git" / "x.txt", "no")
    (notes / "link.txt").symlink_to(notes / "a.txt")
    (notes / "up").symlink_to(tmp_path)
    os.mkfifo(notes / "pipe")
    store = notes / "memory"  # which is not read into itself
    done = run("ingest", notes, "--store", store)
    assert done.status == 0 and done.out.endswith("4 files: 4 read\n")
    names = ["a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt"]
    intact(store, *names)
    again = run("ingest", notes, "--store", store)
    assert (again.status, again.out) == (0, "4 files: 4 unchanged\n")
    prefixed = read_in(tmp_path / "p", notes / "sub", "--name", "work")
    assert list(prefixed) == ["work/a.txt", "work/deep/c.txt"]
    found = find([str(notes), str(notes / "b.txt")], exclude=["deep", "sub/a.*", "[bm]*", "", "."])
    assert [file.name for file in found.files] == ["a.txt"]
    (notes / "a.txt").rename(notes / "e\u0301.txt")
    assert read_in(tmp_path / "x", notes, "--exclude", "[bsm]*") == {"\xe9.txt": "read"}
    assert read_in(tmp_path / "y", notes / "e\u0301.txt") == {"\xe9.txt": "read"}


def test_only_changed_files_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions, inner = list[str](), model_text.read

    def read(data: Any, name: str) -> Any:
        conversions.append(Path(name).name)
        return inner(data, name)

    monkeypatch.setattr(model_text, "read", read)
    pages, store = tmp_path / "pages", tmp_path / "m"
    for name in "abc":
        body = [Section(1, f"Page {name}", [f"The words of {name}."])]
        write(pages / f"{name}.html", made.html(body))
    assert set(read_in(store, pages).values()) == {"read"}
    assert conversions == ["a.html", "b.html", "c.html"]
    conversions.clear()
    os.utime(pages / "b.html")  # touched, and no more
    write(pages / "c.html", made.html([Section(1, "Page c", ["Other words."])]))
    unchanged = dict.fromkeys(("a.html", "b.html"), "unchanged")
    assert read_in(store, pages) == unchanged | {"c.html": "replaced"}
    assert conversions == ["c.html"]
    with MemoryStore.open(store, read_only=True) as memory:
        assert memory.document("c.html").places.at(0, 4) == "Page c"
    assert set(read_in(store, pages, "--replace").values()) == {"unchanged"}


def test_sync_forgets_deleted_files_of_that_folder_only(notes: Path, tmp_path: Path) -> None:
    store, other, plain = tmp_path / "m", tmp_path / "other", tmp_path / "z.txt"
    write(other / "o.txt", "Of another folder. " * 3)
    write(plain, "By itself. " * 3)
    assert read_in(store, notes, other, plain, "--sync")["z.txt"] == "read"
    (notes / "sub/a.txt").unlink()
    (notes / "sub/deep/c.txt").rename(notes / "d.txt")
    (other / "o.txt").unlink()
    plain.unlink()
    assert "sub/a.txt" not in read_in(store, notes)  # it was not asked for
    states = read_in(store, notes, "--sync")
    unchanged = dict.fromkeys(("a.txt", "b.txt", "d.txt"), "unchanged")
    assert states == unchanged | dict.fromkeys(("sub/a.txt", "sub/deep/c.txt"), "forgotten")
    intact(store, "a.txt", "b.txt", "d.txt", "o.txt", "z.txt")
    with MemoryStore.open(store) as memory:
        memory.forget("a.txt")
    # A file that is there, but not asked for, keeps its document.
    assert read_in(store, str(notes / "a*.txt"), "--sync") == {"a.txt": "read"}
    intact(store, "a.txt", "b.txt", "d.txt", "o.txt", "z.txt")
    refused(run("ingest", notes / "a.txt", "--sync", "--store", store), "folders", status=2)


def test_a_pattern_without_a_match_forgets_nothing(notes: Path, tmp_path: Path) -> None:
    store = tmp_path / "m"
    read_in(store, notes)
    (notes / "a.txt").unlink()
    missed = run("ingest", notes / "*.md", "--sync", "--store", store)
    refused(missed, "matches no file")
    intact(store, "a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt")


def test_an_empty_or_missing_folder_forgets_nothing(notes: Path, tmp_path: Path) -> None:
    store = tmp_path / "m"
    read_in(store, notes)
    away = notes.rename(tmp_path / "away")
    refused(run("ingest", notes, "--sync", "--store", store), "does not exist")
    notes.mkdir()
    refused(run("ingest", notes, "--sync", "--store", store), f"no file was found in {notes}")
    intact(store, "a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt")
    # The same files at another place are the same documents, known by their content.
    assert set(read_in(store, away).values()) == {"unchanged"}
    assert set(read_in(store, away).values()) == {"unchanged"}
    if os.geteuid():
        for mode, what in ((0, "the directory"), (0o444, away / "sub")):
            (away / "sub").chmod(mode)
            closed = run("ingest", away, "--sync", "--store", store)
            assert closed.status == 1 and f"cannot read {what}" in lines(closed)[0]
        (away / "sub").chmod(0o755)
        intact(store, "a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt")


def test_an_unreadable_file_does_not_stop_the_others(notes: Path, tmp_path: Path) -> None:
    store = tmp_path / "m"
    write(notes / "aa.png", PNG)
    write(notes / "noise.txt", bytes(range(1, 32)) * 9)
    done = run("ingest", notes, "--store", store)
    assert done.status == 1 and done.out.endswith("6 files: 4 read, 2 not read\n")
    assert ["aa.png is a picture" in one or "is binary" in one for one in lines(done)] == [True] * 2
    write(notes / "b.txt", PNG)
    states = read_in(store, notes, "--sync", status=1)
    assert "b.txt" not in states and list(states.values()).count("failed") == 3
    intact(store, "a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt")
    several = run("ingest", notes / "aa.png", notes / "none", notes / "a.txt", "--store", store)
    assert several.status == 1 and len(lines(several)) == 2 and "a.txt: unchanged" in several.out
    nothing = run("ingest", notes / "none", notes / ("n" * 256), "--store", tmp_path / "new")
    assert nothing.status == 2 and len(lines(nothing)) == 2


def test_colliding_names_are_reported(notes: Path, tmp_path: Path) -> None:
    store = tmp_path / "m"
    write(tmp_path / "more" / "a.txt", "Another a. " * 3)
    both = run("ingest", notes, tmp_path / "more", "--store", store)
    assert both.status == 1 and len(lines(both)) == 1
    assert "more/a.txt" in lines(both)[0] and str(notes / "a.txt") in lines(both)[0]
    later = run("ingest", tmp_path / "more", "--store", store)
    assert later.status == 1 and "'a.txt' exists with other content" in lines(later)[0]
    assert "--replace" in lines(later)[0]
    assert read_in(store, tmp_path / "more", "--name", "more") == {"more/a.txt": "read"}
    both = run("ingest", notes / "a.txt", notes / "sub" / "a.txt", "--store", store)
    assert both.status == 1 and "would be called 'a.txt'" in lines(both)[0]
    same = run("ingest", notes / "a.txt", notes / "a.txt", "--store", tmp_path / "s", "--json")
    assert len(same.json["documents"]) == 1


def test_patterns_and_standard_input_are_read(notes: Path, tmp_path: Path) -> None:
    store = tmp_path / "m"
    found = read_in(store, str(notes / "**" / "a.txt"))
    assert found == {"a.txt": "read", "sub/a.txt": "read"}
    write(notes / "we[i]rd*.txt", "A name that is no pattern. " * 2)
    assert list(read_in(store, str(notes / "we[i]rd*.txt"))) == ["we[i]rd*.txt"]
    none = run("ingest", notes / "*.none", "--store", store)
    refused(none, "matches no file")
    piped = run("ingest", "-", "--store", store, "--name", "talk", stdin="What was said. " * 3)
    assert piped.status == 0 and "talk: read" in piped.out
    page = made.html([Section(1, "Detokenizer", ["What was said."])])
    assert run("ingest", "-", "--store", store, stdin=page).status == 0
    with MemoryStore.open(store, read_only=True) as memory:
        assert memory.document("stdin").places.at(0, 4) == "Detokenizer"
    refused(run("ingest", "-", "--store", store, stdin=PNG), "standard input is a picture")
    refused(run("ingest", "-", "--store", store, stdin=b""), "standard input is empty")


def test_patterns_follow_no_link(notes: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside" / "o.txt", "Not of this folder.")
    for name, target in (("up", notes), ("away", tmp_path / "outside"), ("sub/loop", notes)):
        (notes / name).symlink_to(target)
    (notes / "link.txt").symlink_to(notes / "a.txt")
    for pattern, names in {
        "**/*.txt": ["a.txt", "b.txt", "sub/a.txt", "sub/deep/c.txt"],
        "*/*.txt": ["sub/a.txt"],
        "[a-z]*/o.txt": [],
        "*/**": ["sub/a.txt", "sub/deep/c.txt"],
    }.items():
        found = find([str(notes / pattern)])
        assert [file.name for file in found.files] == names
        assert len(found.refused) == (not names)
    (tmp_path / "way").symlink_to(notes)  # what a pattern begins with is what was asked for
    found = find([str(tmp_path / "way" / "*.txt")])
    assert [file.name for file in found.files] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    "pattern",
    ["*", "**", "**/a.txt", "*/**/c.txt", "s?b/[ad]*", "**/d*/**", ".*/*", "*/../a.txt", "*/"],
)  # fmt: skip
def test_a_pattern_matches_what_glob_matches(
    notes: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    for name in (".hidden/h.txt", "sub/.d", "sub/deep/down/a.txt", "d/**.txt"):
        write(notes / name, "Some text.")
    monkeypatch.chdir(notes)
    matched = map(Path, glob(pattern, recursive=True))
    wanted = sorted({path for path in matched if path.is_file()})
    assert [file.path for file in find([pattern]).files] == wanted
