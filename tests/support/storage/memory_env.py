"""An Env in memory that can lose power at any operation.

What it promises is the least that POSIX promises:
- File content is durable after `File.sync`. Of the writes since then any subset survives a crash,
  each of them whole, torn at sectors or not at all; lost bytes inside the file are zeros.
- Names are durable after `sync_dir` of their folder. Of the creations, renames and deletions since
  then any subset survives, not only the first few. The two halves of one rename survive together.
- Syncing a file does not make its name durable, nor the other way round. Syncing a folder does not
  make the folder's own name durable.
- A sync that failed has written some of the data, and the next one reports success without writing
  the rest (Linux marks the pages clean).
- A write that failed has written some part of the data.
- Open files outlive their names.

`operations` counts what changes or syncs the disk; `crash_at = n` raises SimulatedCrash instead of
carrying out the n-th, and from then on everything fails the same way. `crash()` gives a new Env
that holds what survived. One seed decides all of it; the repr names it.
"""

import errno
import os
import posixpath
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import count

from storage.env import FileStamp, ReadBuffer, WriteBuffer
from storage.errors import DirectoryLockedError

SECTOR_BYTES = 512
FIRST_WALL_MS = 1_700_000_000_000
_STAMPS = count(1)


class SimulatedCrash(BaseException):
    """The machine lost power. Not an Exception: no handler of operating errors may survive it."""


class _Inode:
    """A file's content: what readers see, what the device holds, and what lies between."""

    def __init__(self, content: bytes = b"", mtime_ms: int = 0) -> None:
        self.content = bytearray(content)
        self.durable = bytearray(content)
        self.unsynced: list[tuple[int, bytes | None]] = []  # (position, data) or (length, None)
        self.mtime_ms = mtime_ms
        self.durable_mtime_ms = mtime_ms
        self.number = next(_STAMPS)
        self.changed = next(_STAMPS)

    def change(self, position: int, data: bytes | None) -> None:
        _apply(self.content, position, data)
        self.changed = next(_STAMPS)
        self.unsynced.append((position, data))

    def sync(self) -> None:
        for position, data in self.unsynced:
            _apply(self.durable, position, data)
        self.unsynced = []
        self.durable_mtime_ms = self.mtime_ms

    def lose_sync(self, rng: random.Random) -> None:
        """A failed fsync: some writes reached the device, the others are forgotten as if done."""
        self.durable = self.after_crash(rng)
        self.unsynced = []

    def after_crash(self, rng: random.Random) -> bytearray:
        survived = bytearray(self.durable)
        keep = rng.choice((0.0, 0.5, 1.0))
        for position, data in self.unsynced:
            if data is None:
                if rng.random() < keep:
                    _apply(survived, position, None)
                continue
            for start, piece in _torn(position, data, keep, rng):
                _apply(survived, start, piece)
        return survived


def _apply(content: bytearray, position: int, data: bytes | None) -> None:
    if data is None:
        del content[position:]
    end = position + len(data or b"")
    if len(content) < end:
        content.extend(bytes(end - len(content)))
    if data:
        content[position:end] = data


def _torn(
    position: int, data: bytes, keep: float, rng: random.Random
) -> Iterator[tuple[int, bytes]]:
    """The parts of one unsynced write that survive: whole sectors, now and then half of one."""
    start = position
    end = position + len(data)
    while start < end:
        border = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        piece = data[start - position : border - position]
        if rng.random() < keep:
            cut = rng.random() < 0.05 and keep < 1.0
            yield start, piece[: rng.randrange(len(piece))] if cut else piece
        start = border


class _Folder:
    """Names: as seen, as on the device, and the unsynced changes in order."""

    def __init__(self) -> None:
        self.names: dict[str, _Inode | _Folder] = {}
        self.durable: dict[str, _Inode | _Folder] = {}
        self.unsynced: list[_Change] = []
        self.number = next(_STAMPS)
        self.changed = next(_STAMPS)

    def sync(self) -> None:
        changes, self.unsynced = self.unsynced, []
        for change in changes:
            change.make_durable()


