"""Rows of leased segments as a Spark DataFrame: each task decodes a few segments on its host.

Rules
- A task receives a descriptor, not records. It reads segments through the lease's transport, keeps
  the survivors of an index if there is one, and returns Arrow batches.
- The DataFrame is lazy and may be evaluated again, so the lease must outlive it.
- A segment that cannot be read fails the query: a table never lacks rows silently.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cleaner.job import CleanJob, SourceSegment
from cleaner.planning.grouping import group_adjacent
from pipeline.records.columns import arrow_schema
from pipeline.records.decode import Keep, Selection, decode_segment
from pipeline.stages.planning import TASK_BYTES, source_segments
from pipeline.stages.survivors import SurvivorsFile, read_survivors
from pipeline.stages.task_files import TaskFiles, open_task_files
from pipeline.stages.tasks import SurvivorFiles, decode, encode
from storage.env import Env, RealEnv
from storage.format.filenames import LOG, file_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TASKS: Final = pa.schema([("task", pa.int64()), ("payload", pa.binary())])


@dataclass(frozen=True, slots=True)
class RowTask:
    """Decode the committed records of [first_offset, end_offset) of a job's segments.

    `survivors` restricts them to live records; None: all records.
    """

    source: dict[str, str]  # transport descriptor
    job: CleanJob  # only with the segments to read
    survivors: tuple[SurvivorFiles, ...] | None
    columns: tuple[str, ...]
    first_offset: int
    end_offset: int


def row_tasks(
    job: CleanJob,
    source: dict[str, str],
    columns: Sequence[str],
    *,
    survivors: tuple[SurvivorFiles, ...] | None = None,
    skip: frozenset[int] = frozenset(),
    task_bytes: int = TASK_BYTES,
) -> list[RowTask]:
    """Cut a job into tasks; segments whose base offset is in `skip` have no rows."""
    sources = [source for source in source_segments(job) if source.base_offset not in skip]
    return [
        RowTask(
            source=source,
            job=_narrowed(job, together, keep_aborted=survivors is None),
            survivors=survivors,
            columns=tuple(columns),
            first_offset=job.log_start_offset,
            end_offset=job.end_offset,
        )
        for together in group_adjacent(
            [(source, source.size_bytes) for source in sources], task_bytes
        )
    ]


def _narrowed(job: CleanJob, sources: Sequence[SourceSegment], *, keep_aborted: bool) -> CleanJob:
    """Return the job of one task, without the parts that the task does not need."""
    aborted = job.aborted if keep_aborted else ()
    return replace(job, groups=(tuple(sources),), aborted=aborted, last_records=())


def rows_of(spark: "SparkSession", tasks: Sequence[RowTask], columns: Sequence[str]) -> "DataFrame":
    """Return the rows of the tasks, with the columns of Spark's Kafka source."""
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(arrow_schema(columns))
    if not tasks:
        return spark.createDataFrame([], schema)
    payloads = [encode(task) for task in tasks]
    table = pa.table([range(len(payloads)), payloads], schema=_TASKS)
    frame = spark.createDataFrame(table).repartitionByRange(len(tasks), "task")
    return frame.mapInArrow(_read_all, schema)


def _read_all(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    env = RealEnv()
    for batch in batches:
        for payload in batch.column(1).to_pylist():
            yield from read_rows(env, decode(RowTask, payload))


def read_rows(env: Env, task: RowTask) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one task.

    Raises DamagedSegmentError, CorruptSurvivorsError, InputsGoneError, TransportError, OSError.
    """
    sources = source_segments(task.job)
    with open_task_files(env, task.source, task.job) as place:
        local = place.job_over(source.base_offset for source in sources)
        files = None if task.survivors is None else list(_files(env, place, task.survivors))
        for source in sources:
            yield from _segment_rows(env, task, source, local.directory, files)


def _files(
    env: Env, place: TaskFiles, survivors: Sequence[SurvivorFiles]
) -> Iterator[SurvivorsFile]:
    for survivor_files in survivors:
        folder = place.fetch(survivor_files.folder, survivor_files.names)
        for name in survivor_files.names:
            yield SurvivorsFile(env, f"{folder}/{name}")


def _segment_rows(
    env: Env,
    task: RowTask,
    source: SourceSegment,
    directory: str,
    files: list[SurvivorsFile] | None,
) -> Iterator[pa.RecordBatch]:
    keep: Keep | None = None
    if files is not None:
        live = read_survivors(files, source.base_offset, source.next_base_offset)
        if live.count == 0:
            return
        keep = live.contains
    yield from decode_segment(
        env,
        f"{directory}/{file_name(source.base_offset, LOG)}",
        Selection(
            topic=task.job.partition.topic,
            partition=task.job.partition.partition,
            columns=task.columns,
            first_offset=max(task.first_offset, source.base_offset),
            end_offset=min(task.end_offset, source.next_base_offset),
            keep=keep,
            aborted=() if keep is not None else task.job.aborted,
            unpacked_bytes_max=task.job.decompressed_batch_bytes,
        ),
        size_bytes=source.size_bytes,
        next_base_offset=source.next_base_offset,
    )
