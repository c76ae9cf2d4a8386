"""What the cleaner remembers and what it has done, on the disk: one keeper per data directory.

Rules
- `varve.cleaner` is one sealed file, replaced as a whole and durably; `varve.cleaner-history` is
  appended to and never synced. Both are written in a thread, changes of a few seconds together, an
  operator's hold at once.
- A change stays to be written until it is: a write that failed is repeated every SAVE_SECONDS, and
  once more at the stop. Lines of the history that could not be written are lost.
- What cannot be read is done without, and said in one line. A directory that cannot be written is
  told of once, until it can be again; it never holds up another one.
- A directory of which no partition is served is left as it is: its disk may have failed, and what
  stands there is wanted when it comes back.
"""

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import structlog

from cleaner.host import LogFacts
from cleaner.planning.cleaner_state import PartitionCleanerState, state_of_log
from cleaner.scheduler.history import JobRecord, append_records, encode_record, load_records
from storage.env import Env, write_file_atomically
from storage.errors import StorageError
from storage.format.sealed_json import seal_body, unseal
from storage.model import TopicPartition

MEMORY_NAME: Final = "varve.cleaner"
MAGIC: Final = "varve-cleaner"
VERSION: Final = 1
SAVE_SECONDS: Final = 5.0  # changes of this long are written together
CLOSE_SECONDS: Final = 5.0  # for the last write, at the stop
ANSWER_SECONDS: Final = 5.0  # whoever asks whether a hold is durable waits no longer

logger = structlog.get_logger("cleaner")


class CleanerStateStore:
    """Partition -> Remembered, over all data directories."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._entries: dict[TopicPartition, PartitionCleanerState] = {}
        self._directories: dict[TopicPartition, str] = {}  # the data directory of each
        self._writers: dict[str, StateFileWriter] = {}

    async def load(self, directories: Iterable[str]) -> list[JobRecord]:
        """Read what earlier processes left; returns their jobs. Never raises for bad files."""
        job_records: list[JobRecord] = []
        for directory in directories:
            entries, records = await asyncio.to_thread(_load, self._env, directory)
            self._entries.update(entries)
            self._directories.update(dict.fromkeys(entries, directory))
            job_records += records
        return job_records

    def state_of(self, facts: LogFacts, now_ms: int) -> PartitionCleanerState:
        """What may be believed of this log; a partition never seen before is begun here."""
        cleaner_state = self._entries.get(facts.partition)
        now = state_of_log(cleaner_state, facts, now_ms)
        if cleaner_state is None and not facts.config.compacts:
            return now  # there is nothing to remember before it is compacted
        if (
            now is not cleaner_state
            or self._directories.get(facts.partition) != facts.data_directory
        ):
            self.put(facts, now)
        return now

    def entry(self, partition: TopicPartition) -> PartitionCleanerState | None:
        """What was remembered last, believable or not; for the metrics."""
        return self._entries.get(partition)

    def put(
        self, facts: LogFacts, cleaner_state: PartitionCleanerState, *, at_once: bool = False
    ) -> None:
        """Replace what is remembered of a log, and save it soon."""
        before = self._directories.get(facts.partition)
        self._entries[facts.partition] = cleaner_state
        self._directories[facts.partition] = facts.data_directory
        if before is not None and before != facts.data_directory:
            self._writer_of(before).changed()
        self._writer_of(facts.data_directory).changed(at_once=at_once)

    async def saved(self, partition: TopicPartition) -> bool:
        """Write now what is remembered of a partition; whether it stands on the disk.

        False where a write failed, and where none ended within ANSWER_SECONDS.
        """
        place = self._directories.get(partition)
        return place is None or await self._writer_of(place).saved()

    def paused_partitions(self) -> set[TopicPartition]:
        """Partitions with an operator's hold."""
        return {
            p
            for p, cleaner_state in self._entries.items()
            if cleaner_state.held_since_ms is not None
        }

    def keep_only(
        self, seen: frozenset[TopicPartition], exists: Callable[[TopicPartition], bool]
    ) -> None:
        """Forget partitions that are gone; the file of a directory with none left stays.

        `seen` are served; of the others `exists` is asked: one that is offline, or was made since
        `seen` was begun, is not gone.
        """
        gone = {partition for partition in self._entries.keys() - seen if not exists(partition)}
        if not gone:
            return
        served = {place for partition, place in self._directories.items() if partition in seen}
        for partition in gone:
            del self._entries[partition]
            place = self._directories.pop(partition)
            if place in served:
                self._writer_of(place).changed()

    def record(self, directory: str, record: JobRecord) -> None:
        """Add a job to the directory's history."""
        self._writer_of(directory).record(record)

    async def close(self) -> None:
        """Write what is left; bounded, and each directory for itself."""
        keepers = [writer.close() for writer in self._writers.values()]
        await asyncio.gather(*keepers)

    def _writer_of(self, directory: str) -> "StateFileWriter":
        result = self._writers.get(directory)
        if result is None:
            result = StateFileWriter(self._env, directory, lambda: self._of(directory))
            self._writers[directory] = result
        return result

    def _of(self, directory: str) -> dict[TopicPartition, PartitionCleanerState]:
        return {p: self._entries[p] for p, place in self._directories.items() if place == directory}


