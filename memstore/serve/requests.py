"""Bodies of requests, with limited lengths and null as absent; work that ends with its client."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.requests import Request

from memstore.serve.api_errors import ApiError

T = TypeVar("T")


def entries(most: int = 10_000, *, least: int = 0) -> Any:
    """The field of a list with `least` to `most` entries."""
    return Field(min_length=least, max_length=most, fail_fast=True)


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

    model_config = ConfigDict(extra="forbid", str_max_length=1 << 26)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects, cancels it and raises ApiError (499)."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    made, gone = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not made.done():
            raise ApiError(499, "the client disconnected", code="cancelled")
        return made.result()
    finally:
        for task in (made, gone):
            task.cancel()
        await asyncio.gather(made, gone, return_exceptions=True)
