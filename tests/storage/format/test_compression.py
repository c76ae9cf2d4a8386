"""Codecs: round trips, the framings of Kafka's clients, and data that lies about its size."""

import gzip
import io
import random
import struct
import subprocess
import sys
import tracemalloc
from unittest.mock import MagicMock

import cramjam
import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    StorageError,
    UnsupportedCompressionError,
)
from storage.format import compression
from storage.format.batch import HEADER_BYTES
from storage.format.compression import GZIP, LZ4, SNAPPY, ZSTD, compress, decompress, may_exceed
from tests.support.formats import CODECS, golden_bytes

PACKED = (GZIP, SNAPPY, LZ4, ZSTD)
TEXT = b"compaction keeps the last record of each key. " * 5000
LIMIT = 1 << 20
# Room for the decoders' own windows beside what they unpack.
OVERHEAD_BYTES = 512 * 1024


def zstd_frame(data: bytes, *, known_size: bool) -> bytes:
    """A frame with or without its content size, as Kafka's Java client writes it without."""
    if known_size:
        return zstandard.ZstdCompressor().compress(data)
    packer = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return packer.compress(data) + packer.flush()


def snappy_raw(data: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(data))


def lz4_frame(data: bytes, **options: object) -> bytes:
    frame: bytes = lz4.frame.compress(data, **options)
    return frame


@pytest.mark.parametrize("codec", range(5))
@pytest.mark.parametrize("data", [b"", b"x", TEXT, bytes(300_000)])
def test_what_is_packed_comes_back(codec: int, data: bytes) -> None:
    packed = compress(codec, memoryview(data))
    for buffer in (packed, bytearray(packed), memoryview(packed)):
        assert decompress(codec, buffer, len(data)) == data


@given(st.sampled_from(range(5)), st.binary(max_size=3000), st.integers(1, 50))
def test_any_data_comes_back(codec: int, data: bytes, times: int) -> None:
    packed = compress(codec, data * times)
    assert decompress(codec, packed, len(data) * times) == data * times


@pytest.mark.parametrize("codec", PACKED)
def test_one_byte_above_the_limit_is_refused(codec: int) -> None:
    packed = compress(codec, TEXT)
    assert decompress(codec, packed, len(TEXT)) == TEXT
    for limit in (0, 1, len(TEXT) - 1):
        with pytest.raises(DecompressionLimitError) as caught:
            decompress(codec, packed, limit)
        assert caught.value.limit_bytes == limit


def test_an_uncompressed_batch_has_the_limit_too() -> None:
    with pytest.raises(DecompressionLimitError):
        decompress(compression.NONE, b"abc", 2)


@pytest.mark.parametrize("codec", PACKED)
def test_every_truncation_is_corrupt(codec: int) -> None:
    data = TEXT[:2000]
    packed = compress(codec, data)
    for size in range(len(packed)):
        if codec == SNAPPY and size == 16:
            continue  # a xerial header alone is an empty stream
        with pytest.raises(CorruptBatchError):
            decompress(codec, packed[:size], LIMIT)


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("garbage", [b"\x00", b"abc", bytes(40), b"\xff" * 9])
def test_bytes_behind_the_stream_are_corrupt(codec: int, garbage: bytes) -> None:
    with pytest.raises(CorruptBatchError):
        decompress(codec, compress(codec, TEXT) + garbage, LIMIT)


@pytest.mark.parametrize("codec", PACKED)
def test_streams_behind_each_other_are_one(codec: int) -> None:
    packed = compress(codec, b"one") + compress(codec, b"") + compress(codec, b"two")
    assert decompress(codec, packed, 6) == b"onetwo"
    with pytest.raises(DecompressionLimitError):
        decompress(codec, packed, 5)


def tiny_blocks(codec: int, blocks: int) -> bytes:
    """A stream of stored blocks of one byte, which is in the format."""
    if codec == SNAPPY:
        header = compress(SNAPPY, b"")[:16]
        return header + (b"\x00\x00\x00\x03" + snappy_raw(b"x")) * blocks
    if codec == LZ4:
        return lz4_frame(b"")[:7] + b"\x01\x00\x00\x80x" * blocks + bytes(4)
    head = zstd_frame(b"x" * 1000, known_size=False)[:6]
    return head + b"\x08\x00\x00x" * (blocks - 1) + b"\x09\x00\x00x"