class StateFileWriter:
    """Writes one directory's files, one write at a time. An unnamed directory is not written."""

    def __init__(
        self,
        env: Env,
        directory: str,
        entries: Callable[[], Mapping[TopicPartition, PartitionCleanerState]],
    ) -> None:
        self._env = env
        self._directory = directory
        self._entries = entries
        self._changes = 0  # so far
        self._saved = 0  # of these, so many stand on the disk
        self._lines: list[bytes] = []
        self._urgent = asyncio.Event()
        self._waiting: list[asyncio.Future[int]] = []  # for the end of a write
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False
        self._closing = False

    def changed(self, *, at_once: bool = False) -> None:
        """The memory is to be written, soon or at once."""
        self._changes += 1
        self._begin(at_once=at_once)

    async def saved(self) -> bool:
        """See Memory.saved."""
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
        """Wait for the end of a write, good or bad; how many changes it had in it."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append(ended)
        return await ended

    def record(self, record: JobRecord) -> None:
        """A job is to be added to the history."""
        self._lines.append(encode_record(record))
        self._begin(at_once=False)

    async def close(self) -> None:
        """Write what is left. Gives up after a while: the disk may hang."""
        self._closing = True
        self._urgent.set()
        if self._task is None:
            return
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.shield(self._task)
        except TimeoutError:
            logger.error("what the cleaner remembers is not saved", directory=self._directory)

    def _begin(self, *, at_once: bool) -> None:
        if not self._directory:
            self._lines.clear()
            return
        if at_once:
            self._urgent.set()
        if self._task is None:
            self._task = asyncio.create_task(self._write_all(), name="cleaner-memory")

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
                    break  # it was tried once more
        finally:
            self._task = None
            self._log_failure(self._saved)

    async def _write_once(self) -> None:
        """Write what there is now; what the memory lacks then is written with the next one."""
        changes = self._changes
        entries = self._entries() if changes > self._saved else None
        lines, self._lines = self._lines, []
        if await self._write(entries, lines):
            self._saved = changes
        self._log_failure(changes)

    def _log_failure(self, changes: int) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(changes)

    async def _write(
        self, entries: Mapping[TopicPartition, PartitionCleanerState] | None, lines: list[bytes]
    ) -> bool:
        """Whether all of it stands on the disk."""
        try:
            await asyncio.to_thread(_save, self._env, self._directory, entries, lines)
        except OSError as error:
            if not self._is_failing:
                logger.warning(
                    "what the cleaner remembers is not saved",
                    directory=self._directory,
                    reason=str(error),
                )
            self._is_failing = True
        except Exception:
            logger.exception("what the cleaner remembers is not saved", directory=self._directory)
        else:
            if self._is_failing:
                logger.info("what the cleaner remembers is saved again", directory=self._directory)
            self._is_failing = False
            return True
        return False


# In a thread --------------------------------------------------------------------------------


def _save(
    env: Env,
    directory: str,
    entries: Mapping[TopicPartition, PartitionCleanerState] | None,
    lines: list[bytes],
) -> None:
    try:
        if lines:
            append_records(env, directory, lines)
    finally:
        if entries is not None:
            write_file_atomically(env, f"{directory}/{MEMORY_NAME}", encode_cleaner_state(entries))


def encode_cleaner_state(entries: Mapping[TopicPartition, PartitionCleanerState]) -> bytes:
    """The sealed file. Entry by entry: one large json.dumps would keep the loop from running."""
    rows = [
        json.dumps(
            [partition.topic, partition.partition, cleaner_state.to_json()], separators=(",", ":")
        )
        for partition, cleaner_state in entries.items()
    ]
    return seal_body(MAGIC, VERSION, f'{{"partitions":[{",".join(rows)}]}}'.encode())


def decode_cleaner_state(data: bytes, path: str) -> dict[TopicPartition, PartitionCleanerState]:
    """Raises StorageError, ValueError, KeyError, TypeError for what is not ours."""
    cleaner_states: dict[TopicPartition, PartitionCleanerState] = {}
    rows: list[Any] = unseal(MAGIC, VERSION, data, path)["partitions"]
    for topic, number, existing in rows:
        if not isinstance(topic, str) or not isinstance(number, int):
            raise ValueError(f"{topic!r:.100}, {number!r:.100} is no partition")
        cleaner_states[TopicPartition(topic, number)] = PartitionCleanerState.from_json(existing)
    return cleaner_states


def _load(
    env: Env, directory: str
) -> tuple[dict[TopicPartition, PartitionCleanerState], list[JobRecord]]:
    entries: dict[TopicPartition, PartitionCleanerState] = {}
    records: list[JobRecord] = []
    path = f"{directory}/{MEMORY_NAME}"
    try:
        if env.exists(path):
            entries = decode_cleaner_state(env.read_file(path), path)
    except (OSError, StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Only work is lost, and holds: say so.
        logger.warning(
            "what the cleaner remembers is not read",
            path=path,
            reason=f"{type(error).__name__}: {error}",
        )
    try:
        records = load_records(env, directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        # Nothing but history is lost: the memory is not to go with it.
        reason = f"{type(error).__name__}: {error}"
        logger.warning("history of the cleaner not read", directory=directory, reason=reason)
    return entries, records
