"""A job's staging folder is its own while it lives, wherever the other jobs of its table run."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.errors import JobError
from pipeline.tables import staging
from pipeline.tables.staging import check_intact, remove_abandoned, staging_folder

OTHER_JOB = """
import sys
from pathlib import Path
from pipeline.tables.staging import staging_folder
with staging_folder(Path(sys.argv[1])) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
PID_NAMESPACE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)


@contextmanager
def other_job(table: Path, *, prefix: tuple[str, ...] = ()) -> Iterator[tuple[Path, int]]:
    """Run a job in another process. Return its folder and its process id."""
    command = [*prefix, sys.executable, "-c", OTHER_JOB, str(table)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process.pid
        process.kill()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def abandon(table: Path) -> Path:
    """Leave the folder of a killed job."""
    with other_job(table) as (folder, _):
        pass
    assert folder.is_dir()
    return folder


def test_a_second_job_leaves_the_folder_of_a_job_that_lives(tmp_path: Path) -> None:
    table = tmp_path / "table"
    with other_job(table) as (folder, _):
        with staging_folder(table) as own:
            assert own != folder
            assert folder.is_dir()
        assert names(tmp_path) == [folder.name, f"{folder.name}.lock"]
        check_intact(folder)


def test_what_tasks_write_after_the_failure_of_their_job_goes_with_the_next_job(
    tmp_path: Path,
) -> None:
    table = tmp_path / "table"
    with pytest.raises(KeyboardInterrupt), staging_folder(table) as folder:
        raise KeyboardInterrupt
    assert names(tmp_path) == [f"{folder.name}.lock"]
    (folder / staging.DATA).mkdir(parents=True)
    remove_abandoned(table)
    assert names(tmp_path) == []


@pytest.mark.parametrize("is_completed", [True, False])
def test_only_a_replacement_that_was_not_completed_is_undone(
    tmp_path: Path, *, is_completed: bool
) -> None:
    """After a completed one, another job that is replacing the table may have moved it away."""
    table = tmp_path / "table"
    with staging_folder(table) as folder:
        (folder / staging.OLD).mkdir()
        if not is_completed:
            (folder / staging.DATA).mkdir()
    assert table.exists() == (not is_completed)


def test_a_job_in_another_pid_namespace_leaves_the_folder(tmp_path: Path) -> None:
    """No process id of this namespace means the same process there."""
    if (
        shutil.which("unshare") is None
        or subprocess.run([*PID_NAMESPACE, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("this process may not create a pid namespace")
    table = tmp_path / "table"
    with staging_folder(table) as own:
        (own / "data").write_bytes(b"rows")
        with other_job(table, prefix=PID_NAMESPACE) as (folder, _):
            assert folder.is_dir()
            assert (own / "data").read_bytes() == b"rows"
            check_intact(own)


def test_two_jobs_of_one_process_have_their_own_folders(tmp_path: Path) -> None:
    table = tmp_path / "table"
    with staging_folder(table) as first:
        with staging_folder(table) as second:
            assert first != second
        with staging_folder(table):
            pass
        check_intact(first)
    assert names(tmp_path) == []


def test_the_folder_of_a_killed_job_is_removed_by_the_next_job(tmp_path: Path) -> None:
    table = tmp_path / "table"
    (abandon(table) / "data").mkdir()
    with staging_folder(table) as own:
        assert names(tmp_path) == [own.name, f"{own.name}.lock"]


def test_jobs_of_a_table_with_a_longer_name_are_others(tmp_path: Path) -> None:
    folder = abandon(tmp_path / "table.varve-2")
    (folder / staging.OLD).mkdir()
    remove_abandoned(tmp_path / "table")
    assert names(tmp_path) == [folder.name, f"{folder.name}.lock"]


def test_a_table_that_a_killed_job_had_moved_away_is_not_removed(tmp_path: Path) -> None:
    """The job that finds it may have begun before the other one was killed."""
    table = tmp_path / "table"
    old = abandon(table) / staging.OLD
    old.mkdir()
    (old / "row").touch()
    old.with_name(staging.DATA).mkdir()
    with staging_folder(table):
        assert names(table) == ["row"]


def test_a_folder_without_a_lock_file_is_not_removed(tmp_path: Path) -> None:
    folder = tmp_path / f".table.varve-{'0' * 32}"
    folder.mkdir()
    remove_abandoned(tmp_path / "table")
    assert folder.is_dir()


def test_a_job_that_is_overtaken_before_it_locks_its_file_uses_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"
    flock, steps = fcntl.flock, iter(("removed", "locked"))

    def overtaken(fd: int, operation: int) -> None:
        step = next(steps, "")
        (lock_path,) = tmp_path.glob("*.lock")
        if step == "removed":
            lock_path.unlink()
        elif step == "locked":
            other = os.open(lock_path, os.O_RDWR)
            flock(other, operation)
            try:
                flock(fd, operation)
            finally:
                lock_path.unlink()
                os.close(other)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", overtaken)
    with staging_folder(table) as own:
        assert names(tmp_path) == [own.name, f"{own.name}.lock"]
    assert next(steps, None) is None


def test_without_locks_no_folder_of_another_job_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    table = tmp_path / "table"
    folder = abandon(table)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with staging_folder(table) as own:
        assert own.is_dir()
        assert folder.is_dir()
    assert names(tmp_path) == [folder.name, f"{folder.name}.lock"]


def test_a_job_whose_folder_was_removed_does_not_publish(tmp_path: Path) -> None:
    """As by a job on a host to which the file system does not show the lock."""
    with staging_folder(tmp_path / "table") as own:
        shutil.rmtree(own)
        (own / "data").mkdir(parents=True)  # the executors go on
        with pytest.raises(JobError, match="another process removed"):
            check_intact(own)