class _Change:
    """One creation, deletion or rename: the names it sets (None: removed), atomic as a whole."""

    def __init__(self, parts: list[tuple[_Folder, str, "_Inode | _Folder | None"]]) -> None:
        self.parts = parts
        for folder, name, node in parts:
            _set_name(folder.names, name, node)
        for folder in {id(part[0]): part[0] for part in parts}.values():
            folder.unsynced.append(self)
            folder.changed = next(_STAMPS)

    def make_durable(self) -> None:
        for folder, name, node in self.parts:
            self._make_earlier_durable(folder, name)
            _set_name(folder.durable, name, node)
            if self in folder.unsynced:  # the other folder of a rename between two
                folder.unsynced.remove(self)

    def _make_earlier_durable(self, folder: _Folder, name: str) -> None:
        """What this replaces in the folder that is not being synced must not come back later."""
        if self in folder.unsynced:
            for earlier in folder.unsynced[: folder.unsynced.index(self)]:
                if any(where is folder and part == name for where, part, _ in earlier.parts):
                    earlier.make_durable()


def _set_name(
    names: dict[str, "_Inode | _Folder"], name: str, node: "_Inode | _Folder | None"
) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class MemoryFile:
    """See File."""

    def __init__(self, env: "MemoryEnv", path: str, inode: _Inode, *, writable: bool) -> None:
        self.path = path
        self._env = env
        self._inode: _Inode | None = inode
        self._writable = writable

    def pread(self, length: int, position: int) -> bytes:
        inode = self._open_inode()
        self._env._read("pread", self.path)
        return bytes(inode.content[position : position + length])

    def pread_into(self, buffer: WriteBuffer, position: int) -> int:
        view = memoryview(buffer).cast("B")
        data = self.pread(len(view), position)
        view[: len(data)] = data
        return len(data)

    def pwrite(self, data: ReadBuffer, position: int) -> None:
        inode = self._open_inode(write=True)
        self._env._pwrite(inode, self.path, bytes(data), position)

    def truncate(self, length: int) -> None:
        inode = self._open_inode(write=True)
        self._env._truncate(inode, self.path, length)

    def sync(self) -> None:
        self._env._sync_file(self._open_inode(), self.path)

    def size(self) -> int:
        self._env._read("size", self.path)
        return len(self._open_inode().content)

    def stamp(self) -> FileStamp:
        inode = self._open_inode()
        self._env._read("stamp", self.path)
        return FileStamp(inode.number, inode.changed)

    def is_cached(self, position: int, length: int) -> bool:
        return True

    def warm(self, position: int, length: int) -> None:
        pass

    def is_deleted(self) -> bool:
        folders, inode = self._env._folders(self._env._root), self._open_inode()
        return not any(inode in folder.names.values() for folder in folders)

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._inode = None

    def _open_inode(self, *, write: bool = False) -> _Inode:
        if self._inode is None or (write and not self._writable):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF), self.path)
        return self._inode

    def __repr__(self) -> str:
        return f"MemoryFile({self.path!r}, {self._env!r})"


class _MemoryLock:
    def __init__(self, env: "MemoryEnv", inode: _Inode) -> None:
        self._env = env
        self._inode = inode

    def release(self) -> None:
        self._env._locked.discard(self._inode)


class _MemoryFolder:
    def __init__(self, env: "MemoryEnv", path: str) -> None:
        self._env = env
        self._path = path

    def sync(self) -> None:
        self._env.sync_dir(self._path)

    def close(self) -> None:
        """Nothing to release: only opening can fail for lack of a descriptor."""


class _Fault:
    """Handle of an injected error; `remove()` ends it."""

    def __init__(
        self, env: "MemoryEnv", predicate: Callable[[str, str], bool], error: OSError
    ) -> None:
        self._env = env
        self.predicate = predicate
        self.error = error
        self.hits = 0

    def remove(self) -> None:
        self._env._faults.remove(self)


