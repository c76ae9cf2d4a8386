"""The cleaner's state and job history on disk, one set of files per log directory.

Rules
- `varve.cleaner` is one sealed file, replaced as a whole and durably. `varve.cleaner-history` is
  appended to and never synced. A thread writes both. Changes of a few seconds are written
  together, an operator's pause and the beginning of a publication at once.
- A failed write of the state is repeated every SAVE_SECONDS, and once more at the stop. Lines of
  the history that could not be written are lost.
- A damaged file is ignored and logged. If the disk does not give the file, its directory fails: the
  file may be intact, and the next write would replace it.
- A directory that cannot be written is logged once until it can be written again; it does not
  delay other directories.
- The state is written before the cleaner checkpoint, so the checkpoint never has a higher first
  dirty offset than the state on the disk has, or had before the offset fell
  (`earlier_first_dirty_offset`). If it is higher at a start, another broker has written it, or it
  is damaged.
- The files of a directory without served partitions stay unchanged: if its disk has failed, they
  are needed when the disk comes back.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import structlog

from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import (
    PartitionCleanerState,
    state_at_start,
    state_of_log,
    without_records,
)
from cleaner.scheduler.history import JobRecord, append_records, encode_record, load_records
from storage.env import Env, write_file_atomically
from storage.errors import StorageError
from storage.format.sealed_json import seal_body, unseal
from storage.model import TopicPartition

STATE_NAME: Final = "varve.cleaner"
MAGIC: Final = "varve-cleaner"
VERSION: Final = 1
SAVE_SECONDS: Final = 5.0  # changes of this period are written together
CLOSE_SECONDS: Final = 5.0  # limit of the last write, at the stop
ANSWER_SECONDS: Final = 5.0  # limit of the wait for a durable pause

# The rows of a file, each with the state that it encodes.
EncodedRows: TypeAlias = dict[TopicPartition, tuple[PartitionCleanerState, str]]
OffsetsSaved: TypeAlias = Callable[[Mapping[TopicPartition, int | None]], None]

logger = structlog.get_logger("cleaner")


class CleanerStateStore:
    """The cleaner state of each partition, over all log directories."""

    def __init__(
        self,
        env: Env,
        offsets_saved: OffsetsSaved = lambda _: None,
        fail_directory: Callable[[str, OSError], None] = lambda *_: None,
    ) -> None:
        """`offsets_saved` is called with the first dirty offsets of a file that is on the disk.

        `fail_directory` is called if the disk does not give the file of a directory.
        """
        self._env = env
        self._offsets_saved = offsets_saved
        self._fail_directory = fail_directory
        self._entries: dict[TopicPartition, PartitionCleanerState] = {}
        self._directories: dict[TopicPartition, str] = {}  # the data directory of each
        self._writers: dict[str, StateFileWriter] = {}

    async def load(
        self,
        directories: Iterable[str],
        directory_of: Callable[[TopicPartition], str | None] = lambda _: None,
    ) -> list[JobRecord]:
        """Read the files of all directories; return the job records. Ignores damaged files.

        A kill soon after a move may leave a partition in two files. Then the entry in the directory
        of its log counts, which `directory_of` returns: it is newer.
        """
        job_records: list[JobRecord] = []
        for directory in directories:
            try:
                entries, records = await asyncio.to_thread(_load, self._env, directory)
            except OSError as error:
                self._fail_directory(directory, error)
                continue
            for partition, entry in entries.items():
                if partition not in self._entries or directory_of(partition) == directory:
                    self._entries[partition] = entry
                    self._directories[partition] = directory
            job_records += records
        return job_records

    def report_loaded(self) -> None:
        """Report the loaded first dirty offsets: from now on, they bound the checkpoints."""
        self._offsets_saved(first_dirty_offsets(self._entries))

    def cleaned_elsewhere_end(
        self, partition: TopicPartition, topic_id: bytes, checkpoint: int | None
    ) -> int:
        """Return the offset below which another broker has cleaned the log; 0 if none has.

        `checkpoint` is the one on the disk.
        """
        cleaner_state = self._entries.get(partition)
        if cleaner_state is None or cleaner_state.topic_id != topic_id:
            return 0
        end = cleaner_state.cleaned_elsewhere_end
        is_higher = cleaner_state.is_cleaned_elsewhere(checkpoint)
        return max(end, checkpoint or 0) if is_higher else end

    def state_of(self, facts: LogFacts, now_ms: int) -> PartitionCleanerState:
        """Return the state that applies to this log; create it for a new partition."""
        return self._valid(facts, state_of_log(self._entries.get(facts.partition), facts, now_ms))

    def state_at_start(self, facts: LogFacts, now_ms: int) -> PartitionCleanerState:
        """Return `state_of` for a log that exists at the start; call it once, before `state_of`."""
        return self._valid(facts, state_at_start(self._entries.get(facts.partition), facts, now_ms))

    def _valid(self, facts: LogFacts, valid_state: PartitionCleanerState) -> PartitionCleanerState:
        cleaner_state = self._entries.get(facts.partition)
        is_new = cleaner_state is None and not valid_state.cleaned_end
        if is_new and not facts.config.compacts:
            return valid_state  # nothing to save before the topic is compacted
        has_moved = self._directories.get(facts.partition) != facts.data_directory
        if valid_state is not cleaner_state or has_moved:
            self.put(facts, valid_state)
        return valid_state

    def entry(self, partition: TopicPartition) -> PartitionCleanerState | None:
        """Return the last state, also if it does not apply to the log any more; for metrics."""
        return self._entries.get(partition)

    def put(
        self, facts: LogFacts, cleaner_state: PartitionCleanerState, *, at_once: bool = False
    ) -> None:
        """Replace the state of a log and save it soon."""
        before = self._directories.get(facts.partition)
        self._entries[facts.partition] = cleaner_state
        self._directories[facts.partition] = facts.data_directory
        if before is not None and before != facts.data_directory:
            self._writer_of(before).changed()
        self._writer_of(facts.data_directory).changed(at_once=at_once)

    def note_checkpoint(
        self, partition: TopicPartition, offset: int, *, is_on_disk: bool = False
    ) -> None:
        """Store the first dirty offset as well, if there is a state of the partition.

        `is_on_disk`: the checkpoint on the disk has it already.
        """
        cleaner_state = self._entries.get(partition)
        if cleaner_state is not None and cleaner_state.first_dirty_offset != offset:
            new_state = cleaner_state.with_first_dirty_offset(offset)
            earlier = 0 if is_on_disk else new_state.earlier_first_dirty_offset
            self._entries[partition] = replace(
                new_state,
                earlier_first_dirty_offset=earlier,
                cleaned_end=_raised(cleaner_state.cleaned_end, offset),
            )
            self._writer_of(self._directories[partition]).changed()

    async def prepare_publication(self, partition: TopicPartition, end_offset: int) -> None:
        """Raise the end of all cleans and drop the digests, on the disk as well if it has room.

        Call it before a clean up to `end_offset` changes the log: if the clean is aborted or the
        broker is killed then, a table that is older would not notice what was removed, and a check
        would miss the superseded records that the digests include.
        """
        cleaner_state = self._entries.get(partition)
        if cleaner_state is None:
            return
        end = _raised(cleaner_state.cleaned_end, end_offset)
        new_state = replace(cleaner_state, cleaned_end=end, digest_end=0, digests=())
        if new_state != cleaner_state:
            await self._replace(partition, new_state)

    async def forget_records(self, partition: TopicPartition, offset: int) -> None:
        """Drop what is known of the records of a partition, on the disk as well if it has room.

        Call it before the log is truncated to `offset`: after a kill, what is known of removed
        records would be taken for knowledge of those that producers have written in their place.
        The first dirty offset becomes `offset` at most. If it stayed higher, the broker would not
        notice that another broker has cleaned the log up to an offset in between.
        """
        cleaner_state = self._entries.get(partition)
        if cleaner_state is None:
            return
        new_state = without_records(cleaner_state, self._env.wall_ms())
        if new_state.first_dirty_offset is not None:
            first_dirty_offset = min(new_state.first_dirty_offset, offset)
            new_state = replace(
                new_state, first_dirty_offset=first_dirty_offset, earlier_first_dirty_offset=0
            )
        await self._replace(partition, new_state)

    async def _replace(
        self, partition: TopicPartition, cleaner_state: PartitionCleanerState
    ) -> None:
        self._entries[partition] = cleaner_state
        self._writer_of(self._directories[partition]).changed(at_once=True)
        await self.saved(partition)

    async def saved(self, partition: TopicPartition) -> bool:
        """Write the state of a partition now; return whether it is on the disk.

        Return False if the write fails or takes longer than ANSWER_SECONDS.
        """
        directory = self._directories.get(partition)
        return directory is None or await self._writer_of(directory).saved()

    def paused_partitions(self) -> set[TopicPartition]:
        """Return the partitions that operators paused."""
        return {
            p
            for p, cleaner_state in self._entries.items()
            if cleaner_state.paused_since_ms is not None
        }

    def keep_only(
        self, served: frozenset[TopicPartition], exists: Callable[[TopicPartition], bool]
    ) -> None:
        """Drop deleted partitions; the file of a directory with no partition left stays.

        `exists` decides for partitions that are not served: they are offline, new or deleted.
        """
        deleted = {p for p in self._entries.keys() - served if not exists(p)}
        if not deleted:
            return
        used = {directory for p, directory in self._directories.items() if p in served}
        for partition in deleted:
            del self._entries[partition]
            directory = self._directories.pop(partition)
            if directory in used:
                self._writer_of(directory).changed()

    def record(self, directory: str, record: JobRecord) -> None:
        """Add a job to the directory's history."""
        self._writer_of(directory).record(record)

    async def close(self) -> None:
        """Write all pending changes, within CLOSE_SECONDS."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))

    def _writer_of(self, directory: str) -> "StateFileWriter":
        result = self._writers.get(directory)
        if result is None:
            result = StateFileWriter(
                self._env, directory, lambda: self._entries_in(directory), self._offsets_saved
            )
            self._writers[directory] = result
        return result

    def _entries_in(self, directory: str) -> dict[TopicPartition, PartitionCleanerState]:
        return {p: self._entries[p] for p, path in self._directories.items() if path == directory}


def _raised(cleaned_end: int | None, offset: int) -> int | None:
    return None if cleaned_end is None else max(cleaned_end, offset)


class StateFileWriter:
    """Writes the files of one directory, one write at a time. An empty path is never written."""

    def __init__(
        self,
        env: Env,
        directory: str,
        entries: Callable[[], Mapping[TopicPartition, PartitionCleanerState]],
        offsets_saved: OffsetsSaved,
    ) -> None:
        self._env = env
        self._offsets_saved = offsets_saved
        self._directory = directory
        self._entries = entries
        self._changes = 0  # since the start
        self._saved = 0  # how many of these are on the disk
        self._rows: EncodedRows = {}  # of the last write; the thread uses it, one write at a time
        self._lines: list[bytes] = []
        self._urgent = asyncio.Event()
        self._waiting: list[asyncio.Future[int]] = []  # for the end of a write
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._closing = False

    def changed(self, *, at_once: bool = False) -> None:
        """Schedule a write of the state."""
        self._changes += 1
        self._begin(at_once=at_once)

    async def saved(self) -> bool:
        """See CleanerStateStore.saved."""
        requested = self._changes
        if not self._directory or self._saved >= requested:
            return bool(self._directory)
        self._begin(at_once=True)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                while await self._write_ended() < requested:
                    pass
        except TimeoutError:
            return False
        return self._saved >= requested

    async def _write_ended(self) -> int:
        """Wait for the end of a write; return how many changes it included, even if it failed."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        return await ended

    def record(self, record: JobRecord) -> None:
        """Schedule a write to the history."""
        self._lines.append(encode_record(record))
        self._begin(at_once=False)

    async def close(self) -> None:
        """Write all pending changes; give up after CLOSE_SECONDS, as the disk may hang."""
        self._closing = True
        self._urgent.set()
        if self._task is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self._task)
        except TimeoutError:
            logger.error("cleaner state not saved", directory=self._directory)

    def _begin(self, *, at_once: bool) -> None:
        if not self._directory:
            self._lines.clear()
            return
        if at_once:
            self._urgent.set()
        if self._task is None:
            self._task = asyncio.create_task(self._write_all(), name="cleaner-state")

    async def _write_all(self) -> None:
        try:
            while self._changes > self._saved or self._lines:
                try:
                    async with asyncio.timeout(SAVE_SECONDS):
                        await self._urgent.wait()
                except TimeoutError:
                    pass
                is_last = self._closing
                if not is_last:
                    self._urgent.clear()
                await self._write_once()
                if is_last:
                    break  # this was the last attempt
        finally:
            self._task = None
            self._notify_waiters(self._saved)

    async def _write_once(self) -> None:
        """Write all changes made so far; later ones go into the next write."""
        changes = self._changes
        entries = self._entries() if changes > self._saved else None
        lines, self._lines = self._lines, []
        if await self._write(entries, lines):
            self._saved = changes
            if entries is not None:
                self._offsets_saved(first_dirty_offsets(entries))
        self._notify_waiters(changes)

    def _notify_waiters(self, changes: int) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(changes)

    async def _write(
        self, entries: Mapping[TopicPartition, PartitionCleanerState] | None, lines: list[bytes]
    ) -> bool:
        """Return whether everything is on the disk."""
        try:
            await asyncio.to_thread(_save, self._env, self._directory, entries, lines, self._rows)
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "cleaner state not saved",
                    directory=self._directory,
                    reason=str(error),
                )
            self._is_failing = True
        except Exception:
            logger.exception("cleaner state not saved", directory=self._directory)
        else:
            if self._is_failing:
                logger.info("cleaner state saved again", directory=self._directory)
            self._is_failing = False
            return True
        return False


