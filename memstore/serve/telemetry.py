"""What is measured of answers, under OpenTelemetry's gen_ai names: for Prometheus at /metrics, and
as spans. Nothing of what is asked or answered is in it, and none of it is on unless asked for.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from memstore.errors import InvalidInput
from memstore.serve.api_keys import ReadsAll
from memstore.serve.metrics import Metrics, new_registry

if TYPE_CHECKING:
    from memstore.serve.answering.answers import Outcome, Question
    from memstore.serve.service import Service

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))  # as the conventions advise


class Telemetry:
    """Told of every answer that ends, on the model's thread."""

    def __init__(self, service: "Service") -> None:
        """Raises InvalidInput for what is asked for and not installed."""
        self._service = service
        self.registry: Any = None
        self._tracer: Any = None
        if service.settings.metrics:
            self._count()
        if service.settings.telemetry:
            self._trace()

    def _count(self) -> None:
        self.registry = new_registry()
        from prometheus_client import Histogram

        tiers = Metrics()
        tiers.store = self._service.store
        self.registry.register(tiers)
        self.registry.register(_Load(self._service))
        labels = ["gen_ai_operation_name", "gen_ai_request_model", "error_type"]

        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> Any:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        self._duration = histogram(
            "gen_ai_server_request_duration_seconds",
            "Seconds from a question's turn to the end of its answer.",
            labels,
            _SECONDS,
        )
        self._first = histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds from a question's turn to the first token of its answer.",
            labels[:2],
            _SECONDS,
        )
        self._usage = histogram(
            "gen_ai_client_token_usage",
            "Tokens of prompts and answers.",
            [*labels[:2], "gen_ai_token_type"],
            _TOKENS,
        )

    def _trace(self) -> None:
        try:
            from opentelemetry import trace
        except ImportError:
            raise InvalidInput(
                "telemetry needs the package opentelemetry-api; install it with: pip install "
                "opentelemetry-sdk"
            ) from None
        self._tracer = trace.get_tracer("memstore")

    def ended(self, question: "Question", outcome: "Outcome", error: BaseException | None) -> None:
        """An answer has ended; error: None unless it failed, or its client went away."""
        model, kind = self._service.model, question.operation
        failed = "" if error is None else type(error).__name__
        if self.registry is not None:
            self._duration.labels(kind, model, failed).observe(outcome.seconds)
            if outcome.first_token_seconds:
                self._first.labels(kind, model).observe(outcome.first_token_seconds)
            self._usage.labels(kind, model, "input").observe(outcome.prompt_tokens)
            self._usage.labels(kind, model, "output").observe(len(outcome.tokens))
        if self._tracer is not None:
            self._span(question, outcome, failed)

    def _span(self, question: "Question", outcome: "Outcome", failed: str) -> None:
        sampling, model = question.sampling, self._service.model
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": question.operation,
            "gen_ai.provider.name": "memstore",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.response.finish_reasons": [outcome.finish_reason],
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": len(outcome.tokens),
            "memstore.usage.cached_tokens": outcome.cached_tokens,
            "memstore.answered": outcome.answered,
        }
        if failed:
            attributes["error.type"] = failed
        start = outcome.began_ns or None
        name = f"{question.operation} {model}"
        span = self._tracer.start_span(name, attributes=attributes, start_time=start)
        span.end()


class _Load:
    """What is going on, when it is asked for: a collector of prometheus_client."""

    def __init__(self, service: "Service") -> None:
        self._service = service

    def collect(self) -> Iterable[Any]:
        """Gauges memstore_{active, waiting, jobs, warm_sessions}."""
        from prometheus_client.core import GaugeMetricFamily

        texts = {
            "active": "Questions that are being answered.",
            "waiting": "Questions that wait for their turn.",
            "jobs": "Documents that are being read or wait for it.",
            "warm_sessions": "Conversations that are kept in memory.",
        }
        load = {**self._service.worker.load, "warm_sessions": self._service.sessions.count}
        for name, text in texts.items():
            gauge = GaugeMetricFamily(f"memstore_{name}", text)
            gauge.add_metric([], load[name])
            yield gauge


def router(service: "Service") -> APIRouter:
    """/metrics, where it was asked for."""
    routes = APIRouter()
    registry = service.telemetry.registry
    if registry is None:
        return routes

    @routes.get("/metrics")
    def metrics(access: ReadsAll) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return routes
