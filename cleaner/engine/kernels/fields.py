"""Places in `state`, one int64 array per job.

A kernel takes its settings from it and leaves its counts in it: an array costs less to hand over
than forty numbers, and lives on between calls.
"""

from typing import Final

# the map
KEY_0: Final = 0  # the hash key, two words
KEY_1: Final = 1
SLOTS: Final = 2  # in use now
SLOTS_MAX: Final = 3
ENTRIES: Final = 4
# the job
FIRST_DIRTY: Final = 5
MAP_END: Final = 6  # first offset that the map says nothing about
LOG_START: Final = 7
NOW_MS: Final = 8
HORIZON_MS: Final = 9  # a tombstone met for the first time gets this one
DROP_EXPIRED: Final = 10
LAST_OF_LOG: Final = 11  # last offset of the batch that keeps the log end; -1: none
# the bitmap of survivors
BITS_FIRST: Final = 12  # offset of bit 0
BITS_END: Final = 13
BITS_MAX: Final = 14  # offsets it can cover; 0: ask the map instead
# where the walk is
NEXT_OFFSET: Final = 15  # offsets below were met already: a smaller base offset is damage
SOURCE_END: Final = 16  # base offset of the next segment: no batch may reach it
WRITTEN: Final = 17  # bytes in the output buffer
NEEDED: Final = 18  # with CODE_OUTPUT_FULL: bytes the next batch may need
# one batch, between `filter_records` and whoever finishes the batch
KEPT: Final = 19
LATEST_MS: Final = 20
STAMP: Final = 21
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
TIME_MAX_MS: Final = 36  # largest timestamp so far, and the batch that carries it
TIME_MAX_OFFSET: Final = 37
TIME_INDEXED_MS: Final = 38
FILE_CRC: Final = 39
INDEX_BYTES: Final = 40
TIME_INDEX_BYTES: Final = 41
# transactions and horizons
EXPIRED_ONLY: Final = 42  # 1: only what carries a horizon that has passed goes
SOUND: Final = 43  # 0: a damaged segment precedes, so no marker has surely lost its batches
OPEN_COUNT: Final = 44  # producers with a batch since their last marker
EARLIEST_MS: Final = 45  # the earliest horizon left in the segment that is read; -1: none
# a compacted view
LATEST_ONLY: Final = 46  # 1: no tombstone and no marker stays
KEEP_KEYLESS: Final = 47  # 1: records without a key stay
KEYLESS_MET: Final = 48  # 1: the first pass has seen one
RANKED: Final = 49  # 1: the map holds the record of the largest rank, which may not be the last one
KNOWN_ONLY: Final = 50  # 1: below the dirty section; keys that are not in the map stay out of it
VERSIONLESS: Final = 51  # records put whose version could not be told
# keys that are not all in one map
BITS_FROM: Final = 52  # first offset that the bitmap of survivors can tell of
TRANSACTIONS_MET: Final = 53  # 1: a control or transactional batch was seen while indexing
SIZE: Final = 54

FIRST_COUNT: Final = RECORDS_IN
END_COUNT: Final = MARKERS_REMOVED + 1
