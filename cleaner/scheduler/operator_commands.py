"""Operator commands on a partition: pause, resume, abort, retry, request a clean."""

from collections.abc import Callable, Hashable
from dataclasses import replace

from cleaner import states
from cleaner.host import CleanerHost, LogFacts, NotServedError
from cleaner.planning.scheduling_order import Requester
from cleaner.scheduler.clean_requests import CleanRequest
from cleaner.scheduler.cleaner_state_store import CleanerStateStore
from cleaner.scheduler.control import BY_OPERATOR, PAUSED_BY_OPERATOR, PartitionControl
from cleaner.scheduler.offload import Offload
from cleaner.scheduler.partition_scanner import PartitionScanner
from storage.env import Env
from storage.model import TopicPartition


class OperatorCommands:
    """The operators' commands. They raise NotServedError."""

    def __init__(
        self,
        host: CleanerHost,
        env: Env,
        control: PartitionControl,
        *,
        scanner: PartitionScanner,
        state_store: CleanerStateStore,
        offload: Offload,
        wake: Callable[[], None],
    ) -> None:
        self._host = host
        self._env = env
        self._control = control
        self._scanner = scanner
        self._state_store = state_store
        self._offload = offload
        self._wake = wake

    def pause(self, partition: TopicPartition) -> bool:
        """Pause cleaning until `resume`, also across restarts; return False if it was paused.

        A running job is aborted; this does not wait for its end.
        """
        facts = self._facts_of(partition)
        now_ms = self._env.wall_ms()
        cleaner_state = self._state_store.state_of(facts, now_ms)
        if cleaner_state.paused_since_ms is None:
            self._state_store.put(
                facts, replace(cleaner_state, paused_since_ms=now_ms), at_once=True
            )
        self._offload.abort(partition, PAUSED_BY_OPERATOR)
        return self._control.pause(partition)

    def resume(self, partition: TopicPartition) -> bool:
        """End an operator's pause; return False if there was none."""
        facts = self._facts_of(partition)
        cleaner_state = self._state_store.state_of(facts, self._env.wall_ms())
        if cleaner_state.paused_since_ms is not None:
            self._state_store.put(facts, replace(cleaner_state, paused_since_ms=None), at_once=True)
        return self._control.resume(partition)

    def is_paused(self, partition: TopicPartition) -> bool:
        """Return whether an operator paused the partition."""
        return partition in self._control.operator_pauses

    async def is_saved(self, partition: TopicPartition) -> bool:
        """Return whether the last pause or resume is on the disk; wait a few seconds for it.

        If it is not, it is in force nevertheless, and the write is repeated.
        """
        return await self._state_store.saved(partition)

    def abort(self, partition: TopicPartition, reason: str = BY_OPERATOR) -> bool:
        """Abort a running job and drop a clean request; return False if there was neither.

        The scheduler may choose the partition again at once.
        """
        had_request = self._scanner.requests.cancel(partition)
        was_offloaded = self._offload.abort(partition, reason)
        return self._control.abort(partition, reason) or had_request or was_offloaded

    def retry(self, partition: TopicPartition) -> None:
        """Clear earlier failures of the partition, and try again to start offloaded jobs."""
        self.forget_failures(partition)
        self._offload.retry_jobs()

    def forget_failures(self, partition: TopicPartition) -> None:
        """Clear earlier failures: the partition was replaced, or their cause was removed."""
        self._control.handle(partition, states.RetryRequested())
        self._offload.forget(partition)

    def request_clean(
        self, partition: TopicPartition, requested_by: Hashable = Requester.OPERATOR
    ) -> int | None:
        """Clean the partition next, regardless of earlier failures and of its dirty ratio.

        Return the offset up to which it will be cleaned, None if nothing can be cleaned now. The
        minimum lag, the active segment and open transactions bound it as always. The request
        waits while the partition is paused (clean_requests.py).
        """
        facts = self._facts_of(partition)
        self.forget_failures(partition)
        self._wake()
        verdict = self._scanner.assess(facts)
        section = None if verdict is None else verdict.section
        if section is None or section.dirty_bytes == 0:
            return None
        self._scanner.requests.add(facts, section.end_offset, requested_by)
        return section.end_offset

    def clean_requested(self, partition: TopicPartition) -> CleanRequest | None:
        """Return the pending request, if any."""
        return self._scanner.requests.pending(self._facts_of(partition))

    def request_erasure(
        self,
        partition: TopicPartition,
        end_offset: int,
        victims: tuple[int, ...],
        requested_by: Hashable = Requester.OPERATOR,
    ) -> CleanRequest | None:
        """Rewrite these segments next; return None if not everything below the end is cleanable.

        Earlier failures keep their effect, and the request waits while the partition is paused.
        """
        facts = self._facts_of(partition)
        verdict = self._scanner.assess(facts)
        section = None if verdict is None else verdict.section
        if section is None or section.end_offset < end_offset:
            return None
        request = self._scanner.requests.add_erasure(facts, end_offset, victims, requested_by)
        self._wake()
        return request

    def is_erasing(self, partition: TopicPartition) -> bool:
        """Return whether a request to erase waits or is being carried out."""
        return self._scanner.requests.is_erasing(partition)

    def _facts_of(self, partition: TopicPartition) -> LogFacts:
        facts = self._host.facts_of(partition)
        if facts is None:
            raise NotServedError(partition)
        return facts
