"""HTML files: which encoding they have, and their text."""

import re

from memstore.documents.compose import Composer
from memstore.documents.converted import Converted, Limits
from memstore.documents.elements import Elements
from memstore.documents.markup import walk_html
from memstore.errors import UnreadableDocument

_DECLARED = re.compile(
    rb"<meta[^>]{0,512}?charset\s*=\s*[\"']?\s*([A-Za-z0-9_:.\-]{2,40})"
    rb"|^\s*<\?xml[^>]{0,512}?encoding\s*=\s*[\"']([A-Za-z0-9_:.\-]{2,40})",
    re.IGNORECASE,
)
_LOOKED_AT = 4096  # bytes in which the encoding is declared
_MARKS = ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16"))
# Of what Python calls encodings only these are of texts as the web has them.
_KNOWN = re.compile(
    r"utf-?8|us-ascii|ascii|iso-?8859-?\d+|latin-?[1-9]|(windows-|cp)(125\d|874|1251|866)|ibm866"
    r"|koi8-[ru]|macintosh|gbk|gb2312|gb18030|big5|euc-(jp|kr)|shift[_-]jis|sjis|iso-2022-jp|utf-?16"
)
_MEANT = {
    **dict.fromkeys(("iso-8859-1", "iso8859-1", "latin1", "latin-1"), "windows-1252"),
    **dict.fromkeys(("us-ascii", "ascii"), "windows-1252"),
    **dict.fromkeys(("utf-16", "utf16"), "utf-8"),  # it was declared in ASCII, so it is not
    "gb2312": "gbk",
    "windows-874": "cp874",
    "macintosh": "mac-roman",
}


def read_html(data: bytes, limits: Limits) -> Converted:
    """The text of HTML, with its headings. Raises UnreadableDocument."""
    composer = Composer(limits)
    title = walk_html(decode_html(data), composer, Elements(limits))
    converted = composer.done("html")
    if title.strip() and not composer.headings:
        from memstore.disk.format.citations import Place, plain_name

        converted = Converted(converted.text, (Place(0, 1, plain_name(title)),), "html")
    return converted


def decode_html(data: bytes) -> str:
    """HTML as it says that it is encoded; without a word, UTF-8. Raises UnreadableDocument where
    it is not.
    """
    encoding, said = "utf-8", False
    for mark, known in _MARKS:
        if data.startswith(mark):
            encoding, said = known, True
            break
    else:
        found = _DECLARED.search(data[:_LOOKED_AT])
        if found is not None:
            named = (found[1] or found[2]).decode("ascii").lower()
            if not _KNOWN.fullmatch(named):
                raise UnreadableDocument(f"has the encoding {named}, which is not read; use UTF-8")
            encoding, said = _MEANT.get(named, named), True
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        what = f"says that it is {encoding}, and" if said else "says no encoding and"
        raise UnreadableDocument(
            f"{what} is not {encoding} text (near byte {error.start}); save it as UTF-8"
        ) from None
    except LookupError:
        raise UnreadableDocument(f"has the encoding {encoding}, which is not read") from None
