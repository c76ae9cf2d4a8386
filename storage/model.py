"""The nouns of the log: what every part of storage, the cleaner and the broker passes around.

first_/last_ are inclusive, next_/end_ exclusive; a position counts bytes in a file, an offset
counts records in a log.
"""

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """One partition of one topic; prints as its folder is named."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class AppendInfo(NamedTuple):
    """Where an append ended up. `duplicate`: nothing was written, the offsets are the old ones."""

    first_offset: int
    last_offset: int
    log_append_time_ms: int  # -1 unless the topic stamps LogAppendTime
    log_start_offset: int
    duplicate: bool = False


class TimestampOffset(NamedTuple):
    """A record found by time: its own timestamp (ms), offset and leader epoch."""

    timestamp_ms: int
    offset: int
    leader_epoch: int
