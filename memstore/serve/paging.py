"""Lists that are asked for a page at a time, as OpenAI's are: by a cursor, in order of creation."""

from collections.abc import Callable, Sequence
from sqlite3 import Row
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from memstore.serve.database import Database
from memstore.serve.errors import ApiError

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
    number: str = "number",
    keep: Callable[[Row], bool] | None = None,
) -> dict[str, Any]:
    """A page of the rows of `select`, a query that ends with a condition; each has an "id".

    number: the column they are ordered by. keep: whether the asker may know of a row. Raises
    ApiError for a cursor that is not in the list.
    """
    rising = paging.order == "asc"
    if paging.after is not None:
        at = _place(database, select, values, number, keep, "after", paging.after)
        select, values = f"{select} AND {number} {'>' if rising else '<'} ?", [*values, at]
    if paging.before is not None:
        at = _place(database, select, values, number, keep, "before", paging.before)
        select, values = f"{select} AND {number} {'<' if rising else '>'} ?", [*values, at]
        rising = not rising  # the nearest to the cursor come first
    ordered = f"{select} ORDER BY {number} {'ASC' if rising else 'DESC'}"
    wanted = paging.limit + 1
    if keep is None:
        rows = database.rows(f"{ordered} LIMIT ?", [*values, wanted])
    else:
        rows = [row for row in database.rows(ordered, values) if keep(row)][:wanted]
    more = len(rows) > paging.limit
    rows = rows[: paging.limit]
    data = [show(row) for row in (rows if paging.before is None else reversed(rows))]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def _place(
    database: Database,
    select: str,
    values: Sequence[Any],
    number: str,
    keep: Callable[[Row], bool] | None,
    param: str,
    cursor: str,
) -> int:
    """The number of the object that a cursor names."""
    listed = select.replace("SELECT ", f"SELECT {number} AS at, ", 1)
    row = database.row(f"SELECT * FROM ({listed}) WHERE id = ?", [*values, cursor])
    if row is None or not (keep is None or keep(row)):
        raise ApiError(
            400, f"{param}: no object {cursor!r} in this list", code="invalid_value", param=param
        )
    place: int = row["at"]
    return place
