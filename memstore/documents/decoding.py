"""Decoding of bytes as browsers do it, and normalisation of text for search: ligatures, invisible
characters, exponents.
"""

import re
import unicodedata

from memstore.errors import UnreadableDocument

_MARKS = (
    (b"\xef\xbb\xbf", "utf-8-sig"),
    (b"\xff\xfe\0\0", "utf-32"),  # begins with the mark of UTF-16
    (b"\0\0\xfe\xff", "utf-32"),
    (b"\xff\xfe", "utf-16"),
    (b"\xfe\xff", "utf-16"),
)
_DECLARED = re.compile(
    rb"<meta[^>]{0,512}?charset\s*=\s*[\"']?\s*([\w:.\-]{2,40})"
    rb"|^\s*<\?xml[^>]{0,512}?encoding\s*=\s*[\"']([\w:.\-]{2,40})",
    re.IGNORECASE,
)
# The code pages of the web are wider than Python's encodings of these names.
_WIDER = {"shift_jis": "cp932", "gbk": "gb18030", "euc-kr": "cp949", "big5": "big5hkscs"}
_GUESSED = ["cp1252", "cp1251", "cp1250", "koi8_r", "cp932", "euc_jp", "gb18030", "big5", "cp949"]
_GONE: dict[int, str | None] = {
    **dict.fromkeys((*range(9), *range(11, 32), *range(127, 160))),
    **dict.fromkeys((0xAD, 0x61C, 0x200B, 0x200E, 0x200F, 0x2060, 0xFEFF)),
    **dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A))),
    **dict.fromkeys(range(0xD800, 0xE000), "\ufffd"),
    0xA0: " ",
    **dict(zip((0xF0B7, 0xF0A7, 0xF0D8, 0xF0FC), "•▪➢✓")),  # of the fonts Symbol and Wingdings
}
_COMPATIBLE = ("<compat>", "<wide>", "<narrow>", "<font>", "<init", "<medi", "<fina", "<isol")
_RAISED = re.compile("(?<=[\\w)])[⁺⁻]?[⁰¹²³⁴-⁹]+")
_DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")


def decode(data: bytes, notes: list[str], declared: str = "", *, html: bool = False) -> str:
    """Decode by byte order mark, else as declared, else as guessed; invalid bytes become U+FFFD,
    with a note. Raises UnreadableDocument for binary data.
    """
    encoding = next((name for mark, name in _MARKS if data.startswith(mark)), "")
    if not encoding and b"\0" in data:
        even, odd = data[:4096:2].count(0), data[1:4096:2].count(0)
        few, most = sorted((even, odd))
        if most < 4 or 5 * most < len(data[:4096]) or 20 * few > len(data[:4096]):
            at = data.index(0)
            raise UnreadableDocument(f"is binary (a NUL byte at {at}); save it as PDF or text")
        encoding = "utf-16-le" if odd > even else "utf-16-be"
    if not encoding and html and (found := _DECLARED.search(data[:4096])):
        declared = declared or (found[1] or found[2]).decode("ascii", "replace")
    if not encoding and declared:
        from webencodings import lookup

        known = lookup(declared)
        name = known.name if known else ""
        encoding = "utf-8" if name.startswith("utf-16") else _WIDER.get(name, name)
        encoding = known.codec_info.name if known and encoding == name else encoding
    encoding = encoding or _guessed(data, notes)
    text = data.decode(encoding, "replace")
    if bad := text.count("\ufffd") - data.count(b"\xef\xbf\xbd"):
        notes.append(f"bytes that are no {encoding} text are marked with \ufffd ({bad:,})")
    if 20 * max(0, bad) > len(text) + 20:
        raise UnreadableDocument("is binary, of unknown kind; save it as PDF or text")
    return text


def _guessed(data: bytes, notes: list[str]) -> str:
    """UTF-8, unless there is more that is none; else the likeliest code page."""
    text = data.decode("utf-8", "replace")
    bad = text.count("\ufffd")
    if bad == 0 or bad <= sum(one > "\x7f" for one in text) - bad:
        return "utf-8"
    from charset_normalizer import from_bytes

    # a short text with few bytes outside ASCII is too little for a guess; most are Western
    guessed = len(data) > 200 or 4 * sum(byte > 0x7F for byte in data) > len(data) + 20
    best = from_bytes(data[: 1 << 16], cp_isolation=_GUESSED).best() if guessed else None
    encoding = best.encoding if best else "cp1252"
    notes.append(f"it says no encoding and was read as {encoding}")
    return encoding


def clean(text: str) -> str:
    """Remove control characters, invisible characters and lone surrogates; write ligatures and
    other compatibility letters as plain letters, raised digits as exponents.
    """
    text = text.translate(_GONE)
    if text.isascii():
        return text
    before = text

    def exponent(found: re.Match[str]) -> str:
        start = found.start()
        return raised(before[max(0, start - 9) : start], found[0].translate(_DIGITS))

    text = _RAISED.sub(exponent, text)
    folded = {
        ord(one): unicodedata.normalize("NFKC", one)
        for one in set(text)
        if one > "\x7f" and unicodedata.category(one)[0] in "LN"
        and unicodedata.decomposition(one).startswith(_COMPATIBLE)
    }  # fmt: skip
    return text.translate(folded) if folded else text


def raised(before: str, text: str, *, note: bool = False) -> str:
    """Write superscript text that follows `before`: "^6" for an exponent, "[3]" for a note's mark;
    ordinals and the like stay unchanged.
    """
    text = text.strip()
    letters, digits = re.findall(r"([^\W\d_]*)(\d*)$", before)[0]
    year = len(digits) == 4 and digits[0] in "12" and before[-5:-4] not in (".", ",")
    based = before.endswith(")") or digits or 0 < len(letters) < 3
    if re.fullmatch(r"\d+(?:[,–-] ?\d+)*", text) and (note or year or not based):
        return f"[{text}]"
    if re.fullmatch(r"[-+−]?\d+(?:[.,/]\d+)?", text):
        return f"^{text}"
    if re.search(r"[-+−\d]", text) and (letters or digits) and text[0] not in "[(":
        return f"^({text})"
    variable = len(text) == 1 and text.isalpha() and (len(letters) == 1 or digits)
    return f"^{text}" if variable and text not in "aeo" else text
