"""Settings of a server: address, limits, and permitted hosts and origins."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from memstore.decode import Settings

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})

Some = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
BodyBytes = Annotated[int, Meta(ge=1024)]
Seconds = Annotated[float, Meta(gt=0)]


@dataclass(frozen=True)
class ServeSettings(Settings):
    """The settings. Raises InvalidInput for a value out of range."""

    host: str = "127.0.0.1"  # address to listen on
    port: Annotated[int, Meta(ge=0, le=65535)] = 8741  # 0: any free port
    # limits
    active: Some = 8  # questions answered concurrently
    waiting: Count = 64  # questions and searches in the queue; more get status 429
    answer_seconds: Seconds = 300.0  # of an answer, which is then cut off
    grace: Seconds = 5.0  # for running answers when the server stops
    body_bytes: BodyBytes = 64 << 20  # of an upload
    json_bytes: BodyBytes = 4 << 20  # of any other request
    body_seconds: Seconds = 30.0  # between two parts of a body
    max_tokens: Some = 4096  # of an answer
    message_tokens: Some = 4096  # of a chat message or a search, read in one step
    between_chunks: Some = 32  # most steps of answers between two chunks of an ingest
    # permitted clients
    hosts: tuple[str, ...] = ()  # host names of the server, besides those of loopback
    origins: tuple[str, ...] = ()  # origins of other web pages that may call it (CORS)


def in_url(host: str) -> str:
    """A host as URLs and the header Host write it: in lower case, IPv6 addresses in brackets."""
    return (f"[{host}]" if ":" in host and not host.startswith("[") else host).lower()
