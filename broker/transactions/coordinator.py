"""The transaction coordinator: transactional ids, their transactions, the markers that end them.

Rules
- Only the event loop calls this module. Only broker/transactions/state.py changes a transaction.
- What is answered is in the log of __transaction_state, in the order in which it was decided.
- A decided transaction gets its markers, however often a partition is offline or the broker
  restarts; its end is recorded once every partition has its marker. An offline partition delays
  only its own marker.
- A transactional id is served while its partition of __transaction_state is active.
- Long lists of markers are written for a few transactions at a time, in slots that the creators of
  the transactional ids share: a client may let a thousand transactions of a thousand partitions
  time out at once, and each that is under way has a turn of the loop before any request.

This module does not know the wire format of requests, nor how a marker is written.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Protocol

import structlog

from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import Turns
from broker.logging import RateLimitedLogger
from broker.quotas.memory_budget import MemoryBudget
from broker.quotas.shares import Shares
from broker.topics.internal_topic import KeyedLog, PartitionState, PartitionStates
from broker.topics.producer_ids import Producer
from broker.transactions.model import (
    COMPLETED,
    NO_PRODUCER_ID,
    PREPARED,
    Answer,
    Appended,
    AppendFailed,
    AppendRecord,
    EndRequested,
    Event,
    InitRequested,
    MarkersWritten,
    PartitionsAdded,
    Status,
    TimeChecked,
    Transaction,
    TransactionState,
    TransactionVersion,
    Transition,
    WriteMarkers,
)
from broker.transactions.state import is_changing, new_transaction, restored, transition
from broker.transactions.state_records import LoadedTransactions, encode_key, encode_value
from config.settings import TransactionSettings
from protocol.errors import ErrorCode, code_of
from storage.errors import StorageError
from storage.model import TopicPartition

logger = structlog.get_logger("broker.transactions")
# A client causes these lines: it begins transactions and never ends them.
limited_logger: Final = RateLimitedLogger(logger)

# Longer than any name in use. Kafka's limit is 32,767, in which one character takes four bytes of
# memory: 50,000 such ids would fill 6 GB.
TRANSACTIONAL_ID_BYTES_MAX: Final = 1_000
# About 1 KB each. Kafka has no bound: clients with a new id for each run would fill the memory.
TRANSACTIONAL_IDS_MAX: Final = 100_000
# The partitions of open transactions, in memory. Each has a producer in its log, of 500 bytes.
PARTITION_BYTES: Final = 150
OPEN_PARTITIONS_BYTES_MAX: Final = 128 << 20
# Between two attempts for a partition that is offline; each next one waits twice as long.
MARKER_RETRY_SECONDS: Final = 0.1
MARKER_RETRY_SECONDS_MAX: Final = 10.0
# How long a request waits for the previous transaction to end. Markers take some milliseconds, and
# an offline partition must not keep connections waiting.
SETTLE_SECONDS: Final = 1.0
APPEND_RETRY_SECONDS: Final = 0.5  # likewise for the record that completes a transaction
PARTITIONS_AT_ONCE: Final = 500  # encoded on the event loop: below a millisecond
# Transactions whose markers are written at a time, if they have more than so many: 32 take 1 ms.
LONG_LISTS_AT_ONCE: Final = 8
LONG_LIST: Final = 32


class Markers(Protocol):
    """Writes transaction markers to the partitions of data."""

    async def write(
        self, partition: TopicPartition, producer: Producer, *, commit: bool, only_if_open: bool
    ) -> None:
        """Append a marker, durable on return; nothing where the partition does not exist.

        `only_if_open`: only if the producer has a transaction open there. Raises StorageError.
        """
        ...


@dataclass(slots=True)
class TransactionStats:
    """Counters since the start of the broker, and the transactional ids by status now."""

    statuses: Counter[Status] = field(default_factory=Counter)
    committed: int = 0
    aborted: int = 0
    timed_out: int = 0
    expired_ids: int = 0
    marker_retries: int = 0
    append_errors: int = 0
    records_unknown: int = 0
    records_invalid: int = 0


@dataclass(slots=True, eq=False)
class LiveTransaction:
    """One transactional id with the requests that wait for it."""

    state: TransactionState
    opened_at: float  # loop time at which this process saw the present transaction begin
    waiter: "asyncio.Future[Answer] | None" = None  # of the request whose record is appended
    settling: "list[asyncio.Future[None]]" = field(default_factory=list)
    markers: "asyncio.Task[None] | None" = field(default=None, repr=False)

    @property
    def is_settled(self) -> bool:
        """Return whether no record and no marker of the transaction is under way."""
        return self.state.pending is None and self.state.transaction.status not in PREPARED

    async def wait_settled(self, seconds: float) -> bool:
        """Wait until the transaction is settled; return False if it takes longer."""
        if self.is_settled:
            return True
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.settling.append(settled)
        await asyncio.wait([settled], timeout=seconds)
        if settled.done():
            return True
        self.settling.remove(settled)
        return False

    def wake(self) -> None:
        """End all waits of `wait_settled`."""
        settling, self.settling = self.settling, []
        for settled in settling:
            if not settled.done():
                settled.set_result(None)


class TransactionCoordinator:
    """All transactional ids of this broker."""

    def __init__(
        self,
        store: KeyedLog,
        markers: Markers,
        *,
        new_producer_id: Callable[[], Awaitable[int]],
        wall_ms: Callable[[], int],
        settings: TransactionSettings | None = None,
    ) -> None:
        self.settings = settings or TransactionSettings()
        self.stats = TransactionStats()
        self._store = store
        self._markers = markers
        self._new_producer_id = new_producer_id
        self._wall_ms = wall_ms
        self._transactions: dict[str, LiveTransaction] = {}
        self._ids: list[set[str]] = [set() for _ in range(store.partition_count)]  # by partition
        self._shares = Shares(TRANSACTIONAL_IDS_MAX)
        self._open_partitions = MemoryBudget(OPEN_PARTITIONS_BYTES_MAX)
        self._partitions = PartitionStates(store)
        self._long_lists = FairSlots(LONG_LISTS_AT_ONCE)
        # Encode one value at a time: the threads compete with the loop for the interpreter.
        self._encoding = FairSlots(1)

    # Partitions of __transaction_state ----------------------------------------------------------

    async def activate(self, partition: int, loaded: LoadedTransactions) -> None:
        """Serve the transactional ids of a partition; continue the transactions it has decided.

        See internal_topic.Coordinator.
        """
        self.stats.records_unknown += loaded.unknown_records
        self.stats.records_invalid += loaded.invalid_records
        async for transaction in Turns().over(loaded.transactions.values()):
            if not self._partitions.is_loading(partition):
                return  # it failed meanwhile
            begun = restored(transaction)
            live = self._add(begun.state)
            self._perform(live, begun, is_restart=True)
        self._partitions.activate(partition)

    def deactivate(self, partition: int, state: PartitionState) -> None:
        """Stop serving a partition: it failed, or it will be loaded again."""
        self._partitions.deactivate(partition, state)
        for transactional_id in tuple(self._ids[partition]):
            self._release(self._remove(transactional_id))

    def availability(self, transactional_id: str) -> ErrorCode:
        """Return NONE if the transactional id is served, else what to answer."""
        if not transactional_id or len(transactional_id.encode()) > TRANSACTIONAL_ID_BYTES_MAX:
            return ErrorCode.INVALID_REQUEST
        return self._partitions.error(transactional_id)

    def is_offline(self, partition: int) -> bool:
        """Return whether a partition is neither served nor being loaded."""
        return self._partitions.is_offline(partition)

    @property
    def is_loading(self) -> bool:
        """Return whether a partition is still being loaded."""
        return self._partitions.any_loading

    async def close(self) -> None:
        """Stop writing markers; the next start continues with them."""
        tasks = [live.markers for live in self._transactions.values() if live.markers is not None]
        for partition in range(self._store.partition_count):
            self.deactivate(partition, PartitionState.OFFLINE)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _add(self, state: TransactionState) -> LiveTransaction:
        live = LiveTransaction(state, opened_at=asyncio.get_running_loop().time())
        transactional_id = state.transaction.transactional_id
        self._transactions[transactional_id] = live
        self._ids[self._store.partition_of(transactional_id)].add(transactional_id)
        self.stats.statuses[live.state.transaction.status] += 1
        return live

    def _remove(self, transactional_id: str) -> LiveTransaction:
        live = self._transactions.pop(transactional_id)
        self._ids[self._store.partition_of(transactional_id)].discard(transactional_id)
        self._shares.remove(transactional_id)
        self._open_partitions.remove(transactional_id)
        self.stats.statuses[live.state.transaction.status] -= 1
        return live

    def _release(self, live: LiveTransaction) -> None:
        if live.markers is not None:
            live.markers.cancel()
        if live.waiter is not None and not live.waiter.done():
            live.waiter.set_result(Answer(ErrorCode.NOT_COORDINATOR))
        live.wake()

    # Requests -----------------------------------------------------------------------------------

    async def init_producer(
        self,
        transactional_id: str,
        timeout_ms: int,
        expected: Producer | None,
        creator: Hashable | None = None,
    ) -> Answer:
        """InitProducerId: fence former producers of the id, and return the next epoch."""
        if not 0 < timeout_ms <= self.settings.max_timeout_ms:
            return Answer(ErrorCode.INVALID_TRANSACTION_TIMEOUT)
        error = self.availability(transactional_id)
        if error is not ErrorCode.NONE:
            return Answer(error)
        live = self._transactions.get(transactional_id)
        spare = NO_PRODUCER_ID
        if live is None or live.state.transaction.is_epoch_exhausted:
            try:
                spare = await self._new_producer_id()
            except StorageError as storage_error:
                return Answer(code_of(storage_error))
            error = self.availability(transactional_id)  # it may have changed meanwhile
            if error is not ErrorCode.NONE:
                return Answer(error)
            live = self._transactions.get(transactional_id)
        if live is None:
            if not self._shares.admits(creator, len(self._transactions)):
                return Answer(ErrorCode.POLICY_VIOLATION)
            self._shares.add(transactional_id, creator)
            live = self._add(new_transaction(transactional_id, spare, timeout_ms))
        self._open_partitions.own(transactional_id, creator)
        return await self._request(
            live, InitRequested(timeout_ms, expected, spare, self._wall_ms())
        )

    async def add_partitions(
        self,
        transactional_id: str,
        producer: Producer,
        partitions: frozenset[TopicPartition],
        client_version: TransactionVersion = TransactionVersion.V0,
    ) -> ErrorCode:
        """Add partitions to the open transaction; begin one if none is open.

        POLICY_VIOLATION: the transactions of its owner have too many partitions.
        """
        live, error = self._find(transactional_id)
        if live is None:
            return error
        more_bytes = PARTITION_BYTES * len(partitions - live.state.transaction.partitions)
        if not self._open_partitions.admits(transactional_id, more_bytes):
            return ErrorCode.POLICY_VIOLATION
        event = PartitionsAdded(producer, partitions, client_version, self._wall_ms())
        return (await self._request(live, event)).error

    async def end(
        self,
        transactional_id: str,
        producer: Producer,
        *,
        commit: bool,
        client_version: TransactionVersion = TransactionVersion.V0,
    ) -> Answer:
        """EndTxn: ends when the decision is in the log; the markers follow."""
        live, error = self._find(transactional_id)
        if live is None:
            return Answer(error)
        spare = NO_PRODUCER_ID
        if client_version.bumps_epoch and live.state.transaction.is_epoch_exhausted:
            try:
                spare = await self._new_producer_id()
            except StorageError as storage_error:
                return Answer(code_of(storage_error))
            if not self._is_served(live):
                return Answer(ErrorCode.NOT_COORDINATOR)
        event = EndRequested(producer, commit, client_version, spare, self._wall_ms())
        return await self._request(live, event)

    def produce_error(
        self, transactional_id: str, producer: Producer, partition: TopicPartition
    ) -> ErrorCode:
        """Return NONE if the producer's open transaction includes the partition now.

        INVALID_TXN_STATE: the partition has to be added first.
        """
        live, error = self._find(transactional_id)
        if live is None:
            return error
        transaction, pending = live.state.transaction, live.state.pending
        is_adding = pending is not None and pending.transaction.status is Status.ONGOING
        if not is_adding and is_changing(live.state, producer):
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if producer.producer_id != transaction.producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if producer.epoch != transaction.producer_epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if transaction.status in PREPARED:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if transaction.status is Status.ONGOING and partition in transaction.partitions:
            return ErrorCode.NONE
        return ErrorCode.INVALID_TXN_STATE

    def producer_id_error(self, transactional_id: str, producer_id: int) -> ErrorCode:
        """Return NONE if the producer id is that of the transactional id."""
        live, error = self._find(transactional_id)
        if live is None:
            return error
        is_same = live.state.transaction.producer_id == producer_id
        return ErrorCode.NONE if is_same else ErrorCode.INVALID_PRODUCER_ID_MAPPING

    def _find(self, transactional_id: str) -> tuple[LiveTransaction | None, ErrorCode]:
        error = self.availability(transactional_id)
        if error is not ErrorCode.NONE:
            return None, error
        live = self._transactions.get(transactional_id)
        return live, ErrorCode.INVALID_PRODUCER_ID_MAPPING

    def transactions(self) -> Iterator[Transaction]:
        """Yield every transaction that is served."""
        for live in tuple(self._transactions.values()):
            yield live.state.transaction

    def transaction(self, transactional_id: str) -> tuple[ErrorCode, Transaction | None]:
        """Return the transaction of an id, for DescribeTransactions."""
        error = self.availability(transactional_id)
        live = self._transactions.get(transactional_id)
        if error is not ErrorCode.NONE or live is None:
            missing = ErrorCode.TRANSACTIONAL_ID_NOT_FOUND
            return (missing if error is ErrorCode.NONE else error), None
        return ErrorCode.NONE, live.state.transaction

    async def find_open(self, partition: TopicPartition, producer_id: int) -> str | None:
        """Return the transactional id whose open transaction includes a partition.

        That counts which is open when this returns, also if it began during the search.
        """
        owners = [
            live
            async for live in Turns().over(tuple(self._transactions.values()))
            if live.state.transaction.producer_id == producer_id
        ]
        present = (live.state.transaction for live in owners)
        return next(
            (each.transactional_id for each in present if partition in each.partitions), None
        )

    # Timers -------------------------------------------------------------------------------------

    async def abort_timed_out(self) -> None:
        """Abort transactions that are open for longer than their timeout."""
        turns = Turns()
        for live in tuple(self._transactions.values()):
            await turns.take()
            transaction = live.state.transaction
            is_open = transaction.status is Status.ONGOING and live.state.pending is None
            if is_open and self._is_served(live):
                open_ms = int(1000 * (asyncio.get_running_loop().time() - live.opened_at))
                self._send(live, TimeChecked(self._wall_ms(), open_ms))
                if live.state.pending is not None:
                    self.stats.timed_out += 1
                    limited_logger.info(
                        "transaction timed out",
                        subject=transaction.transactional_id,
                        transactional_id=transaction.transactional_id,
                        timeout_ms=transaction.timeout_ms,
                    )

    async def expire_ids(self) -> int:
        """Delete transactional ids that nobody has used for their retention; return how many.

        Call it only while the wall clock is trusted.
        """
        turns = Turns()
        before_ms = self._wall_ms() - self.settings.id_expiration_ms
        expired = 0
        for transactional_id, live in tuple(self._transactions.items()):
            await turns.take()
            transaction = live.state.transaction
            is_idle = transaction.status is Status.EMPTY or transaction.status in COMPLETED
            if not is_idle or live.state.pending or transaction.last_update_ms >= before_ms:
                continue
            try:
                await self._store.append(transactional_id, [(encode_key(transactional_id), None)])
            except StorageError as error:
                logger.warning("transactional id not expired", reason=str(error))
                continue
            is_unchanged = live.state.transaction is transaction and live.state.pending is None
            if self._is_served(live) and is_unchanged:
                self._remove(transactional_id)
                expired += 1
        self.stats.expired_ids += expired
        if expired:
            logger.info("transactional ids expired", ids=expired)
        return expired

    # Events and effects ---------------------------------------------------------------------------

    async def _request(self, live: LiveTransaction, event: Event) -> Answer:
        """Send an event and wait for its answer, for a while also for the one before it.

        Clients repeat a request after CONCURRENT_TRANSACTIONS, 20 to 100 ms later.
        """
        answer = await self._ask(live, event)
        if answer.error is not ErrorCode.CONCURRENT_TRANSACTIONS:
            return answer
        if not await live.wait_settled(SETTLE_SECONDS):
            return answer
        if not self._is_served(live):
            return Answer(ErrorCode.NOT_COORDINATOR)
        return await self._ask(live, event)

    async def _ask(self, live: LiveTransaction, event: Event) -> Answer:
        answer = self._send(live, event)
        if answer is not None:
            return answer
        # Only the request that made the pending value gets here: others are answered at once.
        waiter = live.waiter = asyncio.get_running_loop().create_future()
        return await asyncio.shield(waiter)

    def _send(self, live: LiveTransaction, event: Event) -> Answer | None:
        result = transition(live.state, event)
        return self._perform(live, result)

    def _perform(
        self, live: LiveTransaction, result: Transition, *, is_restart: bool = False
    ) -> Answer | None:
        self.stats.statuses[live.state.transaction.status] -= 1
        self.stats.statuses[result.state.transaction.status] += 1
        if result.state.transaction.start_ms != live.state.transaction.start_ms or (
            result.state.transaction.status is not live.state.transaction.status
        ):
            live.opened_at = asyncio.get_running_loop().time()
        live.state = result.state
        transaction = result.state.transaction
        size_bytes = PARTITION_BYTES * len(transaction.partitions)
        self._open_partitions.note(transaction.transactional_id, size_bytes)
        answer: Answer | None = None
        for effect in result.effects:
            match effect:
                case Answer():
                    answer = effect
                case AppendRecord(transaction):
                    self._append(live, transaction)
                case WriteMarkers(transaction):
                    live.markers = asyncio.create_task(
                        self._write_markers(live, transaction, only_if_open=is_restart),
                        name=f"markers of {transaction.transactional_id[:100]}",
                    )
        return answer

    def _append(self, live: LiveTransaction, transaction: Transaction) -> None:
        if len(transaction.partitions) <= PARTITIONS_AT_ONCE:
            appended = self._append_value(transaction, encode_value(transaction))
        else:
            appended = asyncio.ensure_future(self._append_large(live, transaction))
        appended.add_done_callback(lambda future: self._note_appended(live, future))

    def _append_value(self, transaction: Transaction, value: bytes) -> "asyncio.Future[object]":
        key = encode_key(transaction.transactional_id)
        return self._store.append(transaction.transactional_id, [(key, value)])

    async def _append_large(self, live: LiveTransaction, transaction: Transaction) -> None:
        """Append a value whose encoding would block the event loop."""
        async with self._encoding.slot(self._shares.creator(transaction.transactional_id)):
            value = await asyncio.to_thread(encode_value, transaction)
        if self._is_served(live):  # else its partition is being loaded, without this value
            await self._append_value(transaction, value)

    def _note_appended(self, live: LiveTransaction, appended: "asyncio.Future[object]") -> None:
        if not self._is_served(live):
            return
        error = asyncio.CancelledError() if appended.cancelled() else appended.exception()
        answer: Answer | None
        if error is None:
            answer = self._send(live, Appended())
        else:
            code = _code_of_append(error)
            self.stats.append_errors += 1
            logger.error("transaction append failed", reason=repr(error))
            answer = self._send(live, AppendFailed(code))
            if live.state.transaction.status in PREPARED:  # its markers are written
                asyncio.get_running_loop().call_later(APPEND_RETRY_SECONDS, self._complete, live)
        waiter, live.waiter = live.waiter, None
        if waiter is not None and not waiter.done() and answer is not None:
            waiter.set_result(answer)
        if live.is_settled:
            live.wake()

    def _is_served(self, live: LiveTransaction) -> bool:
        return self._transactions.get(live.state.transaction.transactional_id) is live

    async def _write_markers(
        self, live: LiveTransaction, transaction: Transaction, *, only_if_open: bool
    ) -> None:
        """Write the markers; try again where a partition is offline, after all others."""
        commit = transaction.status is Status.PREPARE_COMMIT
        remaining, delay = list(transaction.partitions), MARKER_RETRY_SECONDS
        turns = Turns()
        while True:
            # After a restart there may be thousands of short lists at once.
            async with self._slot(transaction, needed=only_if_open or len(remaining) > LONG_LIST):
                remaining = [
                    partition
                    async for partition in turns.over(remaining)
                    if not await self._write_marker(
                        partition, transaction.producer, commit, only_if_open
                    )
                ]
            if not remaining:
                break
            self.stats.marker_retries += len(remaining)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MARKER_RETRY_SECONDS_MAX)
        live.markers = None
        if commit:
            self.stats.committed += 1
        else:
            self.stats.aborted += 1
        self._complete(live)

    @asynccontextmanager
    async def _slot(self, transaction: Transaction, *, needed: bool) -> AsyncIterator[None]:
        """Wait for a slot for a long list of markers, and occupy it for the block."""
        if not needed:
            yield
            return
        async with self._long_lists.slot(self._shares.creator(transaction.transactional_id)):
            yield

    def _complete(self, live: LiveTransaction) -> None:
        if self._is_served(live) and live.state.transaction.status in PREPARED:
            self._send(live, MarkersWritten(self._wall_ms()))

    async def _write_marker(
        self, partition: TopicPartition, producer: Producer, commit: bool, only_if_open: bool
    ) -> bool:
        """Return whether the partition has its marker."""
        try:
            await self._markers.write(partition, producer, commit=commit, only_if_open=only_if_open)
        except StorageError as error:
            logger.warning("marker not written", partition=str(partition), reason=str(error))
        except Exception:
            # Supervised: a decided transaction must not stay open.
            logger.exception("marker not written", partition=str(partition))
        else:
            return True
        return False


def _code_of_append(error: BaseException) -> ErrorCode:
    """Return the code for a value that was not stored.

    As in Kafka's TransactionStateManager, clients try again if the disk is at fault: for
    KAFKA_STORAGE_ERROR they would give up the transaction.
    """
    if not isinstance(error, StorageError):
        return ErrorCode.COORDINATOR_NOT_AVAILABLE
    code = code_of(error)
    return ErrorCode.NOT_COORDINATOR if code is ErrorCode.KAFKA_STORAGE_ERROR else code
