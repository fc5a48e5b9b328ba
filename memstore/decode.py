"""Decode and check contents of files and settings of callers as typed values with ranges.

Everything that a file says passes here before it is used. A form is any type that msgspec supports;
bounds are written as `Annotated[int, Meta(ge=..., lt=...)]`. A bound excludes NaN.
"""

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    Self,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from memstore.errors import InvalidInput

T = TypeVar("T")
Packed = bytes | memoryview
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]  # of tokens, characters, bytes
Block = Annotated[int, Meta(ge=0, lt=1 << 32)]  # as keys hold them
Layer = Annotated[int, Meta(ge=0, lt=1 << 16)]
Positive = Annotated[int, Meta(ge=1, lt=1 << 31)]
Share = Annotated[float, Meta(ge=0, le=1)]
Amount = Annotated[float, Meta(ge=0, le=1e300)]  # finite
Line = Annotated[str, Meta(max_length=4096)]

_MOST_PLAIN = 1 << 24  # bytes
_BOUND = re.compile(r"Expected `(?:int|float)` ([<>]=?) (\S+)")  # msgspec's message
_BOUNDS = {"<": "below", "<=": "at most", ">": "above", ">=": "at least"}


def unpack(data: Packed, form: type[T]) -> T:
    """Decode msgpack as `form`. Raises ValueError, which says what is wrong and where."""
    return _decoded(msgspec.msgpack.decode, data, form)


def from_json(text: str | bytes, form: type[T]) -> T:
    """Decode JSON as `form`. Raises ValueError."""
    return _decoded(msgspec.json.decode, text, form)


def typed(value: Any, form: type[T]) -> T:
    """Convert plain values to `form`. Raises ValueError."""
    return _decoded(msgspec.convert, value, form)


def _decoded(decode: Callable[..., T], given: Any, form: type[T]) -> T:
    try:
        return decode(given, type=form)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def check_settings(settings: Any) -> None:
    """Check the fields of a dataclass against their types. Raises InvalidInput, which names a field
    that is out of range.
    """
    for name, form in _hints(settings.__class__).items():
        value = getattr(settings, name)
        try:
            msgspec.convert(value.item() if hasattr(value, "item") else value, form)
        except msgspec.ValidationError as error:
            choices = get_args(form) if get_origin(form) is Literal else ()
            why = f"choose one of {', '.join(choices)}" if choices else str(error)
            if bound := _BOUND.match(why):
                why = f"it must be {_BOUNDS[bound[1]]} {bound[2]}"
            raise InvalidInput(f"{name} is {value!r}: {why}") from None


class Settings:
    """Base of dataclasses that check their fields at creation: InvalidInput names a field that is
    out of range.
    """

    def __post_init__(self) -> None:
        check_settings(self)

    def changed(self, **settings: Any) -> Self:
        """A copy with other settings; None leaves one unchanged. Raises InvalidInput."""
        given = {name: value for name, value in settings.items() if value is not None}
        known = tuple(field.name for field in fields(cast(Any, self)))
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InvalidInput(f"unknown setting {unknown[0]!r}; choose one of {', '.join(known)}")
        return replace(cast(Any, self), **given) if given else self


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def check_plain(value: Any, what: str) -> None:
    """Raises ValueError for a dict with values that JSON lacks, with a number that is not finite or
    beyond 64 bits, and for one that is too large or nested too deep.
    """
    if not isinstance(value, dict) or not all(type(name) is str for name in value):
        raise ValueError(f"{what} does not map names to values")
    try:
        json.dumps(value, allow_nan=False)
        size = len(msgspec.msgpack.encode(value))  # refuses integers beyond 64 bits
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"{what} is not plain: {error}") from None
    if size > _MOST_PLAIN:
        raise ValueError(f"{what} is too large")
