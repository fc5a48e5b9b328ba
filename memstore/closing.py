"""What is closed when its `with` block ends, or when all its steps are taken."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Self, TypeVar


class Closing(ABC):
    """Held from the beginning of a `with` block to its end, however that comes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Step = TypeVar("Step")
Result = TypeVar("Result")


def finish(
    steps: Generator[Step, None, Result], progress: Callable[[Step], None] | None = None
) -> Result:
    """Take all steps of an ingest or an answer, and return what comes of it. progress: called with
    each step.
    """
    with closing(steps):  # at once, and not when it is collected: an ingest holds the writer's lock
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                result: Result = end.value
                return result
            if progress is not None:
                progress(step)
