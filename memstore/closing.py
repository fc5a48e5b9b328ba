"""What is closed when its `with` block ends."""

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Held from the beginning of a `with` block to its end, however that comes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
