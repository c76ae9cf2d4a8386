"""Read pages of records for people, a step at a time.

Rules
- A page reads committed records only, as a consumer with read_committed does.
- A step reads about STEP_BYTES in a thread. A page ends after PAGE_BYTES or PAGE_SECONDS, so a page
  of one huge batch takes as long as that batch.
- One step runs at a time: the threads compete with the event loop for the interpreter.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final

from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.fair_slots import FairSlots
from broker.inspection.record_scan import Aborted, Gap, RecordPage, Scan, ScanRequest
from broker.topics.index_loads import IndexLoads
from broker.topics.partition import Partition
from storage.errors import DamagedSegmentError, OffsetOutOfRangeError
from storage.format.txn_index import TxnIndexEntry
from storage.log.log import Log
from storage.log.log_reader import LogReader
from storage.segments.fetch_slice import FetchSlice
from storage.view.view_log import ViewCursor

STEP_BYTES: Final = 1 << 20
PAGE_SECONDS: Final = 0.2


class RecordReader:
    """Reads pages of records."""

    def __init__(self, clock: Callable[[], float], threads: DirectoryThreads) -> None:
        """`clock` returns monotonic seconds."""
        self._clock = clock
        self._slots: defaultdict[str, FairSlots] = defaultdict(partial(FairSlots, 1))
        self._threads = threads
        self._index_loads = IndexLoads(threads)

    async def read_page(
        self,
        partition: Partition,
        first_offset: int,
        request: ScanRequest,
        client: Hashable,
        view: ViewCursor | None = None,
    ) -> RecordPage:
        """Return the records of a log, or of its view, from an offset on.

        Raises StorageError, OSError.
        """
        start_offset = 0 if view is not None else partition.log.log_start_offset
        page = RecordPage(max(first_offset, start_offset))
        deadline = float("inf")
        scan = Scan(page, request, lambda: self._clock() >= deadline)

        def read(in_place: bool) -> tuple[FetchSlice, Sequence[TxnIndexEntry]]:
            # The log is another one after a move to another data directory.
            reader = partition.log.reader if view is None else view
            return _read(reader, page.next_offset, request.end_offset, in_place=in_place)

        while page.next_offset < request.end_offset and not page.is_full(request):
            try:
                batches, entries = await self._index_loads.read(read)
            except OffsetOutOfRangeError:
                start_offset = partition.log.log_start_offset
                if page.next_offset >= start_offset:
                    raise  # the log was truncated
                page.next_offset = start_offset  # retention has just deleted the segment
                continue
            except DamagedSegmentError as error:
                gap = _gap(partition.log, page.next_offset, error.reason)
                page.gaps.append(gap)
                if gap.next_offset is None:
                    break
                page.next_offset = gap.next_offset
                continue
            if batches.length == 0:
                page.next_offset = request.end_offset
                break
            directory = self._threads.directory_of(partition.log.directory)
            async with self._slots[directory].slot(client):
                # The time in the queue is not the client's.
                deadline = min(deadline, self._clock() + PAGE_SECONDS)
                await self._threads.run(directory, partial(_step, scan, batches, entries))
            if scan.is_over() or (page.gaps and page.gaps[-1].next_offset is None):
                break
        return page


def _read(
    reader: LogReader | ViewCursor, offset: int, end_offset: int, *, in_place: bool
) -> tuple[FetchSlice, Sequence[TxnIndexEntry]]:
    batches = reader.read(offset, STEP_BYTES, end_offset=end_offset, in_place=in_place)
    if not batches.length:
        return batches, []
    return batches, reader.aborted_in_slice(batches, offset, end_offset, in_place=in_place)


def _step(scan: Scan, batches: FetchSlice, entries: Sequence[TxnIndexEntry]) -> None:
    scan.add(batches.read(), _by_producer(entries))


def _gap(log: Log, offset: int, reason: str) -> Gap:
    """Return the damaged range that a reader at an offset meets."""
    for damage in log.damage.ranges:
        if damage.next_offset > offset:
            return Gap(offset, damage.next_offset, reason)
    return Gap(offset, None, reason)


def _by_producer(entries: Sequence[TxnIndexEntry]) -> Aborted:
    aborted: dict[int, list[tuple[int, int]]] = {}
    for entry in entries:
        aborted.setdefault(entry.producer_id, []).append((entry.first_offset, entry.last_offset))
    return aborted
