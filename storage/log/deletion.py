"""Delayed deletion of segment files: rename them at once, unlink them later.

A file whose name ends in `.deleted` is not part of a log; recovery removes it at once. The delay
lets other programs finish reading, as in Kafka. On a full disk the folder may have no room for the
longer name: then the file is unlinked at once, which makes room. Nothing opens a file by its
`.deleted` name, and files that are open stay readable.
"""

from collections.abc import Iterable
from typing import NamedTuple

from storage.env import Env, rename_if_room
from storage.errors import NoRoomError
from storage.format import filenames


class Delay(NamedTuple):
    """A delay in wall time. It begins again if the clock is set back to before its begin."""

    begun_ms: int
    length_ms: int

    def seen_at(self, now_ms: int) -> "Delay":
        """Return the delay as it applies at this time."""
        return self if self.begun_ms <= now_ms else Delay(now_ms, self.length_ms)

    def is_over(self, now_ms: int) -> bool:
        """Return whether the delay is over."""
        return now_ms - self.begun_ms >= self.length_ms


class ScheduledDeletions:
    """The `.deleted` files of one partition folder, with the time to unlink them."""

    __slots__ = ("_directory", "_due", "_env")

    def __init__(self, env: Env, directory: str) -> None:
        self._env = env
        self._directory = directory
        self._due: list[tuple[Delay, str]] = []

    def relocate(self, directory: str) -> None:
        """Use the new name of the folder, which has no `.deleted` files."""
        self._directory = directory
        self._due = []

    def __len__(self) -> int:
        return len(self._due)

    def schedule(
        self,
        base_offsets: Iterable[int],
        delay: Delay,
        *,
        in_durable_order: bool = False,
    ) -> None:
        """Rename all files of these segments; they are due after the delay.

        The .log file is first: if we crash midway, its orphaned indexes are harmless.
        `in_durable_order` makes the removal of each segment durable before that of the next.
        Raises OSError.
        """
        names = set(self._env.listdir(self._directory))
        for base_offset in base_offsets:
            for kind in (*filenames.FILE_KINDS, filenames.KEYS):
                name = filenames.file_name(base_offset, kind)
                if name not in names:
                    continue
                path = f"{self._directory}/{name}"
                try:
                    self._remove(path, delay)
                except FileNotFoundError:
                    if kind != filenames.KEYS:
                        raise
                    # A worker has removed the index meanwhile.
            if in_durable_order:
                self._env.sync_dir(self._directory)

    def _remove(self, path: str, delay: Delay) -> None:
        try:
            rename_if_room(self._env, path, path + filenames.DELETED)
        except NoRoomError:
            self._env.unlink(path)
        else:
            self._due.append((delay, path + filenames.DELETED))

    def take_due(self, now_ms: int) -> list[str]:
        """Remove and return the files that are due; the caller unlinks them."""
        if not self._due:
            return []
        waiting = [(delay.seen_at(now_ms), path) for delay, path in self._due]
        self._due = [(delay, path) for delay, path in waiting if not delay.is_over(now_ms)]
        return [path for delay, path in waiting if delay.is_over(now_ms)]

    def unlink(self, paths: Iterable[str]) -> None:
        """Unlink files that are due; may run in a thread. Raises OSError."""
        for path in paths:
            try:
                self._env.unlink(path)
            except FileNotFoundError:
                # A later segment with the same base offset replaced it, or its folder is gone.
                continue
