"""A limit on the values of a JSON body: they are counted before it is parsed, since a byte of
it can become thirty, and an object's parts are looked at one by one while everybody waits.
"""

import re
from itertools import islice

MOST_PARTS = 150_000  # strings, brackets, commas and colons
# a string, or what stands before a value; possessive, so that no text has it look twice
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[{,:]', re.DOTALL)


def wrong_with(body: bytes | bytearray) -> str | None:
    """Why JSON is not to be parsed; None where it may be."""
    if b"\0" in body:  # UTF-16 and UTF-32 have them, and quotes that are none
        return "JSON is taken in UTF-8"
    parts = sum(map(body.count, (b"[", b"{", b",", b":"))) + body.count(b'"') // 2
    if parts <= MOST_PARTS:  # at most: those within strings are counted, too
        return None
    if next(islice(_PART.finditer(body), MOST_PARTS, None), None) is None:
        return None
    return "the body holds too many values; send less at once"
