"""Compute the maximum unpacked size of a zstd frame from its block headers.

Rules: handles one frame without a dictionary and nothing after it. For any other,
storage/format/compression.py applies the same rules, but slower.

Source: RFC 8878, sections 3.1.1.1 and 3.1.1.2.
"""

from typing import Final

from cleaner.engine.kernels.codecs.memory import load_u64
from cleaner.engine.kernels.compile import Bytes, inlined, int64

_MAGIC: Final = 0xFD2FB528
_BLOCK_BYTES_MAX: Final = 128 * 1024
_WINDOW_LOG_MAX: Final = 27
_HEAD_BYTES_MAX: Final = 14  # without a dictionary id
_RESERVED: Final = 0x08
_DICTIONARY: Final = 0x03
_CHECKSUM: Final = 0x04
_SINGLE_SEGMENT: Final = 0x20


@inlined
def _content_size(buf: Bytes, at: int, flags: int) -> tuple[int, int]:
    """Read the content size of a frame, -1 if it has none -> (content size, bytes of the field)."""
    word = int64(load_u64(buf, at))
    kind = flags >> 6
    if kind == 0:
        return (word & 0xFF, 1) if flags & _SINGLE_SEGMENT != 0 else (-1, 0)
    if kind == 1:
        return (word & 0xFFFF) + 256, 2
    if kind == 2:
        return word & 0xFFFFFFFF, 4
    return word & 0x7FFFFFFFFFFFFFFF, 8


@inlined
def frame_bound(buf: Bytes, at: int, end: int, limit: int) -> int:
    """Return the maximum unpacked size of the frame `buf[at:end]`; 0 if it exceeds `limit`.

    This is the content size if the frame has one. Reads up to 8 bytes after `end`.
    """
    if end - at < _HEAD_BYTES_MAX or int64(load_u64(buf, at)) & 0xFFFFFFFF != _MAGIC:
        return 0
    flags = int64(buf[at + 4])
    if flags & (_RESERVED | _DICTIONARY) != 0:
        return 0
    at += 5
    if flags & _SINGLE_SEGMENT == 0:
        window = int64(buf[at])
        if (window >> 3) + 10 >= _WINDOW_LOG_MAX:
            return 0
        at += 1
    content, content_bytes = _content_size(buf, at, flags)
    at += content_bytes
    bound = 0
    last = 0
    while last == 0:
        if end - at < 3:
            return 0
        word = int64(load_u64(buf, at)) & 0xFFFFFF
        last = word & 1
        kind = word >> 1 & 3
        size = word >> 3
        at += 4 if kind == 1 else 3 + size
        if kind == 3 or size > _BLOCK_BYTES_MAX or at > end:
            return 0
        bound += _BLOCK_BYTES_MAX if kind == 2 else size
    if flags & _CHECKSUM != 0:
        at += 4
    if at != end or content > bound:
        return 0
    if content >= 0:
        bound = content
    return bound if bound <= limit else 0
