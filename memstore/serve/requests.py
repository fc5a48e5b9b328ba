"""Base classes of requests: null means absent, and the lengths of lists and texts are limited."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


def entries(most: int = 10_000, *, least: int = 0) -> Any:
    """The field of a list with `least` to `most` entries."""
    return Field(min_length=least, max_length=most, fail_fast=True)


Phrase = Annotated[str, Field(max_length=8192, pattern=r"\S")]
"""A question or a phrase to search; not blank."""


class Lenient(BaseModel):
    """A request, or part of one, that ignores unknown parameters."""

    # str_max_length also makes pydantic check each text, and refuse lone surrogates
    model_config = ConfigDict(extra="ignore", str_max_length=1 << 26)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class Strict(Lenient):
    """A request, or part of one, that refuses unknown parameters."""

    model_config = ConfigDict(extra="forbid")
