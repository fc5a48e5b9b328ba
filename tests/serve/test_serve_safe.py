"""Who may ask a server what: addresses, names, keys and their scopes, pages of others, and what an
answer never says.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memstore import MemoryStore, load_model
from memstore.errors import InvalidInput, MemoryLocked
from memstore.serve.api_keys import Keys
from memstore.serve.http.run import check_exposed
from memstore.serve.service import Service
from memstore.serve.settings import ServeSettings
from support.diary import DIARY, QUESTION
from support.serving import Served, serving

READS, WRITES, NOTES = "reads-everything-1", "writes-everything-2", "writes-only-notes-3"
ASKED = {"model": "memstore", "messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with three keys, and metrics."""
    here = tmp_path_factory.mktemp("keyed")
    (here / "keys").write_text(
        f"# of tests\n{READS}\n{WRITES} write\n{NOTES} write only=note*\n", "utf-8"
    )
    settings = ServeSettings(metrics=True, body_bytes=1 << 16, origins=("https://page.example",))
    keys = Keys.of_file(here / "keys")
    with serving(here / "mem", settings, keys=keys) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_another_address_than_loopback_needs_keys() -> None:
    exposed = ServeSettings(host="0.0.0.0")
    with pytest.raises(InvalidInput, match="--api-key-file"):
        check_exposed(exposed, Keys())
    check_exposed(ServeSettings(), Keys())


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("", "no key"),
        ("short", "16 characters"),
        (f"{READS}\n{READS} write", "twice"),
        (f"{READS} everything", "no scope"),
    ],
)
def test_a_key_file_that_says_nothing_clear_is_refused(
    tmp_path: Path, lines: str, what: str
) -> None:
    (tmp_path / "keys").write_text(lines)
    with pytest.raises(InvalidInput, match=what):
        Keys.of_file(tmp_path / "keys")


def test_a_key_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{READS}\n", encoding="utf-8-sig")
    assert Keys.of_file(tmp_path / "keys").access(READS) is not None


@pytest.mark.parametrize("key", [None, "wrong", READS[:-1], f"{READS}x"])
def test_without_a_valid_key_nothing_is_told(keyed: Served, key: str | None) -> None:
    with keyed.client(headers={} if key is None else bearer(key)) as client:
        for path in ("/v1/models", "/v1/files", "/metrics", "/openapi.json", "/v1/nothing"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/").status_code == 200  # the page, which knows nothing itself


def test_a_key_that_may_read_may_not_write(keyed: Served) -> None:
    with keyed.client(headers=bearer(READS)) as client:
        assert client.post("/v1/chat/completions", json=ASKED).status_code == 200
        upload = {"file": ("a.txt", b"text")}
        answer = client.post("/v1/files", files=upload, data={"purpose": "assistants"})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "insufficient_scope"


def test_a_key_for_some_documents_neither_reads_nor_names_others(keyed: Served) -> None:
    with keyed.client(headers=bearer(NOTES)) as client:
        answer = client.post("/v1/chat/completions", json=ASKED).json()
        assert answer["memstore"]["sources"] == []
        named = {**ASKED, "memstore": {"documents": ["diary"]}}
        refused = client.post("/v1/chat/completions", json=named)
        assert refused.status_code == 404
        assert "there are" not in refused.text
        assert client.get("/v1/memstore/documents").json()["data"] == []


def test_a_key_for_some_documents_is_not_told_of_the_whole_server(keyed: Served) -> None:
    for key, status, all_ in ((NOTES, 403, False), (READS, 200, True)):
        with keyed.client(headers=bearer(key)) as client:
            for path in ("/metrics", "/v1/memstore/tiers"):
                assert client.get(path).status_code == status, path
            assert client.get("/v1/memstore").json()["tiers"] is all_


def test_a_conversation_is_its_keys_own(keyed: Served) -> None:
    made = keyed.openai(READS).responses.create(model="memstore", input=QUESTION)
    with keyed.client(headers=bearer(WRITES)) as client:
        assert client.get(f"/v1/responses/{made.id}").status_code == 404
        follow = {"model": "memstore", "input": "And?", "previous_response_id": made.id}
        assert client.post("/v1/responses", json=follow).status_code == 404
        other = client.post("/v1/chat/completions", json=ASKED).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_pages_of_others_are_not_heard_unless_allowed(served: Served, keyed: Served) -> None:
    upload = {"file": ("a.txt", b"text")}
    with served.client() as client:
        from_evil = {"Origin": "https://evil.example"}
        answer = client.post("/v1/files", files=upload, headers=from_evil)
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
        own = {"Origin": served.url}
        assert client.post("/v1/chat/completions", json=ASKED, headers=own).status_code == 200
    with keyed.client(headers=bearer(READS)) as client:
        allowed = client.get("/v1/models", headers={"Origin": "https://page.example"})
        assert allowed.headers["access-control-allow-origin"] == "https://page.example"


def test_a_body_that_is_too_long_is_refused_with_or_without_its_length(keyed: Served) -> None:
    with keyed.client(headers=bearer(READS)) as client:
        for content in (b" " * (1 << 17), iter([b" " * 4096] * 32)):
            answer = client.post(
                "/v1/chat/completions",
                content=content,
                headers={"Content-Type": "application/json"},
            )
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "too_large"


def test_no_answer_names_a_path_of_the_server(keyed: Served) -> None:
    directory = str(keyed.service.store.path)
    with keyed.client(headers=bearer(WRITES)) as client:
        for answer in (
            client.get("/v1/memstore"),
            client.get("/v1/memstore/documents"),
            client.post(
                "/v1/chat/completions", json={**ASKED, "memstore": {"documents": ["none"]}}
            ),
            client.delete("/v1/memstore/documents/none"),
            client.get("/openapi.json"),
        ):
            assert directory not in answer.text


def test_metrics_are_off_unless_asked_for_and_then_count_answers(
    served: Served, keyed: Served
) -> None:
    with served.client() as client:
        assert client.get("/metrics").status_code == 404
    with keyed.client(headers=bearer(READS)) as client:
        client.post("/v1/chat/completions", json=ASKED)
        told = client.get("/metrics").text
    assert 'gen_ai_client_token_usage_count{gen_ai_operation_name="chat"' in told
    assert "memstore_tier_hits_total" in told and "memstore_waiting 0.0" in told
    assert QUESTION not in told and "diary" not in told


def test_a_memory_is_served_once_at_a_time(tmp_path: Path) -> None:
    model = load_model()
    with MemoryStore.create(tmp_path / "mem", model.signature) as store:
        model.ingest(DIARY, store, name="diary")
        first = Service(model, store)
        with pytest.raises(MemoryLocked, match="another server"):
            Service(model, store)
        first.close()
        Service(model, store).close()


def test_a_span_of_every_answer_has_gen_ai_names_and_no_words(tmp_path: Path) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    told: list[dict[str, Any]] = []

    class Tracer(trace.NoOpTracer):  # type: ignore[name-defined, misc]
        def start_span(self, name: str, **given: Any) -> Any:
            told.append({"name": name, **given["attributes"]})
            return trace.INVALID_SPAN

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace, "get_tracer", lambda name: Tracer())
        with serving(tmp_path / "mem", ServeSettings(telemetry=True)) as server:
            said = server.openai().chat.completions.create(**ASKED)
    (span,) = told
    assert span["name"] == "chat memstore"
    assert span["gen_ai.usage.input_tokens"] == said.usage.prompt_tokens
    assert span["gen_ai.response.finish_reasons"] == ["stop"]
    assert "error.type" not in span and QUESTION not in str(span)
