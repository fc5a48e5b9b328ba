"""Filters over the attributes of a vector store's files: comparisons, and what is made of them."""

import json
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StringConstraints,
    model_validator,
)

from memstore.serve.strict import Strict, entries

_MOST = 256  # comparisons of a filter
_NAMES = 16  # of attributes, or of metadata
_LONGEST = 512  # characters of a value
_LARGEST = 2**53  # a JSON number beyond it is not what was meant


def _few(given: Any) -> Any:
    """The first that are too many are enough to say so."""
    return dict(islice(given.items(), _NAMES + 1)) if isinstance(given, dict) else given


Text = Annotated[str, StringConstraints(strict=True, max_length=_LONGEST)]
Key = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=64)]
Number = (
    Annotated[StrictInt, Field(ge=-_LARGEST, le=_LARGEST)]
    | Annotated[StrictFloat, Field(allow_inf_nan=False)]
)
Value = StrictBool | Number | Text
Attributes = Annotated[dict[Key, Value], Field(max_length=_NAMES), BeforeValidator(_few)]
Metadata = Annotated[dict[Key, Text], Field(max_length=_NAMES), BeforeValidator(_few)]

_ORDERED = {
    "gt": lambda left, right: left > right,
    "gte": lambda left, right: left >= right,
    "lt": lambda left, right: left < right,
    "lte": lambda left, right: left <= right,
}


class Comparison(Strict):
    """An attribute compared with a value; of an attribute that is not there only `ne` and `nin`
    hold. A number and a text are never equal, and none is greater.
    """

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    key: Key
    value: Value | Annotated[list[Value], entries(_MOST)]

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if isinstance(self.value, list) != (self.type in ("in", "nin")):
            wanted = "a list of values" if self.type in ("in", "nin") else "one value"
            raise ValueError(f"{self.type} takes {wanted}")
        return self

    def holds(self, attributes: Mapping[str, Any]) -> bool:
        """Of these attributes?"""
        value = attributes.get(self.key)
        among = self.value if isinstance(self.value, list) else [self.value]
        if self.type in ("eq", "in"):
            return any(_equal(value, one) for one in among)
        if self.type in ("ne", "nin"):
            return not any(_equal(value, one) for one in among)
        compare = _ORDERED[self.type]
        return _alike(value, self.value) and bool(compare(value, self.value))


class Compound(Strict):
    """Filters of which all, or any, shall hold."""

    type: Literal["and", "or"]
    filters: Annotated[list["Filter"], entries(_MOST, least=1)]

    def holds(self, attributes: Mapping[str, Any]) -> bool:
        """Of these attributes?"""
        held = (part.holds(attributes) for part in self.filters)
        return all(held) if self.type == "and" else any(held)


Filter = Annotated[Comparison | Compound, Field(discriminator="type")]
Compound.model_rebuild()


def _not_too_much(given: Comparison | Compound) -> Comparison | Compound:
    open_, seen = [given], 0
    while open_:
        part = open_.pop()
        seen += 1
        if seen > _MOST:
            raise ValueError(f"more than {_MOST} comparisons; filter by fewer")
        if isinstance(part, Compound):
            open_ += part.filters
    return given


Filters = Annotated[Filter, AfterValidator(_not_too_much)]
"""A filter as a request gives it."""


def holds(filters: Comparison | Compound | None, attributes: str) -> bool:
    """Of attributes that are stored as JSON? Everything holds without a filter."""
    return filters is None or filters.holds(json.loads(attributes))


def _alike(left: Any, right: Any) -> bool:
    """Can one be greater than the other?"""
    if isinstance(left, bool) or isinstance(right, bool):
        return isinstance(left, bool) and isinstance(right, bool)
    numbers = (int, float)
    return (isinstance(left, numbers) and isinstance(right, numbers)) or (
        isinstance(left, str) and isinstance(right, str)
    )


def _equal(left: Any, right: Any) -> bool:
    return _alike(left, right) and bool(left == right)
