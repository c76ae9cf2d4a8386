"""Kernels by themselves: the hash, the checksum, and walks over bytes that lie."""

import ctypes
import mmap
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c as crc32c_oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.codecs import memory
from cleaner.engine.kernels.codecs.crc import (
    HAS_INSTRUCTION,
    _update_by_instruction,
    _update_by_tables,
    crc32c,
    crc32c_extended,
)
from cleaner.engine.kernels.codecs.crc_folding import HAS_WIDE_PRODUCTS
from cleaner.engine.kernels.codecs.hashing import siphash128
from cleaner.engine.kernels.codecs.memory import SLACK_BYTES
from cleaner.engine.kernels.compile import kernel
from cleaner.engine.kernels.layout import CHUNK_KEYS, Code, Workspace
from cleaner.engine.kernels.passes.fingerprint_table import grow
from cleaner.engine.kernels.passes.rewrite import any_bit, filter_unpacked, rewrite_batches
from cleaner.engine.kernels.passes.walk import count_records, index_batches, index_unpacked
from cleaner.engine.key_map.offset_map import OffsetMap
from storage.errors import StorageError
from storage.format.batch import (
    CONTROL,
    HEADER_BYTES,
    TRANSACTIONAL,
    Record,
    build_batch,
    crc_of,
    decode_records,
    read_header,
    write_varint,
)
from tests.support.draws import cases

PAGE = mmap.PAGESIZE
PROPERTY = settings(max_examples=cases(few=40, many=400), deadline=None)


# The hash.

K0, K1 = np.frombuffer(bytes(range(16)), dtype="<u8")


@kernel
def _hash(buf: np.ndarray, at: int, count: int, k0: np.uint64, k1: np.uint64) -> tuple[int, int]:
    return siphash128(buf, at, count, k0, k1)


def siphash_oracle(message: bytes, k0: int, k1: int) -> tuple[int, int]:
    """SipHash-2-4-128 as the paper and its reference code describe it, in plain integers."""
    mask = (1 << 64) - 1
    v = [
        k0 ^ 0x736F6D6570736575,
        k1 ^ 0x646F72616E646F6D ^ 0xEE,
        k0 ^ 0x6C7967656E657261,
        k1 ^ 0x7465646279746573,
    ]

    def rotl(word: int, count: int) -> int:
        return (word << count | word >> (64 - count)) & mask

    def rounds(count: int) -> None:
        for _ in range(count):
            for a, b, turn in ((0, 1, 13), (2, 3, 16)):
                v[a] = (v[a] + v[b]) & mask
                v[b] = rotl(v[b], turn) ^ v[a]
            v[0] = rotl(v[0], 32)
            for a, b, turn in ((2, 1, 17), (0, 3, 21)):
                v[a] = (v[a] + v[b]) & mask
                v[b] = rotl(v[b], turn) ^ v[a]
            v[2] = rotl(v[2], 32)

    padded = message + bytes(7 - len(message) % 8) + bytes([len(message) & 255])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return first, v[0] ^ v[1] ^ v[2] ^ v[3]


def hashed(message: bytes, offset: int = 0, k0: int = int(K0), k1: int = int(K1)) -> bytes:
    # Ones around the message: what lies after it must not count.
    buf = np.full(offset + len(message) + SLACK_BYTES, 255, dtype=np.uint8)
    buf[offset : offset + len(message)] = np.frombuffer(message, dtype=np.uint8)
    item, two = _hash(buf, offset, len(message), np.uint64(k0), np.uint64(k1))
    return int(item).to_bytes(8, "little") + int(two).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("length", "digest"),
    [
        # `openssl mac -macopt hexkey:000102..0f -macopt size:16 SIPHASH` of 00 01 02 ...
        (0, "a3817f04ba25a8e66df67214c7550293"),
        (1, "da87c1d86b99af44347659119b22fc45"),
    ],
)
def test_the_fingerprint_is_siphash_2_4_128(length: int, digest: str) -> None:
    assert hashed(bytes(range(length))).hex() == digest


