"""The stages on processes and a disk: the cleaner's bytes, also when a process is killed."""

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cleaner.job import CleanJob
from pipeline.compaction.cleaning import clean_partitions
from pipeline.engines.engine import LocalEngine, StageFailedError
from pipeline.stages.planning import Limits
from storage.env import RealEnv
from storage.model import TopicPartition
from tests.pipeline import dying_stages
from tests.pipeline.stages.test_stages_damage import some_log
from tests.support.stages import assert_same, out_of, source_of

WHOLE = Limits(memory_bytes=1 << 20, parallelism=2)
IN_SHARDS = Limits(memory_bytes=1 << 20, task_bytes=2000, parallelism=2, shards=3)

pytestmark = pytest.mark.usefixtures("forked_stages")


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(2) as made:
        yield made


def jobs_on_disk(tmp_path: Path, partitions: int) -> list[CleanJob]:
    """Logs as a broker leaves them for a run, some with transactions."""
    jobs = []
    for partition in range(partitions):
        rng = random.Random(partition)
        env, job = some_log(rng, transactions=partition % 2 == 1)
        directory = tmp_path / str(partition) / "in"
        directory.mkdir(parents=True)
        (directory.parent / "out").mkdir()
        for name in env.listdir(job.directory):
            if name.endswith((".log", ".index", ".timeindex", ".txnindex")):
                (directory / name).write_bytes(env.read_file(f"{job.directory}/{name}"))
        jobs.append(
            replace(
                job,
                directory=str(directory),
                partition=TopicPartition("orders", partition),
            )
        )
    return jobs


@pytest.mark.parametrize("limits", [WHOLE, IN_SHARDS])
def test_processes_leave_what_the_cleaner_leaves(
    engine: LocalEngine, tmp_path: Path, limits: Limits
) -> None:
    jobs = jobs_on_disk(tmp_path, 4)
    reported: list[tuple[str, int, int]] = []
    results = clean_partitions(
        engine, jobs, source_of, limits, progress=lambda *news: reported.append(news)
    )
    for job, cleaned in zip(jobs, results, strict=True):
        assert_same(RealEnv(), cleaned, job)
    stages = [stage for stage, done, total in reported if done == total]
    assert stages == (["whole"] if limits is WHOLE else ["combine", "merge", "rewrite"])


@pytest.mark.parametrize("limits", [WHOLE, IN_SHARDS])
def test_a_process_killed_while_it_writes_leaves_only_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    monkeypatch.setenv(dying_stages.MARK, str(tmp_path / "killed"))
    jobs = jobs_on_disk(tmp_path, 2)
    before = [sorted(Path(job.directory).iterdir()) for job in jobs]
    with LocalEngine(2, registry="tests.pipeline.dying_stages") as engine:
        results = clean_partitions(engine, jobs, source_of, limits)
    assert (tmp_path / "killed").exists()
    remaining = 0
    for job, cleaned in zip(jobs, results, strict=True):
        names = {path.name for path in Path(out_of(job)).iterdir()}
        outputs = {name for name in names if not name.startswith("scratch-")}
        remaining += len(outputs - set(cleaned.folders))
        assert_same(RealEnv(), cleaned, job)
    assert remaining >= 1, "the attempt that was killed has left its folder"
    assert [sorted(Path(job.directory).iterdir()) for job in jobs] == before


@pytest.mark.parametrize("limits", [WHOLE, IN_SHARDS])
def test_inputs_that_are_gone_fail_the_stage(
    engine: LocalEngine, tmp_path: Path, limits: Limits
) -> None:
    (job,) = jobs_on_disk(tmp_path, 1)
    next(Path(job.directory).glob("*.log")).unlink()
    with pytest.raises(StageFailedError, match="the segment is gone"):
        clean_partitions(engine, [job], source_of, limits)
    folders = [path for path in Path(out_of(job)).iterdir() if not path.name.startswith("scratch-")]
    assert folders == []


def test_a_stage_does_not_make_the_folder_of_an_ended_lease_again(
    engine: LocalEngine, tmp_path: Path
) -> None:
    """With its topic deleted, it would be the folder of a partition."""
    (job,) = jobs_on_disk(tmp_path, 1)
    lease = Path(job.directory).parent
    shutil.rmtree(lease)
    with pytest.raises(StageFailedError):
        clean_partitions(engine, [job], source_of, WHOLE)
    assert not lease.exists()
