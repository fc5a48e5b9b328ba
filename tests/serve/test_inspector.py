"""The inspector in a real browser: ask and see what was read, upload and delete, by mouse, keyboard
and on a phone, in light and dark; no error in the console, and no request to another host.
"""

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.browser import browsing, chromium
from support.tiny_decoder import word_reader

pytest.importorskip("fastapi")
from memstore.serve.api_keys import Access, Keys
from memstore.store.memory_store import MemoryStore
from support.diary import ANSWER, QUESTION
from support.serving import serving

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(
        chromium() is None or find_spec("websockets") is None,
        reason="needs Debian's chromium and the package websockets: make services",
    ),
]
KEY = "a-key-for-the-inspector"
HOSTILE = "The lid is <img src=x onerror=alert(1)> & <script>alert(2)</script> of the pot.\n"
# pictures of the page, for docs/results; not taken unless asked for
PICTURES = os.environ.get("MEMSTORE_PICTURES")
WORDS = "document.querySelectorAll('#answer .word').length"
TEXT = "document.getElementById({!r}).textContent"


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
    page.prefers("light")
    page.open(f"{server.url}/")
    if not expected:
        page.until(TEXT.format("model"))
    yield page
    assert [what for what in page.complaints if not any(e in what for e in expected)] == []
    assert {url.split("/")[2] for url in page.requests} == {server.url.split("/")[2]}
    page.close()


def ask(page, question=QUESTION):
    page.ask("document.getElementById('question').value = ''")
    page.click("#question")
    page.type(question)
    page.click("#send")
    page.until("document.getElementById('asked').getAttribute('aria-busy') === 'false'")


def take(page, name):
    if PICTURES:
        page.ask(SETTLED)
        page.picture(Path(PICTURES) / f"{name}.png")


def test_an_answer_streams_and_shows_what_was_read(page):
    page.ask(
        """window.shown = [];
        new MutationObserver((records) => records.forEach((record) =>
          record.addedNodes.forEach((node) => window.shown.push(node.textContent))))
        .observe(document.getElementById('answer'), { childList: true })"""
    )
    ask(page)
    assert page.until(TEXT.format("answer")) == ANSWER
    shown = [text for text in page.ask("window.shown") if text]
    assert len(set(shown)) > 1 and all(ANSWER.startswith(text) for text in shown)
    cost = page.ask(TEXT.format("cost"))
    assert "lookups" in cost and "skipped by the gate" in cost and "host" in cost
    first = page.until("document.querySelector('#sources .source').textContent")
    assert first.startswith("diary") and ANSWER in first
    heads = page.ask(
        """[...document.querySelectorAll('.cell')].map((cell) => cell.getAttribute('aria-label'))"""
    )
    assert len(heads) == 12 and any("lookups skipped" in text for text in heads)
    assert any("0%" not in text for text in heads)


def test_a_source_opens_its_document_at_the_place_that_was_read(page):
    ask(page)
    page.click("#sources .source")
    place = page.until("document.querySelector('#document .place.marked')?.textContent")
    assert ANSWER in place
    strength = "getComputedStyle(document.querySelector({!r})).getPropertyValue('--shade')"
    assert float(page.ask(strength.format("#document .place"))) == 1.0  # the one most read
    assert page.ask(
        """(() => { const box = document.getElementById('document').getBoundingClientRect(),
        place = document.querySelector('#document .place').getBoundingClientRect();
        return place.top >= box.top && place.top < box.bottom; })()"""
    )
    assert "alone" in page.ask(TEXT.format("heads-of"))
    page.window(1120, 880)
    page.ask("window.scrollTo(0, 0)")
    page.prefers("dark")
    take(page, "inspector-dark")
    page.prefers("light")
    page.click("#answer .word")
    page.until("document.getElementById('heads-of').textContent.startsWith('for ')")
    assert ANSWER in page.ask("document.querySelector('#document .marked.place').textContent")
    page.ask("window.scrollTo(0, 0)")
    take(page, "inspector-light")
    page.click("#document-close")
    page.until("document.getElementById('document-panel').hidden")


