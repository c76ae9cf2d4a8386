"""The four codecs of a record batch, in Kafka's framings, bounded in memory.

Lengths in compressed data are not trusted: memory is allocated only up to what the size of the
input and the caller's limit allow. Input that is cut short, or followed by anything but another
frame, is corrupt. Consecutive frames (members) form one stream, as the formats gzip, lz4 and zstd
define.

The broker runs the codecs in threads beside its event loop, so no call holds the interpreter lock
for long: large results are made in pieces. A thread keeps no context of much more than 8 MiB.

Sources: RFC 1952 (gzip), RFC 8878 (zstd), the LZ4 frame format 1.6, the snappy format description
and the xerial framing that Kafka's snappy streams carry.
"""

import mmap
import sys
import threading
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Final, TypeAlias

import cramjam
import lz4.frame
import zstandard

from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    UnsupportedCompressionError,
)

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4
CODEC_NAMES: Final = ("none", "gzip", "snappy", "lz4", "zstd")

Buffer: TypeAlias = bytes | bytearray | memoryview

# Producers write one frame per batch. Each further frame costs a call or a copy of the remaining
# input, so without this bound a stream of empty frames could occupy a thread for minutes.
FRAMES_MAX: Final = 1024
# Producers fill blocks with 64 KiB or more in lz4, 128 KiB in zstd and 32 KiB in snappy; such a
# block may take only 4 bytes. Each block costs a microsecond of the interpreter, for which other
# threads wait.
BLOCKS_MAX: Final = 8192
BLOCK_BYTES_MIN: Final = 256  # compressed, on average, in a stream with more than BLOCKS_MAX
_BLOCKS_WALKED_MAX: Final = 1200  # by `may_exceed`: 64 MiB in blocks of 64 KiB are 1024

GZIP_LEVEL_DEFAULT: Final = -1  # zlib's own default, 6
LZ4_LEVEL_DEFAULT: Final = 9  # Kafka takes the fast compressor at exactly this level
ZSTD_LEVEL_DEFAULT: Final = 3

_GZIP_WINDOW_BITS: Final = 31  # 15 bits of window, and a gzip header and trailer
# What one call reads or writes: libraries copy their results while they hold the interpreter lock,
# a megabyte in half a millisecond. A batch of 1 MiB is one piece.
_PIECE_BYTES: Final = 5 << 18
_ONE_COPY_BYTES: Final = 4 << 20  # up to this size, joining parts costs less than new pages

# Deflate's best: a match of 258 bytes in two bits.
_GZIP_EXPANSION_MAX: Final = 1032

_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"  # version, compatible
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
# The densest element of the format is a copy of 64 bytes named by 3 bytes.
_SNAPPY_EXPANSION_MAX: Final = 22

_LZ4_MAGIC: Final = 0x184D2204
_LZ4_BLOCK_BYTES: Final = {4: 1 << 16, 5: 1 << 18, 6: 1 << 20, 7: 1 << 22}
_LZ4_EXPANSION_MAX: Final = 255  # one length byte of a match adds at most 255 bytes
_LZ4_HC_LEVEL_MIN: Final = 3
_LZ4_HC_LEVEL_MAX: Final = 12

_ZSTD_MAGIC: Final = 0xFD2FB528
_ZSTD_BLOCK_BYTES_MAX: Final = 128 * 1024
_ZSTD_WINDOW_BYTES_MAX: Final = 1 << 27  # what level 22 uses; libzstd's own default limit
_ZSTD_WINDOW_KEPT_MAX: Final = 1 << 23  # what level 19 uses
_ZSTD_WINDOW_KEPT_CODE: Final = 13 << 3  # this window in a frame header
_ZSTD_SINGLE_SEGMENT: Final = 0x20  # a flag: the frame names its content size, but no window
_ZSTD_LEVEL_KEPT_MAX: Final = 6  # contexts of up to 5 MB
_ZSTD_TABLE_LOG_MAX: Final = 22  # 16 MiB in each of two tables; level 22 has 0.6 GB without it
# Both formats: magic 0x184D2A50 to 0x184D2A5F, a length, and bytes for other programs.
_SKIPPABLE_MAGIC: Final = 0x184D2A50


