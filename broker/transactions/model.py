"""Transactions as data: the stored fields, the events that change them, and their effects.

Names follow Kafka's TransactionMetadata. `Transaction` is what a record of __transaction_state
holds; `TransactionState` adds what only the coordinator's memory knows.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from broker.topics.producer_ids import Producer
from protocol.errors import ErrorCode
from storage.model import TopicPartition

NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_TIMESTAMP: Final = -1
EPOCH_MAX: Final = 2**15 - 1
# The last epoch that a producer gets; the one above is left for the abort of its transaction.
PRODUCER_EPOCH_MAX: Final = EPOCH_MAX - 1


class Status(IntEnum):
    """The status of a transaction; the numbers are those of its record (KIP-98)."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7


PREPARED: Final = frozenset({Status.PREPARE_COMMIT, Status.PREPARE_ABORT})
COMPLETED: Final = frozenset({Status.COMPLETE_COMMIT, Status.COMPLETE_ABORT})


class TransactionVersion(IntEnum):
    """The finalized feature `transaction.version` that a client follows (KIP-890)."""

    V0 = 0
    V1 = 1  # flexible records
    V2 = 2  # the epoch grows with each transaction; partitions are added by produce requests

    @property
    def bumps_epoch(self) -> bool:
        """Return whether the end of a transaction increments the producer's epoch."""
        return self >= TransactionVersion.V2


@dataclass(frozen=True, slots=True)
class Transaction:
    """The transaction of one transactional id, as its record keeps it. Times in wall ms."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    status: Status
    partitions: frozenset[TopicPartition] = frozenset()
    last_update_ms: int = NO_TIMESTAMP
    start_ms: int = NO_TIMESTAMP
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    client_version: TransactionVersion = TransactionVersion.V0

    @property
    def producer(self) -> Producer:
        """Return the producer that may use the transactional id now."""
        return Producer(self.producer_id, self.producer_epoch)

    @property
    def is_epoch_exhausted(self) -> bool:
        """Return whether the next epoch needs another producer id."""
        return self.producer_epoch >= PRODUCER_EPOCH_MAX

    @property
    def epoch_of_end(self) -> int:
        """Return the epoch of the markers that fence the producer. A record may have the last."""
        return min(self.producer_epoch + 1, EPOCH_MAX)


@dataclass(frozen=True, slots=True)
class TransactionState:
    """A transaction in the coordinator's memory.

    `pending` is being appended to the log: every other event that would change the transaction is
    answered CONCURRENT_TRANSACTIONS meanwhile. `last_epoch` is the epoch before the present one;
    it recognises a client that repeats a request whose answer was lost.
    """

    transaction: Transaction
    last_epoch: int = NO_PRODUCER_EPOCH
    pending: "Pending | None" = None


@dataclass(frozen=True, slots=True)
class Pending:
    """The next value of a transaction while its record is being appended."""

    transaction: Transaction
    last_epoch: int
    answer: "Answer"


# Events


@dataclass(frozen=True, slots=True)
class InitRequested:
    """InitProducerId. `spare_producer_id` is unused; it serves when the epoch is exhausted.

    NO_PRODUCER_ID if the epoch was not exhausted when the request came.
    """

    timeout_ms: int
    expected: Producer | None  # the producer that the client believes to be; None: it starts
    spare_producer_id: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class PartitionsAdded:
    """AddPartitionsToTxn, AddOffsetsToTxn, or a produce request of a client that follows V2."""

    producer: Producer
    partitions: frozenset[TopicPartition]
    client_version: TransactionVersion
    now_ms: int


@dataclass(frozen=True, slots=True)
class EndRequested:
    """EndTxn. `spare_producer_id` as in InitRequested."""

    producer: Producer
    commit: bool
    client_version: TransactionVersion
    spare_producer_id: int
    now_ms: int


@dataclass(frozen=True, slots=True)
class TimeChecked:
    """The coordinator looks for transactions that are open for longer than their timeout.

    `open_ms` is how long this process has seen the transaction open, by a clock that never jumps.
    """

    now_ms: int
    open_ms: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """The record of the pending value is in the log."""


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """The record of the pending value could not be appended."""

    error: ErrorCode


@dataclass(frozen=True, slots=True)
class MarkersWritten:
    """Every partition of a prepared transaction has its marker."""

    now_ms: int


Event: TypeAlias = (
    InitRequested
    | PartitionsAdded
    | EndRequested
    | TimeChecked
    | Appended
    | AppendFailed
    | MarkersWritten
)

# Effects


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of the request; the producer is set where the API returns one."""

    error: ErrorCode
    producer: Producer | None = None


@dataclass(frozen=True, slots=True)
class AppendRecord:
    """Append the transaction to the log, then send Appended or AppendFailed."""

    transaction: Transaction


@dataclass(frozen=True, slots=True)
class WriteMarkers:
    """Write the marker to every partition of the transaction, then send MarkersWritten."""

    transaction: Transaction


Effect: TypeAlias = Answer | AppendRecord | WriteMarkers


@dataclass(frozen=True, slots=True)
class Transition:
    """The next state and what has to be done now, in this order."""

    state: TransactionState
    effects: tuple[Effect, ...] = field(default=())