def test_a_click_on_a_word_shows_its_sources(page):
    ask(page, "What is the price of the brown mare?")
    whole = page.ask(TEXT.format("sources"))
    assert page.ask(WORDS) >= 1
    page.click("#answer .word")
    page.until("document.querySelector('#answer .word').ariaPressed === 'true'")
    word = page.ask("document.querySelector('#answer .word').textContent")
    assert word in page.ask(TEXT.format("shown")) and word in page.ask(TEXT.format("heads-of"))
    of_word = page.ask(TEXT.format("sources"))
    weights = "[...document.querySelectorAll('#sources .weight')].map((w) => Number(w.textContent))"
    assert page.ask(weights) == sorted(page.ask(weights), reverse=True)
    page.press("Escape")
    page.until("document.getElementById('shown').hidden")
    assert page.ask(TEXT.format("sources")) == whole
    assert of_word != whole or page.ask(WORDS) == 1


def test_all_of_it_can_be_done_by_keyboard(page):
    page.ask("document.getElementById('main').focus()")
    focused = "document.activeElement.id || document.activeElement.className"
    for _ in range(3):
        page.press("Tab")
        if page.ask(focused) == "question":
            break
    assert page.ask(focused) == "question"
    page.type(QUESTION)
    page.press("Enter")
    page.until(WORDS)
    page.until("document.getElementById('asked').getAttribute('aria-busy') === 'false'")
    seen = []
    while "source" not in seen:
        page.press("Tab")
        seen.append(page.ask(focused))
        assert len(seen) < 20, seen
    assert "send" in seen and "word" in seen
    page.press("Enter")
    page.until("document.querySelector('#document .place')")
    page.ask("document.querySelector('.cell').focus()")
    page.press("ArrowRight")
    page.press("ArrowDown")
    assert page.ask("document.activeElement.ariaLabel").startswith("layer 3, head 1:")
    assert page.ask(TEXT.format("heads-summary")).startswith("layer 3, head 1:")


def test_a_file_is_uploaded_asked_and_deleted(page, tmp_path):
    file = tmp_path / "cellar.txt"
    file.write_text("It rained for a week. " * 40 + "The combination of the oak cellar is 5812.\n")
    page.click("[data-view=documents]")
    page.give_file("#files", file)
    page.until("document.getElementById('uploads').textContent.includes('ingested, ')")
    name = page.until("document.querySelector('tr[data-name^=cellar]')?.dataset.name")
    row = f"document.querySelector('tr[data-name={json.dumps(name)}]')"
    assert "ready" in page.ask(f"{row}.textContent")
    page.click("[data-view=ask]")
    page.click("#scope summary")
    page.until(f"document.querySelectorAll('#scope-list input[value={json.dumps(name)}]').length")
    page.click("#scope-list input[value=diary]")
    assert page.ask("document.querySelector('#scope summary').textContent") == name
    page.click("#scope summary")
    ask(page, "What is the combination of the oak cellar?")
    assert page.ask(TEXT.format("answer")) == "5812"
    assert page.ask("document.querySelector('#sources b').textContent") == name
    page.click("[data-view=documents]")
    page.ask("fetch('/v1/memstore/documents').then((answer) => answer.text())")  # behind the page's
    forget = f"tr[data-name={json.dumps(name)}] .for-writers button"
    page.click(forget)
    assert "for good" in page.ask(f"document.querySelector({forget!r}).textContent")
    page.click(forget)
    page.until(f"{row} === null")
    page.until("document.querySelectorAll('#scope-list input[value=diary]').length === 1")
    listed = f"document.querySelectorAll('#scope-list input[value={json.dumps(name)}]').length"
    page.until(f"{listed} === 0")  # and is not asked any more
    assert page.ask("document.querySelector('#scope summary').textContent") == "All documents"


def test_files_that_are_dropped_are_read_and_their_text_is_text(page, served):
    dropped = f"new File([{json.dumps(HOSTILE)}], '<b>pot.txt')"
    page.ask(
        f"""(() => {{ const data = new DataTransfer(); data.items.add({dropped});
        document.body.dispatchEvent(new DragEvent('drop', {{ dataTransfer: data, bubbles: true,
          cancelable: true }})); }})()"""
    )
    page.until("document.getElementById('uploads').textContent.includes('ingested, ')")
    name = page.until(
        "[...document.querySelectorAll('tr[data-name]')].map((row) => row.dataset.name)"
        ".find((name) => name.includes('pot'))"
    )
    page.ask(
        f"""[...document.querySelectorAll('tr[data-name]')]
        .find((row) => row.dataset.name === {json.dumps(name)}).querySelector('button').click()"""
    )
    page.until("document.getElementById('document-text')?.textContent.includes('onerror')")
    assert HOSTILE.strip() in page.ask(TEXT.format("document-text"))
    assert page.ask("document.querySelectorAll('#document img, #document script').length") == 0
    served.service.documents.delete(Access(), name)


