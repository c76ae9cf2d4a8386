"""The interface to log files and clocks.

Rules
- Nothing else in storage/, cleaner/ or broker/ opens, syncs, renames or deletes a log file, or
  reads a clock. Code that needs to gets an `Env`; tests pass one that simulates crashes.
- Errors are the OSError of the system. The caller decides what they mean for a directory.
- A failed sync is never repeated: Linux marks the pages clean after a failed fsync, so that a
  second fsync succeeds without writing them. The caller takes the directory offline.
- `File.sync` makes data durable. `sync_dir` of a folder makes its names durable (creations,
  renames, deletions). Neither implies the other.
- An `Env` has no state that another process needs: each worker makes its own.
"""

import errno
import fcntl
import os
import resource
import shutil
import stat
import struct
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

from storage.errors import (
    DirectoryLockedError,
    NoRoomError,
    is_out_of_descriptors,
    is_scarcity,
)

ReadBuffer: TypeAlias = bytes | bytearray | memoryview
WriteBuffer: TypeAlias = bytearray | memoryview


# Descriptors that segments leave to connections, metadata, swaps and syncs: a client can make the
# log of its own topic roll a thousand times a second.
DESCRIPTORS_RESERVED: Final = 1000
DESCRIPTORS_RESERVED_SHARE: Final = 10  # at most a tenth of all
WARM_CHUNK_BYTES = 1 << 20  # read at a time to bring a range into the page cache


class FileStamp(NamedTuple):
    """Attributes of a file or folder that differ after every change, whichever program made it.

    The system sets the time of the last change (`st_ctime`); no program can choose it. Changes of
    the name, the owner or the mode count as well. Changes in the same few milliseconds may have the
    same time.
    """

    inode: int
    changed_ns: int


@runtime_checkable
class File(Protocol):
    """An open file, addressed by position (bytes); it has no cursor, so threads can share it.

    It stays readable after its name was deleted or given to another file, until it is closed or has
    no references.
    """

    @property
    def path(self) -> str:
        """Return the path at which it was opened; a rename does not change it."""

    def pread(self, length: int, position: int) -> bytes:
        """Return `length` bytes at `position`; fewer only at the end of the file."""

    def pread_into(self, buffer: WriteBuffer, position: int) -> int:
        """Fill `buffer`; return the bytes read, fewer than its size only at the end of the file."""

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """Write all of `data`. After an error the file may contain any part of it."""

    def truncate(self, length: int) -> None:
        """Truncate the file to `length` bytes, or extend it with zeros."""

    def sync(self) -> None:
        """Write content and length to the device. Never call it again after an error."""

    def size(self) -> int:
        """Return the length in bytes."""

    def stamp(self) -> FileStamp:
        """Return the stamp of its present content."""

    def is_deleted(self) -> bool:
        """Return whether it has no name any more, so that it takes room only until it is closed."""

    def fileno(self) -> int:
        """Return the descriptor for sendfile; -1 for a file in memory."""

    def is_cached(self, position: int, length: int) -> bool:
        """Return whether the first and last page of the range are in the page cache."""

    def warm(self, position: int, length: int) -> None:
        """Bring a range into the page cache; waits for the disk."""

    def close(self) -> None:
        """Close the descriptor; closing twice is allowed."""


class Folder(Protocol):
    """An open folder. Its sync needs no further descriptor, so it cannot fail with EMFILE."""

    def sync(self) -> None:
        """Write the names in this folder to the device."""

    def close(self) -> None:
        """Release the descriptor."""


class Lock(Protocol):
    """A file lock. It ends with the process."""

    def release(self) -> None:
        """Release the lock; releasing twice is allowed."""


