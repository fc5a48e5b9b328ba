"""Base classes of requests: null is the same as absent, and lists have a longest length."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


def entries(most: int = 10_000, *, least: int = 0) -> Any:
    """The field of a list of so many entries."""
    return Field(min_length=least, max_length=most, fail_fast=True)


class Lenient(BaseModel):
    """A request, or a part of one, whose unknown parameters are ignored."""

    # with a longest length pydantic looks at each text, and refuses one with half a character
    model_config = ConfigDict(extra="ignore", str_max_length=1 << 26)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Strict(Lenient):
    """A request, or a part of one, whose unknown parameters are errors."""

    model_config = ConfigDict(extra="forbid", str_max_length=1 << 26)
