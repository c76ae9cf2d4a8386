"""The live rows of indexed partitions as a DataFrame: decoded in tasks, through their survivors.

A task reads a stretch of a partition's segments where the run pinned them, beside the files of
survivors that the index left there.
"""

import json
from collections.abc import Iterator, Sequence
from os import path
from typing import TYPE_CHECKING, Any

import pyarrow

from pipeline.stages.indexing import PartitionIndex
from pipeline.stages.planning import sources_of, stretches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp,"
    " timestampType int"
)
_TASKS = pyarrow.schema([("task", pyarrow.int64()), ("payload", pyarrow.string())])


def live_rows(
    spark: "SparkSession", indexes: Sequence[PartitionIndex], task_bytes: int
) -> "DataFrame":
    """Every record that is the last of its key, and no delete."""
    tasks = [payload for index in indexes for payload in _payloads(index, task_bytes)]
    table = pyarrow.table([range(len(tasks)), tasks], schema=_TASKS)
    frame = spark.createDataFrame(table).repartitionByRange(len(tasks), "task")
    return frame.mapInArrow(scan, SCHEMA)


def _payloads(index: PartitionIndex, task_bytes: int) -> Iterator[str]:
    job = index.job
    out = path.join(path.dirname(job.directory), "out")
    sources = {source.base_offset: source for source in sources_of(job)}
    sized = [(base, source.size_bytes) for base, source in sources.items()]
    for bases in stretches(sized, task_bytes):
        yield json.dumps(
            {
                "directory": job.directory,
                "topic": job.partition.topic,
                "partition": job.partition.partition,
                "survivors": [f"{out}/{s.folder}/{n}" for s in index.survivors for n in s.names],
                "segments": [
                    [base, sources[base].next_base_offset, sources[base].size_bytes]
                    for base in bases
                ],
            }
        )


def scan(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """In a task: the live rows of its segments."""
    for batch in batches:
        for payload in batch.column("payload").to_pylist():
            yield from _scan(json.loads(payload))


def _scan(task: dict[str, Any]) -> Iterator[pyarrow.RecordBatch]:
    from pipeline.records.decode import decode_segment
    from pipeline.stages.survivors import SurvivorsFile, read_survivors
    from storage.env import RealEnv
    from storage.filenames import LOG, file_name

    env = RealEnv()
    files = [SurvivorsFile(env, name) for name in task["survivors"]]
    for base, end, size in task["segments"]:
        live = read_survivors(files, base, end)
        if live.count:
            yield from decode_segment(
                env,
                f"{task['directory']}/{file_name(base, LOG)}",
                topic=task["topic"],
                partition=task["partition"],
                keep=live.contains,
                size_bytes=size,
                next_base_offset=end,
            )
