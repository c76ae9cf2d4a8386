"""The leader epochs of an open log and their file, Kafka's leader-epoch-checkpoint.

Rules
- An epoch is recorded durably before its first record: at creation, opening or truncation, so that
  the first append needs no sync, or without room at the next append.
- A truncation begins an epoch: consumers that have read beyond its offset compare epochs (KIP-320),
  and find out even if other records have the removed offsets by then.
- The epoch never goes back: clients ignore one that is older than the one they know.
- Epochs whose records retention removed may stay in the file: recovery drops them.
"""

from collections.abc import Callable
from contextlib import suppress

from storage.env import Env, write_file_atomically
from storage.errors import NoRoomError
from storage.format import filenames
from storage.format.leader_epochs import LeaderEpochs
from storage.log.log_state import LogState

WriteFile = Callable[[Env, str, bytes], None]


class LogEpochs:
    """The leader epochs of one log. Writes raise NoRoomError, LogDirectoryError."""

    __slots__ = ("_is_stale", "_state", "is_entered", "known")

    def __init__(self, state: LogState, known: LeaderEpochs, *, is_stale: bool) -> None:
        self._state = state
        self.known = known
        self.is_entered = False  # the current epoch is recorded
        self._is_stale = is_stale  # the file has removed epochs, or lacks some

    @property
    def is_stale(self) -> bool:
        """Return whether the file differs from what is known."""
        return self._is_stale

    def enter(self, write: WriteFile = write_file_atomically) -> None:
        """Record durably where the current leader epoch begins.

        With another `write`, the caller makes it durable.
        """
        state = self._state
        if self.known.assign(state.leader_epoch, state.log_end_offset) or self._is_stale:
            self._write(write)
        self.is_entered = True

    def enter_or_undo(self) -> None:
        """Like `enter`; without room, the epochs stay as they are on disk."""
        try:
            self.enter()
        except NoRoomError:
            self.undo_enter()
            raise

    def undo_enter(self) -> None:
        """Let the next append or a stop enter the epoch: the write of its entry found no room."""
        self.known.truncate_from_end(self._state.log_end_offset)
        self.is_entered, self._is_stale = False, True

    def truncate_to(self, offset: int) -> None:
        """Begin an epoch at `offset`, the new end, instead of those that begin there or later.

        Without room, the next append or a stop writes the file; a start after a kill begins another
        epoch.
        """
        self.known.truncate_from_end(offset)
        self._state.leader_epoch += 1
        with suppress(NoRoomError):
            self.enter_or_undo()

    def take_over(self, source: "LogEpochs") -> None:
        """Continue the epochs of the replica that this log is a copy of.

        The copy may lack the current epoch, if the source had no room for it.
        """
        epoch = source._state.leader_epoch
        if not source.is_entered or self._state.leader_epoch != epoch:
            self.is_entered, self._is_stale = False, True
        self.known, self._state.leader_epoch = source.known, epoch

    def note_log_start(self, offset: int) -> None:
        """Remove the epochs that end below the new log start, in memory."""
        if self.known.truncate_from_start(offset):
            self._is_stale = True

    def write_if_stale(self) -> None:
        """Write what `note_log_start` removed, and an epoch that found no room."""
        if self._is_stale:
            self.known.assign(self._state.leader_epoch, self._state.log_end_offset)
            self._write()

    def _write(self, write: WriteFile = write_file_atomically) -> None:
        state = self._state
        path = f"{state.directory}/{filenames.LEADER_EPOCH_CHECKPOINT}"
        try:
            write(state.env, path, self.known.encode())
        except NoRoomError:
            raise
        except OSError as error:
            raise state.failed("leader epochs of", error) from error
        self._is_stale = False
