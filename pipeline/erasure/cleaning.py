"""Request the compaction of a view and a log up to an offset, and wait for it.

The view comes first, because the cleaner does not pass its horizon. If the broker reports an
obstacle, the request is repeated until the time is up, and the obstacle becomes the reason.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from admin.client import ApiClient, ApiRefusedError, UnreachableError, partition_path
from cleaner.lease_states import LIVE_STATES
from pipeline.progress import ProgressReporter

VIEWS: Final = "/api/v1/view"
POLL_SECONDS: Final = 0.2
AGAIN_SECONDS: Final = 5.0  # before the request is repeated
_BUSY: Final = ("waiting", "running")  # states of a view


@dataclass(slots=True)
class CleanProgress:
    """The progress of one partition. `reason` is empty once `target_offset` is reached."""

    target_offset: int
    cleaned_offset: int = 0
    view_horizon: int | None = None
    reason: str = ""


class TombstoneClean:
    """Requests the compaction of partitions of one topic."""

    def __init__(self, client: ApiClient, topic: str, *, has_view: bool, until: float) -> None:
        """`until` is a deadline by `time.monotonic`."""
        self._client = client
        self._views = client.below(VIEWS)
        self._topic = topic
        self._has_view = has_view
        self._until = until

    def up_to(
        self, requested: Mapping[int, int], reporter: ProgressReporter
    ) -> dict[int, CleanProgress]:
        """Compact everything below these offsets. Raises UnreachableError."""
        partitions = {n: CleanProgress(offset) for n, offset in requested.items()}
        for done, (n, cleaned) in enumerate(sorted(partitions.items())):
            reporter("cleaning", done, len(partitions))
            if self._has_view:
                cleaned.reason = self._until_done(n, cleaned, self._view)
            if not cleaned.reason:
                cleaned.reason = self._until_done(n, cleaned, self._log)
        reporter("cleaning", len(partitions), len(partitions))
        return partitions

    def _until_done(self, partition: int, cleaned: CleanProgress, attempt: Any) -> str:
        """Repeat `attempt` until it succeeds; return the obstacle if the time is up first."""
        first = True
        while True:
            try:
                reason: str = attempt(partition, cleaned, first)
            except ApiRefusedError as error:
                reason = str(error)
            if not reason or time.monotonic() >= self._until:
                return reason
            time.sleep(min(AGAIN_SECONDS, POLL_SECONDS if first else AGAIN_SECONDS))
            first = False

    def _view(self, partition: int, cleaned: CleanProgress, _: bool) -> str:
        path = partition_path(self._topic, partition)
        self._views.post(f"{path}/compact")
        status = self._wait(lambda: self._views.get(path), lambda row: row["state"] not in _BUSY)
        cleaned.view_horizon = int(status["horizon"])
        if cleaned.view_horizon >= cleaned.target_offset:
            return ""
        if status["error"]:
            return f"the view was not compacted: {status['error']}"
        return (
            f"the view is compacted up to offset {cleaned.view_horizon}, where an open transaction"
            " begins"
        )

    def _log(self, partition: int, cleaned: CleanProgress, first: bool) -> str:
        path = partition_path(self._topic, partition)
        self._client.post(f"{path}/run", {"roll": first})

        def is_settled(row: dict[str, Any]) -> bool:
            return _clean_below(row) >= cleaned.target_offset or row["requested_offset"] is None

        status = self._wait(lambda: self._client.get(path), is_settled)
        cleaned.cleaned_offset = _clean_below(status)
        if cleaned.cleaned_offset >= cleaned.target_offset:
            return ""
        return str(status["obstacle"] or status["sentences"][0])

    def _wait(self, ask: Any, is_over: Any) -> dict[str, Any]:
        while True:
            row: dict[str, Any] = ask()
            if is_over(row) or time.monotonic() >= self._until:
                return row
            time.sleep(POLL_SECONDS)


def _clean_below(row: dict[str, Any]) -> int:
    return int(row["first_dirty_offset"] or 0)


def pinned_leases(client: ApiClient, topic: str) -> list[str] | None:
    """Return the remote compactions that pin files of the topic; None if the broker cannot say."""
    try:
        result = client.below("/api/v1/remote-compactions").get("")["remote_compactions"]
    except (ApiRefusedError, UnreachableError):
        return None
    # The list includes remote compactions that ended recently.
    live = [compaction for compaction in result if compaction["state"] in LIVE_STATES]
    return [str(each["compaction_id"]) for each in live if each["topic"] == topic]
