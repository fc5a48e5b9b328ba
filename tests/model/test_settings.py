"""Settings out of range, and questions that are not text, are refused by name."""

from pathlib import Path

import pytest

from memstore.errors import InvalidInput
from memstore.store.memory_store import MemoryStore
from support.tiny_model import tiny_model

REFUSED: list[tuple[dict[str, object], str]] = [
    ({"top_k": 0}, "top_k is 0"),
    ({"top_k": 5000}, "top_k is 5000"),
    ({"top_k": 2.5}, "top_k is 2.5"),
    ({"score_range": float("inf")}, "score_range is inf"),
    ({"score_range": float("nan")}, "score_range is nan"),
    ({"score_range": "all"}, "score_range is 'all'"),
    ({"recency": -1.0}, "recency is -1.0"),
    ({"supersede": -0.5}, "supersede is -0.5"),
    ({"granularity": "word"}, "granularity is 'word': choose one of per_token_per_head"),
    ({"cmt_cutoff": 1.5}, "cmt_cutoff is 1.5"),
    ({"chunk_blocks": 257}, "chunk_blocks is 257"),
    ({"margin": None, "chunk_blocks": "8"}, "chunk_blocks is '8'"),
    ({"local_tokens": 0}, "local_tokens is 0"),
    ({"caution": 0.5}, "caution is 0.5"),
    ({"max_new_tokens": 0}, "max_new_tokens is 0"),
    ({"max_sources": -1}, "max_sources is -1"),
    ({"stop": [""]}, r"stop is \[''\]"),
    ({"temperature": -1.0}, "temperature is -1.0"),
    ({"temperature": float("nan")}, "temperature is nan"),
    ({"temperature": 10**400}, "temperature is 1000"),
    ({"seed": 1 << 64}, "seed is 18446744073709551616"),
    ({"seed": 1.5}, "seed is 1.5"),
    ({"documents": "book"}, r"a list of names: \['book'\]"),
    ({"top_q": 0.5}, "unknown setting .top_q."),
]


def test_settings_out_of_range_and_questions_that_are_no_text_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    with MemoryStore.create(tmp_path / "m", model.signature) as store:
        model.ingest("the quiet river", store, name="book")
        for setting, message in REFUSED:
            with pytest.raises(InvalidInput, match=message):
                model.ask("who?", store, **setting)
        with pytest.raises(InvalidInput, match="the question must be text, is None"):
            model.ask(None, store)
        with pytest.raises(InvalidInput, match="the phrase must be text, is 5"):
            list(model.search(5, store))
