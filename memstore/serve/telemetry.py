"""Telemetry: Prometheus metrics and OpenTelemetry spans of answers, under the gen_ai conventions.
Nothing of what is asked or answered is in it, and none of it is on unless asked for.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memstore.errors import InvalidInput
from memstore.serve.answering.answers import Outcome, Question
from memstore.serve.metrics import Metrics, new_registry
from memstore.store.memory_store import MemoryStore

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = tuple(4**power for power in range(14))  # as the conventions advise


class Telemetry:
    """Told of every answer that ends, on the model's thread."""

    def __init__(self, model: str, *, metrics: bool, spans: bool) -> None:
        """model: its name. Raises InvalidInput for what is asked for and not installed."""
        self._model = model
        self.registry: Any = None
        self._tracer: Any = None
        if metrics:
            self._count()
        if spans:
            self._trace()

    def observe(self, store: MemoryStore, load: Callable[[], Mapping[str, int]]) -> None:
        """Show a memory's tiers, and what is going on, at /metrics."""
        if self.registry is not None:
            tiers = Metrics()
            tiers.store = store
            self.registry.register(tiers)
            self.registry.register(_Load(load))

    def _count(self) -> None:
        self.registry = new_registry()
        from prometheus_client import Histogram

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

    def ended(self, question: Question, outcome: Outcome, error: BaseException | None) -> None:
        """An answer has ended; error: None unless it failed, or its client went away."""
        model, kind = self._model, question.operation
        failed = "" if error is None else type(error).__name__
        if self.registry is not None:
            self._duration.labels(kind, model, failed).observe(outcome.seconds)
            if outcome.first_token_seconds:
                self._first.labels(kind, model).observe(outcome.first_token_seconds)
            self._usage.labels(kind, model, "input").observe(outcome.prompt_tokens)
            self._usage.labels(kind, model, "output").observe(len(outcome.tokens))
        if self._tracer is not None:
            self._span(question, outcome, failed)

    def _span(self, question: Question, outcome: Outcome, failed: str) -> None:
        sampling, model = question.sampling, self._model
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

    def __init__(self, load: Callable[[], Mapping[str, int]]) -> None:
        self._load = load

    def collect(self) -> Iterable[Any]:
        """Gauges memstore_{active, waiting, jobs, warm_sessions}."""
        from prometheus_client.core import GaugeMetricFamily

        texts = {
            "active": "Questions that are being answered.",
            "waiting": "Questions that wait for their turn.",
            "jobs": "Documents that are being read or wait for it.",
            "warm_sessions": "Conversations that are kept in memory.",
        }
        load = self._load()
        for name, text in texts.items():
            gauge = GaugeMetricFamily(f"memstore_{name}", text)
            gauge.add_metric([], load[name])
            yield gauge
