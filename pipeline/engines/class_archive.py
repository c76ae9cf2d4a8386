"""Creates the class archive with which Spark starts in about half the time.

A JVM spends most of its start on loading and verifying some 15,000 classes. It can dump them to an
archive and map that file at the next start. An archive fits one Java and one Spark; the JVM checks
this and otherwise starts without it. Only `varve pipeline warmup` creates it, because that takes a
whole session and some 190 MB of disk.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from pipeline.engines.java import CACHE_VARIABLE, class_archive, find_java, kept_folder
from pipeline.engines.spark_session import build_session, stop_session

SESSION_SECONDS: Final = 300.0  # for a slow machine: the JVM writes the archive when it exits


class ArchiveError(Exception):
    """The archive could not be created; Spark starts without it."""


def make_archive() -> Path:
    """Return the archive; create it in a session if it does not exist.

    Raises NoJavaError and ArchiveError.
    """
    import pyspark

    java, cache = find_java(), kept_folder()
    if cache is None:
        raise ArchiveError(f"no directory for the class archive; set {CACHE_VARIABLE}")
    archive = class_archive(
        java, cache, os.path.dirname(pyspark.__file__ or ""), pyspark.__version__
    )
    if archive.exists():
        return archive
    with tempfile.TemporaryDirectory(dir=cache, prefix="archive-") as folder:
        partial = os.path.join(folder, archive.name)
        command = [sys.executable, "-P", "-m", "pipeline.engines.class_archive", partial]
        try:
            done = subprocess.run(
                command,
                cwd=Path(__file__).resolve().parents[2],
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SESSION_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ArchiveError(
                f"the session that creates the archive took longer than {SESSION_SECONDS:g} s"
            ) from error
        if done.returncode != 0 or not os.path.exists(partial):
            message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ArchiveError(f"the session that creates the archive failed: {message[:300]}")
        os.replace(partial, archive)
    return archive


def _record(archive: str) -> None:
    """Run a session that loads the classes which the jobs use."""
    from pyspark.sql import Window, functions

    spark = build_session("local[2]", archive_to=archive)
    with tempfile.TemporaryDirectory(prefix="varve-archive-") as folder:
        path, checkpoint = (os.path.join(folder, name) for name in ("table", "checkpoint"))
        rows = spark.createDataFrame([(number, b"x") for number in range(100)], "id long, x binary")
        table = rows.repartitionByRange(4, "id").mapInArrow(lambda batches: batches, rows.schema)
        table.write.mode("overwrite").parquet(path)
        stored = spark.read.parquet(path)
        result = stored.groupBy("x").agg(functions.max("id"))
        result.orderBy("x").collect()
        rank = functions.row_number().over(Window.partitionBy("x").orderBy("id"))
        stored.join(rows, "id", "left_anti").withColumn("rank", rank).persist().collect()
        stream = spark.readStream.schema(rows.schema).parquet(path).writeStream
        stream = stream.foreachBatch(lambda batch, _: batch.join(rows, "x", "left_semi").count())
        stream = stream.trigger(availableNow=True).option("checkpointLocation", checkpoint)
        stream.start().awaitTermination()
    stop_session(spark, timeout_seconds=SESSION_SECONDS)


if __name__ == "__main__":
    _record(sys.argv[1])
