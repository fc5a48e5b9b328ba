"""What benchmarks.share.updates counts as wrong: a passage that its document did not say in any
manifest that the reader may have had.
"""

import pytest

pytest.importorskip("obstore")
pytest.importorskip("transformers")

from benchmarks.share.updates import Edition, History, text_of

FIRST, EDITED = ((0, 0), (1, 0)), ((0, 0), (1, 1))


def history() -> History:
    """A document that is there from manifest 1 on, is edited by 3 and removed by 6; the writer of
    the edit was told late whether manifest 2 or 3 had it.
    """

    def change(after: int, number: int, at: float, edition: Edition | None) -> dict[str, object]:
        documents = {"book": edition}
        return {"after": after, "number": number, "at": at, "documents": documents}

    return History([
        change(0, 1, 10.0, FIRST), change(1, 3, 20.0, EDITED), change(5, 6, 30.0, None)
    ])  # fmt: skip


def source(edition: Edition, text: str | None = None) -> list[object]:
    whole = text_of("book", edition)
    begin = whole.index("In note 1")
    return ["book", [begin, len(whole)], text or whole[begin:]]


@pytest.mark.parametrize(
    ("edition", "first", "last", "right"),
    [
        (FIRST, 1, 1, True),
        (FIRST, 2, 2, True),
        (EDITED, 2, 2, True),
        (FIRST, 3, 5, False),
        (FIRST, 1, 5, True),  # the answer was under way when it was edited
        (EDITED, 1, 1, False),
        (EDITED, 5, 5, True),
        (EDITED, 5, 6, True),
        (EDITED, 6, 7, False),
    ],
)
def test_a_passage_is_of_a_manifest_that_the_reader_may_have_had(
    edition: Edition, first: int, last: int, right: bool
) -> None:
    assert history().is_right(source(edition), first, last) == right


def test_another_text_or_place_is_wrong() -> None:
    made = history()
    assert not made.is_right(source(FIRST, text_of("book", EDITED)), 1, 7)
    name, (begin, end), text = source(FIRST)  # type: ignore[misc]
    assert not made.is_right([name, [begin - 9, end], text], 1, 7)
    assert not made.is_right(["another", [begin, end], text], 1, 7)


def test_a_reader_is_behind_from_when_the_next_manifest_was_there() -> None:
    made = history()
    assert made.behind(1, 25.0) == 5.0 and made.behind(1, 15.0) == 0.0
    assert made.behind(6, 1e9) == 0.0
