"""The page in a real browser: asking, refusals, details, uploads and deletions, by mouse, by
keyboard and on a phone, without console errors or requests to other hosts.
"""

import json
import time
from importlib.util import find_spec

import pytest

from support.browser import browsing, chromium
from support.tiny_decoder import word_reader

pytest.importorskip("fastapi")
from memstore.model.passages.selector import Gate
from memstore.model.source_text import Text
from memstore.serve.access import Access
from memstore.store.memory_store import MemoryStore
from support.diary import ANSWER, QUESTION
from support.serving import serving

MISSING = chromium() is None or find_spec("websockets") is None
NEEDS = "needs Debian's chromium and the package websockets: make services"
pytestmark = [pytest.mark.services, pytest.mark.skipif(MISSING, reason=NEEDS)]
KEY = "a-key-for-the-inspector"
HOSTILE = "The lid is <img src=x onerror=alert(1)> & <script>alert(2)</script> of the pot.\n"
TEXT = "document.getElementById({!r}).textContent"
LAST = "document.querySelector('.turn:last-child {}')"
ANSWER_TEXT = LAST.format(".answer") + ".textContent"
READ = LAST.format(".read") + ".textContent"
SENDING = """window.sent = [];
    const send = window.fetch;
    window.fetch = (path, options) => {
      const post = options?.method === 'POST';
      if (post) window.sent.push(JSON.parse(options.body).messages.length);
      return send(path, options); }"""
STATE = "document.querySelector('tr[data-name{}] td')?.textContent === {!r}"
WIDER = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def open_page(tmp_path_factory):
    with browsing(tmp_path_factory.mktemp("profile")) as pages:
        yield pages


@pytest.fixture
def page(open_page, served):
    """The page of the shared server, on a desktop; checked for errors and requests at the end."""
    yield from _shown(open_page, served)


def _shown(open_page, server, *, expected=()):
    page = open_page()
    page.window(1280, 900)
    page.open(f"{server.url}/")
    if not expected:
        page.until(TEXT.format("model"))
    yield page
    assert [what for what in page.complaints if not any(e in what for e in expected)] == []
    assert {url.split("/")[2] for url in page.requests} == {server.url.split("/")[2]}
    page.close()


def ask(page, question=QUESTION):
    turns = page.ask("document.querySelectorAll('.turn').length")
    page.click("#question")
    page.type(question)
    page.click("#send")
    page.until(f"document.querySelectorAll('.turn[aria-busy=false]').length === {turns + 1}")


def open_details(page):
    page.click(".turn:last-child .details summary")
    page.until(LAST.format(".cost"))


def test_an_empty_memory_invites_to_upload_and_to_ask(open_page, tmp_path):
    with serving(tmp_path / "mem", diary=False) as server:
        for page in _shown(open_page, server, expected=["status of 409"]):
            page.until("document.getElementById('welcome').dataset.state === 'empty'")
            assert "empty" in page.ask(TEXT.format("welcome-title"))
            ask(page)  # no answer from nothing
            assert "holds no documents" in page.ask(LAST.format(".failed") + ".textContent")
            page.click("#clear")
            page.click("#welcome summary")
            assert "Upload text, Markdown, PDF" in page.ask(TEXT.format("welcome"))
            page.click("#example")
            page.until("document.querySelectorAll('#examples button').length")
            assert page.ask(TEXT.format("welcome-title")) == "Ask about 1 document"
            page.click("#examples button")
            page.until("document.querySelector('.turn[aria-busy=false]')")
            assert page.ask(ANSWER_TEXT) == ANSWER
            assert page.ask("document.getElementById('welcome').hidden")
            page.click("#clear")
            page.until("!document.getElementById('welcome').hidden")


def test_an_answer_streams_with_sources_below_it(page):
    page.ask(
        """window.shown = [];
        const keep = () => window.shown.push(document.querySelector('.answer')?.textContent);
        new MutationObserver(keep)
        .observe(document.getElementById('thread'), { childList: true, subtree: true })"""
    )
    ask(page)
    assert page.until(ANSWER_TEXT) == ANSWER
    shown = [text for text in page.ask("window.shown") if text]
    assert len(set(shown)) > 1 and all(ANSWER.startswith(text) for text in shown)
    first = page.ask(LAST.format(".source") + ".textContent")
    assert first.startswith("diary") and first.endswith(f"{ANSWER}.")  # one sentence
    open_details(page)
    cost = page.ask(LAST.format(".cost") + ".textContent")
    assert "lookups" in cost and "skipped by the gate" in cost and "host" in cost


