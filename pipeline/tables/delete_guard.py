"""Check that a table of a topic's state has not missed deletes that the cleaner removed.

A tombstone stays in the log for `delete.retention.ms` after the clean that first passes it. A table
that continues to read later than that may miss the delete and keep the row for ever.

Rules
- The reach of a table is, for each partition, the first offset that is not in it. Its safe time is
  a time before which no clean began that covers offsets at or past the reach. Deletes there stay in
  the log at least until the safe time plus `delete.retention.ms`: what is read by then is complete.
- The table's own commits store the safe time, as an application transaction. The time of a commit
  does not count, because it may be hours after the data was read; nor do commits of others.
- Every batch is checked after it has been read and before it is committed.
- If the safe time is too long ago, the table is still complete if no clean has ever passed its
  reach. The first dirty offset does not show that: it falls when a checkpoint is lost, and it does
  not exist when the topic is no longer compacted.
- The guard does not notice a `delete.retention.ms` that is lowered and raised again between two
  checks.

Why it is done this way: docs/decisions/0027.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from admin.client import ApiClient
from config import exit_codes
from config.units import about_span
from pipeline.errors import JobError

if TYPE_CHECKING:
    from deltalake import DeltaTable

UNKNOWN_MS: Final = 0  # a safe time that is always too long ago
PROGRESS_AGE_MS_MAX: Final = 60_000  # between two checks while nothing is read
CHECK_MS_MIN: Final = 1_000
# States of a partition without a running clean. A clean that began before a check may pass the
# reach after it.
_CALM: Final = ("idle", "quarantined")

Offsets = Mapping[int, int]


@dataclass(frozen=True, slots=True)
class CleanerProgress:
    """The cleaner's state of a partition."""

    cleaned_end_offset: int | None  # the highest end of all cleans; None: unknown
    is_calm: bool  # no clean is running


def read_cleaner_progress(client: ApiClient, topic: str, partition: int) -> CleanerProgress:
    """Ask the broker for one partition. Raises ApiRefusedError, UnreachableError."""
    answer = client.get(f"/partitions/{topic}/{partition}")
    offset = answer.get("cleaned_end_offset")
    return CleanerProgress(None if offset is None else int(offset), answer.get("state") in _CALM)


def safe_time_id(topic: str) -> str:
    """Return the id of the application transaction whose version is the safe time, in ms."""
    return f"varve-safe-ms:{topic}"


def read_safe_ms(table: "DeltaTable", topic: str) -> int:
    """Return the safe time that a table states; UNKNOWN_MS where it states none."""
    version = table.transaction_version(safe_time_id(topic))
    return UNKNOWN_MS if version is None else int(version)


class DeleteGuard:
    """Checks that one table of one topic misses no delete. Thread-safe."""

    def __init__(
        self,
        topic: str,
        partitions: Sequence[int],
        reach: Offsets,
        safe_ms: int,
        *,
        read_progress: Callable[[int], CleanerProgress],
        delete_retention_ms: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        """`read_progress` asks the broker for a partition, `delete_retention_ms` for the setting.

        A partition that is not in `reach` was created after the table: all of it is still unread.
        """
        self._topic = topic
        self._reach = {number: reach.get(number, 0) for number in partitions}
        self._safe_ms = safe_ms
        self._read_progress = read_progress
        self._ask_retention_ms = delete_retention_ms
        self._retention_ms: int | None = None
        self._now_ms = now_ms
        self._refreshed_ms = now_ms()
        self._lock = threading.Lock()

    def check(self) -> None:
        """Check that the table has missed no delete at or past the reach up to now.

        Raises JobError (STALE), ApiRefusedError, UnreachableError.
        """
        with self._lock:
            self._checked()

    def checked_safe_ms(self, reach: Offsets, planned_ms: int) -> int:
        """Check that reading up to `reach`, which has just ended, missed no delete; return the
        safe time of a table with that reach.

        `planned_ms` is a time before `reach` was the end of what can be cleaned. Raises as `check`.
        """
        with self._lock:
            # A partition that was added meanwhile: the table has nothing of it.
            self._reach = dict.fromkeys(reach, 0) | self._reach
            now_ms, progress = self._checked()
            if _is_untouched(progress, {**self._reach, **reach}):
                return now_ms
            # What is safe for a reach is safe for every later one.
            return max(self._safe_ms, planned_ms)

    def committed(self, reach: Offsets, safe_ms: int) -> None:
        """Note that the table has been committed with a new reach."""
        with self._lock:
            self._reach |= reach
            self._safe_ms = max(self._safe_ms, safe_ms)

    def refresh(self) -> None:
        """Move the safe time on while nothing is read, if the cleaner has not passed the reach.

        Asks the broker only when a check is due.
        Raises ApiRefusedError, UnreachableError, JobError.
        """
        if not self._lock.acquire(blocking=False):
            return  # a batch is being checked, which refreshes too
        try:
            now_ms = self._now_ms()
            due_ms = min(max((self._retention_ms or 0) // 4, CHECK_MS_MIN), PROGRESS_AGE_MS_MAX)
            if now_ms - self._refreshed_ms >= due_ms:
                self._fetch_progress()
        finally:
            self._lock.release()

    def _fetch_progress(self) -> tuple[int, int, dict[int, CleanerProgress]]:
        """Return the time before the request, the retention and the progress of all partitions."""
        now_ms = self._refreshed_ms = self._now_ms()
        retention_ms = self._ask_retention_ms()
        # A clean since the last check may have used the setting as it was then.
        before_ms = retention_ms if self._retention_ms is None else self._retention_ms
        least_ms = min(retention_ms, before_ms)
        self._retention_ms = retention_ms
        progress = {number: self._read_progress(number) for number in self._reach}
        if _is_untouched(progress, self._reach):
            self._safe_ms = now_ms
        return now_ms, least_ms, progress

    def _checked(self) -> tuple[int, dict[int, CleanerProgress]]:
        now_ms, retention_ms, progress = self._fetch_progress()
        unread_ms = now_ms - self._safe_ms
        for number, seen in progress.items():
            reach, cleaned = self._reach[number], seen.cleaned_end_offset
            if (cleaned is None or cleaned > reach) and unread_ms > retention_ms:
                unknown = self._safe_ms == UNKNOWN_MS
                as_of = "an unknown time" if unknown else f"{about_span(unread_ms)} ago"
                end = "an unknown offset" if cleaned is None else cleaned
                raise JobError(
                    f"the table may have missed deletes: it has {self._topic}-{number} up to offset"
                    f" {reach} as of {as_of}, the cleaner has cleaned up to {end}, and"
                    f" tombstones stay for {retention_ms / 1000:g} s (delete.retention.ms)."
                    " Create the table again with --overwrite, and raise delete.retention.ms if"
                    " the query needs more time",
                    exit_codes.STALE,
                )
        return now_ms, progress


def _is_untouched(progress: Mapping[int, CleanerProgress], reach: Offsets) -> bool:
    """Return whether no clean that began before the check covers offsets at or past `reach`."""
    return all(
        seen.is_calm
        and seen.cleaned_end_offset is not None
        and seen.cleaned_end_offset <= reach[number]
        for number, seen in progress.items()
    )