@pytest.mark.parametrize("codec", [SNAPPY, LZ4, ZSTD])
def test_the_number_of_blocks_is_bounded(codec: int) -> None:
    """A batch of 1 MB in 200,000 blocks occupied the interpreter for 0.2 seconds."""
    blocks = compression.BLOCKS_MAX
    assert decompress(codec, tiny_blocks(codec, blocks), LIMIT) == b"x" * blocks
    with pytest.raises(CorruptBatchError, match="more blocks than producers write"):
        decompress(codec, tiny_blocks(codec, blocks + 1), LIMIT)


@pytest.mark.parametrize("codec", [LZ4, ZSTD])
def test_a_stream_of_many_blocks_may_exceed_any_limit(
    codec: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks are not all looked at: the event loop asks."""
    monkeypatch.setattr(compression, "_BLOCKS_WALKED_MAX", 3)
    assert not may_exceed(codec, tiny_blocks(codec, 3), 100)
    assert may_exceed(codec, tiny_blocks(codec, 4), 100)


@pytest.mark.parametrize("codec", [GZIP, LZ4, ZSTD])
def test_the_number_of_frames_is_bounded(codec: int) -> None:
    empty = compress(codec, b"")
    assert decompress(codec, empty * compression.FRAMES_MAX, LIMIT) == b""
    with pytest.raises(CorruptBatchError):
        decompress(codec, empty * (compression.FRAMES_MAX + 1), LIMIT)


@given(st.sampled_from(PACKED), st.binary(max_size=300))
def test_any_bytes_give_data_or_an_error_of_ours(codec: int, data: bytes) -> None:
    try:
        assert len(decompress(codec, data, 5000)) <= 5000
    except StorageError:
        return


@given(st.sampled_from(PACKED), st.booleans(), st.data())
def test_flipped_bits_give_data_or_an_error_of_ours(
    codec: int, known_size: bool, data: st.DataObject
) -> None:
    packed = bytearray(compress(codec, TEXT[:3000]))
    if codec == ZSTD:
        packed = bytearray(zstd_frame(TEXT[:3000], known_size=known_size))
    for _ in range(data.draw(st.integers(1, 4))):
        bit = data.draw(st.integers(0, len(packed) * 8 - 1))
        packed[bit // 8] ^= 1 << bit % 8
    try:
        assert len(decompress(codec, packed, 10_000)) <= 10_000
    except StorageError:
        return


@pytest.mark.parametrize("codec", [5, 6, 7])
def test_unknown_codecs_are_named(codec: int) -> None:
    for action in (lambda: compress(codec, b""), lambda: decompress(codec, b"", LIMIT)):
        with pytest.raises(UnsupportedCompressionError) as caught:
            action()
        assert caught.value.codec == codec


# Bombs: small data that promises, or really holds, far more than the limit.

BOMB = bytes(64 << 20)
BOMBS = {
    "gzip": (GZIP, gzip.compress(BOMB, 1)),
    "gzip members": (GZIP, gzip.compress(BOMB[: 1 << 19]) * 64),
    "snappy raw": (SNAPPY, snappy_raw(BOMB)),
    "snappy xerial": (SNAPPY, compress(SNAPPY, BOMB)),
    "lz4": (LZ4, compress(LZ4, BOMB)),
    "lz4 with size": (LZ4, lz4_frame(BOMB, store_size=True)),
    "zstd with size": (ZSTD, zstd_frame(BOMB, known_size=True)),
    "zstd without size": (ZSTD, zstd_frame(BOMB, known_size=False)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_without_being_unpacked(name: str) -> None:
    codec, packed = BOMBS[name]
    tracemalloc.start()
    try:
        with pytest.raises(DecompressionLimitError):
            decompress(codec, packed, LIMIT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * LIMIT + OVERHEAD_BYTES


LARGE = TEXT * 140


@pytest.mark.parametrize("name", ["gzip", "snappy raw", "snappy xerial", "lz4", "zstd no size"])
def test_a_large_result_is_made_in_pieces(name: str) -> None:
    """A library copies its result while it holds the interpreter lock: 50 ms for 60 MB."""
    codec, packed = {
        "gzip": (GZIP, gzip.compress(LARGE, 1)),
        "snappy raw": (SNAPPY, snappy_raw(LARGE)),
        "snappy xerial": (SNAPPY, compress(SNAPPY, LARGE)),
        "lz4": (LZ4, lz4_frame(LARGE, block_size=lz4.frame.BLOCKSIZE_MAX4MB)),
        # The limit is below the bound of the blocks, so it is read as a stream.
        "zstd no size": (ZSTD, zstd_frame(LARGE, known_size=False)),
    }[name]
    tracemalloc.start()
    try:
        unpacked = decompress(codec, packed, len(LARGE))
        peak = tracemalloc.get_traced_memory()[1]  # without the pages of the result
    finally:
        tracemalloc.stop()
    assert unpacked == LARGE
    assert peak < 10 << 20


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("extra_bytes", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_results_of_whole_pieces_come_back(codec: int, extra_bytes: int, pieces: int) -> None:
    data = random.Random(7).randbytes(10_007) * 660
    data = data[: pieces * compression._PIECE_BYTES + extra_bytes]
    packed = bytes(compress(codec, data))
    assert decompress(codec, packed, len(data)) == data
    assert decompress(codec, packed * 2, 2 * len(data)) == data * 2
    with pytest.raises(DecompressionLimitError):
        decompress(codec, packed * 2, 2 * len(data) - 1)
    with pytest.raises(CorruptBatchError):
        decompress(codec, packed[:-1], 2 * len(data))


def wide_zstd_frame(size_bytes: int) -> bytes:
    """A frame with a window of 128 MiB and no content size, as Java writes it at level 22."""
    block = (131072 << 3 | 1 << 1).to_bytes(3, "little") + b"\0"
    last = b"\1\0\0"
    return b"\x28\xb5\x2f\xfd\x00" + bytes([17 << 3]) + block * (size_bytes >> 17) + last


def memory_of(script: str, *arguments: object) -> tuple[int, int]:
    """Run a script in a process; return what it adds to the peak and the kept memory in bytes."""
    program = f"""
import sys
from storage.format.compression import *
def memory():
    rows = dict(line.split(":") for line in open("/proc/self/status"))
    return [int(rows[name].split()[0]) << 10 for name in ("VmHWM", "VmRSS")]
compress(ZSTD, b"x")
before = memory()
{script}
after = memory()
print(after[0] - before[1], after[1] - before[1])
"""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    peak, kept = map(int, printed.split())
    return peak, kept


@pytest.mark.parametrize("size_bytes", [60 << 20, 1 << 27])
def test_a_thread_keeps_no_large_window(size_bytes: int) -> None:
    """Each thread kept 128 MiB after a batch of 3 KB, even if it was refused."""
    script = """
try:
    decompress(ZSTD, bytes.fromhex(sys.argv[1]), 64 << 20)
except DecompressionLimitError:
    pass
"""
    _, kept = memory_of(script, wide_zstd_frame(size_bytes).hex())
    assert kept < 16 << 20


def test_large_windows_are_filled_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = MagicMock()
    monkeypatch.setattr(compression, "_zstd_large_window", lock)
    small, large = (bytes(compression._ZSTD_WINDOW_KEPT_MAX + more) for more in (0, 1 << 17))
    assert decompress(ZSTD, wide_zstd_frame(len(small)), 1 << 26) == small
    lock.__enter__.assert_not_called()
    assert decompress(ZSTD, wide_zstd_frame(len(large)), 1 << 26) == large
    lock.__enter__.assert_called_once()


def test_a_small_limit_waits_for_no_large_window() -> None:
    """The event loop decompresses 64 KiB at most, and would wait for a thread."""
    frame = wide_zstd_frame(compression._ZSTD_WINDOW_KEPT_MAX + (1 << 17))
    with compression._zstd_large_window, pytest.raises(DecompressionLimitError):
        decompress(ZSTD, frame, 64 << 10)


def test_the_highest_level_of_zstd_takes_little_memory() -> None:
    """A batch of 60 MB took 0.7 GB at level 22, which each thread kept."""
    peak, kept = memory_of("data = bytes(24 << 20); compress(ZSTD, data, 22); del data")
    assert peak < (2 * 24 + 48) << 20  # the data, and room for the result
    assert kept < 16 << 20


@pytest.mark.parametrize(("codec", "level"), [(GZIP, 1), (SNAPPY, None), (LZ4, None)])
def test_a_large_packed_result_is_made_in_pieces(codec: int, level: int | None) -> None:
    data = random.Random(7).randbytes(24 << 20)
    tracemalloc.start()
    try:
        packed = compress(codec, data, level)
        peak = tracemalloc.get_traced_memory()[1]  # without the pages of the result
    finally:
        tracemalloc.stop()
    assert decompress(codec, packed, len(data)) == data
    assert peak < 10 << 20


@pytest.mark.parametrize("level", [None, 12])
@pytest.mark.parametrize("extra_bytes", [0, 1, 1 << 17])
def test_lz4_is_the_same_in_pieces(level: int | None, extra_bytes: int) -> None:
    data = (TEXT * 20)[: compression._PIECE_BYTES + extra_bytes]
    assert compress(LZ4, data, level) == lz4_frame(
        data, compression_level=level or 0, block_linked=False, store_size=False
    )


LIARS = {
    "snappy length": (SNAPPY, b"\xff\xff\xff\x1f\x00a"),
    "snappy length of 33 bits": (SNAPPY, b"\xff\xff\xff\xff\x7fa"),
    "snappy length without end": (SNAPPY, b"\xff" * 6),
    "xerial block length": (SNAPPY, compress(SNAPPY, b"")[:16] + b"\x7f\xff\xff\xffabc"),
    "xerial block length 0": (SNAPPY, compress(SNAPPY, b"")[:16] + bytes(4)),
    "lz4 content size": (LZ4, b"\x04\x22\x4d\x18\x68\x40" + b"\xff" * 8 + b"\x00" + bytes(4)),
    "lz4 block size": (LZ4, b"\x04\x22\x4d\x18\x60\x40\x82" + b"\xff\xff\xff\x7f" + bytes(4)),
    "zstd content size": (ZSTD, b"\x28\xb5\x2f\xfd\xc0\x58" + b"\xff" * 7 + b"\0\x01\0\0"),
    "zstd segment size": (ZSTD, b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 7 + b"\0\x01\0\0"),
    "zstd block size": (ZSTD, b"\x28\xb5\x2f\xfd\x00\x58" + b"\xff\xff\xff"),
    "zstd window": (ZSTD, b"\x28\xb5\x2f\xfd\x00\xff" + b"\x01\x00\x00"),
}


@pytest.mark.parametrize("name", LIARS)
@pytest.mark.parametrize("limit", [10, 1 << 60])
def test_lying_lengths_are_corrupt_and_cost_no_memory(name: str, limit: int) -> None:
    codec, packed = LIARS[name]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatchError):
            decompress(codec, packed, limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < OVERHEAD_BYTES


# Framings


def test_snappy_is_read_raw_and_in_xerial_blocks_whatever_version_they_claim() -> None:
    assert decompress(SNAPPY, snappy_raw(TEXT), len(TEXT)) == TEXT
    xerial = bytearray(compress(SNAPPY, TEXT))
    assert xerial[:16] == b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01"
    xerial[8:16] = struct.pack("<ii", 1, 1)  # little-endian, as some clients write it
    assert decompress(SNAPPY, xerial, len(TEXT)) == TEXT


def test_xerial_blocks_hold_32_kib() -> None:
    xerial = compress(SNAPPY, TEXT)
    position, sizes = 16, []
    while position < len(xerial):
        length = int.from_bytes(xerial[position : position + 4], "big")
        block = xerial[position + 4 : position + 4 + length]
        sizes.append(len(decompress(SNAPPY, block, 1 << 16)))
        position += 4 + length
    assert sizes == [32768] * (len(TEXT) // 32768) + [len(TEXT) % 32768]


def test_lz4_is_written_in_independent_blocks_of_64_kib_as_kafka_does() -> None:
    remote = golden_bytes("batch-lz4.bin")[HEADER_BYTES:]
    for level in (None, 1, 9, 12, 17):
        local = compress(LZ4, TEXT, level)
        assert local[:6] == remote[:6]


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("size", [False, True])
def test_lz4_frames_of_any_flags_are_read(linked: bool, checksums: bool, size: bool) -> None:
    frame = lz4_frame(
        TEXT,
        block_linked=linked,
        content_checksum=checksums,
        block_checksum=checksums,
        store_size=size,
    )
    assert decompress(LZ4, frame, len(TEXT)) == TEXT
    with pytest.raises(CorruptBatchError):
        decompress(LZ4, frame[:-1], LIMIT)


@pytest.mark.parametrize("codec", [LZ4, ZSTD])
def test_skippable_frames_are_skipped(codec: int) -> None:
    skippable = b"\x5a\x2a\x4d\x18" + struct.pack("<I", 5) + b"hello"
    packed = skippable + compress(codec, TEXT) + skippable
    assert decompress(codec, packed, len(TEXT)) == TEXT
    with pytest.raises(CorruptBatchError):
        decompress(codec, packed[:-1], LIMIT)


@pytest.mark.parametrize("known_size", [False, True])
def test_an_empty_zstd_frame_adds_nothing(known_size: bool) -> None:
    empty = zstd_frame(b"", known_size=known_size)
    assert decompress(ZSTD, empty, LIMIT) == b""
    assert decompress(ZSTD, empty + compress(ZSTD, TEXT) + empty, len(TEXT)) == TEXT


@pytest.mark.parametrize("known_size", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_zstd_frames_of_any_flags_are_read(known_size: bool, checksum: bool) -> None:
    packer = zstandard.ZstdCompressor(
        write_checksum=checksum, write_content_size=known_size
    ).compressobj(size=len(TEXT) if known_size else -1)
    frame = packer.compress(TEXT) + packer.flush()
    assert decompress(ZSTD, frame, len(TEXT)) == TEXT
    assert decompress(ZSTD, frame, 64 << 20) == TEXT
    with pytest.raises(CorruptBatchError):
        decompress(ZSTD, frame[:-1], LIMIT)


def test_zstd_of_the_highest_level_is_read() -> None:
    packer = zstandard.ZstdCompressor(level=22, write_content_size=False).compressobj()
    frame = packer.compress(TEXT) + packer.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 27
    assert decompress(ZSTD, frame, len(TEXT)) == TEXT


@pytest.mark.parametrize(
    ("codec", "levels"), [(GZIP, (1, 9)), (LZ4, (1, 3, 12, 17)), (ZSTD, (-5, 1, 22))]
)
def test_every_level_of_the_topic_keys_works(codec: int, levels: tuple[int, ...]) -> None:
    for level in levels:
        assert decompress(codec, compress(codec, TEXT, level), len(TEXT)) == TEXT


def test_a_higher_level_packs_better() -> None:
    data = b"".join(b"%d,%d;" % (n * n, n % 97) for n in range(20_000))
    for codec, low, high in ((GZIP, 1, 9), (LZ4, 9, 12), (ZSTD, 1, 19)):
        assert len(compress(codec, data, high)) < len(compress(codec, data, low))


@pytest.mark.parametrize("codec", PACKED)
def test_records_packed_by_kafka_are_unpacked(codec: int) -> None:
    packed = golden_bytes(f"batch-{CODECS[codec]}.bin")[HEADER_BYTES:]
    plain = golden_bytes("batch-none.bin")[HEADER_BYTES:]
    assert decompress(codec, packed, len(plain)) == plain
    with pytest.raises(DecompressionLimitError):
        decompress(codec, packed, len(plain) - 1)


def test_gzip_can_be_read_by_others() -> None:
    with gzip.GzipFile(fileobj=io.BytesIO(compress(GZIP, TEXT))) as reader:
        assert reader.read() == TEXT
