"""CRC-32C (Castagnoli) inside a kernel: no call from Python for each batch.

Uses the processor's CRC instruction if there is one (SSE4.2, or the CRC extension of 64-bit ARM),
in three parallel streams: the instruction takes three cycles, and one can start in each cycle.
Otherwise uses tables for eight bytes at a time. With wide carry-less products (crc_folding.py) the
whole blocks take less than half the time.
"""

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from cleaner.engine.kernels.codecs.crc_folding import (
    FOLDED_BYTES,
    HAS_WIDE_PRODUCTS,
    IS_X86,
    POLYNOMIAL,
    compiled_for,
    fold_blocks,
)
from cleaner.engine.kernels.codecs.memory import load_u64
from cleaner.engine.kernels.compile import Bytes, Words, emitted, inlined, int64, kernel

_STREAM_BYTES = 256  # of each of the three streams


def _has_instruction() -> bool:
    if IS_X86:
        return compiled_for("sse4.2")
    return platform.machine() in {"aarch64", "arm64"} and compiled_for("crc")


HAS_INSTRUCTION = _has_instruction()
# Name, bits of the state and bits of the data operand, for 8 bytes and for one at a time.
_INSTRUCTIONS = (
    {8: ("llvm.x86.sse42.crc32.64.64", 64, 64), 1: ("llvm.x86.sse42.crc32.32.8", 32, 8)}
    if IS_X86
    else {8: ("llvm.aarch64.crc32cx", 32, 64), 1: ("llvm.aarch64.crc32cb", 32, 32)}
)


def _instruction(data_bytes: int) -> Any:
    name, state_bits, data_bits = _INSTRUCTIONS[data_bytes]

    def update(typingctx: Any, crc: Any, word: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            wide, state, data = (ir.IntType(bits) for bits in (64, state_bits, data_bits))
            function = builder.module.globals.get(name) or ir.Function(
                builder.module, ir.FunctionType(state, [state, data]), name
            )
            before = args[0] if state_bits == 64 else builder.trunc(args[0], state)
            operand = args[1] if data_bits == 64 else builder.trunc(args[1], data)
            after = builder.call(function, [before, operand])
            return after if state_bits == 64 else builder.zext(after, wide)

        return types.uint64(types.uint64, types.uint64), codegen

    return emitted(update)


_crc_of_word = _instruction(8)
_crc_of_byte = _instruction(1)


def _byte_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
        table.append(crc)
    return table


def _slicing_tables() -> Words:
    """Return eight tables: the effect of a byte that is 0 to 7 places before the end of a word."""
    rows = [_byte_table()]
    for _ in range(7):
        rows.append([(crc >> 8) ^ rows[0][crc & 255] for crc in rows[-1]])
    return np.array(rows, dtype=np.uint64)


def _shift_tables(count: int) -> Words:
    """Return four tables, one per byte of a CRC: the CRC after `count` more zero bytes."""
    first = _byte_table()
    columns = []
    for bit in range(32):
        crc = 1 << bit
        for _ in range(count):
            crc = (crc >> 8) ^ first[crc & 255]
        columns.append(crc)
    rows = np.zeros((4, 256), dtype=np.uint64)
    for row in range(4):
        for byte in range(256):
            for bit in range(8):
                if byte >> bit & 1:
                    rows[row, byte] ^= np.uint64(columns[row * 8 + bit])
    return rows


_SLICES = _slicing_tables()
_SHIFTS = _shift_tables(_STREAM_BYTES)
_ONES = np.uint64(0xFFFFFFFF)


@inlined
def _shifted(crc: np.uint64) -> np.uint64:
    """Return the CRC after _STREAM_BYTES more zero bytes."""
    shifted: np.uint64 = (
        _SHIFTS[0, crc & np.uint64(255)]
        ^ _SHIFTS[1, (crc >> np.uint64(8)) & np.uint64(255)]
        ^ _SHIFTS[2, (crc >> np.uint64(16)) & np.uint64(255)]
        ^ _SHIFTS[3, crc >> np.uint64(24)]
    )
    return shifted


@inlined
def _update_by_instruction(crc: np.uint64, buf: Bytes, at: int, end: int) -> np.uint64:
    while at + 3 * _STREAM_BYTES <= end:
        second = np.uint64(0)
        third = np.uint64(0)
        for i in range(at, at + _STREAM_BYTES, 8):
            crc = _crc_of_word(crc, load_u64(buf, i))
            second = _crc_of_word(second, load_u64(buf, i + _STREAM_BYTES))
            third = _crc_of_word(third, load_u64(buf, i + 2 * _STREAM_BYTES))
        crc = _shifted(_shifted(crc) ^ second) ^ third
        at += 3 * _STREAM_BYTES
    while at + 8 <= end:
        crc = _crc_of_word(crc, load_u64(buf, at))
        at += 8
    while at < end:
        crc = _crc_of_byte(crc, np.uint64(buf[at]))
        at += 1
    return crc


@inlined
def _update_by_tables(crc: np.uint64, buf: Bytes, at: int, end: int) -> np.uint64:
    byte = np.uint64(255)
    while at + 8 <= end:
        word = crc ^ load_u64(buf, at)
        crc = (
            _SLICES[7, word & byte]
            ^ _SLICES[6, (word >> np.uint64(8)) & byte]
            ^ _SLICES[5, (word >> np.uint64(16)) & byte]
            ^ _SLICES[4, (word >> np.uint64(24)) & byte]
            ^ _SLICES[3, (word >> np.uint64(32)) & byte]
            ^ _SLICES[2, (word >> np.uint64(40)) & byte]
            ^ _SLICES[1, (word >> np.uint64(48)) & byte]
            ^ _SLICES[0, word >> np.uint64(56)]
        )
        at += 8
    while at < end:
        crc = (crc >> np.uint64(8)) ^ _SLICES[0, (crc ^ np.uint64(buf[at])) & byte]
        at += 1
    return crc


@inlined
def _update_by_products(crc: np.uint64, buf: Bytes, at: int, end: int) -> np.uint64:
    if at + FOLDED_BYTES <= end:
        middle = at + ((end - at) & ~(FOLDED_BYTES - 1))
        crc = fold_blocks(crc, buf, at, middle)
        at = middle
    return _update_by_instruction(crc, buf, at, end)


_update = _update_by_instruction if HAS_INSTRUCTION else _update_by_tables
if HAS_WIDE_PRODUCTS:
    _update = _update_by_products


@inlined
def crc32c(buf: Bytes, at: int, end: int) -> int:
    """Return the CRC-32C of `buf[at:end]` as int64."""
    return int64(_update(_ONES, buf, at, end) ^ _ONES)  # type: ignore[no-any-return]


@kernel
def crc32c_extended(crc: int, buf: Bytes, at: int, end: int) -> int:
    """Extend the CRC-32C `crc` (0: of no bytes) by `buf[at:end]` and return it as int64."""
    return int64(_update(np.uint64(crc) ^ _ONES, buf, at, end) ^ _ONES)  # type: ignore[no-any-return]
