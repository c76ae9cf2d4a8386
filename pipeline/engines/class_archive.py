"""Makes the archive of classes with which Spark starts in about half the time.

A JVM spends most of a start with reading and checking some 15,000 classes. It can keep them as they
were and map that file at the next start. The file fits one Java and one Spark; the JVM checks that,
and starts the slow way where it does not fit. Made by `varve pipeline warmup`, never by the way:
it takes a whole session, and some 170 MB of disk.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from pipeline.engines.java import CACHE_VARIABLE, class_archive, find_java, kept_folder
from pipeline.engines.spark_session import build_session, stop_session

SESSION_SECONDS: Final = 300.0  # a slow machine, and the JVM sorts the classes when it ends


class ArchiveError(Exception):
    """The archive could not be made; Spark starts without."""


def make_archive() -> Path:
    """Run a session for its classes; returns the archive, which is there already or made now.

    Raises NoJavaError and ArchiveError.
    """
    import pyspark

    java, cache = find_java(), kept_folder()
    if cache is None:
        raise ArchiveError(f"there is no folder to keep it in; name one by {CACHE_VARIABLE}")
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
            raise ArchiveError(f"no session within {SESSION_SECONDS:g} s") from error
        if done.returncode != 0 or not os.path.exists(partial):
            message = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise ArchiveError(f"the session for it failed: {message[:300]}")
        os.replace(partial, archive)
    return archive


def _record(path: str) -> None:
    """A session that does a bit of all that the jobs do, so that its classes are seen."""
    from pyspark.sql import functions

    spark = build_session("local[2]", archive_to=path)
    with tempfile.TemporaryDirectory(prefix="varve-archive-") as folder:
        rows = spark.createDataFrame([(number, b"x") for number in range(100)], "id long, x binary")
        table = rows.repartitionByRange(4, "id").mapInArrow(lambda batches: batches, rows.schema)
        table.write.mode("overwrite").parquet(folder)
        result = spark.read.parquet(folder).groupBy("x").agg(functions.max("id"))
        result.orderBy("x").collect()
    stop_session(spark, timeout_seconds=SESSION_SECONDS)


if __name__ == "__main__":
    _record(sys.argv[1])
