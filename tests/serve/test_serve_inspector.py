"""The inspector's routes and its page: what they tell, to whom, and what the page may not do."""

import asyncio
import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
import memstore.serve
from memstore.serve.api_keys import Access, Keys
from memstore.serve.http.tier_history import TierHistory
from support.diary import ANSWER, DIARY, QUESTION
from support.serving import serving

PAGE = Path(memstore.serve.__file__).parent / "http" / "page"
READER, WRITER = "reader-key-0123456789", "writer-key-0123456789"


@pytest.fixture(scope="module")
def http(served):
    with served.client() as client:
        yield client


@pytest.mark.parametrize("path", ["/", *(f"/page/{file.name}" for file in sorted(PAGE.iterdir()))])
def test_the_page_comes_with_a_policy_that_lets_nothing_else_in(http, path):
    got = http.get(path)
    assert got.status_code == 200 and got.headers["x-content-type-options"] == "nosniff"
    policy = got.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    again = http.get(path, headers={"If-None-Match": got.headers["etag"]})
    assert again.status_code == 304 and not again.content


def test_nothing_but_the_pages_files_is_served(http):
    for path in ("/page/", "/page/nobody.js", "/page/..%2Finspector.py", "/page/%2e%2e/app.py"):
        got = http.get(path)
        assert got.status_code == 404 and got.json()["error"]["type"] == "invalid_request_error"


def test_the_pages_scripts_make_no_markup_and_know_no_other_host():
    for file in PAGE.iterdir():
        text = file.read_text()
        assert len(text.splitlines()) <= 300, file.name
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|//[a-z]+\.|innerHTML|outerHTML|insertAdjacent", text)
        assert not re.search(r"document\.write|\beval\b|new Function|setTimeout\(['\"]", text)
    page = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=\"/page/)", page)
    known = set(re.findall(r'id="([\w-]+)"', page)) | {"document-text", "earlier", "later"}
    used = set(re.findall(r'\$\("([\w-]+)"\)', "".join(f.read_text() for f in PAGE.glob("*.js"))))
    assert used <= known


def test_an_answer_carries_what_was_read_for_it(http):
    asked = {
        "model": "memstore",
        "messages": [{"role": "user", "content": QUESTION}],
        "memstore": {"trace": True, "max_sources": 4, "documents": ["diary"]},
    }
    got = http.post("/v1/chat/completions", json=asked).json()
    told = got["memstore"]
    assert got["choices"][0]["message"]["content"] == ANSWER
    assert "".join(token["text"] for token in told["tokens"]) == ANSWER
    assert 1 <= len(told["sources"]) <= 4
    assert "The combination of the lime barn is 4467." in told["sources"][0]["text"]
    assert told["attention"]["layers"] == http.get("/v1/memstore").json()["layers"]
    plain = http.post("/v1/chat/completions", json=asked | {"memstore": {}}).json()
    assert "tokens" not in plain["memstore"]


def test_a_document_is_told_block_by_block(http, served):
    told = http.get("/v1/memstore/text", params={"document": "diary", "first": 1, "end": 3}).json()
    assert [block["block"] for block in told["data"]] == [1, 2]
    for block in told["data"]:
        assert DIARY[slice(*block["span"])] == block["text"]
    whole = http.get("/v1/memstore/text", params={"document": "diary"}).json()
    assert "".join(block["text"] for block in whole["data"]) == DIARY
    assert whole["document"]["blocks"] == len(whole["data"])
    for wrong in ({"document": "nobody"}, {"document": "diary", "first": -1}, {}):
        assert http.get("/v1/memstore/text", params=wrong).status_code in (400, 404)


def test_documents_are_listed_and_forgotten(http, served):
    for name in ("a note", "of/two parts?"):
        served.service.reader.ingest(
            "The lid of the pot is blue.\n", served.service.store, name=name
        )
        listed = {one["name"]: one for one in http.get("/v1/memstore/documents").json()["data"]}
        assert listed[name]["state"] == "ready" and listed[name]["tokens"] > 0
        path = f"/v1/memstore/documents/{name.replace('?', '%3F').replace(' ', '%20')}"
        assert http.delete(path).json() == {
            "object": "memstore.document.deleted",
            "name": name,
            "deleted": True,
        }
        assert http.delete(path).status_code == 404
    names = [one["name"] for one in http.get("/v1/memstore/documents").json()["data"]]
    assert "diary" in names and "a note" not in names


def test_a_key_sees_its_documents_only(tmp_path):
    keys = Keys(((READER, Access("key1", False, ("a*",))), (WRITER, Access("key2", True))))
    with serving(tmp_path / "mem", keys=keys) as server, server.client() as http:
        server.service.reader.ingest("A short text.\n", server.service.store, name="attic")
        assert http.get("/").status_code == 200 and http.get("/page/page.js").status_code == 200
        assert http.get("/v1/memstore").status_code == 401
        http.headers["Authorization"] = f"Bearer {READER}"
        assert http.get("/v1/memstore").json()["write"] is False
        listed = http.get("/v1/memstore/documents").json()["data"]
        assert [one["name"] for one in listed] == ["attic"]
        assert http.get("/v1/memstore/text?document=attic").status_code == 200
        hidden = http.get("/v1/memstore/text?document=diary")
        missing = http.get("/v1/memstore/text?document=dairy")
        assert hidden.status_code == missing.status_code == 404
        assert hidden.text.replace("diary", "dairy") == missing.text
        assert http.delete("/v1/memstore/documents/attic").status_code == 403
        http.headers["Authorization"] = f"Bearer {WRITER}"
        assert http.delete("/v1/memstore/documents/attic").status_code == 200


def test_the_tiers_are_told_over_time(http, served):
    asked = {"model": "memstore", "messages": [{"role": "user", "content": QUESTION}]}
    before = http.get("/v1/memstore/tiers").json()["data"][-1]
    http.post("/v1/chat/completions", json=asked).raise_for_status()
    history = TierHistory(served.service.store, every=3600.0, kept=3)
    samples = [history.since()[-1], *(history.sample() for _ in range(5))]
    assert history.since() == samples[-3:]
    assert samples[-1]["tiers"]["host"]["hits"] > before["tiers"].get("host", {"hits": 0})["hits"]
    assert samples[-1]["tiers"]["host"]["budget"] == 64 << 20
    told = http.get("/v1/memstore/tiers").json()
    assert told["data"]
    times = [sample["time"] for sample in told["data"]]
    assert times == sorted(times) and told["every"] > 0
    assert http.get("/v1/memstore/tiers", params={"since": times[-1]}).status_code == 200
    assert http.get("/v1/memstore/tiers?since=nan").status_code == 400


def test_samples_are_taken_while_the_server_runs(served):
    history = TierHistory(served.service.store, every=0.01)

    async def wait():
        async with history.kept():
            while len(history) < 3:
                await asyncio.sleep(0.01)

    asyncio.run(wait())
    assert len(history) >= 3
