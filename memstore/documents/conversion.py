"""Conversion of a file to text. Formats that need a library are read in a child process with limits
of memory and processor time.
"""

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from memstore.child import run_tied
from memstore.decode import unpack
from memstore.documents.converted import DAMAGED, LIMITS, TOO_MUCH, Converted, Limits
from memstore.documents.detect import Form, form_of
from memstore.errors import MemstoreError, UnreadableDocument

_LIBRARIES = (
    "lxml", "pypdfium2", "mammoth", "pptx", "openpyxl", "markdown_it", "webencodings",
    "charset_normalizer",
)  # fmt: skip


def read(content: bytes, name: str, limits: Limits = LIMITS) -> Converted:
    """Convert a file to text with places, and notes of what the text lacks. Thread-safe. name: of
    the file; its suffix decides only between kinds of text.

    Raises UnreadableDocument (one line: name and reason), and MemstoreError if no child process
    starts.
    """
    try:
        form = form_of(content, name)
        if len(content) > limits.file_bytes:
            raise UnreadableDocument(f"is larger than {limits.file_bytes >> 20} MB; split it")
        if not content.strip():
            raise UnreadableDocument("is empty; there is nothing to read")
        if len(content) <= limits.characters and (text := plain_text(content, name)) is not None:
            return Converted(text, (), "text")
        return _read_apart(content, form, limits)
    except UnreadableDocument as error:
        raise UnreadableDocument(f"{name} {error}") from None


def plain_text(content: bytes, name: str) -> str | None:
    """The text of a file that is plain UTF-8; None for one that `read` converts or refuses."""
    with suppress(UnreadableDocument, UnicodeDecodeError):
        if b"\0" not in content and form_of(content, name) == "text":
            return content.decode("utf-8-sig")
    return None


def _read_apart(content: bytes, form: Form, limits: Limits) -> Converted:
    import msgspec

    bounds = msgspec.json.encode(limits.of_size(len(content))).decode()
    try:
        done = run_tied("memstore.documents.child", form, bounds, *_directories(), given=content)
    except OSError as error:
        raise MemstoreError(f"cannot start a process to read documents: {error}") from error
    if done.returncode < 0:
        raise UnreadableDocument(TOO_MUCH)
    if done.returncode:
        last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise MemstoreError(f"the process to read documents failed: {last}")
    try:
        result: Converted | str = unpack(done.stdout, Converted | str)  # type: ignore[arg-type]
    except ValueError as error:
        raise UnreadableDocument(DAMAGED.format(error)) from None
    if isinstance(result, str):
        raise UnreadableDocument(result)
    return result


def _directories() -> list[str]:
    """Directories from which the isolated child imports libraries: this process's path without the
    working directory.
    """
    specs = [find_spec(name) for name in _LIBRARIES]
    found = [str(Path(spec.origin).resolve().parents[1]) for spec in specs if spec and spec.origin]
    return [one for one in dict.fromkeys(found) if one != str(Path.cwd())]
