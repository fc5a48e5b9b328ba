"""What the commands that ask show on a terminal and elsewhere."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from memstore.cli import console
from memstore.model.landmark.landmark_model import load_model
from memstore.store.memory_store import MemoryStore
from support.commands import start
from support.tiny_model import save_tiny_model, text


def shown(arguments: list[str], *, terminal: bool) -> tuple[str, str]:
    """What a command writes to stdout, and to stderr, which may be a terminal."""
    ours, theirs = pty.openpty()
    run = start(
        *arguments,
        env={"TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs if terminal else subprocess.PIPE,
    )
    out, err = run.communicate()
    assert run.returncode == 0
    os.close(theirs)
    said = (err or "").encode()
    while terminal:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # so ends a terminal on Linux
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    return out, said.decode()


def test_a_source_names_its_page_or_heading_and_takes_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    passage = "The ferry leaves at noon,\nand again in the evening. " * 9
    console.print_sources(
        [
            {"document": "tides.pdf", "place": "p. 3", "text": passage},
            {"document": "tides.md", "place": "A very long heading " * 9, "text": passage},
            {"document": "notes", "place": None, "text": "Short."},
        ]
    )
    one, two, three = capsys.readouterr().out.splitlines()
    assert one.startswith("1. tides.pdf, p. 3: The ferry leaves at noon, and again in the")
    assert two.startswith("2. tides.md, A very long heading") and ": The ferry leaves" in two
    assert three == "3. notes: Short." and max(len(one), len(two)) <= 90


def test_a_terminal_shows_a_sign_of_life_and_search_how_sure_it_is(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path / "model")
    model = load_model(directory)
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        model.ingest(text(100), store, name="book")
    place = ["--store", str(tmp_path / "m"), "--model", str(directory)]
    for arguments, sign in (
        (["ask", "the captain", "--max-new-tokens", "2", *place], "reading the memory"),
        (["search", "the captain", *place], "searching"),
    ):
        out, said = shown(arguments, terminal=True)
        assert sign in said and sign not in out
        quiet = shown(arguments, terminal=False)
        assert sign not in quiet[1]
    lines = quiet[0].splitlines()
    assert lines and all(re.match(r"\d\. +\d{1,3}%  book: ", line) for line in lines)
