"""What can be chosen of a server: where it listens, how much it takes on, and how long it keeps."""

from dataclasses import dataclass

from memstore.errors import InvalidInput

PORT = 8741
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True)
class ServeSettings:
    """How a server behaves. Raises InvalidInput, which names what is out of range."""

    host: str = "127.0.0.1"
    port: int = PORT  # 0 = any that is free
    # limits
    active: int = 8  # questions answered at once, a token each in turn
    waiting: int = 512  # questions and searches that may wait for one of these; beyond it, 429
    wait_seconds: float = 60.0  # beyond which one would wait: 429; after twice as much in any case
    answer_seconds: float = 300.0  # of an answer, before it ends where it is
    grace: float = 5.0  # of answers that are being made when the server is told to end
    body_bytes: int = 64 << 20  # of an upload
    json_bytes: int = 4 << 20  # of any other request, where that is less
    body_seconds: float = 30.0  # between two parts of it, before the client is taken to be gone
    max_tokens: int = 4096  # most that one answer may ask for
    between_chunks: int = 32  # tokens of answers between two chunks of an ingest, at most
    # quotas, each of one key's own: what a key stores neither removes nor refuses another's
    files: int = 10_000  # uploaded, and read for an agent
    files_bytes: int = 4 << 30  # of them together
    conversations: int = 10_000  # stored; beyond it the longest unused are forgotten
    conversations_bytes: int = (
        4 << 30
    )  # of what was said, and of the documents that hold it; as well
    # conversations
    window_tokens: int | None = None  # of a prompt, beyond which it is a document; None = reader's
    warm_sessions: int = 16  # kept in memory
    warm_seconds: float = 600.0  # since they were last used
    keep_seconds: float | None = None  # of a stored conversation since then; None = until forgotten
    # who may ask
    hosts: tuple[str, ...] = ()  # names under which it may be called, beside those of loopback
    origins: tuple[str, ...] = ()  # web pages of other hosts that may call it (CORS)
    metrics: bool = False  # Prometheus at /metrics
    telemetry: bool = False  # OpenTelemetry spans of what is asked

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidInput(f"port must lie in 0..65535, is {self.port}")
        for name, least in (
            ("active", 1),
            ("waiting", 0),
            ("body_bytes", 1024),
            ("json_bytes", 1024),
            ("max_tokens", 1),
            ("between_chunks", 1),
            ("files", 0),
            ("files_bytes", 0),
            ("conversations_bytes", 0),
            ("warm_sessions", 0),
            ("conversations", 1),
        ):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} must be at least {least}, is {getattr(self, name)}")
        for name in (
            "wait_seconds",
            "answer_seconds",
            "grace",
            "body_seconds",
            "warm_seconds",
            "keep_seconds",
        ):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInput(f"{name} must be above 0, is {value}")
        if self.window_tokens is not None and self.window_tokens < 8:
            raise InvalidInput(f"window_tokens must be at least 8, is {self.window_tokens}")

    @property
    def most_json(self) -> int:
        """Bytes of a request that is no upload."""
        return min(self.json_bytes, self.body_bytes)

    @property
    def loopback(self) -> bool:
        """Can only this machine reach it?"""
        return self.host in _LOOPBACK