@PROPERTY
@given(
    st.binary(max_size=300), st.integers(0, 9), st.integers(0, (1 << 64) - 1), st.integers(0, 99)
)
def test_the_fingerprint_agrees_with_plain_python(
    message: bytes, offset: int, k0: int, k1: int
) -> None:
    item, two = siphash_oracle(message, k0, k1)
    expected = item.to_bytes(8, "little") + two.to_bytes(8, "little")
    assert hashed(message, offset, k0, k1) == expected


# The checksum.


@kernel
def _by_tables(buf: np.ndarray, at: int, end: int) -> int:
    items = np.uint64(0xFFFFFFFF)
    return np.int64(_update_by_tables(items, buf, at, end) ^ items)


@kernel
def _by_instruction(buf: np.ndarray, at: int, end: int) -> int:
    items = np.uint64(0xFFFFFFFF)
    return np.int64(_update_by_instruction(items, buf, at, end) ^ items)


@kernel
def _by_choice(buf: np.ndarray, at: int, end: int) -> int:
    return crc32c(buf, at, end)


@PROPERTY
@given(st.integers(0, 3000), st.integers(0, 9), st.integers(0, 1 << 32))
def test_the_checksum_is_crc32c_by_products_by_instruction_and_by_tables(
    count: int, at: int, seed: int
) -> None:
    data = random.Random(seed).randbytes(at + count)
    buf = np.frombuffer(data + bytes(SLACK_BYTES), dtype=np.uint8).copy()
    expected = crc32c_oracle(data[at:])
    assert _by_choice(buf, at, at + count) == expected
    assert _by_tables(buf, at, at + count) == expected
    if HAS_INSTRUCTION:
        assert _by_instruction(buf, at, at + count) == expected
    middle = at + count // 2
    first = crc32c_extended(0, buf, at, middle)
    assert crc32c_extended(first, buf, middle, at + count) == expected


def test_the_processors_instruction_is_found_where_there_is_one() -> None:
    with open("/proc/cpuinfo") as file:
        flags = file.read()
    if "sse4_2" in flags or "crc32" in flags:
        assert HAS_INSTRUCTION
    if "avx512f" in flags and "vpclmulqdq" in flags:
        assert HAS_WIDE_PRODUCTS


# Numbers.


@kernel
def _varint(buf: np.ndarray, value: int) -> tuple[int, int, int, int]:
    end = memory.write_varint(buf, 0, value)
    back, behind = memory.read_varint(buf, 0)
    return end, back, behind, memory.varint_bytes(value)


@PROPERTY
@given(st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-200, 200))
def test_a_varint_reads_back(value: int) -> None:
    buf = np.zeros(16, dtype=np.uint8)
    end, back, behind, size = _varint(buf, value)
    assert back == value
    assert end == behind == size


@kernel
def _read(buf: np.ndarray) -> tuple[int, int]:
    return memory.read_varint(buf, 0)


def test_a_varint_without_an_end_is_refused() -> None:
    assert _read(np.full(16, 255, dtype=np.uint8))[1] == -1


@kernel
def _any(bits: np.ndarray, first: int, last: int) -> bool:
    return any_bit(bits, first, last)


@PROPERTY
@given(st.integers(0, 400), st.integers(0, 400), st.sets(st.integers(0, 400), max_size=3))
def test_a_range_of_bits_is_searched_exactly(one: int, other: int, marked: set[int]) -> None:
    bits = np.zeros(51, dtype=np.uint8)
    for bit in marked:
        bits[bit >> 3] |= 1 << (bit & 7)
    first, last = min(one, other), max(one, other)
    assert _any(bits, first, last) == any(first <= bit <= last for bit in marked)


# Hostile bytes. The buffers end at a protected page: an access beyond them kills the process.

_libc = ctypes.CDLL(None, use_errno=True)


