"""Random logs, cleaned on Spark, on this machine's processes and by the cleaner: the same bytes."""

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.job import CleanJob
from pipeline.compaction.cleaning import clean_partitions
from pipeline.engines.engine import LocalEngine, StageFailedError
from pipeline.engines.spark_engine import SparkEngine
from pipeline.stages.planning import Limits
from storage.env import RealEnv
from tests.support.cleaner import cleaning
from tests.support.cleaner.cleaning import write_segments
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.draws import cases
from tests.support.stages import any_limits, assert_same, out_of, source_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
PARTITIONS = 8  # an engine takes them together, and a stage costs a second
ENV = RealEnv()


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    with LocalEngine(2) as engine:
        yield engine


def written(data: st.DataObject, folder: Path) -> CleanJob:
    """A random log on the disk, and a job over it."""
    directory = folder / "in"
    directory.mkdir(parents=True)
    (folder / "out").mkdir()
    segments = data.draw(logs())
    with patch.object(cleaning, "DIRECTORY", str(directory)):
        return replace(
            data.draw(jobs(segments, write_segments(ENV, segments))), directory=str(directory)
        )


@settings(
    max_examples=cases(few=1, many=2),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.data(), st.integers(0, 1 << 30))
def test_engines_leave_the_same_of_any_log(
    spark: "SparkSession", local: LocalEngine, data: st.DataObject, seed: int
) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        made = [written(data, Path(folder, str(number))) for number in range(PARTITIONS)]
        for limits in (Limits(memory_bytes=1 << 20), any_limits(rng, shards=rng.randint(1, 4))):
            for engine in (SparkEngine(spark), local):
                cleaneds = clean_partitions(engine, made, source_of, limits)
                for job, cleaned in zip(made, cleaneds, strict=True):
                    assert_same(ENV, cleaned, job)


def test_inputs_that_are_gone_fail_the_stage_by_name(spark: "SparkSession", tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    segment = cleaning.segment(0, [], 10)
    with patch.object(cleaning, "DIRECTORY", str(tmp_path / "in")):
        job = cleaning.clean_job([write_segments(ENV, [segment])])
        job = replace(job, directory=str(tmp_path / "in"))
    (tmp_path / "in/00000000000000000000.log").unlink()
    ENV.mkdir(out_of(job))
    with pytest.raises(StageFailedError, match=r"00000000000000000000\.log: the segment is gone"):
        clean_partitions(SparkEngine(spark), [job], source_of, Limits(memory_bytes=1 << 20))
