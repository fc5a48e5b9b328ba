"""What nothing of a published memory exceeds, in bytes: known before anything is read, so that what
is larger is refused by its size alone.
"""

PACKED_BYTES = 64 << 20  # a manifest, a page or a footer, packed or unpacked
OBJECT_BYTES = 256 << 20  # any object that is read whole; segments of 32 MB are the largest
PIECE_BYTES = 64 << 20  # a piece of a document: 8 MiB of values and one more, or an index
INDEX_BYTES = 16 << 20  # an index of records, unpacked


def most_record_bytes(raw: int) -> int:
    """A record, however it is encoded. raw: bytes of one in codec raw, to which zstd adds little
    where it finds nothing to make smaller.
    """
    return raw + raw // 16 + 1024
