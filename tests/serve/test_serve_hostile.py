"""Any request, valid or not, gets a success or an error in OpenAI's format that blames the request
and shows no path of the server.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memstore.serve.settings import ServeSettings
from support.serving import Served, serving

REQUESTS = int(os.environ.get("MEMSTORE_SERVE_HOSTILE", "80"))  # 2,000 in `make soak`
CALL = {"name": "ask", "arguments": {"question": "Who?", "max_new_tokens": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "memstore",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}],
        "max_tokens": 1,
        "stream": False,
        "stop": ["a"],
        "memstore": {"documents": ["diary"], "trace": True},
    },
    "/v1/memstore/search": {"query": "barn", "documents": ["diary"], "top_k": 1},
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL},
}
PATHS = (
    *BODIES, "/v1/memstore/documents", "/../etc/passwd", "/v1/models/memstore", "/v1/memstore",
    "/v1/memstore/text", "/v1/memstore/tiers", "/v1/memstore/documents/note", "/page/page.js",
    "/openapi.json", "/v1/files", "/v1/models", "/v1/memstore/documents/%00%ff", "/%2e%2e/%2e%2e",
)  # fmt: skip
ODD = st.sampled_from(
    [None, True, -1, 2**63, 10**400, 1e308, "", "\0", "\ud800", "\u202e", "a" * 20_000, [], {},
     ["x"] * 3000, {"\ud800": 1}, [[[]]], "../../etc/passwd"]
)  # fmt: skip
VALUES = st.recursive(
    ODD | st.text(max_size=8) | st.floats() | st.integers(),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=5), parts),
    max_leaves=6,
)
RAW = st.binary(max_size=50) | st.sampled_from(
    [b"null", b"{", b"[" * 50_000, b'{"a":' * 20_000, b"NaN", b"\xff\xfe", b"1" * 5000,
     b"--x\r\n\r\n--x--", b'--x\r\nContent-Disposition: form-data; name="file"\r\n\r\na\r\n--x--']
)  # fmt: skip
TYPES = st.sampled_from(
    ["application/json", "application/json; charset=utf-16", "text/plain", "",
     "multipart/form-data", "multipart/form-data; boundary=x"]
)  # fmt: skip


@st.composite
def changed(draw: st.DrawFn, value: Any) -> Any:
    """A value with one place in it replaced, removed or added to."""
    if isinstance(value, dict) and draw(st.integers(0, 3)):
        name = draw(st.sampled_from([*value, "colour"]))
        if draw(st.integers(0, 5)):
            return {**value, name: draw(changed(value.get(name)))}
        return {key: kept for key, kept in value.items() if key != name}
    if isinstance(value, list) and value and draw(st.booleans()):
        return [draw(changed(value[0])), *value[1:]]
    return draw(VALUES)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path with its query, body and headers."""
    if draw(st.integers(0, 2)):
        path, body = draw(st.sampled_from([*BODIES.items()]))
        broken = draw(changed(body)) if draw(st.integers(0, 5)) else body
        headers = {"Content-Type": "application/json"}
        return "POST", path, json.dumps(broken).encode(), headers
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"]))
    path = draw(st.sampled_from(PATHS))
    query = draw(st.sampled_from(["", "?document=diary", "?document=diary&first=-1", "?a=%00&%ff"]))
    return method, path + query, draw(RAW), {"Content-Type": draw(TYPES)}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, httpx2.Client]]:
    settings = ServeSettings(max_tokens=2, json_bytes=1 << 20)
    directory = tmp_path_factory.mktemp("hostile") / "mem"
    with serving(directory, settings) as served, served.client() as client:
        yield served, client


@settings(max_examples=REQUESTS, suppress_health_check=[*HealthCheck])
@given(sent=requests())
def test_a_request_succeeds_or_is_refused_in_openais_shape(
    http: tuple[Served, httpx2.Client], sent: tuple[str, str, bytes, dict[str, str]]
) -> None:
    served, client = http
    method, path, body, headers = sent
    headers = {**headers, "Accept": "application/json, text/event-stream"}
    answer = client.request(method, path, content=body, headers=headers)
    assert 200 <= answer.status_code < 500, answer.text
    assert str(served.service.store.path) not in answer.text
    assert "internal_error" not in answer.text
    if answer.status_code >= 400 and not path.startswith("/mcp"):
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"] and "\n" not in error["message"]


@pytest.mark.parametrize(("path", "body"), BODIES.items())
def test_the_unchanged_requests_succeed(
    http: tuple[Served, httpx2.Client], path: str, body: dict[str, Any]
) -> None:
    headers = {"Accept": "application/json, text/event-stream"}
    answer = http[1].post(path, json=body, headers=headers)
    assert answer.status_code in (200, 202), answer.text
    answer = http[1].post(path, content=json.dumps(body), headers=headers)
    assert answer.status_code == 400 and "Content-Type" in answer.text, answer.text
