"""Topics whose compression.type is not `producer`."""

import itertools

import pytest

from config.topics.keys import TopicConfig
from storage.errors import MessageTooLargeError
from storage.format.batch import Record, build_batch, decode_records, read_header, verify_crc
from storage.format.compression import CODEC_NAMES
from storage.format.recompression import needs_recompression, recompress

RECORDS = [
    Record(n, 1_000 + n, b"key-%d" % n, None if n == 3 else b"value" * n, (("h", b"1"),))
    for n in range(20)
]


@pytest.mark.parametrize(("have", "want"), list(itertools.product(range(5), range(5))))
def test_a_batch_in_another_codec_holds_the_same_records_and_header(have: int, want: int) -> None:
    name = CODEC_NAMES[want] if want else "uncompressed"
    config = TopicConfig(compression_type=name)
    batch = build_batch(RECORDS, codec=have, producer_id=7, producer_epoch=2, base_sequence=11)
    header = read_header(batch)
    assert needs_recompression(header, config) == (have != want)
    packed = recompress(batch, header, config)
    changed = read_header(packed)
    assert verify_crc(packed, 0, changed)
    assert changed.codec == want
    assert decode_records(packed, changed) == decode_records(batch, header)
    retained = {"batch_length", "attributes", "crc"}
    assert {
        name for name in header._fields if getattr(header, name) != getattr(changed, name)
    } <= retained


def test_a_topic_of_type_producer_keeps_what_comes() -> None:
    for codec in range(5):
        header = read_header(build_batch(RECORDS, codec=codec))
        assert not needs_recompression(header, TopicConfig())


def test_a_batch_that_grows_above_the_limit_is_refused() -> None:
    batch = build_batch([Record(0, 0, b"k", b"x" * 10_000, ())], codec=4)
    config = TopicConfig(compression_type="uncompressed", max_message_bytes=5_000)
    with pytest.raises(MessageTooLargeError):
        recompress(batch, read_header(batch), config)