# In a thread --------------------------------------------------------------------------------


def _save(
    env: Env,
    directory: str,
    entries: Mapping[TopicPartition, PartitionCleanerState] | None,
    lines: list[bytes],
    rows: EncodedRows,
) -> None:
    try:
        if lines:
            append_records(env, directory, lines)
    finally:
        if entries is not None:
            data = encode_cleaner_state(entries, rows)
            write_file_atomically(env, f"{directory}/{STATE_NAME}", data)


def first_dirty_offsets(
    entries: Mapping[TopicPartition, PartitionCleanerState],
) -> dict[TopicPartition, int | None]:
    """Return the first dirty offset of each partition; None if unknown."""
    return {p: cleaner_state.first_dirty_offset for p, cleaner_state in entries.items()}


def encode_cleaner_state(
    entries: Mapping[TopicPartition, PartitionCleanerState], rows: EncodedRows | None = None
) -> bytes:
    """Return the sealed file. `rows` are those of the previous file; they become those of this one.

    Only entries that changed are encoded, because most cleans write the file, which may have
    thousands of entries. Each is encoded alone, because one large json.dumps blocks the loop.
    """
    rows = {} if rows is None else rows
    for partition in rows.keys() - entries.keys():
        del rows[partition]
    for partition, cleaner_state in entries.items():
        if partition not in rows or rows[partition][0] is not cleaner_state:
            row = [partition.topic, partition.partition, cleaner_state.to_json()]
            rows[partition] = cleaner_state, json.dumps(row, separators=(",", ":"))
    text = ",".join(row for _, row in rows.values())
    return seal_body(MAGIC, VERSION, f'{{"partitions":[{text}]}}'.encode())