class Env(Protocol):
    """Files, folders, clocks and randomness. Paths are strings; times in ms are wall time."""

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> File:
        """Open a file; `create` and `truncate` imply `write`. FileNotFoundError if it is absent."""

    def exists(self, path: str) -> bool:
        """Return whether a file or folder has this path, not a broken link. Raises OSError."""

    def is_dir(self, path: str) -> bool:
        """Return whether the path is a folder. Raises OSError."""

    def is_link(self, path: str) -> bool:
        """Return whether the path is a symbolic link, even a broken one. Raises OSError."""

    def listdir(self, path: str) -> list[str]:
        """Return the sorted names in a folder."""

    def size(self, path: str) -> int:
        """Return the length of a file in bytes."""

    def mtime_ms(self, path: str) -> int:
        """Return the time of the last modification (wall time)."""

    def stamp(self, path: str) -> FileStamp:
        """Return the stamp of a file, or of a folder, which changes with the names in it."""

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        """Set the time of the last modification. `File.sync` does not make it durable."""

    def mkdir(self, path: str, *, parents: bool = True) -> None:
        """Create a folder, and its parents if they are missing; no error if it exists.

        Without `parents`, raises FileNotFoundError if its parent is missing.
        """

    def rename(self, src: str, dst: str) -> None:
        """Rename `src` to `dst` atomically; replace a file of that name."""

    def link(self, src: str, dst: str) -> None:
        """Add the name `dst` to the file `src`. Raises FileExistsError if `dst` exists."""

    def unlink(self, path: str) -> None:
        """Delete a file's name; open files stay readable."""

    def rmdir(self, path: str) -> None:
        """Delete an empty folder."""

    def remove_tree(self, path: str) -> None:
        """Delete a folder and its content."""

    def open_folder(self, path: str) -> Folder:
        """Open a folder for a later sync, which then needs no descriptor."""

    def sync_dir(self, path: str) -> None:
        """Write the names in this folder to the device."""

    def set_private(self, path: str) -> None:
        """Let only the user of the process read and write a file."""

    def sync_all(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """Sync these files, then these folders, several at a time."""

    def total_bytes(self, path: str) -> int:
        """Return the size of the file system of `path` in bytes."""

    def free_bytes(self, path: str) -> int:
        """Return bytes an unprivileged process can still write on the file system of `path`."""

    def has_spare_descriptors(
        self, *, for_new_log: bool = False, for_small_segment: bool = False
    ) -> bool:
        """Return whether a log may keep another file open: a reserve is left for other work.

        New logs may use half of the reserve, small segments half of all descriptors.
        """

    def lock(self, path: str) -> Lock:
        """Lock the file `path`, created if absent. Raises DirectoryLockedError at once."""

    def read_file(self, path: str) -> bytes:
        """Return the whole content of a file of at most READ_BYTES_MAX. Raises OSError."""

    def wall_ms(self) -> int:
        """Return the wall time in ms since 1970; it may jump."""

    def monotonic(self) -> float:
        """Return monotonic seconds, which have no meaning outside this process."""

    def random_bytes(self, count: int) -> bytes:
        """Return unpredictable bytes."""


def write_file_atomically(env: Env, path: str, data: bytes, *, is_private: bool = False) -> None:
    """Replace the content of `path`: after a crash it is the old or the new one, never a mixture.

    Kafka writes its checkpoints in the same steps and with the same temporary name, `<path>.tmp`.
    Nobody but the user of the process can read a private file. Raises NoRoomError if nothing was
    changed, otherwise OSError.
    """
    write_temporary(env, path, data, is_private=is_private)
    put_in_place(env, path)


def write_temporary(env: Env, path: str, data: bytes, *, is_private: bool = False) -> None:
    """Do the first half of `write_file_atomically`, which does not change `path` itself."""
    temporary = f"{path}.tmp"
    try:
        file = _open_anew(env, temporary)
    except OSError as error:
        raise _error_after_write(env, temporary, error) from error
    try:
        try:
            if is_private:
                env.set_private(temporary)
            file.pwrite(data, 0)
        except OSError as error:
            raise _error_after_write(env, temporary, error) from error
        file.sync()
    finally:
        file.close()


def put_in_place(env: Env, path: str) -> None:
    """Do the second half of `write_file_atomically`, with its errors; the result is durable."""
    temporary = f"{path}.tmp"
    try:
        rename_if_room(env, temporary, path)
    except NoRoomError:
        remove_temporary(env, temporary)
        raise
    env.sync_dir(os.path.dirname(path) or ".")


def rename_if_room(env: Env, src: str, dst: str) -> None:
    """Rename `src` to `dst`.

    Raises NoRoomError if the folder needs another block for the new name and the disk is full,
    otherwise OSError.
    """
    try:
        env.rename(src, dst)
    except OSError as error:
        if is_scarcity(error):
            raise NoRoomError(error, src) from error
        raise


def write_file(env: Env, path: str, data: bytes) -> None:
    """Write a file without sync: after a crash it may be absent or have any content.

    Raises NoRoomError, and then the file does not exist.
    """
    try:
        file = _open_anew(env, path)
        try:
            file.pwrite(data, 0)
        finally:
            file.close()
    except OSError as error:
        if not is_scarcity(error):
            raise
        remove_if_there(env, path)
        raise NoRoomError(error, path) from error


def _open_anew(env: Env, path: str) -> File:
    """Open an empty file to write it, instead of one that another user, such as root, has left."""
    try:
        return env.open(path, create=True, write=True, truncate=True)
    except PermissionError:
        remove_if_there(env, path)  # the folder is ours
        return env.open(path, create=True, write=True, truncate=True)


def _error_after_write(env: Env, temporary: str, error: OSError) -> OSError:
    """Return the error of a failed write; delete the file again if there was no room."""
    if not is_scarcity(error):
        return error
    remove_temporary(env, temporary)
    return NoRoomError(error, temporary)


def remove_temporary(env: Env, temporary: str) -> None:
    """Delete the temporary file of a write that was given up.

    On some file systems that are full, such as ZFS over its quota, a deletion finds no room either.
    Then the file stays, and the next write replaces it.
    """
    try:
        remove_if_there(env, temporary)
    except OSError as error:
        if not is_scarcity(error):
            raise


def remove_if_there(env: Env, path: str) -> None:
    """Delete a file if it exists, without sync."""
    if env.exists(path):
        env.unlink(path)


def mkdir_durably(env: Env, path: str) -> None:
    """Create a folder and its parents, and sync the parent of each new one.

    Raises NoRoomError if there is no room, otherwise OSError.
    """
    parents = []
    missing = path
    while not env.is_dir(missing):
        above = os.path.dirname(missing) or "."
        parents.append(above)
        if above == missing:
            break
        missing = above
    try:
        env.mkdir(path)
    except OSError as error:
        if not is_scarcity(error):
            raise
        raise NoRoomError(error, path) from error
    for parent in reversed(parents):
        env.sync_dir(parent)


# Bytes of one call that copies to or from the page cache. A kernel without preemption (the default
# on servers) gives the core to no other process before the call returns. With calls of 4 MiB a
# waking process waited 1.9 ms at the 99th percentile, with these 0.2 ms.
CALL_BYTES_MAX: Final = 256 << 10
# A file that `read_file` returns. The largest with a use is the transaction index of a segment of
# 2 GiB: 34 bytes for two batches of 150 bytes. A damaged or hostile file may have any length, also
# without taking space on the disk.
READ_BYTES_MAX: Final = 512 << 20
# fdatasync writes the content and what is needed to read it, such as the length, but not the
# modification time. It saves a journal commit if the length did not change. macOS has fsync only.
# Syncs at a time: the journal of a file system combines concurrent ones.
SYNC_THREADS: Final = 8
_sync_data = getattr(os, "fdatasync", os.fsync)
# Other users can write to folders of leases: opening a pipe there would block for ever without
# this flag, which has no effect on files.
_AT_ONCE: Final = os.O_NONBLOCK


def _open_regular(path: str, flags: int) -> int:
    """Return a descriptor of a regular file. Raises IsADirectoryError if it is anything else.

    Pipes and devices would fail later, by errors that a disk gives, or be read without an end.
    """
    fd = os.open(path, flags | _AT_ONCE, 0o644)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, "Not a regular file", path)
    return fd