def test_a_source_opens_its_document_at_the_place_that_was_read(page):
    ask(page)
    page.click(".sources .source")
    place = page.until("document.querySelector('#document .place.marked')?.textContent")
    assert ANSWER in place
    strength = "getComputedStyle(document.querySelector({!r})).getPropertyValue('--shade')"
    assert float(page.ask(strength.format("#document .place"))) == 1.0  # the one most read
    assert page.until(
        """(() => { const box = document.getElementById('document').getBoundingClientRect(),
        place = document.querySelector('#document .place').getBoundingClientRect();
        return place.top >= box.top && place.top < box.bottom; })()"""
    )
    open_details(page)
    page.click(".read .source")
    page.click(".words .word")
    assert ANSWER in page.until("document.querySelector('#document .marked.place')?.textContent")
    page.ask(
        """window.fetched = window.fetch;
        window.fetch = (...given) =>
            new Promise((go) => setTimeout(go, 300)).then(() => fetched(...given))"""
    )
    page.click(".read .source")
    page.click("#document-close")  # before the reply
    page.until("document.getElementById('document-panel').hidden")
    page.ask("new Promise((go) => setTimeout(go, 600))")
    assert page.ask("document.getElementById('document-panel').hidden")


def test_a_click_on_a_word_shows_its_sources(page):
    ask(page, "What is the price of the brown mare?")
    open_details(page)
    whole, words = page.ask(READ), page.ask("document.querySelectorAll('.word').length")
    page.click(".word")
    page.until("document.querySelector('.word').ariaPressed === 'true'")
    word = page.ask("document.querySelector('.word').textContent")
    assert word in page.ask(LAST.format(".shown") + ".textContent")
    of_word = page.ask(READ)
    weights = "[...document.querySelectorAll('.read .weight')].map((w) => Number(w.textContent))"
    assert page.ask(weights) == sorted(page.ask(weights), reverse=True)
    page.press("Escape")
    page.until("document.querySelector('.word').ariaPressed === 'false'")
    assert page.ask(READ) == whole
    assert of_word != whole or words == 1


def test_a_refusal_is_shown_with_the_closest_passages(open_page, tmp_path):
    reader = word_reader(gate=Gate((0.5,) * 5))
    with MemoryStore.create(tmp_path / "mem", reader.signature, selector=reader.keeps) as store:
        reader.ingest("The ladder of the mill broke. " * 60, store, name="inventory")
    with serving(tmp_path / "mem", model=reader) as server:
        for page in _shown(open_page, server):
            page.ask(SENDING)
            ask(page, "Who was the first president of France?")
            assert page.ask(ANSWER_TEXT).startswith("Not sure")
            assert "ladder" not in page.ask(ANSWER_TEXT)  # the passages are listed below
            assert page.ask(LAST.format("section") + ".ariaLabel") == "Closest passages"
            closest = page.ask(LAST.format(".source") + ".textContent")
            assert closest.startswith("inventory") and "The ladder of the mill broke." in closest
            open_details(page)
            assert page.ask("document.querySelectorAll('.turn .candidates li').length")
            ask(page, "Who broke the ladder?")
            assert page.ask("window.sent") == [1, 3]  # a follow-up may complete what was refused


def test_a_thread_keeps_its_turns_and_sends_the_answered_ones(page):
    page.ask(SENDING)
    ask(page)
    ask(page, "What is the price of the brown mare?")
    page.click("#options summary")
    page.click("#follow")
    page.press("Escape")  # closes the menu
    ask(page)
    assert page.ask("window.sent") == [1, 3, 1]
    texts = "[...turn.querySelectorAll('.sources .text')].map((one) => one.textContent)"
    listed = f"[...document.querySelectorAll('.turn')].map((turn) => {texts})"
    first, second, _ = page.ask(listed)
    assert second and not set(second[1:]) & set(first)  # a follow-up lists what is its own
    turns = "[...document.querySelectorAll('.turn h2')].map((title) => title.textContent)"
    assert page.ask(turns) == [QUESTION, "What is the price of the brown mare?", QUESTION]


def test_the_page_can_be_used_by_keyboard_alone(page):
    focused = "document.activeElement.id || document.activeElement.className"

    def tab_to(wanted):
        for _ in range(20):
            page.press("Tab")
            if page.ask(focused) == wanted:
                return
        raise AssertionError(f"no way to {wanted}")

    page.ask("document.getElementById('main').focus()")
    tab_to("question")
    page.type(QUESTION)
    page.press("Enter")
    page.until("document.querySelector('.turn[aria-busy=false]')")
    page.ask("document.getElementById('main').focus()")
    tab_to("source")
    page.press("Enter")
    page.until("document.querySelector('#document .place')")
    page.ask("document.querySelector('.details summary').focus()")
    page.press("Enter")
    tab_to("word")
    page.press("Enter")
    page.until("document.activeElement.ariaPressed === 'true'")


