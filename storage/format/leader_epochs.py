"""The leader epochs of a log with their start offsets; pure.

Epochs and start offsets increase strictly. Clients detect a truncation of the log with them: they
ask where the last epoch that they know ends (KIP-101, KIP-320).
"""

from bisect import bisect_left, bisect_right
from operator import itemgetter
from typing import Final, NamedTuple

from storage.errors import CorruptCheckpointError
from storage.format.checkpoints import (
    LARGEST_INT32,
    LARGEST_INT64,
    decode_lines,
    encode_lines,
    parse_number,
)

UNDEFINED: Final = -1  # an unknown epoch or offset


class EpochEntry(NamedTuple):
    """An epoch and the first offset written in it."""

    epoch: int
    start_offset: int


class LeaderEpochs:
    """The epochs of one log, oldest first."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: list[EpochEntry] = []

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        """Return all epochs, oldest first."""
        return tuple(self._entries)

    @property
    def latest(self) -> EpochEntry | None:
        """Return the epoch that is being written."""
        return self._entries[-1] if self._entries else None

    @property
    def earliest(self) -> EpochEntry | None:
        """Return the oldest epoch that still has records."""
        return self._entries[0] if self._entries else None

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Add the epoch that begins at `start_offset`; return whether anything changed.

        Entries that contradict the new one (an epoch or offset not below it) are removed, as after
        a truncation. Adding the latest epoch again, at or after its start, changes nothing.
        """
        assert epoch >= 0
        assert start_offset >= 0
        latest = self.latest
        if latest is not None and epoch == latest.epoch and start_offset >= latest.start_offset:
            return False
        while self._entries and (
            self._entries[-1].epoch >= epoch or self._entries[-1].start_offset >= start_offset
        ):
            self._entries.pop()
        self._entries.append(EpochEntry(epoch, start_offset))
        return True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """Return the largest known epoch up to `epoch`, and where it ends; (-1, -1) if not known.

        An epoch older than all known ones has no records left: it ends where the oldest known one
        begins.
        """
        latest = self.latest
        if latest is None or epoch < 0 or epoch > latest.epoch:
            return UNDEFINED, UNDEFINED
        if epoch == latest.epoch:
            return epoch, log_end_offset
        after = bisect_right(self._entries, epoch, key=itemgetter(0))
        result = self._entries[after - 1].epoch if after else epoch
        return result, self._entries[after].start_offset

    def epoch_of(self, offset: int) -> int:
        """Return the epoch in which `offset` was written; -1 if older than all known ones."""
        after = bisect_right(self._entries, offset, key=itemgetter(1))
        return self._entries[after - 1].epoch if after else UNDEFINED

    def truncate_from_end(self, end_offset: int) -> bool:
        """Remove the epochs that begin at `end_offset` or after; return whether there were any."""
        keep = bisect_left(self._entries, end_offset, key=itemgetter(1))
        changed = keep < len(self._entries)
        del self._entries[keep:]
        return changed

    def truncate_from_start(self, start_offset: int) -> bool:
        """Remove epochs below `start_offset`; the epoch that contains it begins there."""
        after = bisect_right(self._entries, start_offset, key=itemgetter(1))
        if after == 0 or (self._entries[after - 1].start_offset == start_offset and after == 1):
            return False
        epoch = self._entries[after - 1].epoch
        self._entries[:after] = [EpochEntry(epoch, start_offset)]
        return True

    def clear(self) -> None:
        """Remove all epochs."""
        self._entries.clear()

    def encode(self) -> bytes:
        """Return the content of `leader-epoch-checkpoint`."""
        return encode_lines([f"{epoch} {start}" for epoch, start in self._entries])

    @classmethod
    def decode(cls, data: bytes, path: str = "") -> "LeaderEpochs":
        """Read a `leader-epoch-checkpoint`. Raises CorruptCheckpointError."""
        epochs = cls()
        for line in decode_lines(data, path):
            fields = line.split()
            numbers = [parse_number(field, LARGEST_INT64) for field in fields]
            if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
                raise CorruptCheckpointError(path, f"malformed line {line!r:.100}")
            if numbers[0] > LARGEST_INT32:
                raise CorruptCheckpointError(path, f"epoch {numbers[0]}")
            epochs.assign(numbers[0], numbers[1])
        return epochs