class RealFile:
    """A file of the operating system. It is closed when its last reference is gone."""

    __slots__ = ("__weakref__", "_fd", "path")

    path: str

    _close = staticmethod(os.close)  # available even when the interpreter has cleared its modules

    def __init__(self, path: str, fd: int) -> None:
        self.path = path
        self._fd = fd

    def pread(self, length: int, position: int) -> bytes:
        """See File."""
        data = os.pread(self._fd, length, position)
        if len(data) == length or not data:
            return data
        chunks = [data]  # a read is short at the end of the file, after a signal, or above 2 GiB
        done = len(data)
        while done < length:
            data = os.pread(self._fd, length - done, position + done)
            if not data:
                break
            chunks.append(data)
            done += len(data)
        return b"".join(chunks)

    def pread_into(self, buffer: WriteBuffer, position: int) -> int:
        """See File."""
        view = memoryview(buffer).cast("B")
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done : done + CALL_BYTES_MAX]], position + done)
            if count == 0:
                break
            done += count
        return done

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        """See File."""
        view = memoryview(data)
        done = 0
        if view.nbytes <= CALL_BYTES_MAX:
            done = os.pwrite(self._fd, data, position)
            if done == view.nbytes:
                return
        view = view.cast("B")
        while done < len(view):
            count = os.pwrite(self._fd, view[done : done + CALL_BYTES_MAX], position + done)
            if count == 0:
                raise OSError(errno.EIO, "write made no progress", self.path)
            done += count

    def truncate(self, length: int) -> None:
        """See File."""
        os.ftruncate(self._fd, length)

    def sync(self) -> None:
        """See File."""
        _sync_data(self._fd)

    def size(self) -> int:
        """See File."""
        return os.fstat(self._fd).st_size

    def stamp(self) -> FileStamp:
        """See File."""
        status = os.fstat(self._fd)
        return FileStamp(status.st_ino, status.st_ctime_ns)

    def is_deleted(self) -> bool:
        """See File."""
        return os.fstat(self._fd).st_nlink == 0

    def fileno(self) -> int:
        """See File."""
        return self._fd

    def is_cached(self, position: int, length: int) -> bool:
        """See File. Uses RWF_NOWAIT; a file system without it counts as cached."""
        probe = bytearray(1)
        try:
            for at in (position, position + length - 1):
                os.preadv(self._fd, [probe], at, os.RWF_NOWAIT)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
        return True

    def warm(self, position: int, length: int) -> None:
        """See File."""
        os.posix_fadvise(self._fd, position, length, os.POSIX_FADV_WILLNEED)
        scratch = memoryview(bytearray(min(length, WARM_CHUNK_BYTES)))
        for at in range(position, position + length, WARM_CHUNK_BYTES):
            os.preadv(self._fd, [scratch[: position + length - at]], at)

    def close(self) -> None:
        """See File."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._close(fd)

    def __del__(self) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RealFile({self.path!r}, fd={self._fd})"


# Files that this process has locked, by (device, inode). lockf locks belong to the process: it
# would get a second lock, and closing another descriptor of the file would release the first.
# Therefore a file in this set is never opened a second time.
_locked_here: set[tuple[int, int]] = set()


# `struct flock` of Linux on 64 bits: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK: Final = struct.Struct("hhqqi4x")


def _pid_of_lock(fd: int) -> int:
    """Return the process that has locked a file; 0 if it is in another container or has ended."""
    try:
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:  # the file system does not say
        return 0
    kind, _whence, _start, _length, pid = _FLOCK.unpack(answer)
    return 0 if kind == fcntl.F_UNLCK else max(0, pid)


class RealLock:
    """A lock by fcntl.lockf on an open file."""

    def __init__(self, fd: int, identity: tuple[int, int]) -> None:
        self._fd = fd
        self._identity = identity

    def release(self) -> None:
        """See Lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
            _locked_here.discard(self._identity)


