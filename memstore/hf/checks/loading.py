"""How transformers is asked for what lies in a directory, and what it answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memstore.errors import InvalidWeights

# without the first, whoever is at standard input is asked
LOCAL = {"trust_remote_code": False, "local_files_only": True}


@contextmanager
def without_bars() -> Iterator[None]:
    """Transformers draws a progress bar for whatever it loads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def whole(loaded: Any, name: str | Path) -> Any:
    """The model of what `from_pretrained` gives with `output_loading_info`. Raises InvalidWeights
    where weights are missing, which transformers has drawn at random.
    """
    model, found = loaded
    missing = sorted({*found["missing_keys"], *map(str, found["mismatched_keys"])})
    if missing:
        raise InvalidWeights(
            f"{name} lacks {len(missing)} of its weights, such as {missing[0]}; get all of its "
            "files, or the config.json that belongs to them"
        )
    return model


def first_line(error: Exception) -> str:
    """What an error of transformers says, in a line of an error here."""
    first, *rest = str(error).strip().splitlines() or [type(error).__name__]
    said = f"{first} {rest[0].strip()}" if rest and first.endswith(":") else first
    return said[:200]