class MemoryEnv:
    """See the module and Env. Absolute and relative paths start at the same root."""

    def __init__(self, seed: int = 0) -> None:
        self.private_files: set[str] = set()
        self.seed = seed
        self.crashes = 0
        self.operations = 0
        self.crash_at: int | None = None
        self.history: list[tuple[str, str]] = []  # (operation, path), as counted
        self.free_space_bytes = 1 << 40
        self.spare_descriptors = True
        self.half_of_descriptors_is_free = True
        self._rng = random.Random(seed)
        self._root = _Folder()
        self._dead = False
        self._faults: list[_Fault] = []
        self._ignored_sync: Callable[[str, str], bool] | None = None
        self._locked: set[_Inode] = set()
        self._wall_ms = FIRST_WALL_MS
        self._monotonic_s = 1_000.0
        self._mutex = threading.RLock()  # flushes run in threads

    def __repr__(self) -> str:
        return (
            f"MemoryEnv(seed={self.seed}, crashes={self.crashes}, operations={self.operations}, "
            f"crash_at={self.crash_at})"
        )

    # --- faults -------------------------------------------------------------------------------

    def fail_on(self, predicate: Callable[[str, str], bool], error: OSError | int) -> _Fault:
        """Raise `error` (or that errno) where predicate(operation, path) holds, until removed.

        Operations: open, pread, pwrite, truncate, sync, size, stamp, listdir, exists, mkdir,
        rename, link, unlink, rmdir, sync_dir, read_file, set_mtime, lock. A rename is asked with
        its target.
        """
        if isinstance(error, int):
            error = OSError(error, os.strerror(error))
        fault = _Fault(self, predicate, error)
        self._faults.append(fault)
        return fault

    def ignore_sync(self, predicate: Callable[[str, str], bool] | None) -> None:
        """Mutate the program under test: sync and sync_dir that match do nothing."""
        self._ignored_sync = predicate

    def settle(self) -> None:
        """Make everything durable, as time would (sync(2))."""
        for folder in list(self._folders(self._root)):
            folder.sync()
        for folder in list(self._folders(self._root)):
            for node in folder.names.values():
                if isinstance(node, _Inode):
                    node.sync()

    def crash(self) -> "MemoryEnv":
        """What is left after losing power now: a new Env. Can be asked again for another fate."""
        self._dead = True
        after = type(self)(self.seed)
        after._rng = self._rng
        after.crashes = self.crashes + 1
        after.free_space_bytes = self.free_space_bytes
        after._wall_ms = self._wall_ms
        after._monotonic_s = 0.0  # counts from the boot
        after._root = self._survivors()
        return after

    def kill(self) -> "MemoryEnv":
        """The process died and the machine did not: a new Env on the same disk, synced or not."""
        self._dead = True
        after = type(self)(self.seed)
        after._rng = self._rng
        after.crashes = self.crashes + 1
        after.free_space_bytes = self.free_space_bytes
        after._wall_ms = self._wall_ms
        after._monotonic_s = self._monotonic_s
        after._root = self._root
        return after

    def _survivors(self) -> _Folder:
        fates: dict[_Change, bool] = {}
        keep = self._rng.choice((0.0, 0.2, 0.5, 0.8, 1.0))
        copies: dict[_Inode, _Inode] = {}

        def folder_after(folder: _Folder) -> _Folder:
            names = dict(folder.durable)
            for change in folder.unsynced:
                if change not in fates:
                    fates[change] = self._rng.random() < keep
                if fates[change]:
                    for where, name, node in change.parts:
                        if where is folder:
                            _set_name(names, name, node)
            after = _Folder()
            for name, node in sorted(names.items()):
                after.names[name] = (
                    folder_after(node) if isinstance(node, _Folder) else inode_after(node)
                )
            after.durable = dict(after.names)
            return after

        def inode_after(inode: _Inode) -> _Inode:
            if inode not in copies:
                mtime_ms = self._rng.choice((inode.mtime_ms, inode.durable_mtime_ms))
                copies[inode] = _Inode(bytes(inode.after_crash(self._rng)), mtime_ms)
                copies[inode].number = inode.number
                if not inode.unsynced:
                    copies[inode].changed = inode.changed
            return copies[inode]

        return folder_after(self._root)

    def _folders(self, folder: _Folder) -> Iterator[_Folder]:
        yield folder
        for node in folder.names.values():
            if isinstance(node, _Folder):
                yield from self._folders(node)

    # --- clock ----------------------------------------------------------------------------------

    def advance_ms(self, ms: int) -> None:
        """Let time pass."""
        self._wall_ms += ms
        self._monotonic_s += ms / 1000

    def jump_wall_ms(self, ms: int) -> None:
        """Set the wall clock forward or back while no time passes."""
        self._wall_ms += ms

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic(self) -> float:
        return self._monotonic_s

    def random_bytes(self, count: int) -> bytes:
        return self._rng.randbytes(count)

    # --- Env ------------------------------------------------------------------------------------

    def open(
        self, path: str, *, create: bool = False, write: bool = False, truncate: bool = False
    ) -> MemoryFile:
        with self._mutex:
            folder, name = self._parent(path)
            node = folder.names.get(name)
            if isinstance(node, _Folder):
                raise _os_error(errno.EISDIR, path)
            if node is None and not create:
                self._read("open", path)
                raise _os_error(errno.ENOENT, path)
            if node is None:
                self._step("open", path)
                node = _Inode(mtime_ms=self._wall_ms)
                _Change([(folder, name, node)])
            elif truncate and node.content:
                self._step("open", path)
                node.change(0, None)
                node.mtime_ms = self._wall_ms
            else:
                self._read("open", path)
            return MemoryFile(self, path, node, writable=write or create or truncate)

    def exists(self, path: str) -> bool:
        self._read("exists", path)
        return self._find(path) is not None

    def is_dir(self, path: str) -> bool:
        self._read("exists", path)
        return isinstance(self._find(path), _Folder)

    def is_link(self, path: str) -> bool:
        self._read("is_link", path)
        return False

    def listdir(self, path: str) -> list[str]:
        self._read("listdir", path)
        return sorted(self._folder(path).names)

    def size(self, path: str) -> int:
        self._read("size", path)
        return len(self._inode(path).content)

    def mtime_ms(self, path: str) -> int:
        self._read("size", path)
        return self._inode(path).mtime_ms

    def stamp(self, path: str) -> FileStamp:
        self._read("stamp", path)
        node = self._find(path)
        if node is None:
            raise _os_error(errno.ENOENT, path)
        return FileStamp(node.number, node.changed)

    def set_mtime_ms(self, path: str, mtime_ms: int) -> None:
        inode = self._inode(path)
        self._step("set_mtime", path)
        inode.mtime_ms = mtime_ms
        inode.changed = next(_STAMPS)

    def mkdir(self, path: str, *, parents: bool = True) -> None:
        with self._mutex:
            folder = self._root
            if not parents and not isinstance(self._find(os.path.dirname(path)), _Folder):
                raise _os_error(errno.ENOENT, path)
            for part in _parts(path):
                node = folder.names.get(part)
                if isinstance(node, _Inode):
                    raise _os_error(errno.ENOTDIR, path)
                if node is None:
                    self._step("mkdir", path)
                    node = _Folder()
                    _Change([(folder, part, node)])
                folder = node

    def rename(self, src: str, dst: str) -> None:
        with self._mutex:
            source, old = self._parent(src)
            target, new = self._parent(dst)
            node = source.names.get(old)
            if node is None:
                raise _os_error(errno.ENOENT, src)
            replaced = target.names.get(new)
            if isinstance(replaced, _Folder) and (isinstance(node, _Inode) or replaced.names):
                raise _os_error(errno.EISDIR, dst)
            if isinstance(node, _Folder) and isinstance(replaced, _Inode):
                raise _os_error(errno.ENOTDIR, dst)
            self._step("rename", dst)
            if node is not replaced:  # POSIX: two names of one file stay as they are
                _Change([(source, old, None), (target, new, node)])
                if isinstance(node, _Inode):
                    node.changed = next(_STAMPS)

    def link(self, src: str, dst: str) -> None:
        with self._mutex:
            target, new = self._parent(dst)
            inode = self._inode(src)
            if new in target.names:
                raise _os_error(errno.EEXIST, dst)
            self._step("link", dst)
            _Change([(target, new, inode)])
            inode.changed = next(_STAMPS)

    def unlink(self, path: str) -> None:
        with self._mutex:
            folder, name = self._parent(path)
            self._inode(path)
            self._step("unlink", path)
            _Change([(folder, name, None)])

    def rmdir(self, path: str) -> None:
        with self._mutex:
            folder, name = self._parent(path)
            if self._folder(path).names:
                raise _os_error(errno.ENOTEMPTY, path)
            self._step("rmdir", path)
            _Change([(folder, name, None)])

    def remove_tree(self, path: str) -> None:
        for name in sorted(self._folder(path).names):
            child = posixpath.join(path, name)
            if self.is_dir(child):
                self.remove_tree(child)
            else:
                self.unlink(child)
        self.rmdir(path)

    def open_folder(self, path: str) -> _MemoryFolder:
        self._read("open_folder", path)
        self._folder(path)
        return _MemoryFolder(self, path)

    def sync_dir(self, path: str) -> None:
        with self._mutex:
            folder = self._folder(path)
            self._step("sync_dir", path)
            if not self._is_ignored("sync_dir", path):
                folder.sync()

    def set_private(self, path: str) -> None:
        with self._mutex:
            self.private_files.add(path)

    def sync_all(self, files: Sequence[str], folders: Sequence[str]) -> None:
        for path in files:
            self.open(path, write=True).sync()
        for path in folders:
            self.sync_dir(path)

    def total_bytes(self, path: str) -> int:
        return 1 << 40

    def free_bytes(self, path: str) -> int:
        self._folder(path)
        return self.free_space_bytes

    def has_spare_descriptors(
        self, *, for_new_log: bool = False, for_small_segment: bool = False
    ) -> bool:
        if for_small_segment:
            return self.spare_descriptors and self.half_of_descriptors_is_free
        return for_new_log or self.spare_descriptors

    def lock(self, path: str) -> _MemoryLock:
        self._read("lock", path)
        self.open(path, create=True, write=True)
        inode = self._inode(path)
        if inode in self._locked:
            raise DirectoryLockedError(posixpath.dirname(path))
        self._locked.add(inode)
        return _MemoryLock(self, inode)

    def read_file(self, path: str) -> bytes:
        self._read("read_file", path)
        return bytes(self._inode(path).content)

    # --- inside ---------------------------------------------------------------------------------

    def _pwrite(self, inode: _Inode, path: str, data: bytes, position: int) -> None:
        with self._mutex:
            try:
                self._step("pwrite", path)
            except OSError:
                part = data[: self._rng.randrange(len(data) + 1)]
                inode.change(position, part) if part else None
                raise
            inode.change(position, data)
            inode.mtime_ms = self._wall_ms

    def _truncate(self, inode: _Inode, path: str, length: int) -> None:
        with self._mutex:
            self._step("truncate", path)
            inode.change(length, None)
            inode.mtime_ms = self._wall_ms

    def _sync_file(self, inode: _Inode, path: str) -> None:
        with self._mutex:
            try:
                self._step("sync", path)
            except OSError:
                inode.lose_sync(self._rng)
                raise
            if not self._is_ignored("sync", path):
                inode.sync()

    def _is_ignored(self, operation: str, path: str) -> bool:
        return self._ignored_sync is not None and self._ignored_sync(operation, path)

    def _step(self, operation: str, path: str) -> None:
        """Count an operation that changes the disk; crash or fail instead of it if so asked."""
        if not self._dead:
            self.operations += 1
            self._dead = self.crash_at == self.operations
        self._read(operation, path)
        self.history.append((operation, path))

    def _read(self, operation: str, path: str) -> None:
        if self._dead:
            raise SimulatedCrash(f"{self!r}: {operation} {path}")
        for fault in self._faults:
            if fault.predicate(operation, path):
                fault.hits += 1
                number = fault.error.errno or errno.EIO
                raise OSError(number, fault.error.strerror or os.strerror(number), path)

    def _find(self, path: str) -> _Inode | _Folder | None:
        return self._at(_parts(path))

    def _at(self, parts: tuple[str, ...]) -> _Inode | _Folder | None:
        node: _Inode | _Folder | None = self._root
        for part in parts:
            if not isinstance(node, _Folder):
                return None
            node = node.names.get(part)
        return node

    def _parent(self, path: str) -> tuple[_Folder, str]:
        parts = _parts(path)
        if not parts:
            raise _os_error(errno.EISDIR, path)
        return _as_folder(self._at(parts[:-1]), path), parts[-1]

    def _folder(self, path: str) -> _Folder:
        return _as_folder(self._find(path), path)

    def _inode(self, path: str) -> _Inode:
        node = self._find(path)
        if node is None:
            raise _os_error(errno.ENOENT, path)
        if isinstance(node, _Folder):
            raise _os_error(errno.EISDIR, path)
        return node


def _as_folder(node: _Inode | _Folder | None, path: str) -> _Folder:
    if node is None:
        raise _os_error(errno.ENOENT, path)
    if isinstance(node, _Inode):
        raise _os_error(errno.ENOTDIR, path)
    return node


@lru_cache(4096)  # the crash tests name the same files millions of times
def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in posixpath.normpath(path).split("/") if part not in ("", "."))


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
