"""Generating from a memory, and how fast that is."""

from collections.abc import Sequence
from typing import Any

from benchmarks.common.timing import timed
from memstore import LandmarkModel, MemoryStore

PROMPT = 32  # tokens before generation begins


def generate(
    model: LandmarkModel,
    store: MemoryStore,
    documents: list[str],
    prompt: Sequence[int],
    tokens: int,
    *,
    seed: int = 0,
    **lookup: Any,
) -> tuple[float, dict[str, int]]:
    """Tokens a second while `tokens` are generated after a prompt, and the lookups (token, head,
    layer) done and skipped.
    """
    with model.session(store, documents, **lookup) as session:
        state = session.feed(list(prompt))[-1]
        before = (session.attention.lookups.done, session.attention.lookups.skipped)
        seconds, _ = timed(
            lambda: list(session.generate(state, tokens + 1, temperature=0.8, seed=seed))
        )
        after = session.attention.lookups
        return tokens / seconds, {
            "done": after.done - before[0],
            "skipped": after.skipped - before[1],
        }
