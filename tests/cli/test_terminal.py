"""Text of documents reaches the terminal without control characters."""

import json

import pytest

from memstore.cli import console


def test_control_characters_are_escaped_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b[2J\x07\x9b1m\u202eb\udc80\r\x7f"
    console.say(hostile)
    console.note(hostile)
    console.emit({"name": hostile})
    source = {"weight": 1.0, "document": hostile, "span": (0, 1), "tiers": {}}
    console.print_answer(
        {
            "text": hostile,
            "sources": [{**source, "sentence": hostile, "place": hostile}],
            "lookups": {"done": 1, "skipped": 0},
            "tiers": {},
            "seconds": 0.0,
        },
        streamed=False,
    )
    print(console.columns([("name",), (hostile + "\n",)]))
    shown = "".join(capsys.readouterr())
    assert all(letter.isprintable() or letter == "\n" for letter in shown), ascii(shown)
    assert r"\u001b[2J" in shown
    (line,) = [line for line in shown.splitlines() if line.startswith("{")]
    assert json.loads(line) == {"name": hostile}
