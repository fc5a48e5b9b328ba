"""Pictures of the page of `memstore serve` with the default model.

PYTHONPATH=.:tests python -m support.page_pictures DIR
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from memstore.cli.demo import chapters
from memstore.hf.models_by_name import default_name, reader_named
from support.browser import Page, browsing
from support.serving import serving

SIZES = {"wide": (1280, 860), "phone": (390, 844)}
ANSWERED = "What was the schooner Nantasket carrying when she overtook the Spray?"
SECOND = "Who gave Slocum the white cheese that he ate before he fell ill?"
REFUSED = "Who was the first president of France?"


def ask(page: Page, question: str) -> None:
    """Ask, and wait for the end of the answer."""
    turns = page.ask("document.querySelectorAll('.turn').length")
    page.click("#question")
    page.type(question)
    page.press("Enter")
    page.until(f"document.querySelectorAll('.turn[aria-busy=false]').length === {turns + 1}", 600)


@contextmanager
def shown(url: str, profile: Path) -> Iterator[Page]:
    """The page of a server in a new browser."""
    with browsing(profile) as pages:
        page = pages()
        page.open(url)
        page.until("document.getElementById('model').textContent")
        yield page
        assert page.complaints == []


def take(page: Page, directory: Path, name: str) -> None:
    """The page in each size, light and dark."""
    for size, (width, height) in SIZES.items():
        page.window(width, height, phone=size == "phone")
        for colours in ("light", "dark"):
            page.prefers(colours)
            page.ask("Promise.all(document.getAnimations().map((one) => one.finished))")
            page.ask("document.querySelector('#document .place')?.scrollIntoView()")
            page.ask("document.querySelector('.turn:last-child')?.scrollIntoView()")
            page.picture(directory / f"page-{name}-{size}-{colours}.png")


def take_after(page: Page, clicked: str, shown: str, directory: Path, name: str) -> None:
    """Click an element, wait until another is shown, and take the page."""
    page.click(clicked)
    page.until(f"document.querySelector({shown!r})")
    take(page, directory, name)


def main(directory: Path) -> None:
    """Write all pictures to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    model = reader_named(default_name())
    with TemporaryDirectory() as scratch:
        work = Path(scratch)
        with serving(
            work / "memory", model=model, diary=False, name="SmolLM2-135M-Instruct"
        ) as server:
            with shown(server.url, work / "empty") as page:
                page.until("document.getElementById('welcome').dataset.state === 'empty'")
                take(page, directory, "empty")
                book = work / "sailing-alone.md"
                parts = [f"# {name}\n\n{text}" for name, text in chapters()[3:5]]
                book.write_text("\n\n".join(parts))
                page.give_file("#first-files", book)
                page.until("document.getElementById('welcome').dataset.state === 'ready'", 600)
            with shown(server.url, work / "asked") as page:
                take(page, directory, "ready")
                ask(page, ANSWERED)
                ask(page, SECOND)
                take(page, directory, "thread")
                source = ".turn:last-child .sources .source"
                take_after(page, source, "#document .place", directory, "document")
                page.click("#document-close")
                details, cell = ".turn:last-child .details summary", ".turn:last-child .cell"
                take_after(page, details, cell, directory, "details")
                ask(page, REFUSED)
                take(page, directory, "refusal")
                take_after(page, "[data-view=documents]", "tr[data-name]", directory, "documents")
                take_after(page, "[data-view=tiers]", ".tier-panel", directory, "tiers")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
