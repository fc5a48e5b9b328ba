"""GET /v1/models: the one model that is served."""

from typing import Any

from fastapi import APIRouter

from memstore.serve.api_errors import ApiError
from memstore.serve.service import Service


def router(service: Service) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.get("/v1/models")
    def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @routes.get("/v1/models/{name:path}")
    def model(name: str) -> dict[str, Any]:
        check_model(service, name)
        return _model(service)

    return routes


def check_model(service: Service, name: str) -> None:
    """Raises ApiError (404) for another model than is served."""
    if name not in (service.model, "memstore"):
        raise ApiError(
            404,
            f"no model {name!r}; this server has {service.model!r}",
            code="model_not_found",
            param="model",
        )


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "memstore",
    }
