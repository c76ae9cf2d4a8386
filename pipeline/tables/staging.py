"""The hidden folders next to a table in which jobs prepare it.

Rules
- A job owns the folder `.NAME.varve-ID` while it holds a lock (flock) on the file next to it,
  `.NAME.varve-ID.lock`. The kernel drops the lock when the process ends, however it ends. Unlike a
  process id, the lock is valid for processes in other containers, and on other hosts if the file
  system shares its locks (NFS 4 does).
- The lock is older than its folder, and its file is removed after the folder. So a folder is left
  behind only if its lock can be taken; a folder without a lock file is never touched.
- After an error, the lock file stays for the next job: tasks of Spark may still write and create
  the folder again.
- Several jobs may prepare one table at once: each has its own folder.
- If the file system has no locks, a job works without one, and folders of killed jobs stay.
"""

import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pipeline.errors import JobError

# In a staging folder:
DATA: Final = "data"  # the table until it is in its place
OLD: Final = "old"  # the table that is being replaced
_LOCK: Final = ".lock"
_INTACT: Final = "intact"  # an empty file in a staging folder, until somebody removes the folder
_ATTEMPTS_MAX: Final = 10  # one more is needed each time another job starts within microseconds


@contextmanager
def staging_folder(table: Path) -> Iterator[Path]:
    """Create a folder next to a table; delete it at the end of the block.

    Raises JobError, OSError.
    """
    remove_abandoned(table)
    lock_path, lock_fd = _new_lock(table)
    folder = lock_path.with_suffix("")
    try:
        folder.mkdir()
        (folder / _INTACT).touch()
        yield folder
    except BaseException:
        _remove_folder(table, lock_path)  # the lock file stays, see the rules
        raise
    else:
        _remove(table, lock_path)
    finally:
        os.close(lock_fd)


def check_intact(folder: Path) -> None:
    """Check that no other process began to remove a folder. Raises JobError.

    This finds file systems whose locks are not valid on other hosts.
    """
    if not (folder / _INTACT).exists():
        raise JobError(
            f"another process removed {folder} while this job wrote to it; the table was not"
            " changed. If jobs on several hosts write this table, use a file system that shares"
            " locks (flock) between them, or run one job at a time"
        )


def remove_abandoned(table: Path) -> None:
    """Remove the folders of jobs that were killed. Raises OSError.

    If such a job had moved the table away and put no other in its place, restore the table.
    """
    name = re.compile(re.escape(f".{table.name}.varve-") + "[0-9a-f]{32}" + re.escape(_LOCK))
    for lock_path in table.parent.iterdir():
        if not name.fullmatch(lock_path.name):
            continue
        try:
            lock_fd = os.open(lock_path, os.O_RDWR)
        except OSError:  # its job has just ended, or belongs to another user
            continue
        try:
            if _take(lock_fd):
                _remove(table, lock_path)
        finally:
            os.close(lock_fd)


def _new_lock(table: Path) -> tuple[Path, int]:
    """Create a lock file next to a table and lock it. Return its path and file descriptor."""
    for _ in range(_ATTEMPTS_MAX):
        lock_path = table.parent / f".{table.name}.varve-{uuid.uuid4().hex}{_LOCK}"
        lock_fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            is_mine = _take(lock_fd, without_locks=True) and _is_file_at(lock_path, lock_fd)
        except BaseException:
            os.close(lock_fd)
            raise
        if is_mine:
            return lock_path, lock_fd
        os.close(lock_fd)  # another job took it, and removes it, before this one locked it
    raise JobError(f"other jobs keep removing the lock files in {table.parent}; run the job again")


def _take(lock_fd: int, *, without_locks: bool = False) -> bool:
    """Lock an open file. Return whether this process has the lock now.

    `without_locks` is the result if the file system has no locks.
    """
    try:
        # Not lockf: its locks end as soon as any thread of the process closes the file.
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return without_locks
    return True


def _is_file_at(path: Path, fd: int) -> bool:
    """Return whether a path still names an open file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except OSError:  # it is gone; NFS reports this for the open file, too
        return False


def _remove(table: Path, lock_path: Path) -> None:
    """Remove a folder and then its lock file."""
    if _remove_folder(table, lock_path):  # otherwise the next job tries again
        lock_path.unlink(missing_ok=True)


def _remove_folder(table: Path, lock_path: Path) -> bool:
    """Undo a replacement that was not completed, and remove a folder; return whether it is gone.

    After a completed one, a missing table was moved away by somebody else, such as another job that
    is replacing it.
    """
    folder = lock_path.with_suffix("")
    if (folder / OLD).is_dir() and (folder / DATA).is_dir() and not table.exists():
        (folder / OLD).rename(table)
    shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
