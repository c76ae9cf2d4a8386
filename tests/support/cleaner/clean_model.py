"""What a clean leaves of a log with transactions, in plain Python: the oracle of the properties.

Written after Kafka's own cleaner, which walks the batches of the log from its start and keeps in
mind, per producer, whether an aborted transaction is open and whether a committed one has data. It
shares nothing with ours but the reading and building of batches. The rules for single records are
in `cleaning.expected_batch`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cleaner.job import CleanJob
from storage.format.batch import (
    CONTROL,
    LOG_APPEND_TIME,
    TRANSACTIONAL,
    BatchHeader,
    ControlType,
    build_batch,
    control_type,
    decode_records,
    read_header,
)
from storage.format.txn_index import TxnIndexEntry
from tests.support.cleaner.cleaning import expected_batch, stays_empty, survivors
from tests.support.storage.empty_batch import empty_batch


class Tracker:
    """Kafka's bookkeeping: which transactions are open at this point of the log."""

    def __init__(self, aborted: Iterable[TxnIndexEntry]) -> None:
        self._waiting = sorted(aborted, key=lambda entry: entry.first_offset)
        self._aborted: dict[int, TxnIndexEntry] = {}  # open ones, by producer
        self._seen: set[int] = set()  # producers with a batch in their open aborted one
        self._committed: set[int] = set()  # producers with a batch in one that is not aborted
        self.kept_entries: list[TxnIndexEntry] = []

    def _begin_up_to(self, offset: int) -> None:
        while self._waiting and self._waiting[0].first_offset <= offset:
            entry = self._waiting.pop(0)
            self._aborted.setdefault(entry.producer_id, entry)

    def is_aborted(self, header: BatchHeader) -> bool:
        """Whether a data batch belongs to an aborted transaction."""
        self._begin_up_to(header.last_offset)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._seen.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def is_bare(self, header: BatchHeader, kind: int) -> bool:
        """Whether a control record decides nothing that is still in the log."""
        self._begin_up_to(header.last_offset)
        producer = header.producer_id
        if kind == ControlType.ABORT:
            entry = self._aborted.pop(producer, None)
            if entry is None or producer not in self._seen:
                return True
            self._seen.discard(producer)
            self.kept_entries.append(entry)
            return False
        if kind == ControlType.COMMIT:
            had_data = producer in self._committed
            self._committed.discard(producer)
            return not had_data
        return False


@dataclass
class ModelResult:
    """The batches that stay, each with the one it came from, and the index entries that do."""

    batches: list[tuple[bytes, bytes]] = field(default_factory=list)
    entries: list[TxnIndexEntry] = field(default_factory=list)
    map_end: int = 0
    keys: int = 0


def model_clean(job: CleanJob, log: Sequence[bytes], keys_max: int) -> ModelResult:
    """A clean of the batches of `log`, none of which lies at or after the job's end.

    Batches of segments that begin after the end of the map are not expected to change.
    """
    last_offsets, map_end = model_map(job, log, keys_max)
    result = ModelResult(map_end=map_end, keys=len(last_offsets))
    reached = [s for group in job.groups for s in group if s.base_offset < map_end]
    end = reached[-1].next_base_offset if reached else 0
    tracker = Tracker(job.aborted)
    for batch in log:
        header = read_header(batch)
        if header.base_offset >= end:
            result.batches.append((batch, batch))
            continue
        if header.is_control:
            remaining = control_batch(job, batch, header, tracker)
        elif tracker.is_aborted(header) and (
            job.first_dirty_offset <= header.last_offset and header.base_offset < map_end
        ):
            remaining = emptied(job, batch, header)
        else:
            remaining = expected_batch(job, batch, last_offsets, map_end)
        if remaining is not None:
            result.batches.append((remaining, batch))
    result.entries = tracker.kept_entries
    result.entries += [entry for entry in job.aborted if entry.last_offset >= end]
    return result


def model_map(job: CleanJob, log: Sequence[bytes], keys_max: int) -> tuple[dict[bytes, int], int]:
    """The last offset of each key of the dirty section, and the first offset it does not cover."""
    tracker = Tracker(job.aborted)
    last_offsets: dict[bytes, int] = {}
    for batch in log:
        header = read_header(batch)
        if header.is_control:
            records = decode_records(batch, header)
            if records:
                tracker.is_bare(header, control_type(records[0]))
            continue
        if tracker.is_aborted(header):
            continue
        for record in decode_records(batch, header):
            if record.key is None or record.offset < job.first_dirty_offset:
                continue
            if record.key not in last_offsets and len(last_offsets) == keys_max:
                return last_offsets, record.offset
            last_offsets[record.key] = record.offset
    return last_offsets, job.end_offset


def control_batch(
    job: CleanJob, batch: bytes, header: BatchHeader, tracker: Tracker
) -> bytes | None:
    """What becomes of a control batch."""
    records = decode_records(batch, header)
    if not records:
        return emptied(job, batch, header)
    if not tracker.is_bare(header, control_type(records[0])):
        return batch
    if not header.has_delete_horizon and not job.drop_expired_tombstones:
        return batch
    if not header.has_delete_horizon:
        return bytes(
            build_batch(
                records,
                base_offset=header.base_offset,
                producer_id=header.producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
                attributes=header.attributes & (TRANSACTIONAL | CONTROL | LOG_APPEND_TIME),
                partition_leader_epoch=header.partition_leader_epoch,
                last_offset_delta=header.last_offset_delta,
                delete_horizon_ms=job.now_ms + job.delete_retention_ms,
                max_timestamp=header.max_timestamp,
            )
        )
    if job.drop_expired_tombstones and job.now_ms >= header.base_timestamp:
        return emptied(job, batch, header)
    return batch


def emptied(job: CleanJob, batch: bytes, header: BatchHeader) -> bytes | None:
    """A batch whose records have gone."""
    if not stays_empty(job, header):
        return None
    return batch if header.size_bytes == 61 else bytes(empty_batch(header))


def model_expired(job: CleanJob, log: Sequence[bytes]) -> ModelResult:
    """A job over what has expired in the segments that it names."""
    result = ModelResult(map_end=job.end_offset)
    ranges = [(s.base_offset, s.next_base_offset) for group in job.groups for s in group]
    gone: set[int] = set()
    for batch in log:
        header = read_header(batch)
        named = any(first <= header.base_offset < end for first, end in ranges)
        expired = (
            header.has_delete_horizon
            and job.drop_expired_tombstones
            and job.now_ms >= header.base_timestamp
        )
        remaining: bytes | None = batch
        if named and expired and header.is_control and header.record_count:
            gone.add(header.base_offset)
            remaining = emptied(job, batch, header)
        elif named and expired and not header.is_control:
            if not survivors(job, batch, {}, job.end_offset):
                remaining = emptied(job, batch, header)
            else:
                remaining = expected_batch(job, batch, {}, job.end_offset)
        if remaining is not None:
            result.batches.append((remaining, batch))
    result.entries = [entry for entry in job.aborted if entry.last_offset not in gone]
    return result
