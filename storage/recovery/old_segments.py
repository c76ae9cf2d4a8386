"""Convert segments with messages of formats 0 and 1 to batches of format v2, in a folder of Kafka.

Rules
- Offsets, keys, values, timestamps and codecs stay. Batches of format v2 are copied as they are.
- The new file replaces the old one by one rename when it is durable. A crash leaves the old segment
  or the new one; indexes are removed before, and rebuilt by recovery.
- If a message cannot be read, it and everything after it in its segment stay as they are. Recovery
  treats the old messages among them as damage. A segment whose first message cannot be read is not
  replaced.
- Only a segment that begins with an old message is read. Kafka changes the format of a topic when
  its version is raised, so a segment seldom has old messages after new ones.
- The start that takes a folder over looks at all segments. Later ones try again what failed, for
  example for lack of room: they look at the segments before the first one of format v2, which is
  one read of a few bytes if there are none. The latest segment is converted first, so those that
  are left are the earliest ones.
"""

from collections.abc import Callable, Iterable
from enum import Enum, auto
from itertools import pairwise
from typing import Final

from storage.env import Env, File, remove_if_there
from storage.errors import (
    CorruptBatchError,
    DecompressionLimitError,
    NoRoomError,
    is_scarcity,
)
from storage.format import filenames
from storage.format.batch import LOG_APPEND_TIME, UNPACKED_BYTES_MAX, build_batch
from storage.format.compression import NONE
from storage.format.index import RELATIVE_OFFSET_MAX
from storage.format.old_messages import (
    OLD_HEAD_BYTES,
    OldMessages,
    is_old,
    old_size,
    read_old_messages,
)
from storage.segments.batch_scan import read_batch, verify

MESSAGE_BYTES_MAX: Final = 100 << 20  # of one message; Kafka's default is 1 MB
RUN_ID: Final = "convert"  # in the name of the new file; a start removes one that a crash left
BLOCK_BYTES: Final = 1 << 20  # of one read
BATCH_BYTES: Final = 64 << 10  # of the messages without a codec that one batch takes
NO_LEADER_EPOCH: Final = -1  # as Kafka writes it into batches that it converts


class OldSegments(Enum):
    """Which segments of a folder may begin with an old message."""

    NONE = auto()  # Varve created the topic
    FIRST = auto()  # those before the first segment of format v2: an earlier start took it over
    ANY = auto()  # this start takes the folder over


def convert_old_segments(
    env: Env,
    directory: str,
    bases: Iterable[int],
    go_on: Callable[[], None],
    *,
    expected: OldSegments,
) -> list[str]:
    """Convert the segments that begin with an old message; return a line for each.

    `bases` ascend. Raises NoRoomError, OSError.
    """
    if expected is OldSegments.NONE:
        return []
    old: list[int] = []
    for base_offset in bases:
        source = env.open(_path(directory, base_offset))
        try:
            if is_old(source.pread(OLD_HEAD_BYTES, 0)):
                old.append(base_offset)
            elif expected is OldSegments.FIRST:
                break
        finally:
            source.close()
    notes = []
    for base_offset in reversed(old):
        path = _path(directory, base_offset)
        source = env.open(path)
        try:
            done = _convert(env, directory, base_offset, source, go_on)
        finally:
            source.close()
        if done is not None:
            notes.append(f"{path}: {done}")
    return notes


def _path(directory: str, base_offset: int) -> str:
    return f"{directory}/{filenames.file_name(base_offset, filenames.LOG)}"


def _convert(
    env: Env, directory: str, base_offset: int, source: File, go_on: Callable[[], None]
) -> str | None:
    """Return what was done; None if the first message cannot be read."""
    name = filenames.cleaned_name(base_offset, filenames.LOG, RUN_ID)
    path = f"{directory}/{name}"
    modified_ms = env.mtime_ms(source.path)
    try:
        target = env.open(path, create=True, write=True, truncate=True)
        conversion = _Conversion(source, target)
        try:
            done = conversion.run(go_on)
            target.sync()
        finally:
            target.close()
        if not conversion.records:
            remove_if_there(env, path)
            return None
        env.set_mtime_ms(path, modified_ms)
    except OSError as error:
        remove_if_there(env, path)
        if is_scarcity(error):
            raise NoRoomError(error, directory) from error
        raise
    for kind in (filenames.INDEX, filenames.TIME_INDEX):
        remove_if_there(env, f"{directory}/{filenames.file_name(base_offset, kind)}")
    env.sync_dir(directory)
    env.rename(path, source.path)
    env.sync_dir(directory)
    return done


