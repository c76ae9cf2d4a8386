"""A copy of a partition in another log directory, which becomes the replica (Kafka's future log).

Rules
- The copy is in a folder with the suffix `-future`, which no start serves. The closed segments are
  copied as files; then the copy is a log that takes the batches that were appended meanwhile.
- One rename makes the copy the replica: the folder gets the name of the partition. Before it, all
  records that are durable in the old folder are durable in the copy, the checkpoints of the target
  directory have its offsets, and the metadata says that the replica moves. So a start after a crash
  serves the folder in the target directory if it exists, and else the old one
  (storage/directory/partition_placement.py).
- The copy is of one generation of the log. Nothing but retention may remove segments meanwhile.
- Lack of room and of descriptors ends the copy only. Another error of the target fails it.

`begin`, `copy_segment`, `copy_damaged_bytes`, `open` and `append` may run in a thread; the caller
serialises them.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from storage.directory.log_directory import LogDirectory
from storage.env import Env, File, rename_if_room, write_file
from storage.errors import LogDirectoryError, NoRoomError, StorageError, is_scarcity
from storage.format import filenames
from storage.format.batch import walk_headers
from storage.format.checkpoints import encode_partition_metadata
from storage.log.log import Log
from storage.log.log_state import LogContext, index_limits
from storage.recovery.load_log import load_log
from storage.segments.producer_snapshots import snapshots_in
from storage.segments.segment import Segment
from storage.view.ledger import read_manifest, view_path
from storage.view.manifest import MANIFEST_NAME

_T = TypeVar("_T")
CHUNK_BYTES: Final = 1 << 20  # copied between two looks at the order to stop


class CopyStoppedError(StorageError):
    """The copy was cancelled, or a change of its log made it useless."""


class ReplicaCopy:
    """The copy of one log in the directory `log_directory`."""

    def __init__(
        self, env: Env, log: Log, log_directory: LogDirectory, new_generation: Callable[[], str]
    ) -> None:
        self.log_directory = log_directory
        self.source = log
        self.log: Log | None = None  # after `open`
        self.is_stopped = False  # `stop` was called; any thread may read it
        self.copied_bytes = 0
        name = filenames.future_dir_name(log.partition, env.random_bytes(16).hex())
        self.folder = log_directory.file(name)
        self._env = env
        self._generation = log.generation
        self._new_generation = new_generation
        self.segments = log.segments.closed
        self._end_offset = log.segments.active.base_offset
        self._bases: list[int] = []

    def stop(self) -> None:
        """Stop copying soon, from any thread."""
        self.is_stopped = True

    def check(self) -> None:
        """Raise CopyStoppedError if the copy has become useless."""
        if self.is_stopped:
            raise CopyStoppedError("the move was cancelled")
        source = self.source
        if source.is_deleted or source.generation != self._generation or source.swap.is_running:
            raise CopyStoppedError("the log changed meanwhile")

    @property
    def size_bytes(self) -> int:
        """Return the bytes copied so far."""
        return self.copied_bytes if self.log is None else self.log.segments.size_bytes

    @property
    def lag(self) -> int:
        """Return how many offsets the copy is behind the log."""
        start = self.source.log_start_offset
        copied_end = self.log.log_end_offset if self.log is not None else start
        return max(0, self.source.log_end_offset - copied_end)

    # Closed segments

    def begin(self) -> None:
        """Create the folder. Raises NoRoomError, LogDirectoryError."""
        self._at_target(self._make_folder)

    def _make_folder(self) -> None:
        self._env.mkdir(self.folder)
        metadata = encode_partition_metadata(self.source.topic_id)
        write_file(self._env, f"{self.folder}/{filenames.PARTITION_METADATA}", metadata)

    def copy_segment(self, segment: Segment) -> None:
        """Copy the files of a closed segment; missing indexes are rebuilt by `open`.

        Retention may remove the segment meanwhile: its log file is open, and its records are below
        the log start offset. Raises CopyStoppedError, NoRoomError, LogDirectoryError, OSError.
        """
        base_offset = segment.base_offset
        path = self._path(base_offset, filenames.LOG)
        self._copy_file(segment.file, segment.size_bytes, path)
        self._at_target(lambda: self._env.set_mtime_ms(path, segment.last_modified_ms))
        for kind in (filenames.INDEX, filenames.TIME_INDEX, filenames.TXN_INDEX):
            self._copy_small(base_offset, kind)
        self._bases.append(base_offset)

    def copy_damaged_bytes(self) -> None:
        """Copy the files with bytes that an operator skipped; nothing else has these bytes.

        Raises CopyStoppedError, NoRoomError, LogDirectoryError, OSError.
        """
        for name in self._env.listdir(self.source.directory):
            if not name.endswith(filenames.DAMAGED_BYTES):
                continue
            with suppress(FileNotFoundError):  # deleted by the operator
                file = self._env.open(f"{self.source.directory}/{name}")
                try:
                    self._copy_file(file, file.size(), f"{self.folder}/{name}")
                finally:
                    file.close()

    def _copy_file(self, source: File, size_bytes: int, path: str) -> None:
        target = self._at_target(lambda: self._env.open(path, create=True, truncate=True))
        try:
            for position in range(0, size_bytes, CHUNK_BYTES):
                self.check()
                data = source.pread(min(CHUNK_BYTES, size_bytes - position), position)
                self._at_target(partial(target.pwrite, data, position))
                self.copied_bytes += len(data)
        finally:
            target.close()

    def _copy_small(self, base_offset: int, kind: str) -> None:
        name = filenames.file_name(base_offset, kind)
        try:
            data = self._env.read_file(f"{self.source.directory}/{name}")
        except FileNotFoundError:
            return
        self._at_target(lambda: write_file(self._env, f"{self.folder}/{name}", data))

    # The log

    def open(self) -> None:
        """Sync the copied files and open them as a log that ends at the last roll.

        Raises NoRoomError, LogDirectoryError, CopyStoppedError, OSError.
        """
        self.check()
        for offset in snapshots_in(self._env, self.source.directory):
            if offset <= self._end_offset:
                self._copy_small(offset, filenames.SNAPSHOT)
        epochs = f"{self.source.directory}/{filenames.LEADER_EPOCH_CHECKPOINT}"
        if self._env.exists(epochs):
            data = self._env.read_file(epochs)
            to = f"{self.folder}/{filenames.LEADER_EPOCH_CHECKPOINT}"
            self._at_target(lambda: write_file(self._env, to, data))
        self.log = self._at_target(self._open)
        epoch = self.log.leader_epoch  # that of the source may not be recorded, for lack of room
        if self.source.epochs.is_entered:
            epoch = self.source.leader_epoch
        if (self.log.log_end_offset, self.log.leader_epoch) != (self._end_offset, epoch):
            raise CopyStoppedError(
                f"the copy ends at offset {self.log.log_end_offset} of epoch "
                f"{self.log.leader_epoch}, not at {self._end_offset} of {epoch}"
            )
        for damage in self.source.damage.ranges:
            checksum = self.source.damage.checksum_of(damage)
            if checksum is not None and damage.base_offset in self._bases:
                self.log.damage.restore(
                    base_offset=damage.base_offset,
                    positions=range(damage.position, damage.end_position),
                    offsets=range(damage.first_offset, damage.next_offset),
                    checksum=checksum,
                    reason=damage.reason,
                )

    def _open(self) -> Log:
        limits = index_limits(self.source.config)
        Segment.begin(self._env, self.folder, self._end_offset, limits)
        names = self._env.listdir(self.folder)
        # With the topic id: if the topic is deleted while this directory is offline, the next start
        # has to recognise the folder.
        files = [f"{self.folder}/{name}" for name in names]
        self._env.sync_all(files, [self.folder, self.log_directory.path])
        loaded = load_log(
            self._env,
            self.folder,
            limits,
            was_clean=True,
            recovery_point=self._end_offset,
            log_start_offset=self.source.log_start_offset,
        )
        context = LogContext(self._env, self.log_directory, self._new_generation)
        source = self.source
        return Log(
            context, source.partition, source.topic_id, self.folder, source.config, loaded=loaded
        )

    def append(self, data: bytes) -> None:
        """Append whole batches of the log to the copy. Raises NoRoomError, LogDirectoryError."""
        assert self.log is not None
        now_ms = self._env.wall_ms()
        batches = memoryview(bytearray(data))
        for position, header in walk_headers(data):
            if header.base_offset < self.log.log_end_offset:
                continue
            batch = batches[position : position + header.size_bytes]
            self.log.append_replica(batch, header, now_ms=now_ms)

    def flush(self) -> None:
        """Make the copy durable. Raises NoRoomError, LogDirectoryError."""
        assert self.log is not None
        self.log.flush()

    def copy_view(self) -> None:
        """Copy the published version of the partition's view, if there is one.

        Raises CopyStoppedError, InvalidViewError, NoRoomError, LogDirectoryError, OSError.
        """
        manifest = read_manifest(self._env, self.source.directory)
        if manifest is None:
            return
        source, target = view_path(self.source.directory), view_path(self.folder)
        folders = [target, f"{target}/{manifest.compaction_id}"]
        for folder in folders:
            self._at_target(partial(self._env.mkdir, folder))
        paths = [f"{manifest.compaction_id}/{name}" for name in self._env.listdir(
            f"{source}/{manifest.compaction_id}"
        )]  # fmt: skip
        if self._env.exists(f"{source}/{MANIFEST_NAME}"):  # else `paths` have its copy
            paths.append(MANIFEST_NAME)
        for path in paths:
            file = self._env.open(f"{source}/{path}")
            try:
                self._copy_file(file, file.size(), f"{target}/{path}")
            finally:
                file.close()
        files = [f"{target}/{path}" for path in paths]
        self._at_target(lambda: self._env.sync_all(files, [*folders, self.folder]))

    # The switch

    def publish(self) -> Log:
        """Make the copy the replica, by one rename; return its log.

        The rename is durable when the caller has synced the directory. Raises LogDirectoryError or
        NoRoomError if it failed; the old log is the replica then.
        """
        assert self.log is not None
        folder = self.log_directory.file(str(self.source.partition))
        try:
            rename_if_room(self._env, self.folder, folder)
        except NoRoomError:
            raise
        except OSError as error:
            raise self.log_directory.failure(folder, "move to", error) from error
        self.log.replace_replica(self.source, folder)
        return self.log

    def _path(self, base_offset: int, kind: str) -> str:
        return f"{self.folder}/{filenames.file_name(base_offset, kind)}"

    def _at_target(self, operation: Callable[[], _T]) -> _T:
        """Run an operation on files of the copy; translate its errors."""
        try:
            return operation()
        except NoRoomError:
            raise
        except OSError as error:
            if is_scarcity(error):
                raise NoRoomError(error, self.folder) from error
            raise LogDirectoryError(
                self.log_directory.path, f"copy to {self.folder}: {error}"
            ) from error
