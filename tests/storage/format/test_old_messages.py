"""Messages of formats 0 and 1; those of the tests are made by kafka-python."""

import random

import lz4.frame
import pytest

from storage.errors import CorruptBatchError, DecompressionLimitError
from storage.format.batch import Record
from storage.format.compression import GZIP, LZ4, NONE, SNAPPY
from storage.format.old_messages import _xxh32_of_few, is_old, old_size, read_old_messages
from tests.support.storage.logs import NOW_MS
from tests.support.storage.old_messages import old_messages

RECORDS = (
    Record(7, NOW_MS, b"a", b"1" * 100),
    Record(9, NOW_MS + 5, None, b""),
    Record(12, NOW_MS + 3, b"", None),
)
LIMIT_BYTES = 1 << 20


def expected(magic: int, *records: Record) -> tuple[Record, ...]:
    """Format 0 has no timestamps."""
    return records if magic else tuple(record._replace(timestamp=-1) for record in records)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("record", RECORDS)
def test_a_message_is_one_record(magic: int, record: Record) -> None:
    data = old_messages([record], magic)
    assert is_old(data)
    assert old_size(data) == len(data)
    messages = read_old_messages(data, LIMIT_BYTES)
    assert messages == (expected(magic, record), NONE, False)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4])
def test_a_compressed_message_contains_records_with_offsets(magic: int, codec: int) -> None:
    data = old_messages(RECORDS, magic, codec)
    assert is_old(data)
    assert old_size(data) == len(data)
    assert read_old_messages(data, LIMIT_BYTES) == (expected(magic, *RECORDS), codec, False)


@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_the_append_time_of_a_message_is_that_of_its_records(codec: int) -> None:
    records = RECORDS if codec else RECORDS[:1]
    data = old_messages(records, 1, codec, append_time=NOW_MS + 77)
    late = tuple(record._replace(timestamp=NOW_MS + 77) for record in records)
    assert read_old_messages(data, LIMIT_BYTES) == (late, codec, True)


def test_more_than_the_limit_is_not_decompressed() -> None:
    with pytest.raises(DecompressionLimitError):
        read_old_messages(old_messages(RECORDS, 1, GZIP), 50)


@pytest.mark.parametrize("magic", [0, 1])
@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_a_message_with_a_wrong_byte_is_corrupt(magic: int, codec: int) -> None:
    """Its CRC covers everything but the offset, its size and the CRC itself."""
    data = old_messages(RECORDS if codec else RECORDS[:1], magic, codec)
    for at in range(12, len(data)):
        wrong = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises(CorruptBatchError):
            read_old_messages(wrong, LIMIT_BYTES)


def test_a_message_that_is_cut_short_is_corrupt() -> None:
    data = old_messages(RECORDS, 1, GZIP)
    for end in range(26, len(data)):  # `is_old` needs as much
        with pytest.raises(CorruptBatchError):
            read_old_messages(data[:end], LIMIT_BYTES)


def test_the_checksum_of_lz4_headers_is_that_of_the_library() -> None:
    rng = random.Random(1)
    for size in [None, *(rng.randrange(1 << 20) for _ in range(20))]:
        frame = lz4.frame.compress(b"x" * (size or 10), store_size=size is not None)
        end = 14 if size is not None else 6
        assert _xxh32_of_few(frame[4:end]) >> 8 & 0xFF == frame[end]
