"""Settings of a server: where it listens, how much it takes on, and who may call it."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from memstore.decode import check_settings

PORT = 8741
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Some = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
BodyBytes = Annotated[int, Meta(ge=1024)]
Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class ServeSettings:
    """The settings. Raises InvalidInput, which names a value out of range."""

    host: str = "127.0.0.1"  # the address it listens on
    port: Annotated[int, Meta(ge=0, le=65535)] = PORT  # 0: any that is free
    # limits
    active: Some = 8  # questions answered at once
    waiting: Count = 64  # questions and searches that may wait for a place; beyond it, 429
    answer_seconds: Seconds = 300.0  # of an answer; then it is cut off
    grace: Seconds = 5.0  # left to answers when the server is told to stop
    body_bytes: BodyBytes = 64 << 20  # of an uploaded file
    json_bytes: BodyBytes = 4 << 20  # of any other request
    body_seconds: Seconds = 30.0  # between two parts of a body
    max_tokens: Some = 4096  # of an answer
    message_tokens: Some = 4096  # of a message of a chat; all of it is read at once
    between_chunks: Some = 32  # steps of answers between two chunks of an ingest, at most
    # who may call it
    hosts: tuple[str, ...] = ()  # names it may be called by, besides those of loopback
    origins: tuple[str, ...] = ()  # web pages of other hosts that may call it (CORS)

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in _LOOPBACK
