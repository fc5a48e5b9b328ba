"""Authorization of a request: FastAPI dependencies that give a route what its API key may do."""

from typing import Annotated

from fastapi import Depends, Request

from memstore.serve.api_errors import ApiError
from memstore.serve.api_keys import Access


def reading(request: Request) -> Access:
    """A dependency of routes that read: what the asker may do."""
    access: Access = request.state.access
    return access


def writing(request: Request) -> Access:
    """A dependency of routes that change something. Raises ApiError (403)."""
    access = reading(request)
    if not access.write:
        raise ApiError(
            403, "this key may only read", type="permission_error", code="insufficient_scope"
        )
    return access


def reading_all(request: Request) -> Access:
    """A dependency of routes that tell of the whole server. Raises ApiError (403)."""
    access = reading(request)
    if access.only:
        raise ApiError(
            403,
            "this key may read some documents only, and this tells of all",
            type="permission_error",
            code="insufficient_scope",
        )
    return access


Reads = Annotated[Access, Depends(reading)]
ReadsAll = Annotated[Access, Depends(reading_all)]
Writes = Annotated[Access, Depends(writing)]


def owner(request: Request) -> str:
    """Whose turn in the worker's queue a request takes: "ASKER/CONNECTION"."""
    client = request.client
    group = reading(request).name
    if group == "local" and client is not None:
        group = client.host
    return f"{group}/{client.host}:{client.port}" if client is not None else f"{group}/-"
