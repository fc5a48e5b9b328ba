"""GET /metrics, for Prometheus."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from memstore.serve.http.authorization import ReadsAll


def router(registry: Any) -> APIRouter:
    """The route, where there is a registry of prometheus_client."""
    routes = APIRouter()
    if registry is None:
        return routes

    @routes.get("/metrics")
    def metrics(access: ReadsAll) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
