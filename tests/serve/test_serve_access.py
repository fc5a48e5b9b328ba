"""Access to a server: keys and scopes, Host and Origin, body sizes, and secrets that no answer
contains.
"""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from memstore import errors
from memstore.errors import InvalidInput
from memstore.serve.access import read_keys
from memstore.serve.api_errors import as_api_error
from memstore.serve.app import check_exposed
from memstore.serve.settings import ServeSettings
from support.diary import ASKED, QUESTION
from support.serving import Served, serving

READS, WRITES, NOTES = "reads-everything-1", "writes-everything-2", "writes-only-notes-3"
CHAT, DOCUMENTS = "/v1/chat/completions", "/v1/memstore/documents"
PAGE = "https://friend.example"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with three keys."""
    here = tmp_path_factory.mktemp("keyed")
    (here / "keys").write_text(
        f"# of tests\n{READS}\n{WRITES} write\n{NOTES} write only=note*\n", "utf-8"
    )
    keys = read_keys(here / "keys")
    with serving(here / "mem", keys=keys) as server:
        yield server


@pytest.fixture(scope="module")
def bounded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A keyless server of short bodies, which one page of another host may call."""
    names = {"host": "FD00::A", "hosts": ("Barn.LAN", "fd00::b", "[fd00::c]"), "origins": (PAGE,)}
    settings = ServeSettings(body_bytes=4096, json_bytes=4096, **names)
    with serving(tmp_path_factory.mktemp("bounded") / "mem", settings) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# Keys and scopes


def test_serving_beyond_loopback_needs_keys() -> None:
    with pytest.raises(InvalidInput, match="--api-key-file"):
        check_exposed(ServeSettings(host="0.0.0.0"), {})
    check_exposed(ServeSettings(), {})


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ("", "no key"), ("short", "16 characters"), (f"{READS}\n{READS} write", "twice"),
        (f"{READS} everything", "not a scope"), (f"{READS}ü", "all of ASCII"),
    ],
)  # fmt: skip
def test_a_key_file_with_an_invalid_line_is_refused(tmp_path: Path, lines: str, what: str) -> None:
    (tmp_path / "keys").write_text(lines)
    with pytest.raises(InvalidInput, match=what):
        read_keys(tmp_path / "keys")


