"""Report a tokenizer that alters a document's text, as one that normalises Unicode (NFKC) does."""

import logging

_log = logging.getLogger("memstore")
_SHOWN = 12  # characters of the first difference


def report_altered(name: str, text: str, read: str) -> bool:
    """Log where the text of a document differs from what its tokens stand for; True if it does.

    name: of the document; text: a part of it; read: the text of that part's tokens.
    """
    if text == read:
        return False
    at = next((at for at, (one, other) in enumerate(zip(text, read)) if one != other), len(read))
    _log.warning(
        "%s: the model's tokenizer alters the text (%r becomes %r, for instance); passages are "
        "quoted as altered, and their places in the text may be off",
        name,
        text[at : at + _SHOWN],
        read[at : at + _SHOWN],
    )
    return True