class _Conversion:
    """The conversion of one segment to a new file."""

    def __init__(self, source: File, target: File) -> None:
        self._source, self._target = source, target
        self._size_bytes = source.size()
        self._block, self._block_position = b"", 0
        self._written_bytes = 0
        self.records = 0  # converted ones
        self._group: list[OldMessages] = []  # of the next batch
        self._group_bytes = 0

    def run(self, go_on: Callable[[], None]) -> str:
        """Write the new file; return what was done. Raises OSError."""
        position, reason = 0, ""
        while position < self._size_bytes:
            go_on()
            head = self._read(position, OLD_HEAD_BYTES)
            try:
                if is_old(head):
                    if old_size(head) > min(MESSAGE_BYTES_MAX, self._size_bytes - position):
                        raise CorruptBatchError("the message is cut short")
                    message = self._read(position, old_size(head))
                    self._add(_records_of(message), len(message))
                    position += len(message)
                else:
                    self._end_batch()
                    batch = read_batch(self._source, position, self._size_bytes)
                    verify(batch, self._source.path)
                    self._write(batch.buffer)
                    position = batch.end_position
            except (CorruptBatchError, DecompressionLimitError) as error:
                reason = f"; from byte {position} on, nothing was converted: {error}"
                break
        self._end_batch()
        if self.records:  # else the new file is not used
            for at in range(position, self._size_bytes, BLOCK_BYTES):
                self._write(self._source.pread(min(BLOCK_BYTES, self._size_bytes - at), at))
        return f"{self.records} records converted from an old message format{reason}"

    def _read(self, position: int, size_bytes: int) -> memoryview:
        at = position - self._block_position
        if at + size_bytes > len(self._block):
            block_bytes = min(max(BLOCK_BYTES, size_bytes), self._size_bytes - position)
            self._block, self._block_position = self._source.pread(block_bytes, position), position
            at = 0
        return memoryview(self._block)[at : at + size_bytes]

    def _add(self, messages: OldMessages, size_bytes: int) -> None:
        if self._group and not (
            self._group_bytes + size_bytes <= BATCH_BYTES
            and _fit(self._group[0], self._group[-1], messages)
        ):
            self._end_batch()
        self._group.append(messages)
        self._group_bytes += size_bytes
        self.records += len(messages.records)

    def _end_batch(self) -> None:
        if not self._group:
            return
        first = self._group[0]
        self._write(
            build_batch(
                [record for messages in self._group for record in messages.records],
                codec=first.codec,
                attributes=LOG_APPEND_TIME if first.is_log_append_time else 0,
                partition_leader_epoch=NO_LEADER_EPOCH,
            )
        )
        self._group, self._group_bytes = [], 0

    def _write(self, data: bytes | bytearray) -> None:
        self._target.pwrite(data, self._written_bytes)
        self._written_bytes += len(data)


def _records_of(message: memoryview) -> OldMessages:
    """Return the records of a message. Raises CorruptBatchError, DecompressionLimitError."""
    messages = read_old_messages(message, UNPACKED_BYTES_MAX)
    offsets = [record.offset for record in messages.records]
    is_ascending = all(first < second for first, second in pairwise(offsets))
    if not is_ascending or offsets[-1] - offsets[0] > RELATIVE_OFFSET_MAX:
        raise CorruptBatchError("the offsets in the message do not ascend")
    return messages


def _fit(first: OldMessages, last: OldMessages, following: OldMessages) -> bool:
    """Return whether a message can be in one batch with others, from the first to the last."""
    if first.codec != NONE or following.codec != NONE:
        return False
    offset = following.records[0].offset
    is_after = last.records[-1].offset < offset  # else recovery says which one is damaged
    if not is_after or offset - first.records[0].offset > RELATIVE_OFFSET_MAX:
        return False
    # All records of a batch with append time have the same timestamp.
    times = {
        messages.records[0].timestamp if messages.is_log_append_time else None
        for messages in (first, following)
    }
    return len(times) == 1
