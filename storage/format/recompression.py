"""Changing the codec of a batch, for topics whose `compression.type` is not `producer`.

The records are neither parsed nor changed: they are unpacked and packed as one block, and the
header keeps everything but its codec, its length and its CRC.
"""

from typing import Final

from config.topic_keys import TopicConfig
from storage.errors import MessageTooLargeError
from storage.format.batch import (
    CODEC_MASK,
    HEADER_BYTES,
    LENGTH_END,
    BatchHeader,
    Buffer,
    unpack_records,
    with_crc,
)
from storage.format.compression import CODEC_NAMES, GZIP, LZ4, NONE, ZSTD, compress

PRODUCER: Final = "producer"
_CODECS: Final = {"uncompressed": NONE, **{name: c for c, name in enumerate(CODEC_NAMES) if c}}


def needs_recompression(header: BatchHeader, config: TopicConfig) -> bool:
    """Whether the topic wants another codec than the batch has."""
    requested = config.compression_type
    return requested != PRODUCER and _CODECS[requested] != header.codec


def recompress(records: Buffer, header: BatchHeader, config: TopicConfig) -> bytearray:
    """The batch in the topic's codec and level. May run in a thread.

    Raises CorruptBatchError, DecompressionLimitError, and MessageTooLargeError if the result is
    above max.message.bytes.
    """
    codec = _CODECS[config.compression_type]
    body = unpack_records(records, header, 0, config.varve_decompressed_batch_bytes)
    if codec != NONE:
        body = compress(codec, body, _level(codec, config))
    size_bytes = HEADER_BYTES + len(body)
    if size_bytes > config.max_message_bytes:
        raise MessageTooLargeError(size_bytes, config.max_message_bytes)
    return with_crc(
        header._replace(
            batch_length=size_bytes - LENGTH_END,
            attributes=header.attributes & ~CODEC_MASK | codec,
        ),
        body,
    )


def _level(codec: int, config: TopicConfig) -> int | None:
    levels = {
        GZIP: config.compression_gzip_level,
        LZ4: config.compression_lz4_level,
        ZSTD: config.compression_zstd_level,
    }
    return levels.get(codec)
