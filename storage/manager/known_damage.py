"""The damaged ranges of logs, kept over restarts in one file per log directory.

Rules
- `varve.damage` is a sealed file that is replaced atomically. It is written with the checkpoints,
  and only if a range was found or is gone since.
- Each range has a checksum of its bytes. At the next start it applies only if the segment still has
  these bytes. It is dropped if the segment is gone or the topic was created again.
- Ranges of an offline partition stay in the file.
- A damaged file is ignored, with a note: the damage must be found again. A file that the disk does
  not give may be intact: its directory fails, before a write replaces the file.
- Ranges that are only uncleanable are not kept: a clean finds them again, and a newer version may
  be able to clean them.
"""

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

from storage.directory.log_directory import LogDirectory
from storage.env import Env, write_file_atomically
from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.format import filenames
from storage.format.sealed_json import seal_body, unseal
from storage.log.log import Log
from storage.model import TopicPartition
from storage.segments.damage import DamagedSegment

MAGIC: Final = "varve-damage"
VERSION: Final = 1
RANGES_MAX: Final = 10_000  # of one directory: 3 MB of JSON; more damage is found again
REASON_CHARS_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class DamageEntry:
    """One range in the file; the fields are those of DamagedSegment."""

    topic_id: str
    base_offset: int
    position: int
    end_position: int
    first_offset: int
    next_offset: int
    checksum: int
    reason: str

    def __post_init__(self) -> None:
        numbers = (
            self.base_offset,
            self.position,
            self.end_position,
            self.first_offset,
            self.next_offset,
            self.checksum,
        )
        if not all(type(number) is int and 0 <= number < 1 << 63 for number in numbers):
            raise ValueError(f"{numbers} are not offsets and positions")
        if not self.position < self.end_position:
            raise ValueError(f"bytes {self.position} to {self.end_position} are no range")
        if not isinstance(self.reason, str):
            raise TypeError(f"{self.reason!r:.100} is no reason")


Entries = dict[TopicPartition, tuple[DamageEntry, ...]]


class KnownDamage:
    """The damage files of all log directories. One thread at a time uses it."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._on_disk: dict[str, Entries] = {}  # by log directory
        self._checksums: dict[DamagedSegment, int] = {}  # of the ranges in the files

    def read(self, directory: LogDirectory) -> None:
        """Read the file of a directory; a damaged file is noted there and ignored.

        Raises OSError.
        """
        path = directory.file(filenames.DAMAGE)
        try:
            self._on_disk[directory.path] = decode_damage(self._env.read_file(path), path)
        except FileNotFoundError:
            self._on_disk[directory.path] = {}
        except (
            IsADirectoryError,
            CorruptCheckpointError,
            NewerFormatError,
            ValueError,
            TypeError,
            KeyError,
        ) as error:
            self._on_disk[directory.path] = {}
            directory.notes.append(f"{path} is ignored, its damage must be found again: {error}")

    def entries(self, directory: LogDirectory) -> Entries:
        """Return the content of a directory's file as it was last read or written."""
        return self._on_disk.get(directory.path, {})

    def restore(self, directory: LogDirectory, log: Log) -> None:
        """Add the ranges of the file to an opened log where its bytes are the same."""
        for entry in self.entries(directory).get(log.partition, ()):
            if entry.topic_id == log.topic_id.hex():
                with suppress(OSError):  # bytes that cannot be read are found again
                    log.damage.restore(
                        base_offset=entry.base_offset,
                        positions=range(entry.position, entry.end_position),
                        offsets=range(entry.first_offset, entry.next_offset),
                        checksum=entry.checksum,
                        reason=entry.reason,
                    )

    def write(
        self,
        directory: LogDirectory,
        logs: Mapping[TopicPartition, Log],
        offline: Collection[TopicPartition],
    ) -> None:
        """Write the file if the ranges differ from those in it. Raises NoRoomError, OSError."""
        before = self.entries(directory)
        entries = {partition: before[partition] for partition in offline if partition in before}
        count = 0
        for partition, log in logs.items():
            damaged = log.damage.ranges[: RANGES_MAX - count]
            rows = tuple(filter(None, (self._entry(log, damage) for damage in damaged)))
            if rows:
                entries[partition] = rows
                count += len(rows)
        if entries == before:
            return
        path = directory.file(filenames.DAMAGE)
        write_file_atomically(self._env, path, encode_damage(entries))
        self._on_disk[directory.path] = entries

    def _entry(self, log: Log, damage: DamagedSegment) -> DamageEntry | None:
        """Return the entry of a range; None if its segment is gone or cannot be read."""
        checksum = self._checksums.get(damage)
        if checksum is None:
            with suppress(OSError):  # a bad sector; its next reader finds it again
                checksum = log.damage.checksum_of(damage)
            if checksum is None:
                return None
            if len(self._checksums) >= 2 * RANGES_MAX:
                self._checksums.clear()
            self._checksums[damage] = checksum
        return DamageEntry(
            log.topic_id.hex(),
            damage.base_offset,
            damage.position,
            damage.end_position,
            damage.first_offset,
            damage.next_offset,
            checksum,
            damage.reason[:REASON_CHARS_MAX],
        )


def encode_damage(entries: Entries) -> bytes:
    """Return the sealed file."""
    rows = [
        [*partition, asdict(entry)]
        for partition, ranges in sorted(entries.items())
        for entry in ranges
    ]
    body = json.dumps({"damaged": rows}, separators=(",", ":"))
    return seal_body(MAGIC, VERSION, body.encode())


def decode_damage(data: bytes, path: str) -> Entries:
    """Decode the file.

    Raises CorruptCheckpointError, NewerFormatError, ValueError, TypeError, KeyError.
    """
    entries: Entries = {}
    rows: list[Any] = unseal(MAGIC, VERSION, data, path)["damaged"]
    for topic, number, fields in rows:
        partition = TopicPartition(topic, number)
        entries[partition] = (*entries.get(partition, ()), DamageEntry(**fields))
    return entries
