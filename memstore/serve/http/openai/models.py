"""GET /v1/models: the one model that is served."""

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from memstore.serve.api_errors import ApiError


@dataclass(frozen=True)
class ServedModel:
    """The model's name, and when it was opened (seconds since 1970)."""

    name: str
    created: int

    def check(self, name: str) -> None:
        """Raises ApiError (404) for another model than is served."""
        if name not in (self.name, "memstore"):
            raise ApiError(
                404,
                f"no model {name!r}; this server has {self.name!r}",
                code="model_not_found",
                param="model",
            )

    @property
    def object(self) -> dict[str, Any]:
        """OpenAI's object of it."""
        owned = {"created": self.created, "owned_by": "memstore"}
        return {"id": self.name, "object": "model", **owned}


def router(served: ServedModel) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [served.object]}

    @routes.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        served.check(name)
        return served.object

    return routes
