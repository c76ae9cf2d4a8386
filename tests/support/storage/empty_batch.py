"""Batches without records, as Kafka's cleaner and ours leave them."""

from storage.format.batch import (
    BATCH_LENGTH_MIN,
    CODEC_MASK,
    DELETE_HORIZON,
    NO_TIMESTAMP,
    BatchHeader,
    with_crc,
)


def empty_batch(header: BatchHeader) -> bytearray:
    """Return a batch without records, for a header that is still needed.

    61 bytes: codec none, no horizon, base timestamp -1; offsets, sequences, producer, epochs,
    maximum timestamp and the other flags stay.
    """
    return with_crc(
        header._replace(
            batch_length=BATCH_LENGTH_MIN,
            attributes=header.attributes & ~(CODEC_MASK | DELETE_HORIZON),
            base_timestamp=NO_TIMESTAMP,
            record_count=0,
        ),
        b"",
    )