def test_a_file_is_uploaded_asked_and_deleted(page, served, tmp_path):
    file = tmp_path / "cellar.txt"
    file.write_text("It rained for a week. " * 40 + "The combination of the oak cellar is 5812.\n")
    page.click("[data-view=documents]")
    with served.busy():
        page.give_file("#files", file)
        page.until(STATE.format("^=cellar", "waiting"))
        served.service.documents.add(Access(), Text("The oven is hot.", "other/../diary"))
    page.until(STATE.format("^=other", "ready"))
    for _ in range(2):  # and diary stays
        page.click("tr[data-name^=other] .for-writers button")
    page.until("document.querySelector('tr[data-name^=other]') === null")
    page.until("document.getElementById('uploads').textContent.includes('ingested, ')")
    name = page.until("document.querySelector('tr[data-name^=cellar]')?.dataset.name")
    row = f"document.querySelector('tr[data-name={json.dumps(name)}]')"
    page.click("[data-view=ask]")
    page.click("#scope summary")
    page.until(f"document.querySelectorAll('#scope-list input[value={json.dumps(name)}]').length")
    page.click("#scope-list input[value=diary]")
    assert page.ask("document.querySelector('#scope summary').textContent") == name
    page.click("#scope summary")
    ask(page, "What is the combination of the oak cellar?")
    assert page.ask(ANSWER_TEXT) == "5812"
    assert page.ask("document.querySelector('.sources b').textContent") == name
    page.click("[data-view=documents]")
    # after the page's own request
    page.ask("fetch('/v1/memstore/documents').then((answer) => answer.text())")
    forget = f"tr[data-name={json.dumps(name)}] .for-writers button"
    page.click(forget)
    assert "for good" in page.ask(f"document.querySelector({forget!r}).textContent")
    page.click(forget)
    page.until(f"{row} === null")
    page.until("document.querySelectorAll('#scope-list input[value=diary]').length === 1")
    listed = f"document.querySelectorAll('#scope-list input[value={json.dumps(name)}]').length"
    page.until(f"{listed} === 0")  # and is not asked any more
    assert page.ask("document.querySelector('#scope summary').textContent") == "Scope"


def test_an_ingest_is_watched_on_after_a_request_that_fails(page, served, tmp_path):
    file = tmp_path / "attic.txt"
    file.write_text("The attic is dry.\n")
    uploads = TEXT.format("uploads")
    page.click("[data-view=documents]")

    def cut_off(shown):
        page.ask(
            """window.fetched = window.fetch, void (window.fetch = () =>
            Promise.reject(new TypeError('Failed to fetch')))"""
        )
        page.until(f"{shown}.includes('cannot be reached')")
        page.ask("void (window.fetch = window.fetched)")

    with served.busy():
        page.give_file("#files", file)
        page.until(f"{uploads}.includes('waiting')")
        cut_off(uploads)
    page.until(f"{uploads}.includes('ingested, ')")
    with served.busy():  # a document that another client uploads
        served.service.documents.add(Access(), Text("The oven is hot.", "oven"))
        page.click("[data-view=documents]")
        page.until(STATE.format("=oven", "waiting"))
        page.ask("document.getElementById('problem').textContent = ''")
        cut_off(TEXT.format("problem"))
    page.until(STATE.format("=oven", "ready"))
    for name in (file.name, "oven"):
        served.service.documents.delete(Access(), name)


def test_dropped_files_are_ingested_and_their_text_is_escaped(page, served):
    script = f"""(() => {{ const data = new DataTransfer();
        data.items.add(new File([{json.dumps(HOSTILE * 40)}], '<b>pot.txt'));
        for (let n = 0; n < 8; n++) data.items.add(new File(['The oven is hot.'], `oven${{n}}`));
        document.body.dispatchEvent(new DragEvent('drop', {{ dataTransfer: data, bubbles: true,
          cancelable: true }})); }})()"""
    asked = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('ments'))"
    with served.busy():
        page.ask(f"{script}, new Promise((go) => setTimeout(go, 2000))")
        assert page.ask(f"{asked}.length") < 50  # they are looked at together while they wait
    page.click("[data-view=documents]")
    for name in ("pot", *(f"oven{n}" for n in range(8))):
        page.until(STATE.format(f"*={name}", "ready"))
    page.click("tr[data-name*=pot] button")
    page.until("document.getElementById('document-text')?.textContent.includes('onerror')")
    assert HOSTILE.strip() in page.ask(TEXT.format("document-text"))
    more = "for (const click of [1, 2]) document.getElementById('later').click();"
    page.ask(f"{more} new Promise((go) => setTimeout(go, 600))")  # both replies have come
    blocks = "[...document.getElementById('document-text').children].map((n) => n.dataset.block)"
    assert page.ask(blocks) == [str(block) for block in range(31)]
    assert page.ask("document.querySelectorAll('#document img, #document script').length") == 0
    for name in ("<b>pot.txt", *(f"oven{n}" for n in range(8))):
        served.service.documents.delete(Access(), name)


