"""Read and write the LZ4 frames of Kafka's clients inside a kernel: no call from Python per batch.

Rules
- Handles only frames of independent blocks of 64 KiB, without checksums, sizes or bytes after the
  frame. storage/format/compression.py handles all others, and reports malformed ones.
- The LZ4 library of the `lz4` package codes the blocks; kernels call its functions by address. If
  the library does not export them, this module handles no frame.
- Packed frames are byte for byte those of storage/format/compression.py.

Source: the LZ4 frame format 1.6.
"""

# ruff: noqa: PLR0917  kernels are called with plain positions: keywords cost a slower call

import ctypes
from functools import cache
from typing import Any, Final

import lz4.block._block as lz4_library
from llvmlite import ir
from numba import types

from cleaner.engine.kernels.codecs.memory import copy_bytes, load_u64, pointer_to
from cleaner.engine.kernels.compile import Bytes, emitted, inlined, int64

_BLOCK_BYTES: Final = 64 << 10
_HEAD: Final = 0x82_40_60_18_4D_22_04  # magic, flags, block size, checksum of these; as loaded
_HEAD_BYTES: Final = 7
_HEAD_MASK: Final = (1 << 56) - 1
_END_BYTES: Final = 4
_STORED: Final = 1 << 31  # a bit of a block's size: the block is not compressed
_FAST: Final = 1  # LZ4_compress_default's acceleration

UNHANDLED: Final = -1


def unpacker_address() -> int:
    """Return the address of LZ4_decompress_safe; 0 if there is none."""
    return _address("LZ4_decompress_safe")


def packer_address() -> int:
    """Return the address of LZ4_compress_fast; 0 if there is none."""
    return _address("LZ4_compress_fast")


@cache
def _address(name: str) -> int:
    try:
        function = getattr(ctypes.CDLL(lz4_library.__file__), name)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@inlined
def frame_bytes_max(count: int) -> int:
    """Return the maximum size of a frame with `count` bytes."""
    return _HEAD_BYTES + count + (count // _BLOCK_BYTES + 1) * 4 + _END_BYTES


def _call(
    typingctx: Any, address: Any, source: Any, at: Any, target: Any, to: Any, counts: Any
) -> Any:
    """Call `int f(const char *source, char *target, int count, int room[, int acceleration])`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        begin = pointer_to(context, builder, signature.args[1], args[1], args[2])
        out = pointer_to(context, builder, signature.args[3], args[3], args[4])
        numbers = [builder.trunc(builder.extract_value(args[5], i), word) for i in range(3)]
        kind = ir.FunctionType(word, [begin.type, out.type, word, word, word])
        function = builder.inttoptr(args[0], kind.as_pointer())
        result = builder.call(function, [begin, out, *numbers])
        return builder.sext(result, ir.IntType(64))

    int_3: Any = types.Tuple([types.int64] * 3)  # type: ignore[no-untyped-call]
    return types.int64(types.int64, source, types.int64, target, types.int64, int_3), codegen


_call_library = emitted(_call)


@inlined
def unpack_frame(
    address: int, source: Bytes, at: int, end: int, target: Bytes, to: int, room: int
) -> int:
    """Unpack the frame `source[at:end]` to `target[to:]`, at most `room` bytes -> its size.

    UNHANDLED if that is not possible for any reason.
    """
    if address == 0 or end - at < _HEAD_BYTES + _END_BYTES:
        return UNHANDLED
    if int64(load_u64(source, at)) & _HEAD_MASK != _HEAD:
        return UNHANDLED
    at += _HEAD_BYTES
    begin = to
    limit = to + room
    while end - at >= 4:
        size = int64(load_u64(source, at)) & 0xFFFFFFFF
        at += 4
        if size == 0:
            return to - begin if at == end else UNHANDLED
        stored = size & _STORED != 0
        size &= _STORED - 1
        if size > end - at or size > _BLOCK_BYTES:
            return UNHANDLED
        if stored:
            if size > limit - to:
                return UNHANDLED
            copy_bytes(target, to, source, at, size)
            to += size
        else:
            counts = (int64(size), int64(min(_BLOCK_BYTES, limit - to)), int64(0))
            actual = _call_library(address, source, at, target, to, counts)
            if actual < 0:
                return UNHANDLED
            to += actual
        at += size
    return UNHANDLED


@inlined
def _store_le32(target: Bytes, at: int, value: int) -> None:
    target[at] = value & 255
    target[at + 1] = value >> 8 & 255
    target[at + 2] = value >> 16 & 255
    target[at + 3] = value >> 24 & 255


@inlined
def pack_frame(address: int, source: Bytes, at: int, end: int, target: Bytes, to: int) -> int:
    """Pack `source[at:end]` into a frame at `target[to:]` -> its end.

    `target` has room for `frame_bytes_max(end - at)`.
    """
    for i in range(_HEAD_BYTES):
        target[to + i] = _HEAD >> (8 * i) & 255
    to += _HEAD_BYTES
    while at < end:
        size = min(_BLOCK_BYTES, end - at)
        counts = (int64(size), int64(size - 1), int64(_FAST))
        packed = _call_library(address, source, at, target, to + 4, counts)
        if packed > 0:
            _store_le32(target, to, packed)
            to += 4 + packed
        else:
            _store_le32(target, to, size | _STORED)
            copy_bytes(target, to + 4, source, at, size)
            to += 4 + size
        at += size
    _store_le32(target, to, 0)
    return to + _END_BYTES
