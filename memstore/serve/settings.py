"""Settings of a server: where it listens, how much it admits and how long it keeps, who may ask."""

from dataclasses import dataclass
from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

from memstore.errors import InvalidInput

PORT = 8741
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Some = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
BodyBytes = Annotated[int, Meta(ge=1024)]
Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class ServeSettings:
    """How a server behaves. Raises InvalidInput, which names what is out of range."""

    host: str = "127.0.0.1"  # the address that it listens at
    port: Annotated[int, Meta(ge=0, le=65535)] = PORT  # 0 = any that is free
    # limits
    active: Some = 8  # questions answered at once, a token each in turn
    waiting: Count = 512  # questions and searches that may wait for one of these; beyond it, 429
    wait_seconds: Seconds = 60.0  # that one would wait, beyond it 429; in any case after twice that
    answer_seconds: Seconds = 300.0  # of an answer, before it ends where it is
    grace: Seconds = 5.0  # of answers that are being made when the server is told to end
    body_bytes: BodyBytes = 64 << 20  # of an upload
    json_bytes: BodyBytes = 4 << 20  # of any other request, where that is less
    body_seconds: Seconds = 30.0  # between two parts of it, before the client is taken to be gone
    max_tokens: Some = 4096  # most that one answer may ask for
    between_chunks: Some = 32  # tokens of answers between two chunks of an ingest, at most
    # quotas, each of one key's own: what a key stores neither removes nor refuses another's
    files: Count = 10_000  # uploaded, and read for an agent
    files_bytes: Count = 4 << 30  # of them together
    conversations: Some = 10_000  # stored; beyond it the longest unused are forgotten
    conversations_bytes: Count = 4 << 30  # of their turns and documents; likewise
    # tokens of a prompt, beyond which it is a document; None = the model's
    window_tokens: Annotated[int, Meta(ge=8)] | None = None
    warm_sessions: Count = 16  # kept in memory
    warm_seconds: Seconds = 600.0  # since they were last used
    keep_seconds: Seconds | None = None  # of a stored conversation; None = until it is deleted
    # who may ask
    hosts: tuple[str, ...] = ()  # names under which it may be called, beside those of loopback
    origins: tuple[str, ...] = ()  # web pages of other hosts that may call it (CORS)
    metrics: bool = False  # Prometheus at /metrics
    telemetry: bool = False  # OpenTelemetry spans of what is asked

    def __post_init__(self) -> None:
        for name, kind in get_type_hints(ServeSettings, include_extras=True).items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, kind)
            except msgspec.ValidationError as error:
                raise InvalidInput(f"{name}: {error}, is {value}") from None

    @property
    def most_json(self) -> int:
        """Bytes of a request that is no upload."""
        return min(self.json_bytes, self.body_bytes)

    @property
    def loopback(self) -> bool:
        """Can only this machine reach it?"""
        return self.host in _LOOPBACK
