"""Constants, return codes and arrays that kernels share with their callers."""

from enum import IntEnum, auto
from typing import Final, NamedTuple

import numpy as np

from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Bytes, Ints, Words

HEADER_BYTES: Final = 61  # of a record batch, format v2
LENGTH_BYTES: Final = 12  # base offset and batchLength, which counts the bytes after itself
RECORD_BYTES_MIN: Final = 7  # seven fields of one byte each
# Positions of the fields of a batch header that kernels read or write.
LENGTH_POSITION: Final = 8
MAGIC_POSITION: Final = 16
CRC_POSITION: Final = 17  # the checksum covers the bytes from ATTRIBUTES_POSITION on
ATTRIBUTES_POSITION: Final = 21
CODEC_POSITION: Final = 22  # the lower byte of the attributes
LAST_OFFSET_DELTA_POSITION: Final = 23
BASE_TIMESTAMP_POSITION: Final = 27
MAX_TIMESTAMP_POSITION: Final = 35
PRODUCER_ID_POSITION: Final = 43
PRODUCER_EPOCH_POSITION: Final = 51
RECORD_COUNT_POSITION: Final = 57
ATTR_CODEC: Final = 0x07
ATTR_LOG_APPEND_TIME: Final = 0x08
ATTR_TRANSACTIONAL: Final = 0x10
ATTR_CONTROL: Final = 0x20
ATTR_OF_TRANSACTION: Final = ATTR_TRANSACTIONAL | ATTR_CONTROL
ATTR_DELETE_HORIZON: Final = 0x40
LARGEST_INT32: Final = (1 << 31) - 1
LARGEST_BASE_OFFSET: Final = (1 << 63) - 1 - LARGEST_INT32

LAST_RECORD_WORDS: Final = 3
ABORTED_WORDS: Final = 3
SLOT_WORDS: Final = 3  # two words of fingerprint, then offset + 1; 0: a free slot
CHUNK_KEYS: Final = 4096  # fingerprints of one probing loop: 96 KiB, which fit the L2 cache
GROWN_BYTES_PER_RECORD: Final = 11  # a new horizon: a time delta of 10 bytes, a longer length


class Code(IntEnum):
    """Why a kernel returned. From BAD_LENGTH on, the batch at the position is damaged."""

    MORE = 0  # the buffer holds no further whole batch
    COMPRESSED = auto()
    OUTPUT_FULL = auto()
    MAP_FULL = auto()
    NEXT_WINDOW = auto()
    DONE = auto()
    PRODUCERS_FULL = auto()
    MISINDEXED = auto()  # the transaction indexes contradict a marker
    BAD_LENGTH = auto()
    OLD_FORMAT = auto()
    BAD_MAGIC = auto()
    BAD_CRC = auto()
    BAD_OFFSETS = auto()
    BAD_COUNT = auto()
    BAD_CODEC = auto()
    BAD_RECORD = auto()


REASONS: Final = {
    Code.BAD_LENGTH: "a batch length that no batch can have",
    Code.OLD_FORMAT: "message format 0 or 1",
    Code.BAD_MAGIC: "no record batch begins here",
    Code.BAD_CRC: "the checksum does not match",
    Code.BAD_OFFSETS: "offsets that the log cannot have at this place",
    Code.BAD_COUNT: "a record count that the batch cannot hold",
    Code.BAD_CODEC: "an unknown compression codec",
    Code.BAD_RECORD: "records that do not fill their batch",
}


class Workspace(NamedTuple):
    """The arrays of one clean, passed to kernels as one argument."""

    table: Words  # the map
    state: Ints
    lows: Words  # first words of up to CHUNK_KEYS fingerprints
    highs: Words  # their second words
    offsets: Ints  # and the offsets of their records
    last_offsets: Ints  # the last offsets of these keys
    keep: Bytes  # one per record: 0 where a later record of the key exists
    bits: Bytes  # one bit per offset from BITS_FIRST on: the last of its key
    producers: Ints  # rows of (id, epoch, last data offset or -1) of live producers, by id
    aborted: Ints  # rows of (producer id, first offset, marker's offset), ascending
    aborted_kept: Bytes  # one per row: 1 if the output has the marker and a batch
    open_producers: Ints  # hash set of ~id: producers with a batch since their last marker; 0: free


def new_state() -> Ints:
    """Return a state of zeros."""
    return np.zeros(fields.SIZE, dtype=np.int64)
