"""What is said of a document that is read in: what to expect, how fast it goes, what came of it."""

from typing import TYPE_CHECKING, Any

from memstore.cli.terminal import console

if TYPE_CHECKING:
    from memstore.disk.format.document import Document
    from memstore.model.document_ingest import IngestProgress
    from memstore.store.size_estimate import SizeEstimate


def result(
    document: "Document", status: str, resumed_at: int = 0, seconds: float = 0.0
) -> dict[str, Any]:
    """What came of a document, as plain values.

    resumed_at: the token from which it was read; of an append that is where a chunk began,
    before `appended_to`, the tokens that were there.
    """
    appended = {"appended_to": document.appended_to} if status == "appended" else {}
    return {
        "name": document.name,
        "status": status,
        "resumed_at": resumed_at,
        **appended,
        "blocks": document.blocks,
        "tokens": document.tokens,
        "bytes": document.bytes,
        "seconds": seconds,
    }


def expected(name: str, forecast: "SizeEstimate") -> str:
    """How large a document will be, before it is read."""
    size = f"{'up to' if forecast.most else 'about'} {console.size(forecast.bytes)} on disk"
    return f"{console.one_line(name)}: about {forecast.tokens:,} tokens, {size}"


def speed(name: str, state: "IngestProgress") -> str:
    """How fast a document is read, and how long that will take, by its first chunk."""
    return (
        f"{console.one_line(name)}: {state.tokens_per_second:,.0f} tokens a second, about "
        f"{console.duration(state.seconds_left)} to go"
    )


def told(result: dict[str, Any]) -> str:
    """What came of a document, in a line."""
    status = result["status"]
    if status == "resumed":
        status += f" at token {result['resumed_at']:,}"
    elif status == "appended":
        status += f" behind token {result['appended_to']:,}"
    figures = (
        f"{result['blocks']:,} blocks, {result['tokens']:,} tokens, {console.size(result['bytes'])}"
    )
    return f"{console.one_line(result['name'])}: {status}; {figures}, {result['seconds']:.1f} s"