@pytest.mark.parametrize("key", [None, "wrong", READS[:-1], f"{READS}x"])
def test_without_a_valid_key_only_the_page_is_served(keyed: Served, key: str | None) -> None:
    with keyed.client(headers={} if key is None else bearer(key)) as client:
        for path in ("/v1/models", DOCUMENTS, "/metrics", "/openapi.json", "/v1/nothing"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/").status_code == 200
        assert client.get("/page/page.js").status_code == 200


def test_a_read_key_cannot_upload_or_delete(keyed: Served) -> None:
    with keyed.client(headers=bearer(READS)) as client:
        assert client.post(CHAT, json=ASKED).status_code == 200
        assert client.get("/v1/memstore").json()["write"] is False
        for answer in (
            client.post(DOCUMENTS, files={"file": ("a.txt", b"text")}),
            client.delete(f"{DOCUMENTS}/diary"),
        ):
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "insufficient_scope"


def test_an_upload_with_a_read_key_is_refused_before_its_body(keyed: Served) -> None:
    head = f"POST {DOCUMENTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {READS}\r\n"
    form = "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 9000000\r\n\r\n"
    with connected(keyed) as client:
        client.sendall((head + form).encode())
        assert client.recv(100).startswith(b"HTTP/1.1 403 ")


def test_a_key_limited_to_some_documents_cannot_read_write_or_list_others(keyed: Served) -> None:
    with keyed.client(headers=bearer(NOTES)) as client:
        answer = client.post(CHAT, json=ASKED).json()
        assert answer["error"]["code"] == "no_documents"
        for name in ("diary", "dairy"):  # hidden and missing look alike
            options = {"documents": [name]}
            for refused in (
                client.post(CHAT, json={**ASKED, "memstore": options}),
                client.post("/v1/memstore/search", json={"query": "barn", **options}),
                client.get("/v1/memstore/text", params={"document": name}),
                client.delete(f"{DOCUMENTS}/{name}"),
            ):
                assert refused.status_code == 404
                assert refused.json()["error"]["message"] == f"no document {name!r}"
            form = {"files": {"file": (name, b"a")}}
            assert client.post(DOCUMENTS, **form).status_code == 403
        assert client.get(DOCUMENTS).json()["data"] == []
        found = client.post("/v1/memstore/search", json={"query": "the lime barn"}).json()
        assert found["data"] == [] and found["answered"] is False
        note = {"files": {"file": ("note", b"A note.")}}
        assert client.post(DOCUMENTS, **note).status_code == 202
        assert [one["name"] for one in client.get(DOCUMENTS).json()["data"]] == ["note"]
        assert client.delete(f"{DOCUMENTS}/note").status_code == 200


def test_a_key_limited_to_some_documents_gets_no_server_report(keyed: Served) -> None:
    for key, status, all_ in ((NOTES, 403, False), (READS, 200, True)):
        with keyed.client(headers=bearer(key)) as client:
            for path in ("/metrics", "/v1/memstore/tiers"):
                assert client.get(path).status_code == status, path
            about = client.get("/v1/memstore").json()
            assert about["tiers"] is all_ and (about["stored"] is not None) is all_


# Host, Origin and bodies


def test_a_page_of_another_origin_is_refused_unless_allowed(bounded: Served) -> None:
    upload = {"files": {"file": ("evil.txt", b"poison")}}
    with bounded.client() as client:
        for origin in ("https://evil.example", "null", f"{bounded.url}.evil.example", "http://"):
            refused = client.post(DOCUMENTS, headers={"Origin": origin}, **upload)
            assert refused.status_code == 403, origin
            assert refused.json()["error"]["code"] == "wrong_origin"
            assert "access-control-allow-origin" not in refused.headers
        for origin in (bounded.url, PAGE):
            taken = client.post(DOCUMENTS, headers={"Origin": origin}, **upload)
            assert taken.status_code == 202, origin
            assert client.delete(f"{DOCUMENTS}/evil.txt").status_code == 200
        preflight = {"Access-Control-Request-Method": "POST"}
        for origin, allowed in ((PAGE, PAGE), ("https://evil.example", None)):
            answer = client.options(DOCUMENTS, headers={"Origin": origin, **preflight})
            assert answer.headers.get("access-control-allow-origin") == allowed


EVIL = (
    "evil.example",
    "evil.example:80",
    "localhost.evil.example:80",
    "127.0.0.1.evil.example",
    "",
)


OWN = ("LOCALHOST:1", "[::1]:8741", "[fd00::a]:8741", "barn.lan", "[FD00::B]", "[fd00::c]:80")


@pytest.mark.parametrize("host", [*EVIL, *OWN])
def test_a_foreign_host_header_is_refused(bounded: Served, host: str) -> None:
    with bounded.client() as client:
        answer = client.get("/v1/models", headers={"Host": host})
        assert answer.status_code == (421 if host in EVIL else 200)


def test_a_body_that_is_too_long_is_refused_with_or_without_content_length(bounded: Served) -> None:
    json = {"Content-Type": "application/json"}
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    begin = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    with bounded.client() as client:
        for path, headers in ((CHAT, json), (DOCUMENTS, form), ("/mcp", json)):
            first = begin if headers is form else b""
            for content in (first + b" " * 5000, iter([first, *[b" " * 1000] * 5])):
                long = client.post(path, content=content, headers=headers)
                assert (long.status_code, long.json()["error"]["code"]) == (413, "too_large")


def test_a_request_whose_body_never_arrives_times_out(tmp_path: Path) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{"
    impatient = ServeSettings(body_seconds=0.2)
    with serving(tmp_path / "mem", impatient) as server, connected(server) as slow:
        slow.sendall(head.encode())
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


def connected(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


# What answers say


STORAGE = "DocumentNotFound MemoryLocked MemoryNotFound ReadOnlyMemory StorageFull CorruptMemory"


@pytest.mark.parametrize("kind", [*STORAGE.split(), "StoreUnavailable"])
def test_errors_name_neither_the_memorys_directory_nor_other_documents(kind: str) -> None:
    error = as_api_error(getattr(errors, kind)("/srv/mem: no document 'a'; it holds 'secret'"))
    assert "/srv" not in error.message and "secret" not in error.message
    assert error.code not in (None, "internal_error") and "\n" not in error.message


def test_metrics_hold_no_text(keyed: Served) -> None:
    with keyed.client(headers=bearer(READS)) as client:
        client.post(CHAT, json=ASKED)
        shown = client.get("/metrics").text
    for line in (
        'gen_ai_server_request_duration_seconds_count{error_type=""}',
        "gen_ai_server_time_to_first_token_seconds_count",
        'gen_ai_client_token_usage_sum{gen_ai_token_type="output"}',
        'memstore_tier_hits_total{tier="host"}',
        "memstore_waiting 0.0",
        "memstore_documents 1.0",
    ):
        assert line in shown
    assert QUESTION not in shown and "diary" not in shown
