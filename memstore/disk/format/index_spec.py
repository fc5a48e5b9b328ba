"""What a memory keeps to be found by where a selector chooses its blocks: landmarks of every token,
words, or both.
"""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, Self, get_args

from msgspec import Meta

from memstore.decode import typed
from memstore.errors import InvalidConfig

LandmarkDtype = Literal["int8", "float16", "float32"]
Name = Annotated[str, Meta(min_length=1, max_length=128)]


@dataclass(frozen=True)
class IndexSpec:
    """What a selector keeps of every token and block; a memory keeps it for one selector."""

    name: Name
    digest: Name  # of all that its landmarks depend on: other weights, another digest
    heads: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0  # landmarks a token; 0: it has none
    width: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0  # numbers a landmark
    dtype: LandmarkDtype = "int8"  # of a landmark; in int8 it is a unit vector times 127
    words: bool = False  # are the words of every block kept

    def __post_init__(self) -> None:
        if self.dtype not in get_args(LandmarkDtype):
            raise InvalidConfig(
                f"token landmarks in {self.dtype!r} are not stored; choose one of "
                f"{', '.join(get_args(LandmarkDtype))}"
            )
        if (self.heads < 1) != (self.width < 1) or min(self.heads, self.width) < 0:
            raise InvalidConfig(
                f"a selector of {self.heads} landmarks a token, {self.width} numbers wide; give "
                "both, or neither"
            )

    def to_dict(self) -> dict[str, Any]:
        """The form as plain values."""
        return asdict(self)

    @classmethod
    def decode(cls, values: Any) -> Self:
        """The form that `to_dict` was taken of. Raises ValueError for what is none."""
        try:
            return typed(values, cls)
        except InvalidConfig as error:
            raise ValueError(str(error)) from error
