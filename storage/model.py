"""Types that storage, the cleaner and the broker share.

first_ and last_ are inclusive, next_ and end_ exclusive. A position counts bytes in a file, an
offset records in a log.
"""

from typing import NamedTuple


class TopicPartition(NamedTuple):
    """One partition of a topic. Its text is the name of its folder."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class AppendInfo(NamedTuple):
    """The offsets of an append. `duplicate`: the log already had the batch at these offsets."""

    first_offset: int
    last_offset: int
    log_append_time_ms: int  # -1 unless the topic stamps LogAppendTime
    log_start_offset: int
    duplicate: bool = False


class TimestampOffset(NamedTuple):
    """A record found by time: its timestamp (ms), offset and leader epoch."""

    timestamp_ms: int
    offset: int
    leader_epoch: int


class SegmentFacts(NamedTuple):
    """The facts of a segment that are known without reading it. The last one of a log is active.

    `largest_timestamp_ms` and `first_batch_timestamp_ms` are -1 without a timestamp;
    `last_modified_ms` is the modification time of the log file. `content_id` identifies
    the content of a closed segment; 0 if it is not known.
    """

    base_offset: int
    next_base_offset: int  # of the next segment; for the last one the log end offset
    size_bytes: int
    index_bytes: int
    time_index_bytes: int
    largest_timestamp_ms: int
    first_batch_timestamp_ms: int
    last_modified_ms: int
    has_transactions: bool
    files: tuple[str, ...]
    content_id: int = 0