class GuardedPages:
    """Memory whose last byte has nothing after it."""

    def __init__(self, size_bytes: int) -> None:
        self._pages = -(-size_bytes // PAGE)
        self._map = mmap.mmap(-1, (self._pages + 1) * PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        guard = ctypes.c_void_p(address + self._pages * PAGE)
        assert _libc.mprotect(guard, PAGE, 0) == 0

    def array(self, size_bytes: int) -> np.ndarray:
        whole = np.frombuffer(self._map, dtype=np.uint8, count=self._pages * PAGE)
        return whole[len(whole) - size_bytes :]


GUARDED = {
    name: GuardedPages(1 << 16) for name in ("buf", "out", "scratch", "keep", "unpacked", "bits")
}
END = 1 << 40


def workspace(size_bytes: int, first_dirty: int = 0) -> Workspace:
    offset_map = OffsetMap(1 << 16, 1 << 16, bytes(16))
    state = offset_map.state
    state[fields.SOURCE_END] = state[fields.MAP_END] = END
    state[fields.FIRST_DIRTY] = first_dirty
    state[fields.BITS_MAX] = 1 << 12
    state[fields.HORIZON_MS] = 5
    bits = GUARDED["bits"].array((1 << 9) + 1)
    bits[:] = 0x55
    return Workspace(
        table=offset_map.table,
        state=state,
        lows=offset_map.lows,
        highs=offset_map.highs,
        offsets=offset_map.offsets,
        last_offsets=np.empty(CHUNK_KEYS, dtype=np.int64),
        keep=GUARDED["keep"].array(max(size_bytes // 7, CHUNK_KEYS)),
        bits=bits,
        producers=np.array([3, 0, 4, 7, 1, -1], dtype=np.int64),
        aborted=np.array([5, 2, 9], dtype=np.int64),
        aborted_kept=np.zeros(1, dtype=np.uint8),
        open_producers=np.zeros(8, dtype=np.int64),
    )


RECORDS = st.lists(
    st.tuples(
        st.sampled_from([None, b"", b"k", b"key" * 30]),
        st.sampled_from([None, b"", b"value" * 9]),
    ),
    max_size=12,
)
CHANGES = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=6)


def hostile_batch(
    pairs: list[tuple[bytes | None, bytes | None]], changes: list[tuple[int, int]], crc_right: bool
) -> bytearray:
    records = [Record(i, i, key, value) for i, (key, value) in enumerate(pairs)]
    batch = build_batch(
        records, base_offset=0, last_offset_delta=len(pairs) + 3, producer_id=len(pairs)
    )
    for place, byte in changes:
        batch[place % len(batch)] = byte
    if crc_right and len(batch) >= HEADER_BYTES:
        batch[17:21] = crc_of(batch, 0, len(batch)).to_bytes(4, "big")
    return batch


def guarded(name: str, data: bytes | bytearray) -> np.ndarray:
    array = GUARDED[name].array(len(data) + SLACK_BYTES)
    array[: len(data)] = np.frombuffer(bytes(data), dtype=np.uint8)
    array[len(data) :] = 0xFF  # numbers without an end
    return array


@PROPERTY
@given(RECORDS, CHANGES, st.booleans(), st.integers(0, 60))
def test_indexing_hostile_bytes_stays_inside_them(
    pairs: list[tuple[bytes | None, bytes | None]],
    changes: list[tuple[int, int]],
    crc_right: bool,
    cut: int,
) -> None:
    data = hostile_batch(pairs, changes, crc_right)
    data = data + data[: max(len(data) - cut, 0)]
    space = workspace(len(data))
    buf = guarded("buf", data)
    assert count_records(buf, 0, len(data)) >= 0
    code, position = index_batches(buf, 0, len(data), space)
    assert 0 <= position <= len(data)
    assert Code(code) != Code.MAP_FULL
    assert space.state[fields.ENTRIES] <= 2 * len(pairs)


@PROPERTY
@given(RECORDS, CHANGES, st.booleans(), st.booleans())
def test_rewriting_hostile_bytes_stays_inside_them(
    pairs: list[tuple[bytes | None, bytes | None]],
    changes: list[tuple[int, int]],
    ask_bits: bool,
    crc_right: bool,
) -> None:
    data = hostile_batch(pairs, changes, crc_right)
    first_dirty = 0 if ask_bits else END
    space = workspace(len(data), first_dirty)
    space.state[fields.BITS_END] = 1 << 12
    buf = guarded("buf", data)
    out = guarded("out", bytes(3 * len(data)))
    scratch = guarded("scratch", bytes(len(data)))
    code, position = rewrite_batches(buf, 0, len(data), out, scratch, space)
    assert 0 <= position <= len(data)
    written = int(space.state[fields.WRITTEN])
    if written:
        header = read_header(bytes(out[:written]))
        assert header.size_bytes == written, "what comes out is one whole batch"
        assert crc_of(bytes(out[:written]), 0, written) == header.crc
    assert Code(code) is not Code.DONE


@PROPERTY
@given(st.binary(max_size=300), st.integers(0, 40), st.integers(0, 50), st.booleans())
def test_unpacked_bytes_of_any_kind_stay_in_their_buffers(
    data: bytes, count: int, last_delta: int, ask_bits: bool
) -> None:
    check_unpacked(data, count, last_delta, ask_bits)


@PROPERTY
@given(RECORDS, CHANGES, st.booleans())
def test_unpacked_records_with_changed_bytes_stay_in_their_buffers(
    pairs: list[tuple[bytes | None, bytes | None]], changes: list[tuple[int, int]], ask_bits: bool
) -> None:
    data = bytes(hostile_batch(pairs, changes, crc_right=False)[HEADER_BYTES:])
    check_unpacked(data, len(pairs), len(pairs) + 3, ask_bits)


def check_unpacked(
    data: bytes, count: int, last_delta: int, ask_bits: bool, expected: Code | None = None
) -> None:
    space = workspace(len(data), 0 if ask_bits else END)
    space.state[fields.BITS_END] = 1 << 12
    header = build_batch([], base_offset=0, last_offset_delta=last_delta)
    header[57:61] = count.to_bytes(4, "big")
    buf = guarded("buf", header)
    source = guarded("unpacked", data + bytes(count * 11))
    retained = guarded("out", bytes(len(data)))
    code = index_unpacked(source, len(data), 0, count, last_delta, space)
    code_again = filter_unpacked(source, len(data), buf, 0, retained, space)
    assert Code(code) in {Code.DONE, Code.BAD_RECORD, Code.BAD_COUNT}
    assert code_again == code, "both passes decide alike"
    assert expected in {None, Code(code)}


# Lengths that a walk may not follow: around the true size, past the guard page, past 32 bits.
LENGTHS = st.sampled_from([-(1 << 40), -2, -1, 0, 1, 6, 40, 300, 70_000, 10**6, 1 << 33, 1 << 62])
DELTAS = st.sampled_from([-1, 0, 1, 2, 3, 50, 51, 10**6, 1 << 40])
LIES = st.lists(
    st.tuples(LENGTHS, DELTAS, LENGTHS, LENGTHS, st.integers(0, 40)),
    min_size=1,
    max_size=4,
)


def test_an_offset_beyond_its_batch_is_not_looked_up() -> None:
    for delta in (51, 10**6, 1 << 40):
        data = lying_records([(6, delta, 0, 0, 1)])
        check_unpacked(data, 1, 50, ask_bits=True, expected=Code.BAD_RECORD)
    check_unpacked(lying_records([(6, 50, 0, 0, 1)]), 1, 50, ask_bits=True, expected=Code.DONE)


def test_a_record_that_ends_with_its_value_is_refused() -> None:
    check_unpacked(lying_records([(6, 0, 0, 1, 1)]), 1, 50, False, expected=Code.BAD_RECORD)
    check_unpacked(lying_records([(7, 0, 0, 1, 2)]), 1, 50, False, expected=Code.DONE)


def lying_records(lies: list[tuple[int, int, int, int, int]]) -> bytes:
    out = bytearray()
    for length, delta, key_bytes, value_bytes, room in lies:
        write_varint(out, length)
        out.append(0)
        for number in (0, delta, key_bytes):
            write_varint(out, number)
        if 0 < key_bytes <= room:
            out += bytes(key_bytes)
        write_varint(out, value_bytes)
        out += bytes(room)
    return bytes(out)


@settings(max_examples=cases(few=100, many=2000), deadline=None)
@given(LIES, st.booleans(), st.sampled_from([0, TRANSACTIONAL, CONTROL | TRANSACTIONAL]))
def test_lengths_that_lie_are_not_followed(
    lies: list[tuple[int, int, int, int, int]], ask_bits: bool, attributes: int
) -> None:
    data = lying_records(lies)
    check_unpacked(data, len(lies), 50, ask_bits)
    whole = build_batch([], base_offset=0, last_offset_delta=50, producer_id=6) + data
    whole[22] = attributes
    whole[8:12] = (len(whole) - 12).to_bytes(4, "big")
    whole[57:61] = len(lies).to_bytes(4, "big")
    whole[17:21] = crc_of(whole, 0, len(whole)).to_bytes(4, "big")
    space = workspace(len(whole))
    index_batches(guarded("buf", whole), 0, len(whole), space)
    space = workspace(len(whole), 0 if ask_bits else END)
    space.state[fields.BITS_END] = 1 << 12
    out, scratch = guarded("out", bytes(3 * len(whole))), guarded("scratch", whole)
    rewrite_batches(guarded("buf", whole), 0, len(whole), out, scratch, space)


# Type, and whether the record is of a marker's form at all.
MARKER_KEYS = st.sampled_from(
    [b"\0\0\0\0", b"\0\0\0\1", b"\0\0\0\2", b"\x80\0\0\0", b"\0\0\0", b"", None]
)


@PROPERTY
@given(
    st.lists(st.tuples(MARKER_KEYS, st.sampled_from([None, b"", b"value"])), max_size=3),
    CHANGES,
    st.booleans(),
    st.booleans(),
)
def test_hostile_markers_stay_inside_their_buffers(
    pairs: list[tuple[bytes | None, bytes | None]],
    changes: list[tuple[int, int]],
    stamps: bool,
    full: bool,
) -> None:
    data = hostile_batch(pairs, [(22, CONTROL | TRANSACTIONAL), *changes], crc_right=True)
    space = workspace(len(data))
    state = space.state
    state[fields.SOUND] = stamps
    state[fields.HORIZON_MS] = 1 << 62 if stamps else -1
    state[fields.BITS_END] = 1 << 12
    size = 20 if full else 2 * len(data) + 200
    out, scratch = guarded("out", bytes(size)), guarded("scratch", data)
    code, position = rewrite_batches(guarded("buf", data), 0, len(data), out, scratch, space)
    assert position in {0, len(data)}
    assert 0 <= state[fields.WRITTEN] <= size
    assert position == 0 or Code(code) == Code.MORE


@PROPERTY
@given(RECORDS, CHANGES)
def test_what_plain_python_can_read_the_kernel_indexes_alike(
    pairs: list[tuple[bytes | None, bytes | None]], changes: list[tuple[int, int]]
) -> None:
    batch = bytes(hostile_batch(pairs, changes, crc_right=True))
    try:
        header = read_header(batch)
        records = decode_records(batch, header)
    except StorageError:
        return
    if header.size_bytes != len(batch) or header.codec or header.next_offset > END:
        return
    space = workspace(len(batch))
    code, position = index_batches(guarded("buf", batch), 0, len(batch), space)
    assert (Code(code), position) == (Code.MORE, len(batch))
    first, last_offset = header.base_offset, header.last_offset
    aborted = (
        header.is_transactional and header.producer_id == 5 and first <= 9 and last_offset >= 2
    )
    counted = [] if aborted or header.is_control else records
    last = {record.key: record.offset for record in counted if record.key is not None}
    table = space.table.reshape(-1, 3)
    results = {(int(a), int(b)): int(c) - 1 for a, b, c in table if c}
    assert results == {siphash_oracle(key, 0, 0): offset for key, offset in last.items()}


def test_compiled_kernels_are_kept_per_state_of_their_sources() -> None:
    folders = {Path(dispatcher._cache.cache_path) for dispatcher in (index_batches, grow)}
    for folder in folders:
        assert any(part.startswith("cleaner-") for part in folder.parts)
