"""Strict pydantic models of requests: every parameter is known, lists have a longest length, and
the first error ends the validation.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

Neutral = Mapping[str, tuple[Any, ...]]
"""The values of parameters that ask for nothing."""
MOST = 10_000
"""Entries of the longest lists."""


def entries(most: int = MOST, *, least: int = 0) -> Any:
    """The field of a list of so many entries."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class Strict(BaseModel):
    """A request, or a part of one: a parameter that is not known is an error that names it, unless
    its value asks for nothing (`neutral`: the values that do, by parameter).
    """

    # a longest text has pydantic look at every one: none with half a character gets in
    model_config = ConfigDict(extra="forbid", str_max_length=1 << 26)
    neutral: ClassVar[Neutral] = {}

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, given: Any) -> Any:
        """Without what asks for nothing, and with the first alone of what is not known: a body may
        have a million of these.
        """
        if not isinstance(given, dict):
            return given
        kept: dict[str, Any] = {}
        known = True
        for name, value in given.items():
            if name in cls.neutral and any(
                value == none and type(value) is type(none) for none in cls.neutral[name]
            ):
                continue
            if name in cls.model_fields or known:
                kept[name] = value
            known = known and name in cls.model_fields
        return kept
