"""Write the reference pages that mkdocs shows: commands, settings, environment, API.

    python -m docs_build [DIR]

DIR is docs/reference by default, which git ignores: `make docs` writes it before the site.
"""

import sys
from pathlib import Path

from docs_build.api import api_page
from docs_build.commands import commands_page
from docs_build.environment import environment_page
from docs_build.settings import settings_page

PAGES = {
    "commands": commands_page,
    "settings": settings_page,
    "environment": environment_page,
    "api": api_page,
}


def write_pages(folder: Path) -> None:
    """Write every reference page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / f"{name}.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference"))
