"""The state of a topic: the last committed record of each key in a leased log, as of some offsets.

Rules
- State is per partition: a key in two partitions has two rows.
- Closed segments are leased, indexed, and read by their survivors. The rest, after the first open
  transaction or within the segment of a requested offset, is usually less than one segment: Spark
  finds its last records, which supersede those of the index.
- A state as of an offset exists if no later record removed a record below it: from the end of all
  cleans on, and anywhere in a log without missing offsets. Other requests are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from admin.client import ApiClient
from cleaner.job import CleanJob
from config import exit_codes
from config.security.clients import Cluster
from pipeline.client.lease import Lease
from pipeline.client.topics import TopicBounds, fetch_topic_id, read_topic
from pipeline.compaction.indexing import PartitionIndex, index_partitions
from pipeline.engines.engine import Engine
from pipeline.errors import JobError
from pipeline.progress import ProgressReporter
from pipeline.stages.planning import Limits, source_segments
from pipeline.stages.tasks import SegmentCounts
from pipeline.tables.delete_guard import UNKNOWN_MS, read_cleaner_progress
from pipeline.tables.rows import RowTask, row_tasks, rows_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


@dataclass(frozen=True, slots=True)
class StateRange:
    """The range [first_offset, end_offset) of one partition's state, and its record counts.

    Counts cover committed records. -1 means not counted: all counts for `all_records`, and the key
    counts `live` and `tombstones` if records follow the indexed segments.
    """

    partition: int
    first_offset: int
    end_offset: int
    records: int = -1
    live: int = -1
    tombstones: int = -1
    keyless: int = -1


@dataclass(slots=True)
class TopicState:
    """A state, readable while the lease is alive. `frame` has the requested columns."""

    frame: "DataFrame"
    partitions: list[StateRange]
    tails: dict[int, int] = field(default_factory=dict)  # partition -> end offset of its open part
    safe_ms: int = UNKNOWN_MS  # see delete_guard.py
    topic_id: bytes = b""  # zeros if the broker has no topic ids

    @property
    def end_offsets(self) -> dict[int, int]:
        """Return the exclusive end offset of each partition's state."""
        return {state.partition: state.end_offset for state in self.partitions}


@dataclass(frozen=True, slots=True)
class Reading:
    """A leased topic and the means to read it."""

    spark: "SparkSession"
    engine: Engine
    lease: Lease
    transport: str
    limits: Limits
    reporter: ProgressReporter
    cluster: Cluster
    topic_id: bytes  # fetched before the bounds


def open_state(
    reading: Reading,
    bounds: TopicBounds,
    columns: Sequence[str],
    *,
    as_of: Mapping[int, int] | None = None,
) -> TopicState:
    """Return the state below `as_of`, or up to the last stable offsets in `bounds`.

    `bounds` were fetched before the lease. Raises JobError for damage, StageFailedError.
    """
    ends = dict(bounds.end if as_of is None else as_of)
    jobs = _jobs(reading, bounds)
    requested = tuple(dict.fromkeys((*columns, "key", "value", "partition", "offset")))
    whole = {n: below(job, ends[n] if as_of is not None else None) for n, job in jobs.items()}
    indexes = _indexed(reading, [job for job in whole.values() if job is not None])
    source = reading.lease.source(reading.transport)
    tasks: list[RowTask] = []
    for index in indexes.values():
        empty = frozenset(counts.base_offset for counts in index.counts if not counts.live)
        tasks += row_tasks(
            index.job, source, requested, survivors=index.survivors, skip=empty,
            task_bytes=reading.limits.task_bytes,
        )  # fmt: skip
    state = TopicState(rows_of(reading.spark, tasks, requested), [], topic_id=reading.topic_id)
    if as_of is None:  # the cleaner may have passed earlier offsets long ago
        state.safe_ms = bounds.at_ms
    parts: list[RowTask] = []
    open_first: dict[int, int] = {}
    reaches: dict[int, int] = {}
    for number in sorted(ends):
        job, covered = jobs.get(number), whole.get(number)
        reached = bounds.first[number] if covered is None else covered.end_offset
        if job is not None and as_of is not None and reached < ends[number]:
            part = _part(job, reached, ends[number])
            parts += row_tasks(part, source, requested, task_bytes=reading.limits.task_bytes)
            reached = max(reached, min(job.end_offset, ends[number]))
        if reached < ends[number]:
            open_first[number], state.tails[number] = reached, ends[number]
        reaches[number] = max(reached, ends[number])
    tail = rows_of(reading.spark, parts, requested) if parts else None
    if open_first:
        rest = read_topic(
            reading.spark, reading.cluster, reading.lease.plan.topic, open_first, state.tails,
            columns=requested,
        )  # fmt: skip
        tail = rest if tail is None else tail.unionByName(rest)
    counts = {} if tail is None else _counted(tail)
    state.partitions += [
        _partition_state(number, bounds.first[number], end, indexes.get(number), counts.get(number))
        for number, end in reaches.items()
    ]
    if tail is not None:
        state.frame = _superseded(state.frame, tail, requested)
    state.frame = state.frame.select(*columns)
    return state