class RealFolder:
    """See Folder."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def sync(self) -> None:
        """See Folder."""
        os.fsync(self._fd)

    def close(self) -> None:
        """See Folder."""
        os.close(self._fd)


_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


def _stat(path: str, *, is_followed: bool = True) -> os.stat_result | None:
    """Return the status of a path, None if nothing has this path.

    Any other error is raised, unlike by `os.path.exists`: a file whose disk does not answer is not
    missing, and callers replace what is missing.
    """
    try:
        return os.stat(path, follow_symlinks=is_followed)
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise


class RealEnv:
    """The operating system."""

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> RealFile:
        """See Env."""
        flags = os.O_RDWR if write or create or truncate else os.O_RDONLY
        if create:
            flags |= os.O_CREAT
        if truncate:
            flags |= os.O_TRUNC
        return RealFile(path, _open_regular(path, flags))

    def exists(self, path: str) -> bool:
        """See Env."""
        return _stat(path) is not None

    def is_dir(self, path: str) -> bool:
        """See Env."""
        status = _stat(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def is_link(self, path: str) -> bool:
        """See Env."""
        status = _stat(path, is_followed=False)
        return status is not None and stat.S_ISLNK(status.st_mode)

    def listdir(self, path: str) -> list[str]:
        """See Env."""
        return sorted(os.listdir(path))

    def size(self, path: str) -> int:
        """See Env."""
        return os.stat(path).st_size

    def mtime_ms(self, path: str) -> int:
        """See Env."""
        return os.stat(path).st_mtime_ns // 1_000_000

    def stamp(self, path: str) -> FileStamp:
        """See Env."""
        status = os.stat(path)
        return FileStamp(status.st_ino, status.st_ctime_ns)

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        """See Env."""
        os.utime(path, ns=(mtime_ms * 1_000_000, mtime_ms * 1_000_000))

    def mkdir(self, path: str, *, parents: bool = True) -> None:
        """See Env."""
        try:
            if parents:
                os.makedirs(path, exist_ok=True)
            else:
                os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path) from None

    def rename(self, src: str, dst: str) -> None:
        """See Env."""
        os.replace(src, dst)

    def link(self, src: str, dst: str) -> None:
        """See Env."""
        os.link(src, dst)

    def unlink(self, path: str) -> None:
        """See Env."""
        os.unlink(path)

    def rmdir(self, path: str) -> None:
        """See Env."""
        os.rmdir(path)

    def remove_tree(self, path: str) -> None:
        """See Env."""
        if os.path.islink(path):
            os.unlink(path)  # a folder that was moved elsewhere; its content is not ours to delete
        else:
            shutil.rmtree(path)

    def open_folder(self, path: str) -> Folder:
        """See Env."""
        return RealFolder(path)

    def sync_dir(self, path: str) -> None:
        """See Env."""
        folder = RealFolder(path)
        try:
            folder.sync()
        finally:
            folder.close()

    def set_private(self, path: str) -> None:
        """See Env."""
        os.chmod(path, 0o600)

    def sync_all(self, files: Sequence[str], folders: Sequence[str]) -> None:
        """See Env."""
        with ThreadPoolExecutor(SYNC_THREADS, "sync") as threads:
            for _ in threads.map(self._sync_file, files):
                pass
            for _ in threads.map(self.sync_dir, folders):
                pass

    def _sync_file(self, path: str) -> None:
        file = self.open(path, write=True)
        try:
            file.sync()
        finally:
            file.close()

    def total_bytes(self, path: str) -> int:
        """See Env."""
        status = os.statvfs(path)
        return status.f_blocks * status.f_frsize

    def free_bytes(self, path: str) -> int:
        """See Env."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def has_spare_descriptors(
        self, *, for_new_log: bool = False, for_small_segment: bool = False
    ) -> bool:
        """See Env. A new descriptor is the lowest free one, so all below it are in use."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return True
        try:
            lowest = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            return False
        os.close(lowest)
        if for_small_segment:
            return lowest < limit // 2
        reserved = min(DESCRIPTORS_RESERVED, limit // DESCRIPTORS_RESERVED_SHARE)
        return lowest < limit - (reserved // 2 if for_new_log else reserved)

    def lock(self, path: str) -> RealLock:
        """See Env. Kafka's lock (FileChannel.tryLock) is a lockf lock as well."""
        directory = os.path.dirname(path)
        try:
            facts = os.stat(path)
        except FileNotFoundError:
            pass
        else:
            if (facts.st_dev, facts.st_ino) in _locked_here:
                raise DirectoryLockedError(directory)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            facts = os.fstat(fd)
        except OSError as error:
            is_locked = error.errno in (errno.EACCES, errno.EAGAIN)
            pid = _pid_of_lock(fd) if is_locked else 0
            os.close(fd)
            if is_locked:
                raise DirectoryLockedError(directory, pid) from error
            raise
        identity = (facts.st_dev, facts.st_ino)
        _locked_here.add(identity)
        return RealLock(fd, identity)

    def read_file(self, path: str) -> bytes:
        """See Env."""
        with open(path, "rb", opener=_open_regular) as file:
            if os.fstat(file.fileno()).st_size > READ_BYTES_MAX:
                raise OSError(errno.EFBIG, f"Larger than {READ_BYTES_MAX} bytes", path)
            return file.read()

    def wall_ms(self) -> int:
        """See Env."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """See Env."""
        return time.monotonic()

    def random_bytes(self, count: int) -> bytes:
        """See Env."""
        return os.urandom(count)
