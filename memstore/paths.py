"""Paths as users write them."""

import os
from pathlib import Path


def expanded(path: Path | str) -> Path:
    """A path with a leading ~ or ~user replaced by that user's home directory.

    A shell does this only at the beginning of a word: not in --store=~/x, "~/x", Python or JSON.
    """
    return Path(os.path.expanduser(path))
