"""Loads, stores, copies and prefetches that Numba's arrays do not offer.

Rules: nothing here checks bounds. A kernel that walks untrusted bytes gets a buffer with
`SLACK_BYTES` readable bytes after the end of its input. It may read the first fields of a record
past that end, but compares every position with the end before it follows a length. Kafka's formats
are big-endian.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from cleaner.engine.kernels.compile import Bytes, Words, emitted, inlined, int64, kernel

# The first fields of a record (five varints and a byte: at most 51 bytes) may be read past the end
# of its batch before the check that they fit; a load of a word reads up to 8 bytes more.
SLACK_BYTES = 64


def pointer_to(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Generate the LLVM code for the address of element `index` of an array argument."""
    data = context.make_array(array_type)(context, builder, array).data
    offset = builder.mul(index, ir.Constant(ir.IntType(64), array_type.dtype.bitwidth // 8))
    start = builder.ptrtoint(data, ir.IntType(64))
    return builder.inttoptr(builder.add(start, offset), ir.IntType(8).as_pointer())


def _load(bits: int, swapped: bool, result: Any) -> Any:
    def load(typingctx: Any, array: Any, index: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
            value = builder.load(builder.bitcast(pointer, ir.IntType(bits).as_pointer()))
            value.align = 1
            if swapped:
                value = builder.bswap(value)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return result(array, types.int64), codegen

    return emitted(load)


def _store(bits: int) -> Any:
    def store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = pointer_to(context, builder, signature.args[0], args[0], args[1])
            word = ir.IntType(bits)
            number = args[2] if bits == 64 else builder.trunc(args[2], word)
            place = builder.bitcast(pointer, word.as_pointer())
            builder.store(builder.bswap(number), place).align = 1
            return context.get_dummy_value()

        return types.void(array, types.int64, types.int64), codegen

    return emitted(store)


def _copy(  # noqa: PLR0917  Numba passes the types of the arguments by position
    typingctx: Any, target: Any, at: Any, source: Any, start: Any, count: Any
) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = pointer_to(context, builder, signature.args[0], args[0], args[1])
        origin = pointer_to(context, builder, signature.args[2], args[2], args[3])
        _raw_memcpy(builder, to, origin, args[4], 1, align=1)
        return context.get_dummy_value()

    return types.void(target, types.int64, source, types.int64, types.int64), codegen


def _prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = pointer_to(context, builder, signature.args[0], args[0], args[1])
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
        name = "llvm.prefetch.p0"
        call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        # 1: for writing, 3: into all caches, 1: data
        builder.call(call, [address, *(ir.Constant(word, n) for n in (1, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


_raw_memcpy: Any = cgutils.raw_memcpy
_load_u64 = _load(64, False, types.uint64)
_load_be64 = _load(64, True, types.int64)
_load_be32 = _load(32, True, types.int64)
_load_be16 = _load(16, True, types.int64)
_store_be64 = _store(64)
_store_be32 = _store(32)
_store_be16 = _store(16)
_copy_bytes = emitted(_copy)
_prefetch_word = emitted(_prefetch)


@inlined
def load_u64(buf: Bytes, at: int) -> np.uint64:
    """Load 64 bits, little-endian, at byte `at`."""
    return _load_u64(buf, at)  # type: ignore[no-any-return]


@inlined
def load_be64(buf: Bytes, at: int) -> int:
    """Load an int64, big-endian, at byte `at`."""
    return _load_be64(buf, at)  # type: ignore[no-any-return]


@inlined
def load_be32(buf: Bytes, at: int) -> int:
    """Load 32 unsigned bits, big-endian, at byte `at`."""
    return _load_be32(buf, at)  # type: ignore[no-any-return]


@inlined
def load_be16(buf: Bytes, at: int) -> int:
    """Load 16 unsigned bits, big-endian, at byte `at`."""
    return _load_be16(buf, at)  # type: ignore[no-any-return]


@inlined
def store_be64(buf: Bytes, at: int, value: int) -> None:
    """Store an int64, big-endian, at byte `at`."""
    _store_be64(buf, at, value)


@inlined
def store_be32(buf: Bytes, at: int, value: int) -> None:
    """Store the low 32 bits of `value`, big-endian, at byte `at`."""
    _store_be32(buf, at, value)


@inlined
def store_be16(buf: Bytes, at: int, value: int) -> None:
    """Store the low 16 bits of `value`, big-endian, at byte `at`."""
    _store_be16(buf, at, value)


@inlined
def copy_bytes(target: Bytes, at: int, source: Bytes, start: int, count: int) -> None:
    """Copy `source[start:start + count]` to `target[at:]`; they must not overlap."""
    _copy_bytes(target, at, source, start, count)


@inlined
def prefetch(words: Words, index: int) -> None:
    """Prefetch the cache line of word `index` for writing."""
    _prefetch_word(words, index)


@inlined
def read_varint(buf: Bytes, at: int) -> tuple[int, int]:
    """Read a zigzag varint of up to 10 bytes (record format v2) -> (value, position after it).

    The position is -1 if the tenth byte is not the last. Reads up to 10 bytes from `at`.
    """
    byte = int64(buf[at])
    if byte < 128:
        return (byte >> 1) ^ -(byte & 1), at + 1
    value = byte & 127
    for i in range(1, 10):
        byte = int64(buf[at + i])
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return ((value >> 1) & 0x7FFFFFFFFFFFFFFF) ^ -(value & 1), at + i + 1
    return int64(0), -1


@kernel
def write_varint(buf: Bytes, at: int, value: int) -> int:
    """Write `value` as a zigzag varint, at most 10 bytes -> position after it."""
    word = (value << 1) ^ (value >> 63)
    while word < 0 or word > 127:
        buf[at] = (word & 127) | 128
        word = (word >> 7) & 0x1FFFFFFFFFFFFFF
        at += 1
    buf[at] = word
    return at + 1


@kernel
def varint_bytes(value: int) -> int:
    """Return the number of bytes that `write_varint` writes for `value`."""
    word = (value << 1) ^ (value >> 63)
    count = 1
    while word < 0 or word > 127:
        word = (word >> 7) & 0x1FFFFFFFFFFFFFF
        count += 1
    return count
