"""Files on their way out: renamed at once, unlinked some time later.

Rules: a file whose name ends in `.deleted` is no part of a log any more; opening the log removes
it, whatever its time. The delay lets readers of other programs finish, as in Kafka.
"""

from collections.abc import Iterable

from storage.env import Env
from storage.format import filenames


class ScheduledDeletions:
    """The `.deleted` files of one partition's folder, with the time at which they go."""

    __slots__ = ("_directory", "_due", "_env")

    def __init__(self, env: Env, directory: str) -> None:
        self._env = env
        self._directory = directory
        self._due: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._due)

    def schedule(self, base_offsets: Iterable[int], due_ms: int) -> None:
        """Rename all files of these segments. OSError as it comes.

        The log goes first: without it the others are nothing, should we not come any further.
        """
        names = set(self._env.listdir(self._directory))
        for base_offset in base_offsets:
            for kind in filenames.FILE_KINDS:
                name = filenames.file_name(base_offset, kind)
                if name not in names:
                    continue
                path = f"{self._directory}/{name}"
                self._env.rename(path, path + filenames.DELETED)
                self._due.append((due_ms, path + filenames.DELETED))

    def take_due(self, now_ms: int) -> list[str]:
        """Return the files that are due, and forget them: the caller unlinks them."""
        if not self._due:
            return []
        due = [path for due_ms, path in self._due if due_ms <= now_ms]
        if due:
            self._due = [entry for entry in self._due if entry[0] > now_ms]
        return due

    def unlink(self, paths: Iterable[str]) -> None:
        """Unlink files that were due; may run in a thread. OSError as it comes."""
        for path in paths:
            try:
                self._env.unlink(path)
            except FileNotFoundError:
                # Renamed over by a later segment of the same base, and unlinked with it; or gone
                # with its folder.
                continue