def decode_cleaner_state(data: bytes, path: str) -> dict[TopicPartition, PartitionCleanerState]:
    """Decode the file. Raises StorageError, ValueError, KeyError, TypeError if it is malformed."""
    cleaner_states: dict[TopicPartition, PartitionCleanerState] = {}
    rows: list[Any] = unseal(MAGIC, VERSION, data, path)["partitions"]
    for topic, number, fields in rows:
        if not isinstance(topic, str) or not isinstance(number, int):
            raise ValueError(f"{topic!r:.100}, {number!r:.100} is no partition")
        cleaner_states[TopicPartition(topic, number)] = PartitionCleanerState.from_json(fields)
    return cleaner_states


def _load(
    env: Env, directory: str
) -> tuple[dict[TopicPartition, PartitionCleanerState], list[JobRecord]]:
    """Raises the OSError of a state file that is there and cannot be read."""
    entries: dict[TopicPartition, PartitionCleanerState] = {}
    records: list[JobRecord] = []
    path = f"{directory}/{STATE_NAME}"
    try:
        if env.exists(path):
            entries = decode_cleaner_state(env.read_file(path), path)
    except (
        IsADirectoryError,
        StorageError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        # Only learned facts and pauses are lost.
        logger.warning(
            "cleaner state not read",
            path=path,
            reason=f"{type(error).__name__}: {error}",
        )
    try:
        records = load_records(env, directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        # Only history is lost; keep the state.
        reason = f"{type(error).__name__}: {error}"
        logger.warning("job history not read", directory=directory, reason=reason)
    return entries, records
