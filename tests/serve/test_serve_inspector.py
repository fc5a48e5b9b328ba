"""Routes of the inspector: page files, security policy, traced answers, tiers."""

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
import memstore.serve
from support.diary import ANSWER, ASKED, DIARY

PAGE = Path(memstore.serve.__file__).parent / "page"


@pytest.fixture(scope="module")
def http(served):
    with served.client() as client:
        yield client


@pytest.mark.parametrize("path", ["/", *(f"/page/{file.name}" for file in sorted(PAGE.iterdir()))])
def test_the_page_has_a_strict_content_security_policy(http, path):
    got = http.get(path)
    assert got.status_code == 200 and got.headers["x-content-type-options"] == "nosniff"
    assert http.head(path).status_code == 200
    policy = got.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy


def test_only_the_files_of_the_page_are_served(http):
    for path in ("/page/", "/page/nobody.js", "/page/..%2Finspector.py", "/page/%2e%2e/app.py"):
        got = http.get(path)
        assert got.status_code == 404 and got.json()["error"]["type"] == "invalid_request_error"


def test_the_scripts_refer_only_to_existing_elements():
    page = (PAGE / "index.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=\"/page/)", page)
    known = set(re.findall(r'id="([\w-]+)"', page)) | {"document-text", "earlier", "later"}
    used = set(re.findall(r'\$\("([\w-]+)"\)', "".join(f.read_text() for f in PAGE.glob("*.js"))))
    assert used <= known


def test_a_traced_answer_reports_what_every_token_read(http):
    traced = {"trace": True, "max_sources": 4, "documents": ["diary"]}
    got = http.post("/v1/chat/completions", json=ASKED | {"memstore": traced}).json()
    report = got["memstore"]
    assert got["choices"][0]["message"]["content"] == ANSWER
    assert "".join(token["text"] for token in report["tokens"]) == ANSWER
    assert 1 <= len(report["sources"]) <= 4
    assert report["sources"][0]["sentence"] == "The combination of the lime barn is 4467."
    assert report["sources"][0]["sentence"] in report["sources"][0]["text"]
    assert report["tokens"][0]["sources"] and report["sources"][0]["tiers"]
    plain = http.post("/v1/chat/completions", json=ASKED).json()
    assert "tokens" not in plain["memstore"]
    assert plain["memstore"].keys() <= report.keys()
    assert plain["memstore"]["sources"][0]["sentence"] == report["sources"][0]["sentence"]


def test_the_server_reports_how_much_is_stored(http, served):
    figures = served.service.store.stats()
    stored = http.get("/v1/memstore").json()["stored"]
    assert stored == {name: figures[name] for name in ("documents", "tokens", "file_bytes")}


def test_a_documents_text_is_sent_block_by_block(http, served):
    report = http.get("/v1/memstore/text?document=diary&first=1&end=3").json()
    assert [block["block"] for block in report["data"]] == [1, 2]
    for block in report["data"]:
        assert DIARY[slice(*block["span"])] == block["text"]
    whole = http.get("/v1/memstore/text", params={"document": "diary"}).json()
    assert "".join(block["text"] for block in whole["data"]) == DIARY
    assert whole["document"]["blocks"] == len(whole["data"])
    for wrong in ({"document": "nobody"}, {"document": "diary", "first": -1}, {}):
        assert http.get("/v1/memstore/text", params=wrong).status_code in (400, 404)


def test_the_tiers_report_their_counts(http, served):
    before = http.get("/v1/memstore/tiers").json()
    http.post("/v1/chat/completions", json=ASKED).raise_for_status()
    after = http.get("/v1/memstore/tiers").json()
    assert after["time"] > before["time"]
    assert after["tiers"]["host"]["hits"] > before["tiers"].get("host", {"hits": 0})["hits"]
    assert after["tiers"]["host"]["budget"] == 64 << 20
