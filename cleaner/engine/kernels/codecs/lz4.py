"""LZ4 frames inside a kernel, as Kafka's clients write them: no Python call per batch.

Rules
- Only the plain frame is handled: independent blocks of 64 KiB, no checksums, no sizes, nothing
  behind it. Any other, and any that is not sound, is left to storage/format/compression.py.
- The blocks are coded by the LZ4 library that the `lz4` package carries; its functions are called
  by their addresses. Where it does not export them, nothing is handled here.
- What is packed is byte for byte what storage/format/compression.py makes of it.

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
_STORED: Final = 1 << 31  # in a block's size: it is not compressed
_FAST: Final = 1  # LZ4_compress_default's acceleration

NOT_HERE: Final = -1


def unpacker_address() -> int:
    """Of LZ4_decompress_safe; 0 where there is none."""
    return _address("LZ4_decompress_safe")


def packer_address() -> int:
    """Of LZ4_compress_fast; 0 where there is none."""
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
    """Room that a frame of `count` bytes may need."""
    return _HEAD_BYTES + count + (count // _BLOCK_BYTES + 1) * 4 + _END_BYTES


def _call(
    typingctx: Any, address: Any, source: Any, at: Any, target: Any, to: Any, counts: Any
) -> Any:
    """`int f(const char *source, char *target, int count, int room[, int acceleration])`."""

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
    """Unpack the frame `source[at:end]` to `target[to:]`, at most `room` bytes -> how many.

    NOT_HERE where that is not possible, whatever the reason.
    """
    if address == 0 or end - at < _HEAD_BYTES + _END_BYTES:
        return NOT_HERE
    if int64(load_u64(source, at)) & _HEAD_MASK != _HEAD:
        return NOT_HERE
    at += _HEAD_BYTES
    begin = to
    limit = to + room
    while end - at >= 4:
        size = int64(load_u64(source, at)) & 0xFFFFFFFF
        at += 4
        if size == 0:
            return to - begin if at == end else NOT_HERE
        stored = size & _STORED != 0
        size &= _STORED - 1
        if size > end - at or size > _BLOCK_BYTES:
            return NOT_HERE
        if stored:
            if size > limit - to:
                return NOT_HERE
            copy_bytes(target, to, source, at, size)
            to += size
        else:
            counts = (int64(size), int64(min(_BLOCK_BYTES, limit - to)), int64(0))
            actual = _call_library(address, source, at, target, to, counts)
            if actual < 0:
                return NOT_HERE
            to += actual
        at += size
    return NOT_HERE


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
