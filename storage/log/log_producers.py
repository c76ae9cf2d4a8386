"""The producers of an open log: their state, and how it limits what readers see.

Rules
- The last stable offset (LogState.last_stable_offset) ends at the first offset of the oldest
  undecided transaction.
- A finished transaction stays undecided for readers until the high watermark is after its marker,
  because a crash could lose the marker before that.
"""

from storage.format.batch import BatchHeader
from storage.format.producer_state import Duplicate, LastRecords, ProducerStates
from storage.format.txn_index import TxnIndexEntry
from storage.segments.batch_scan import ScannedBatch
from storage.segments.producer_snapshots import note_batch


class LogProducers:
    """The producer state of an open log (Kafka's ProducerStateManager)."""

    __slots__ = ("_ended", "_states")

    def __init__(self, states: ProducerStates) -> None:
        self._states = states
        # (marker offset, first offset) of each; Kafka's unreplicatedTxns.
        self._ended: list[tuple[int, int]] = []

    @property
    def first_undecided_offset(self) -> int | None:
        """Return the start of the oldest transaction that is undecided for readers.

        Kafka's firstUnstableOffset.
        """
        first = self._states.first_undecided_offset
        if not self._ended:
            return first
        ended = min(first_offset for _, first_offset in self._ended)
        return ended if first is None else min(first, ended)

    def check(
        self, header: BatchHeader, *, in_transaction: bool, by_coordinator: bool
    ) -> Duplicate | None:
        """See ProducerStates.check."""
        return self._states.check(
            header, in_transaction=in_transaction, by_coordinator=by_coordinator
        )

    def note_append(
        self,
        records: bytes,
        header: BatchHeader,
        first_offset: int,
        timestamp_ms: int,
        now_ms: int,
    ) -> TxnIndexEntry | None:
        """Apply an appended batch; return its entry for the transaction index, if any."""
        last_offset = first_offset + header.last_offset_delta
        if not header.is_control:
            self._states.update(
                header, first_offset, last_offset, timestamp_ms=timestamp_ms, seen_ms=now_ms
            )
            return None
        begun = self._begin_of(header.producer_id)
        placed = header._replace(base_offset=first_offset)
        entry = note_batch(self._states, ScannedBatch(0, placed, records, 0))
        if begun is not None and self._begin_of(header.producer_id) is None:
            self._ended.append((last_offset, begun))
        return entry

    def _begin_of(self, producer_id: int) -> int | None:
        entry = self._states.producer(producer_id)
        return None if entry is None else entry.transaction_first_offset

    def note_high_watermark(self, high_watermark: int) -> None:
        """Decide the transactions whose markers are below the new high watermark."""
        if self._ended:
            self._ended = [item for item in self._ended if item[0] >= high_watermark]

    def replace(self, states: ProducerStates) -> None:
        """Replace the state."""
        self._states = states
        self._ended = []

    def open_transaction(self) -> tuple[int, int, int] | None:
        """Return the oldest open transaction: producer id, first offset, last write (ms)."""
        first = self._states.first_undecided_offset
        if first is None:
            return None
        holder = next(e for e in self._states.producers if e.transaction_first_offset == first)
        return holder.producer_id, first, holder.timestamp_ms

    def expire(self, now_ms: int, expiration_ms: int) -> int:
        """See ProducerStates.expire."""
        return self._states.expire(now_ms, expiration_ms)

    def forget_idle(self, keep: int) -> None:
        """See ProducerStates.forget_idle."""
        self._states.forget_idle(keep)

    def last_records(self) -> dict[int, tuple[int, int]]:
        """See ProducerStates.last_records."""
        return self._states.last_records()

    def packed_last_records(self) -> LastRecords:
        """See ProducerStates.packed_last_records."""
        return self._states.packed_last_records()

    @property
    def states(self) -> ProducerStates:
        """Return the state, read-only."""
        return self._states
