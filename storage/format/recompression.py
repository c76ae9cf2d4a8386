"""Change the codec of a batch, for topics whose `compression.type` is not `producer`.

Records are neither parsed nor changed: they are decompressed and compressed as one block. In the
header only codec, length and CRC change.
"""

from typing import Final

from config.topics.keys import TopicConfig
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
    """Return whether the topic requires another codec than that of the batch."""
    requested = config.compression_type
    return requested != PRODUCER and _CODECS[requested] != header.codec


def recompress(records: Buffer, header: BatchHeader, config: TopicConfig) -> bytearray:
    """Return the batch in the topic's codec and level. May run in a thread.

    Raises CorruptBatchError, DecompressionLimitError, and MessageTooLargeError if the result
    exceeds max.message.bytes.
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