def all_records(
    reading: Reading,
    bounds: TopicBounds,
    columns: Sequence[str],
    *,
    as_of: Mapping[int, int] | None = None,
) -> TopicState:
    """Return every committed record below `as_of`, with or without a key; see `open_state`."""
    ends = dict(bounds.end if as_of is None else as_of)
    jobs = _jobs(reading, bounds)
    source = reading.lease.source(reading.transport)
    tasks: list[RowTask] = []
    rest: dict[int, int] = {}
    partitions, tails = [], {}
    for number, end in sorted(ends.items()):
        reached = bounds.first[number]
        if (job := jobs.get(number)) is not None:
            stop = job.end_offset if as_of is None else min(end, job.end_offset)
            part = _part(job, job.log_start_offset, stop)
            tasks += row_tasks(part, source, columns, task_bytes=reading.limits.task_bytes)
            reached = max(reached, stop)
        if reached < end:
            rest[number], tails[number] = reached, end
        first = bounds.first[number]
        partitions.append(StateRange(number, first, max(reached, end)))
    frame = rows_of(reading.spark, tasks, columns)
    if rest:
        open_part = read_topic(
            reading.spark, reading.cluster, reading.lease.plan.topic, rest, tails, columns=columns
        )
        frame = frame.unionByName(open_part)
    return TopicState(frame, partitions, tails, topic_id=reading.topic_id)


def _jobs(reading: Reading, bounds: TopicBounds) -> dict[int, CleanJob]:
    return {
        planned.job.partition.partition: planned.job
        for planned in reading.lease.plan.partitions
        if planned.job.partition.partition in bounds.end
    }


def below(job: CleanJob, end: int | None) -> CleanJob | None:
    """Return the job over the segments wholly below `end`, or None if there is none."""
    if end is None or end >= job.end_offset:
        return job
    groups = tuple(
        sources
        for group in job.groups
        if (sources := tuple(source for source in group if source.next_base_offset <= end))
    )
    if not groups:
        return None
    return replace(job, groups=groups, end_offset=groups[-1][-1].next_base_offset)


def _part(job: CleanJob, first: int, end: int) -> CleanJob:
    """Return the job over the segments that overlap [first, end), limited to that range."""
    sources = tuple(
        source
        for source in source_segments(job)
        if source.next_base_offset > first and source.base_offset < end
    )
    start = max(first, job.log_start_offset)
    return replace(job, groups=(sources,), log_start_offset=start, end_offset=end)


def _indexed(reading: Reading, jobs: Sequence[CleanJob]) -> dict[int, PartitionIndex]:
    source = reading.lease.source(reading.transport)
    indexes = index_partitions(
        reading.engine, jobs, lambda _: source, reading.limits, progress=reading.reporter
    )
    for index in indexes:
        if index.damaged:
            damage = index.damaged[0]
            raise JobError(
                f"{damage.path} is damaged at byte {damage.position} ({damage.reason}), so a table"
                " would lack the records after it"
            )
    return {index.job.partition.partition: index for index in indexes}