@pytest.mark.parametrize("width", [360, 390])
def test_on_a_phone_nothing_is_wider_than_the_screen(page, width):
    page.window(width, 740, phone=True)
    page.until("!document.getElementById('welcome').hidden")
    assert page.ask(WIDER) <= 0
    ask(page)
    open_details(page)
    assert page.ask(WIDER) <= 0
    page.click(".sources .source")
    page.until("document.querySelector('#document .place')")
    assert page.ask(WIDER) <= 0
    page.click("#document-close")
    page.click("#options summary")
    assert page.ask(WIDER) <= 0
    for view, shown in (("documents", "tr[data-name]"), ("tiers", ".tier-panel")):
        page.click(f"[data-view={view}]")
        page.until(f"document.querySelector('{shown}')")
        assert page.ask(WIDER) <= 0
    touched = "[...document.querySelectorAll('nav button, #theme')]"
    assert page.ask(f"{touched}.every((one) => one.getBoundingClientRect().height >= 40)")


def test_a_server_with_keys_asks_for_one(open_page, tmp_path):
    with serving(tmp_path / "mem", keys={KEY: Access(False)}) as server:
        for page in _shown(open_page, server, expected=["status of 401"]):
            for key in ("wrong", KEY):
                shown = "" if key == "wrong" else "!"  # once the wrong key is answered
                page.until(f"document.activeElement.id === 'key' && {shown}problem.hidden")
                page.type(key)
                page.press("Enter")
            page.until(TEXT.format("model"))
            assert page.ask("document.getElementById('key-form').hidden && problem.hidden")
            ask(page)
            assert page.ask(ANSWER_TEXT) == ANSWER
            page.click("[data-view=documents]")
            page.until("document.querySelector('tr[data-name=diary]')")
            assert page.ask("document.getElementById('drop').hidden")  # this key may only read


def test_candidates_are_shown_and_an_answer_can_be_stopped(open_page, tmp_path):
    reader = word_reader(top_k=2, score_range=None)
    reader.ends_turn = lambda token: bool(time.sleep(0.01))  # still answering when Stop is clicked
    fact = "The copper anchor of the orchard weighs ninety pounds. "
    text = "The red kettle of the mill has no lid. " * 30 + fact + "The ladder broke. " * 90
    with MemoryStore.create(tmp_path / "mem", reader.signature, selector=reader.keeps) as store:
        reader.ingest(text, store, name="inventory")
    with serving(tmp_path / "mem", model=reader) as server:
        for page in _shown(open_page, server):
            page.ask("document.getElementById('most').value = '6'")
            ask(page, "How much does the copper anchor of the orchard weigh?")
            open_details(page)
            listed = "[...document.querySelectorAll('.candidates li')]"
            rows = page.until(f"{listed}.map((row) => [row.className, row.textContent])")
            assert len(rows) > 2 and rows[0][0] == "chosen" and "copper anchor" in rows[0][1]
            assert [row[0] for row in rows].count("chosen") == 2
            assert "scored" in page.ask(LAST.format(".choice") + ".textContent")
            page.click(".candidates .source")
            place = page.until("document.querySelector('#document .place.marked')?.textContent")
            assert "copper anchor" in place
            page.ask("document.getElementById('most').value = '4000'")
            page.ask("document.getElementById('question').value = 'Where is the ladder?'")
            page.ask("document.getElementById('ask-form').requestSubmit()")
            page.until("!document.getElementById('stop').hidden")
            page.until(ANSWER_TEXT)
            page.click("#stop")
            page.until("document.getElementById('stop').hidden")
            page.until(LAST.format(".stopped") + ".textContent === 'Stopped.'")
            while server.service.worker.load["active"]:
                page.ask("new Promise((resolve) => setTimeout(resolve, 20))")