class _BlockCount:
    """How many blocks a stream may still have."""

    __slots__ = ("left",)

    def __init__(self, blocks_max: int) -> None:
        self.left = blocks_max

    @classmethod
    def of(cls, data: memoryview) -> "_BlockCount":
        """Return the count for a whole stream."""
        return cls(max(BLOCKS_MAX, len(data) // BLOCK_BYTES_MIN))


class _Output:
    """The result of a codec, at most `limit_bytes`.

    A single part is returned as it is, and a few small ones are joined. A large result of several
    parts is copied to pages of its own. These grow without another copy, and the operating system
    gets them back at once.
    """

    __slots__ = ("_limit_bytes", "_pages", "_parts", "_size_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._size_bytes = 0
        self._parts: list[bytes] = []
        self._pages: mmap.mmap | None = None

    @property
    def room_bytes(self) -> int:
        """Return the bytes that still fit."""
        return self._limit_bytes - self._size_bytes

    def check_room(self, size_bytes: int) -> None:
        """Raise DecompressionLimitError if `size_bytes` do not fit."""
        if size_bytes > self.room_bytes:
            raise DecompressionLimitError(self._limit_bytes)

    def append(self, part: bytes) -> None:
        """Add a part. Raises DecompressionLimitError."""
        self.check_room(len(part))
        begin, end = self._size_bytes, self._size_bytes + len(part)
        if not part:
            return  # of an empty frame or block
        if self._pages is None and (begin == 0 or end <= _ONE_COPY_BYTES):
            self._parts.append(part)
        else:
            _copy(part, self._pages_of(end), begin)
        self._size_bytes = end

    def extend(self, size_bytes: int) -> memoryview:
        """Return the next `size_bytes`, which the caller writes and releases.

        Raises DecompressionLimitError.
        """
        self.check_room(size_bytes)
        begin, end = self._size_bytes, self._size_bytes + size_bytes
        pages = self._pages_of(end)
        self._size_bytes = end
        return memoryview(pages)[begin:end]

    def result(self) -> bytes | memoryview:
        """Return all parts in a row."""
        if self._pages is not None:
            return memoryview(self._pages)[: self._size_bytes].toreadonly()
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def _pages_of(self, size_bytes: int) -> mmap.mmap:
        """Return pages for at least `size_bytes`; the parts so far are in them."""
        try:
            if self._pages is None:
                self._pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                with suppress(OSError):  # a kernel without them
                    self._pages.madvise(mmap.MADV_HUGEPAGE)  # half the time to write them
                at = 0
                for part in self._parts:
                    _copy(part, self._pages, at)
                    at += len(part)
                self._parts.clear()
            elif size_bytes > len(self._pages):
                self._pages.resize(max(size_bytes, 2 * len(self._pages)))
        except OSError as error:
            raise MemoryError from error
        return self._pages


def _copy(part: bytes, pages: mmap.mmap, at: int) -> None:
    """Copy a part in pieces, because each copy holds the interpreter lock."""
    with memoryview(part) as view:
        for begin in range(0, len(view), _PIECE_BYTES):
            piece = view[begin : begin + _PIECE_BYTES]
            pages[at + begin : at + begin + len(piece)] = piece


# (data, position of a frame, output, blocks of the stream) -> end of the frame
_FrameDecompressor: TypeAlias = Callable[[memoryview, int, _Output, _BlockCount], int]


def compress(codec: int, data: Buffer, level: int | None = None) -> bytes | memoryview:
    """Compress the records of a batch as Kafka's producer does; `level` as in topic configs.

    The result is read-only. Raises UnsupportedCompressionError for an unknown codec.
    """
    if codec == NONE:
        return bytes(data)
    if codec not in _COMPRESSORS:
        raise UnsupportedCompressionError(codec)
    return _COMPRESSORS[codec](memoryview(data), level)


def decompress(codec: int, data: Buffer, limit_bytes: int) -> bytes | memoryview:
    """Decompress the records of a batch to at most `limit_bytes`. The result is read-only.

    Raises DecompressionLimitError above the limit, CorruptBatchError for data that is not in the
    format of the codec, UnsupportedCompressionError for an unknown codec.
    """
    assert limit_bytes >= 0
    if codec == NONE:
        if len(data) > limit_bytes:
            raise DecompressionLimitError(limit_bytes)
        return bytes(data)
    if codec not in _DECOMPRESSORS:
        raise UnsupportedCompressionError(codec)
    output = _Output(limit_bytes)
    _DECOMPRESSORS[codec](memoryview(data), output)
    return output.result()


def may_exceed(codec: int, data: Buffer, limit_bytes: int) -> bool:
    """Return whether the records of a batch may decompress to more than `limit_bytes`.

    This is cheap, because nothing is decompressed: in most cases the size of the data times the
    maximum ratio of its codec decides, otherwise the sum of the block lengths. True for data that
    cannot be walked, or has more blocks than producers write. False for an unknown codec, which
    other checks reject.
    """
    view = memoryview(data)
    if codec not in _EXPANSION_MAX or len(view) * _EXPANSION_MAX[codec] <= limit_bytes:
        return False
    if codec not in {LZ4, ZSTD}:
        return True
    bound = position = frames = 0
    blocks = _BlockCount(_BLOCKS_WALKED_MAX)
    try:
        while position < len(view) and bound <= limit_bytes:
            frames += 1
            if frames > FRAMES_MAX:
                return True
            end = _skippable_end(view, position)
            if end < 0:
                end, frame_bound = _frame_end(codec, view, position, blocks)
                bound += frame_bound
            position = end
    except CorruptBatchError:
        return True
    return bound > limit_bytes


def _frame_end(codec: int, data: memoryview, position: int, blocks: _BlockCount) -> tuple[int, int]:
    """Return the end of an lz4 or zstd frame, and its maximum decompressed size."""
    if codec == LZ4:
        return _lz4_frame_end(data, position, blocks)
    end, bound, promised = _zstd_frame_end(data, position, blocks)
    return end, bound if promised < 0 else promised


def decompress_zstd_frame(data: memoryview, bound_bytes: int) -> bytes:
    """Decompress a zstd frame that fills `data`, was walked already and has no dictionary.

    `bound_bytes` is its content size, or its maximum decompressed size if it names none. Raises
    CorruptBatchError.
    """
    try:
        decompressor, lock = _zstd_decompressor(data, bound_bytes)
        with lock:
            return decompressor.decompress(data, max_output_size=bound_bytes)
    except zstandard.ZstdError as error:
        raise CorruptBatchError(f"zstd: {error}") from error


def _decompress_frames(
    codec: int, decompress_frame: _FrameDecompressor, data: memoryview, output: _Output
) -> None:
    """Decompress a stream of frames. Raises as `decompress` does."""
    blocks = _BlockCount.of(data)
    end = decompress_frame(data, 0, output, blocks)
    frames = 1
    while end < len(data):
        frames += 1
        if frames > FRAMES_MAX:
            raise CorruptBatchError(f"{CODEC_NAMES[codec]}: more than {FRAMES_MAX} frames")
        end = decompress_frame(data, end, output, blocks)


# gzip


def _compress_gzip(data: memoryview, level: int | None) -> bytes | memoryview:
    packer = zlib.compressobj(
        GZIP_LEVEL_DEFAULT if level is None else level, zlib.DEFLATED, _GZIP_WINDOW_BITS
    )
    output = _Output(sys.maxsize)
    for begin in range(0, len(data), _PIECE_BYTES):
        output.append(packer.compress(data[begin : begin + _PIECE_BYTES]))
    output.append(packer.flush())
    return output.result()


def _decompress_gzip_member(
    data: memoryview, position: int, output: _Output, _: _BlockCount
) -> int:
    member = zlib.decompressobj(_GZIP_WINDOW_BITS)
    source: Buffer = b""
    part = b""
    while not member.eof:
        if not source:
            source = data[position : position + _PIECE_BYTES]
            position += len(source)
            if not source and not part:
                raise CorruptBatchError("gzip: the stream is cut short")
        try:
            # One byte above the limit tells "exactly full" from "more to come".
            part = member.decompress(source, min(_PIECE_BYTES, output.room_bytes + 1))
        except zlib.error as error:
            raise CorruptBatchError(f"gzip: {error}") from error
        output.append(part)
        source = member.unconsumed_tail
    return position - len(member.unused_data)


# snappy


def _compress_snappy(data: memoryview, level: int | None) -> bytes | memoryview:
    del level  # the format has none
    output = _Output(sys.maxsize)
    head = _XERIAL_HEADER
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES])
        output.append(b"".join((head, len(block).to_bytes(4, "big"), block)))
        head = b""
    output.append(head)  # of an empty stream
    return output.result()


def _decompress_snappy(data: memoryview, output: _Output) -> None:
    if bytes(data[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        _decompress_snappy_block(data, output)
        return
    # Ignore version and compatible version: some clients write them little-endian.
    position = len(_XERIAL_HEADER)
    if len(data) < position:
        raise CorruptBatchError("snappy: the xerial header is cut short")
    left = _BlockCount.of(data).left
    while position < len(data):
        left -= 1
        if left < 0:
            raise CorruptBatchError("snappy: more blocks than producers write")
        if bytes(data[position : position + len(_XERIAL_MAGIC)]) == _XERIAL_MAGIC:
            position += len(_XERIAL_HEADER)  # xerial streams may be concatenated
            if position > len(data):
                raise CorruptBatchError("snappy: the xerial header is cut short")
            continue
        length = int.from_bytes(data[position : position + 4], "big")
        start = position + 4
        position = start + length
        if start > len(data) or length == 0 or position > len(data):
            raise CorruptBatchError("snappy: a block length runs past the end")
        _decompress_snappy_block(data[start:position], output)


def _decompress_snappy_block(block: memoryview, output: _Output) -> None:
    promised = _snappy_length(block)
    if promised > len(block) * _SNAPPY_EXPANSION_MAX:
        raise CorruptBatchError("snappy: the data cannot decompress to the length in front")
    output.check_room(promised)
    try:
        if promised <= _ONE_COPY_BYTES:
            output.append(bytes(cramjam.snappy.decompress_raw(block)))
        else:
            with output.extend(promised) as view:
                cramjam.snappy.decompress_raw_into(block, view)
    except cramjam.DecompressionError as error:
        raise CorruptBatchError(str(error)) from error


def _snappy_length(block: memoryview) -> int:
    """Return the decompressed length in front of a snappy block, an unsigned varint of 32 bits."""
    length = 0
    for index, byte in enumerate(block[:5]):
        length |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            if length >> 32:
                break
            return length
    raise CorruptBatchError("snappy: no valid length in front")


# lz4


def _compress_lz4(data: memoryview, level: int | None) -> bytes | memoryview:
    if level is None or level == LZ4_LEVEL_DEFAULT:
        frame_level = 0
    else:
        frame_level = min(max(level, _LZ4_HC_LEVEL_MIN), _LZ4_HC_LEVEL_MAX)
    options = {
        "compression_level": frame_level,
        "block_size": lz4.frame.BLOCKSIZE_MAX64KB,
        "block_linked": False,
    }
    if len(data) <= _PIECE_BYTES:
        frame: bytes = lz4.frame.compress(data, store_size=False, **options)
        return frame
    # The same bytes, because a piece is a multiple of the blocks.
    output = _Output(sys.maxsize)
    context = lz4.frame.create_compression_context()
    output.append(lz4.frame.compress_begin(context, **options))
    for begin in range(0, len(data), _PIECE_BYTES):
        output.append(lz4.frame.compress_chunk(context, data[begin : begin + _PIECE_BYTES]))
    output.append(lz4.frame.compress_flush(context))
    return output.result()


def _decompress_lz4_frame(
    data: memoryview, position: int, output: _Output, blocks: _BlockCount
) -> int:
    end = _skippable_end(data, position)
    if end >= 0:
        return end
    end, bound = _lz4_frame_end(data, position, blocks)
    context = lz4.frame.create_decompression_context()
    is_complete = False
    while not is_complete:
        # One byte above the limit tells "exactly full" from "more to come".
        capacity = min(bound, output.room_bytes, _PIECE_BYTES) + 1
        try:
            part, read_bytes, is_complete = lz4.frame.decompress_chunk(
                context, data[position:end], max_length=capacity
            )
        except (RuntimeError, ValueError) as error:
            raise CorruptBatchError(f"lz4: {error}") from error
        output.append(part)
        position += read_bytes
        if not part and not is_complete:
            raise CorruptBatchError("lz4: the frame is cut short")
    return end


def _lz4_frame_end(data: memoryview, position: int, blocks: _BlockCount) -> tuple[int, int]:
    """Return the end of one frame and its maximum decompressed size, from its block sizes."""
    if int.from_bytes(data[position : position + 4], "little") != _LZ4_MAGIC:
        raise CorruptBatchError("lz4: no frame where one has to begin")
    if len(data) < position + 7:
        raise CorruptBatchError("lz4: the frame header is cut short")
    flags = data[position + 4]
    block_bytes = _LZ4_BLOCK_BYTES.get(data[position + 5] >> 4 & 7)
    if block_bytes is None or flags & 0x01:
        raise CorruptBatchError("lz4: unknown block size or a dictionary in the frame header")
    checksum_bytes = 4 if flags & 0x10 else 0
    at = position + 7 + (8 if flags & 0x08 else 0)
    bound = 0
    left = blocks.left
    while True:
        word = int.from_bytes(data[at : at + 4], "little")
        at += 4
        size = word & 0x7FFFFFFF
        if at > len(data) or size > len(data) - at:
            raise CorruptBatchError("lz4: a block runs past the end")
        if word == 0:
            break
        left -= 1
        if left < 0:
            raise CorruptBatchError("lz4: more blocks than producers write")
        stored = word >> 31
        bound += min(block_bytes, size if stored else size * _LZ4_EXPANSION_MAX)
        at += size + checksum_bytes
    blocks.left = left
    at += 4 if flags & 0x04 else 0
    if at > len(data):
        raise CorruptBatchError("lz4: the content checksum is cut short")
    return at, bound


def _skippable_end(data: memoryview, position: int) -> int:
    """Return the end of a skippable lz4 or zstd frame at `position`, -1 if there is none."""
    if int.from_bytes(data[position : position + 4], "little") & ~0xF != _SKIPPABLE_MAGIC:
        return -1
    end = position + 8 + int.from_bytes(data[position + 4 : position + 8], "little")
    if len(data) < position + 8 or end > len(data):
        raise CorruptBatchError("a skippable frame is cut short")
    return end


# zstd


class _ZstdOfThread(threading.local):
    """Contexts of one thread: creation costs more than a small batch, sharing is illegal."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_KEPT_MAX)
        self.level = ZSTD_LEVEL_DEFAULT
        self.compressor = zstandard.ZstdCompressor(level=self.level)

    def compressor_of(self, level: int) -> zstandard.ZstdCompressor:
        """Return a compressor; the one that is kept, or a new one for a high level."""
        if level > _ZSTD_LEVEL_KEPT_MAX:
            return _zstd_compressor(level)
        if level != self.level:
            self.level, self.compressor = level, _zstd_compressor(level)
        return self.compressor


_zstd_of_thread = _ZstdOfThread()
# Held while a frame is decompressed through a large window: so one thread at a time has such a
# window, of up to 128 MiB, beside the result.
_zstd_large_window = threading.Lock()
_NO_LOCK: Final = nullcontext()


def _zstd_compressor(level: int) -> zstandard.ZstdCompressor:
    """Return a compressor that takes less than 40 MB. Small inputs need no limits."""
    parameters = zstandard.ZstdCompressionParameters.from_level(level)
    limits = {
        name: _ZSTD_TABLE_LOG_MAX
        for name in ("window_log", "chain_log", "hash_log")
        if getattr(parameters, name) > _ZSTD_TABLE_LOG_MAX
    }
    if not limits:
        return zstandard.ZstdCompressor(level=level)
    parameters = zstandard.ZstdCompressionParameters(compression_level=level, **limits)
    return zstandard.ZstdCompressor(compression_params=parameters)


def _compress_zstd(data: memoryview, level: int | None) -> bytes:
    compressor = _zstd_of_thread.compressor_of(ZSTD_LEVEL_DEFAULT if level is None else level)
    return compressor.compress(data)


def _zstd_decompressor(
    frame: memoryview, bound_bytes: int
) -> tuple[zstandard.ZstdDecompressor, AbstractContextManager[object]]:
    """Return a decompressor, and the lock to use it under.

    At most `bound_bytes` of the frame are decompressed: with a small limit, the event loop does so.
    """
    if frame[4] & _ZSTD_SINGLE_SEGMENT or frame[5] <= _ZSTD_WINDOW_KEPT_CODE:
        return _zstd_of_thread.decompressor, _NO_LOCK
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
    # The first bytes of the window are used, as many as the frame decompresses to.
    return decompressor, _NO_LOCK if bound_bytes <= _ZSTD_WINDOW_KEPT_MAX else _zstd_large_window


def _decompress_zstd_frame(
    data: memoryview, position: int, output: _Output, blocks: _BlockCount
) -> int:
    end = _skippable_end(data, position)
    if end >= 0:
        return end
    end, bound, promised = _zstd_frame_end(data, position, blocks)
    output.check_room(promised)
    room_bytes = output.room_bytes
    frame = data[position:end]
    try:
        decompressor, lock = _zstd_decompressor(frame, min(bound, room_bytes + 1))
        with lock:
            if promised >= 0:
                output.append(decompressor.decompress(frame))
            elif bound <= room_bytes:
                # 0 would be no limit.
                output.append(decompressor.decompress(frame, max_output_size=max(1, bound)))
            else:
                _read_zstd_stream(decompressor, frame, output)
    except zstandard.ZstdError as error:
        raise CorruptBatchError(f"zstd: {error}") from error
    return end


def _read_zstd_stream(
    decompressor: zstandard.ZstdDecompressor, frame: memoryview, output: _Output
) -> None:
    """Decompress a frame in pieces; stop above the limit."""
    with decompressor.stream_reader(frame) as reader:
        # One byte above the limit tells "exactly full" from "more to come".
        while part := reader.read(min(_PIECE_BYTES, output.room_bytes + 1)):
            output.append(part)


def _zstd_frame_end(data: memoryview, position: int, blocks: _BlockCount) -> tuple[int, int, int]:
    """Return the end of one frame, its bound, and its content size or -1, from block headers.

    `bound` is the maximum decompressed size of the blocks; a zstd block has at most 128 KiB.
    """
    if int.from_bytes(data[position : position + 4], "little") != _ZSTD_MAGIC:
        raise CorruptBatchError("zstd: no frame where one has to begin")
    head = data[position : position + 18]  # the longest frame header
    try:
        parameters = zstandard.get_frame_parameters(head)
        at = position + zstandard.frame_header_size(head)
    except zstandard.ZstdError as error:
        raise CorruptBatchError(f"zstd: {error}") from error
    # A frame in a single segment has no window of its own; its content is limited below.
    window_bytes = (
        0 if parameters.window_size == parameters.content_size else parameters.window_size
    )
    if parameters.dict_id or window_bytes > _ZSTD_WINDOW_BYTES_MAX:
        raise CorruptBatchError("zstd: a dictionary or an over-long window in the frame header")
    bound = 0
    last = 0
    left = blocks.left
    while not last:
        left -= 1
        if left < 0:
            raise CorruptBatchError("zstd: more blocks than producers write")
        word = int.from_bytes(data[at : at + 3], "little")
        last, kind, size = word & 1, word >> 1 & 3, word >> 3
        at += 3 + (1 if kind == 1 else size)  # an RLE block has one byte
        if kind == 3 or size > _ZSTD_BLOCK_BYTES_MAX or at > len(data):
            raise CorruptBatchError("zstd: a block header is impossible or cut short")
        bound += _ZSTD_BLOCK_BYTES_MAX if kind == 2 else size
    blocks.left = left
    at += 4 if parameters.has_checksum else 0
    if at > len(data):
        raise CorruptBatchError("zstd: the content checksum is cut short")
    promised = -1
    if parameters.content_size != zstandard.CONTENTSIZE_UNKNOWN:
        promised = parameters.content_size
        if promised > bound:
            raise CorruptBatchError("zstd: the blocks cannot decompress to the content size")
    return at, bound, promised


# The maximum decompressed size of one byte. A zstd block that repeats one byte has four bytes.
_EXPANSION_MAX: Final = {
    NONE: 1,
    GZIP: _GZIP_EXPANSION_MAX,
    SNAPPY: _SNAPPY_EXPANSION_MAX,
    LZ4: _LZ4_EXPANSION_MAX,
    ZSTD: _ZSTD_BLOCK_BYTES_MAX // 4,
}
_COMPRESSORS: Final[dict[int, Callable[[memoryview, int | None], bytes | memoryview]]] = {
    GZIP: _compress_gzip,
    SNAPPY: _compress_snappy,
    LZ4: _compress_lz4,
    ZSTD: _compress_zstd,
}
_DECOMPRESSORS: Final[dict[int, Callable[[memoryview, _Output], None]]] = {
    GZIP: partial(_decompress_frames, GZIP, _decompress_gzip_member),
    SNAPPY: _decompress_snappy,
    LZ4: partial(_decompress_frames, LZ4, _decompress_lz4_frame),
    ZSTD: partial(_decompress_frames, ZSTD, _decompress_zstd_frame),
}
