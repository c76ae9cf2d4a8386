"""What the cleaner remembers and what it has done, on the disk: one keeper per data directory.

Rules
- `varve.cleaner` is one sealed file, replaced as a whole and durably; `varve.cleaner-history` is
  appended to and never synced. Both are written in a thread, changes of a few seconds together, an
  operator's hold at once.
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
from cleaner.planning.remembered import Remembered, recall
from cleaner.pool.history import JobRecord, append_records, encode_record, load_records
from storage.env import Env, write_file_atomically
from storage.errors import StorageError
from storage.model import TopicPartition
from storage.sealed_json import seal_body, unseal

MEMORY_NAME: Final = "varve.cleaner"
MAGIC: Final = "varve-cleaner"
VERSION: Final = 1
SAVE_SECONDS: Final = 5.0  # changes of this long are written together
CLOSE_SECONDS: Final = 5.0  # for the last write, at the stop

log = structlog.get_logger("cleaner")


class Memory:
    """Partition -> Remembered, over all data directories."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._entries: dict[TopicPartition, Remembered] = {}
        self._places: dict[TopicPartition, str] = {}  # the data directory of each
        self._keepers: dict[str, Keeper] = {}

    async def load(self, directories: Iterable[str]) -> list[JobRecord]:
        """Read what earlier processes left; returns their jobs. Never raises for bad files."""
        found: list[JobRecord] = []
        for directory in directories:
            entries, records = await asyncio.to_thread(_load, self._env, directory)
            self._entries.update(entries)
            self._places.update(dict.fromkeys(entries, directory))
            found += records
        return found

    def recall(self, facts: LogFacts, now_ms: int) -> Remembered:
        """What may be believed of this log; a partition never seen before is begun here."""
        known = self._entries.get(facts.partition)
        now = recall(known, facts, now_ms)
        if known is None and not facts.config.compacts:
            return now  # there is nothing to remember before it is compacted
        if now is not known or self._places.get(facts.partition) != facts.data_directory:
            self.put(facts, now)
        return now

    def put(self, facts: LogFacts, known: Remembered, *, at_once: bool = False) -> None:
        """Replace what is remembered of a log, and save it soon."""
        before = self._places.get(facts.partition)
        self._entries[facts.partition] = known
        self._places[facts.partition] = facts.data_directory
        if before is not None and before != facts.data_directory:
            self._keeper(before).changed()
        self._keeper(facts.data_directory).changed(at_once=at_once)

    def held(self) -> set[TopicPartition]:
        """Partitions with an operator's hold."""
        return {p for p, known in self._entries.items() if known.held_since_ms is not None}

    def keep_only(self, seen: frozenset[TopicPartition]) -> None:
        """Forget partitions that are gone; the file of a directory with none left stays."""
        gone = self._entries.keys() - seen
        if not gone:
            return
        served = {place for partition, place in self._places.items() if partition in seen}
        for partition in gone:
            del self._entries[partition]
            place = self._places.pop(partition)
            if place in served:
                self._keeper(place).changed()

    def record(self, directory: str, record: JobRecord) -> None:
        """Add a job to the directory's history."""
        self._keeper(directory).record(record)

    async def close(self) -> None:
        """Write what is left; bounded, and each directory for itself."""
        keepers = [keeper.close() for keeper in self._keepers.values()]
        await asyncio.gather(*keepers)

    def _keeper(self, directory: str) -> "Keeper":
        found = self._keepers.get(directory)
        if found is None:
            found = Keeper(self._env, directory, lambda: self._of(directory))
            self._keepers[directory] = found
        return found

    def _of(self, directory: str) -> dict[TopicPartition, Remembered]:
        return {p: self._entries[p] for p, place in self._places.items() if place == directory}


class Keeper:
    """Writes one directory's files, one write at a time. An unnamed directory is not written."""

    def __init__(
        self,
        env: Env,
        directory: str,
        entries: Callable[[], Mapping[TopicPartition, Remembered]],
    ) -> None:
        self._env = env
        self._directory = directory
        self._entries = entries
        self._changed = False
        self._lines: list[bytes] = []
        self._urgent = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failing = False
        self._closing = False

    def changed(self, *, at_once: bool = False) -> None:
        """The memory is to be written, soon or at once."""
        self._changed = True
        self._begin(at_once=at_once)

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
            log.error("cleaner_memory_given_up", directory=self._directory)

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
            while self._changed or self._lines:
                try:
                    async with asyncio.timeout(SAVE_SECONDS):
                        await self._urgent.wait()
                except TimeoutError:
                    pass
                if not self._closing:
                    self._urgent.clear()
                entries = self._entries() if self._changed else None
                lines, self._changed, self._lines = self._lines, False, []
                await self._write(entries, lines)
        finally:
            self._task = None

    async def _write(
        self, entries: Mapping[TopicPartition, Remembered] | None, lines: list[bytes]
    ) -> None:
        """A change that could not be written is written with the next one; lines are lost."""
        try:
            await asyncio.to_thread(_save, self._env, self._directory, entries, lines)
        except OSError as error:
            if not self._failing:
                log.warning("cleaner_memory_not_saved", directory=self._directory, why=str(error))
            self._failing = True
        except Exception:
            log.exception("cleaner_memory_not_saved", directory=self._directory)
        else:
            self._failing = False


# In a thread --------------------------------------------------------------------------------


def _save(
    env: Env,
    directory: str,
    entries: Mapping[TopicPartition, Remembered] | None,
    lines: list[bytes],
) -> None:
    if entries is not None:
        write_file_atomically(env, f"{directory}/{MEMORY_NAME}", encode_memory(entries))
    if lines:
        append_records(env, directory, lines)


def encode_memory(entries: Mapping[TopicPartition, Remembered]) -> bytes:
    """The sealed file. Entry by entry: one large json.dumps would keep the loop from running."""
    rows = [
        json.dumps([partition.topic, partition.partition, known.to_json()], separators=(",", ":"))
        for partition, known in entries.items()
    ]
    return seal_body(MAGIC, VERSION, f'{{"partitions":[{",".join(rows)}]}}'.encode())


def decode_memory(data: bytes, path: str) -> dict[TopicPartition, Remembered]:
    """Raises StorageError, ValueError, KeyError, TypeError for what is not ours."""
    found: dict[TopicPartition, Remembered] = {}
    rows: list[Any] = unseal(MAGIC, VERSION, data, path)["partitions"]
    for topic, number, known in rows:
        if not isinstance(topic, str) or not isinstance(number, int):
            raise ValueError(f"{topic!r:.100}, {number!r:.100} is no partition")
        found[TopicPartition(topic, number)] = Remembered.from_json(known)
    return found


def _load(env: Env, directory: str) -> tuple[dict[TopicPartition, Remembered], list[JobRecord]]:
    entries: dict[TopicPartition, Remembered] = {}
    records: list[JobRecord] = []
    path = f"{directory}/{MEMORY_NAME}"
    try:
        if env.exists(path):
            entries = decode_memory(env.read_file(path), path)
    except (OSError, StorageError, ValueError, KeyError, TypeError, AttributeError) as error:
        # Only work is lost, and holds: say so.
        log.warning("cleaner_memory_not_read", path=path, why=f"{type(error).__name__}: {error}")
    try:
        records = load_records(env, directory)
    except OSError as error:
        log.warning("cleaner_history_not_read", directory=directory, why=str(error))
    return entries, records