SETTLED = "Promise.all(document.getAnimations().map((one) => one.finished.catch(() => null)))"


def test_on_a_phone_nothing_is_wider_than_the_screen(page):
    page.window(360, 740, phone=True)
    wide = "document.documentElement.scrollWidth - window.innerWidth"
    ask(page)
    page.click("#sources .source")
    page.until("document.querySelector('#document .place')")
    assert page.ask(wide) <= 0
    page.ask("window.scrollTo(0, 0)")
    take(page, "inspector-phone")
    page.click("[data-view=documents]")
    page.until("document.querySelector('tr[data-name]')")
    assert page.ask(wide) <= 0
    page.click("[data-view=tiers]")
    page.until("document.querySelector('.tier-panel')")
    assert page.ask(wide) <= 0
    small = page.ask(
        """[...document.querySelectorAll('nav button, #theme')]
        .filter((one) => one.getBoundingClientRect().height < 40).length"""
    )
    assert small == 0  # what is touched is large enough


def test_the_tiers_are_drawn_over_time(page):
    ask(page)
    page.click("[data-view=tiers]")
    page.until("document.querySelectorAll('.tier-panel[data-tier=host] circle').length")
    host = page.ask("document.querySelector('.tier-panel[data-tier=host]').textContent")
    assert "found here" in host and "units looked up" in host and "of 67 MB" in host
    assert page.ask("document.querySelector('.tier-panel[data-tier=disk]') !== null")
    take(page, "inspector-tiers")


def test_a_server_with_keys_asks_for_one(open_page, tmp_path):
    keys = Keys(((KEY, Access(False)),))
    with serving(tmp_path / "mem", keys=keys) as server:
        for page in _shown(open_page, server, expected=["status of 401"]):
            page.until("!document.getElementById('key-form').hidden")
            assert "API key" in page.until("!problem.hidden && problem.textContent")
            page.until("document.activeElement.id === 'key'")
            page.type(KEY)
            page.press("Enter")
            page.until(TEXT.format("model"))
            assert page.ask("document.getElementById('key-form').hidden && problem.hidden")
            ask(page)
            assert page.ask(TEXT.format("answer")) == ANSWER
            page.click("[data-view=documents]")
            page.until("document.querySelector('tr[data-name=diary]')")
            assert page.ask("document.getElementById('drop').hidden")  # this key may only read


def test_a_reader_that_chooses_shows_its_candidates_and_is_stopped(open_page, tmp_path):
    reader = word_reader(top_k=2, score_range=None)
    fact = "The copper anchor of the orchard weighs ninety pounds. "
    text = "The red kettle of the mill has no lid. " * 30 + fact + "The ladder broke. " * 90
    with MemoryStore.create(tmp_path / "mem", reader.signature, selector=reader.keeps) as store:
        reader.ingest(text, store, name="inventory")
    with serving(tmp_path / "mem", model=reader) as server:
        for page in _shown(open_page, server):
            page.ask("document.getElementById('most').value = '6'")
            ask(page, "How much does the copper anchor of the orchard weigh?")
            rows = page.until(
                """[...document.querySelectorAll('#choice li')].map((row) =>
                [row.className, row.querySelectorAll('.strip i').length, row.textContent])"""
            )
            layers = len(reader.shape.memory_layers)
            assert len(rows) > 2 and "copper anchor" in rows[0][2]
            assert [row[0] for row in rows].count("chosen") == 2 == sum(row[1] > 0 for row in rows)
            assert rows[0][:2] == ["chosen", layers]
            assert "scored" in page.ask(TEXT.format("choice-gate"))
            assert page.ask("document.querySelectorAll('.cell').length") == layers * 4
            page.click("#choice .source")
            place = page.until("document.querySelector('#document .place.marked')?.textContent")
            assert "copper anchor" in place
            take(page, "inspector-choice")
            page.ask("document.getElementById('most').value = '4000'")
            page.ask("document.getElementById('ask-form').requestSubmit()")
            page.until("!document.getElementById('stop').hidden")
            page.until(TEXT.format("answer"))
            page.click("#stop")
            page.until("document.getElementById('stop').hidden")
            page.until("document.getElementById('cost').textContent === 'stopped'")
            while server.service.worker.load["active"]:
                page.ask("new Promise((resolve) => setTimeout(resolve, 20))")
