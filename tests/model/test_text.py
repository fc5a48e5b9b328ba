"""A text is checked as a whole before anything of it is stored."""

from pathlib import Path

import pytest

from memstore.errors import InvalidInput
from memstore.model.source_text import Text


def test_a_text_is_the_same_however_it_is_given(tmp_path: Path) -> None:
    body = "naïve Zoë — 漢字\n" * 40
    book = tmp_path / "book.txt"
    book.write_text(f"\ufeff{body}")
    read = [Text(body, "a"), Text(book)]
    for one in read:
        one.check()
        assert one.content == body
    assert len({one.digest for one in read}) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\t", "is empty; there is nothing to read"),
        (b"abc\0def", r"is binary \(a NUL byte at 3\)"),
        (bytes(range(1, 32)) * 9, "is binary"),
    ],
)
def test_empty_and_binary_texts_are_refused_before_anything_is_stored(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        Text(tmp_path / "file").check()
    with pytest.raises(InvalidInput, match="does not exist"):
        Text(tmp_path / "other")
    with pytest.raises(InvalidInput, match="is a directory"):
        Text(tmp_path)
    with pytest.raises(InvalidInput, match="needs a name"):
        Text("words")