def _counted(tail: "DataFrame") -> dict[int, tuple[int, int]]:
    """Count records, and records without a key, after the indexed segments, by partition."""
    from pyspark.sql import functions as sql

    keyless = sql.count(sql.when(sql.col("key").isNull(), 1))
    counted = tail.groupBy("partition").agg(sql.count(sql.lit(1)), keyless).collect()
    return {number: (records, without) for number, records, without in counted}


def _partition_state(
    number: int,
    first: int,
    end: int,
    index: PartitionIndex | None,
    after: tuple[int, int] | None,
) -> StateRange:
    counts: Sequence[SegmentCounts] = () if index is None else index.counts
    records, keyless = (0, 0) if after is None else after
    # The tail supersedes an unknown number of keys of the index.
    return StateRange(
        partition=number,
        first_offset=first,
        end_offset=end,
        records=sum(counts.records - counts.aborted for counts in counts) + records,
        live=-1 if records else sum(counts.live for counts in counts),
        tombstones=-1 if records else sum(counts.tombstones for counts in counts),
        keyless=sum(counts.keyless for counts in counts) + keyless,
    )


def _superseded(before: "DataFrame", tail: "DataFrame", columns: Sequence[str]) -> "DataFrame":
    """Return the live records after `tail`, whose offsets follow those of `before`."""
    from pyspark.sql import functions as sql

    # The source must read the same records for both uses of `tail`.
    last = last_by_key(tail, columns)
    keys = last.select("partition", "key")
    remaining = before.join(keys, ["partition", "key"], "left_anti").select(*columns)
    return remaining.unionByName(last.where(sql.col("value").isNotNull()))


def last_by_key(frame: "DataFrame", columns: Sequence[str]) -> "DataFrame":
    """Return the record with the largest offset of each key of each partition."""
    from pyspark.sql import functions as sql

    owned = sql.struct(*(sql.col(name) for name in columns))
    return (
        frame.where(sql.col("key").isNotNull())
        .groupBy(sql.col("partition").alias("_partition"), sql.col("key").alias("_key"))
        .agg(sql.max_by(owned, sql.col("offset")).alias("_last"))
        .select(*(sql.col("_last")[name].alias(name) for name in columns))
    )


def fetch_cleaned_end_offset(client: ApiClient, topic: str, partition: int) -> int | None:
    """Return the highest end of all cleans of a partition; None if the broker does not know it.

    Call it after the lease is open: the result is then no less than when the segments were pinned.
    Raises ApiRefusedError, UnreachableError.
    """
    return read_cleaner_progress(client, topic, partition).cleaned_end_offset


def check_open_part(client: ApiClient, cluster: Cluster, topic: str, state: TopicState) -> None:
    """Check an open part after it was read.

    It must still be that of the leased topic, and no later record may have made the cleaner clean
    it. Raises JobError (STALE), UnknownTopicError, WireError.
    """
    if state.tails and any(state.topic_id) and fetch_topic_id(cluster, topic) != state.topic_id:
        raise JobError(
            f"{topic} was deleted and created again while the job read it; try again",
            exit_codes.STALE,
        )
    for partition, end in state.tails.items():
        cleaned = fetch_cleaned_end_offset(client, topic, partition)
        if cleaned is not None and cleaned > end:
            raise JobError(
                f"{topic}-{partition} was cleaned up to offset {cleaned} while the job read it"
                f" up to {end}; try again",
                exit_codes.STALE,
            )


def lacks_offsets(job: CleanJob, counts: Sequence[SegmentCounts]) -> bool:
    """Return whether offsets are missing from these segments, so that records were removed."""
    start = job.log_start_offset
    return any(
        counts.records + counts.control < counts.next_base_offset - max(counts.base_offset, start)
        for counts in counts
    )
