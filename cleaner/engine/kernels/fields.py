"""Indexes into `state`, the int64 array of one job.

It holds the settings and counters of kernels: an array is cheaper to pass than forty numbers, and
keeps its contents between calls.
"""

from typing import Final

# the map
KEY_0: Final = 0  # the hash key, two words
KEY_1: Final = 1
SLOTS: Final = 2  # slots in use
SLOTS_MAX: Final = 3
ENTRIES: Final = 4
# the job
FIRST_DIRTY: Final = 5
MAP_END: Final = 6  # the first offset that the map does not cover
LOG_START: Final = 7
NOW_MS: Final = 8
HORIZON_MS: Final = 9  # for tombstones without a horizon
DROP_EXPIRED: Final = 10
LAST_OF_LOG: Final = 11  # last offset of the batch that keeps the log end; -1: none
# the bitmap of survivors
BITS_FIRST: Final = 12  # offset of bit 0
BITS_END: Final = 13
BITS_MAX: Final = 14  # offsets it can cover; 0: the map decides
# the position of the walk
NEXT_OFFSET: Final = 15  # the next possible offset: a smaller base offset is damage
SOURCE_END: Final = 16  # base offset of the next segment: no batch may reach it
WRITTEN: Final = 17  # bytes in the output buffer
NEEDED: Final = 18  # with Code.OUTPUT_FULL: bytes the next batch may need
# one batch, between `filter_records` and the end of the batch
KEPT: Final = 19
MAX_TIMESTAMP_MS: Final = 20  # of the surviving records
SET_HORIZON: Final = 21  # 1: the batch gets a delete horizon
RECORD_BYTES: Final = 22
# counts
RECORDS_IN: Final = 23
RECORDS_OUT: Final = 24
TOMBSTONES_KEPT: Final = 25
TOMBSTONES_REMOVED: Final = 26
KEYLESS: Final = 27
BATCHES_REBUILT: Final = 28
BATCHES_DROPPED: Final = 29
RECORDS_ABORTED: Final = 30
MARKERS_REMOVED: Final = 31
# the index of the output
FILE_BASE: Final = 32
FILE_POSITION: Final = 33
INDEXED_POSITION: Final = 34
INDEX_INTERVAL: Final = 35
TIME_MAX_MS: Final = 36  # the largest timestamp so far, and its batch
TIME_MAX_OFFSET: Final = 37
TIME_INDEXED_MS: Final = 38
FILE_CRC: Final = 39
INDEX_BYTES: Final = 40
TIME_INDEX_BYTES: Final = 41
# transactions and horizons
EXPIRED_ONLY: Final = 42  # 1: only records past their delete horizon are removed
SOUND: Final = 43  # 0: a damaged segment precedes, so batches of a marker may remain
OPEN_COUNT: Final = 44  # producers with a batch since their last marker
EARLIEST_MS: Final = 45  # the earliest horizon left in the present segment; -1: none
# a compacted view
LATEST_ONLY: Final = 46  # 1: no tombstone and no marker stays
KEEP_KEYLESS: Final = 47  # 1: records without a key stay
# 1: the first pass has seen a record without a key, so no batch is dropped by its bits alone.
KEYLESS_SEEN: Final = 48
RANKED: Final = 49  # 1: the map holds the record with the largest rank of each key
KNOWN_ONLY: Final = 50  # 1: below the dirty section, where no new key is added to the map
VERSIONLESS: Final = 51  # indexed records without a valid version
# several maps
BITS_FROM: Final = 52  # the first offset that the bitmap of survivors covers
TRANSACTIONS_SEEN: Final = 53  # 1: a control or transactional batch was seen
TOMBSTONES_SEEN: Final = 54  # 1: a record without a value was listed
SIZE: Final = 55

FIRST_COUNT: Final = RECORDS_IN
END_COUNT: Final = MARKERS_REMOVED + 1
