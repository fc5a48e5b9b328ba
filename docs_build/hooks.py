"""Hooks of mkdocs: pages of the repository's root, and links that leave docs/.

The README is the first page unless docs/index.md exists. A link to a page of the root leads to its
page of the site; a link to a file that the site does not have becomes its text.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
_ELSEWHERE = re.compile(r"[a-z]+:")
_PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)\s]+)(\))")
_TAG = re.compile(r"""(\b(?:src|srcset)=["'])([^"'\s]+)(["'])""")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    from mkdocs.structure.files import File

    for source, page in OUTSIDE.items():
        if files.get_file_from_path(page) is None:
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links to pages of the site."""
    shown = page.file.src_uri
    generated = page.file.generated_by is not None
    source = next((s for s, p in OUTSIDE.items() if p == shown and generated), f"docs/{shown}")
    return relinked(
        markdown, source, shown, lambda name: files.get_file_from_path(name) is not None
    )


def relinked(markdown: str, source: str, shown: str, has: Callable[[str], bool]) -> str:
    """A page's text with the links of the site. A dead link is unchanged, and mkdocs reports it.

    source, shown: the page's path in the repository, and in the site. has: is a path in the site?
    """

    here = posixpath.dirname(shown) or "."
    # mkdocs points links of Markdown from the page's URL, which ends in /, but no tags of HTML
    url = here if posixpath.basename(shown) == "index.md" else shown.removesuffix(".md")

    def led(target: str, base: str = here) -> str | None:
        """The path from the page to a link's target; None if only the repository has it."""
        at = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        page = OUTSIDE.get(at, at.removeprefix("docs/"))
        if has(page):
            return posixpath.relpath(page, base)
        return None if (ROOT / at).exists() else target

    def link(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if not target or _ELSEWHERE.match(target):
            return found[0]
        new = led(target)
        return text if new is None else f"[{text}]({new}{anchor})"

    def picture(found: re.Match[str]) -> str:
        before, target, after = found.groups()
        base = url if found.re is _TAG else here
        return (
            f"{before}{target if _ELSEWHERE.match(target) else led(target, base) or target}{after}"
        )

    parts = re.split(r"(```.*?```)", markdown, flags=re.DOTALL)
    for number in range(0, len(parts), 2):
        text = _PICTURE.sub(picture, _TAG.sub(picture, parts[number]))
        parts[number] = _LINK.sub(link, text)
    return "".join(parts)
