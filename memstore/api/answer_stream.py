"""An answer that is read while it is generated."""

from collections.abc import Generator, Iterator

from memstore.closing import Closing
from memstore.errors import InvalidInput
from memstore.model.answer import Answer
from memstore.model.chat_session import spoken


class AnswerStream(Closing, Iterator[str]):
    """Pieces of an answer's text, never a part of a character; a context manager, which ends the
    answer where it is left early.
    """

    def __init__(self, steps: Generator[str, None, Answer]) -> None:
        """steps: see ModelAPI.asking."""
        self._answer: Answer | None = None
        self._pieces = self._run(steps)

    @property
    def answer(self) -> Answer:
        """The whole of it, with its sources. Raises InvalidInput before the last piece."""
        if self._answer is None:
            raise InvalidInput("the answer is not there before its last piece; read them all")
        return self._answer

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """End the answer where it is."""
        self._pieces.close()

    def _run(self, steps: Generator[str, None, Answer]) -> Generator[str, None, None]:
        self._answer = yield from spoken(steps)
