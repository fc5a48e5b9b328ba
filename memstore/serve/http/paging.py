"""Cursor pagination of lists, as OpenAI's API has it, in order of creation."""

from collections.abc import Callable, Sequence
from sqlite3 import Row
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memstore.serve.api_errors import ApiError
from memstore.serve.state.database import Database

Show = Callable[[Row], dict[str, Any]]


class Paging(BaseModel):
    """Which part of a list: `limit` objects behind the one called `after`, or the last ones in
    front of `before`.
    """

    model_config = ConfigDict(extra="forbid")
    after: str | None = None
    before: str | None = None
    limit: int = Field(20, ge=1, le=100)
    order: Literal["asc", "desc"] = "desc"


def page(
    database: Database,
    select: str,
    values: Sequence[Any],
    paging: Paging,
    show: Show,
    *,
    keep: Callable[[Row], bool] | None = None,
) -> dict[str, Any]:
    """A page of the rows of `select`, a query that ends with a condition; each has an "id" and a
    "number", by which they are ordered.

    keep: whether the asker may know of a row. Raises ApiError for a cursor that is not in the list.
    """
    rising = paging.order == "asc"
    if paging.after is not None:
        at = _number(database, select, values, keep, "after", paging.after)
        select, values = f"{select} AND number {'>' if rising else '<'} ?", [*values, at]
    if paging.before is not None:
        at = _number(database, select, values, keep, "before", paging.before)
        select, values = f"{select} AND number {'<' if rising else '>'} ?", [*values, at]
        rising = not rising  # the nearest to the cursor come first
    ordered = f"{select} ORDER BY number {'ASC' if rising else 'DESC'}"
    wanted = paging.limit + 1
    if keep is None:
        rows = database.rows(f"{ordered} LIMIT ?", [*values, wanted])
    else:
        rows = [row for row in database.rows(ordered, values) if keep(row)][:wanted]
    more = len(rows) > paging.limit
    rows = rows[: paging.limit]
    return _listed([show(row) for row in (rows if paging.before is None else reversed(rows))], more)


def page_of(objects: Sequence[dict[str, Any]], paging: Paging) -> dict[str, Any]:
    """A page of objects, the oldest of which comes first; each has an "id". Raises ApiError for a
    cursor that is not among them.
    """
    ids = [thing["id"] for thing in objects]

    def index(param: str, cursor: str) -> int:
        if cursor not in ids:
            raise _no_object(param, cursor)
        return ids.index(cursor)

    first, end = 0, len(ids)
    rising = paging.order == "asc"
    if paging.after is not None:
        at = index("after", paging.after)
        first, end = (at + 1, end) if rising else (first, at)
    if paging.before is not None:
        at = index("before", paging.before)
        first, end = (first, min(at, end)) if rising else (max(first, at + 1), end)
    inside = list(objects[first:end] if rising else reversed(objects[first:end]))
    more = len(inside) > paging.limit
    data = inside[-paging.limit :] if paging.before is not None else inside[: paging.limit]
    return _listed(data, more)


def _listed(data: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def _no_object(param: str, cursor: str) -> ApiError:
    message = f"{param}: no object {cursor!r} in this list"
    return ApiError(400, message, code="invalid_value", param=param)


def _number(
    database: Database,
    select: str,
    values: Sequence[Any],
    keep: Callable[[Row], bool] | None,
    param: str,
    cursor: str,
) -> int:
    """The number of the object that a cursor names."""
    listed = select.replace("SELECT ", "SELECT number AS at, ", 1)
    row = database.row(f"SELECT * FROM ({listed}) WHERE id = ?", [*values, cursor])
    if row is None or not (keep is None or keep(row)):
        raise _no_object(param, cursor)
    number: int = row["at"]
    return number
