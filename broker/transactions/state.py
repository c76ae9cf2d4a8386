"""The state machine of one transactional id: a pure function from a state and an event.

Rules
- A value counts when its record is in the log. Until then it is pending, and requests that would
  change the transaction are answered CONCURRENT_TRANSACTIONS; clients repeat them.
- A prepared transaction is decided: only its markers change it, however often the broker restarts.
- A producer id with an old epoch is fenced (PRODUCER_FENCED). A producer id that never belonged to
  the transactional id gets INVALID_PRODUCER_ID_MAPPING.
- A transaction whose producer restarts, or that exceeds its timeout, is aborted with a higher
  epoch: the former producer is fenced before anybody reads beyond its records.
- With transaction version 2 each end of a transaction increments the epoch (KIP-890), so that no
  late produce request of one transaction can land in the next.

Source: KIP-98, KIP-360, KIP-890, and the behaviour of Kafka 4.3.0's TransactionCoordinator.
"""

from dataclasses import replace

from broker.topics.producer_ids import Producer
from broker.transactions.model import (
    COMPLETED,
    NO_PRODUCER_EPOCH,
    NO_PRODUCER_ID,
    NO_TIMESTAMP,
    PREPARED,
    PRODUCER_EPOCH_MAX,
    Answer,
    Appended,
    AppendFailed,
    AppendRecord,
    EndRequested,
    Event,
    InitRequested,
    MarkersWritten,
    PartitionsAdded,
    Pending,
    Status,
    TimeChecked,
    Transaction,
    TransactionState,
    Transition,
    WriteMarkers,
)
from protocol.errors import ErrorCode


def new_transaction(transactional_id: str, producer_id: int, timeout_ms: int) -> TransactionState:
    """Return the state of a transactional id that nobody has used; it is in no log yet."""
    return TransactionState(
        Transaction(transactional_id, producer_id, NO_PRODUCER_EPOCH, timeout_ms, Status.EMPTY)
    )


def restored(transaction: Transaction) -> Transition:
    """Return the state that a record of the log stands for; a decided transaction goes on."""
    state = TransactionState(transaction)
    if transaction.status in PREPARED:
        return Transition(state, (WriteMarkers(transaction),))
    return Transition(state)


def transition(state: TransactionState, event: Event) -> Transition:
    """Return the next state and its effects. Raises AssertionError for an illegal event."""
    match event:
        case Appended():
            return _appended(state)
        case AppendFailed(error):
            assert state.pending is not None
            return Transition(replace(state, pending=None), (Answer(error),))
        case MarkersWritten():
            return _complete(state, event)
        case InitRequested():
            return _init(state, event)
        case PartitionsAdded():
            return _add_partitions(state, event)
        case EndRequested():
            return _end(state, event)
        case TimeChecked():
            return _check_timeout(state, event)


def _answer(state: TransactionState, error: ErrorCode) -> Transition:
    return Transition(state, (Answer(error),))


# The log ------------------------------------------------------------------------------------------


def _append(
    transaction: Transaction, answer: Answer, state: TransactionState, last_epoch: int
) -> Transition:
    pending = Pending(transaction, last_epoch, answer)
    return Transition(replace(state, pending=pending), (AppendRecord(transaction),))


def _appended(state: TransactionState) -> Transition:
    assert state.pending is not None
    transaction = state.pending.transaction
    next_state = TransactionState(transaction, state.pending.last_epoch)
    answer = state.pending.answer
    if transaction.status in PREPARED:
        return Transition(next_state, (answer, WriteMarkers(transaction)))
    return Transition(next_state, (answer,))


def _complete(state: TransactionState, event: MarkersWritten) -> Transition:
    transaction = state.transaction
    assert transaction.status in PREPARED
    if state.pending is not None:
        return Transition(state)  # the completion is being appended already
    committed = transaction.status is Status.PREPARE_COMMIT
    completed = replace(
        transaction,
        status=Status.COMPLETE_COMMIT if committed else Status.COMPLETE_ABORT,
        partitions=frozenset(),
        last_update_ms=event.now_ms,
    )
    last_epoch = state.last_epoch
    if transaction.next_producer_id != NO_PRODUCER_ID:  # the epoch was exhausted
        completed = replace(
            completed,
            producer_id=transaction.next_producer_id,
            producer_epoch=0,
            previous_producer_id=transaction.producer_id,
            next_producer_id=NO_PRODUCER_ID,
        )
        last_epoch = PRODUCER_EPOCH_MAX  # the last one that the producer had
    return _append(completed, Answer(ErrorCode.NONE, completed.producer), state, last_epoch)


# InitProducerId -----------------------------------------------------------------------------------


def _init(state: TransactionState, event: InitRequested) -> Transition:
    transaction = state.transaction
    if state.pending is not None or (
        event.expected is not None and is_changing(state, event.expected)
    ):
        return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
    if event.expected is not None and not _may_continue(transaction, event.expected):
        return _answer(state, ErrorCode.PRODUCER_FENCED)
    match transaction.status:
        case Status.PREPARE_COMMIT | Status.PREPARE_ABORT:
            return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
        case Status.ONGOING:
            return _fence(state, Answer(ErrorCode.CONCURRENT_TRANSACTIONS), event)
        case Status.EMPTY | Status.COMPLETE_COMMIT | Status.COMPLETE_ABORT:
            return _begin_epoch(state, event)
        case _:
            raise AssertionError(f"a transaction cannot be {transaction.status.name}")


def _may_continue(transaction: Transaction, expected: Producer) -> bool:
    """Return whether the producer may ask for the next epoch; its own epoch is checked later."""
    return (
        transaction.producer_epoch == NO_PRODUCER_EPOCH
        or expected.producer_id == transaction.producer_id
        or (
            expected.producer_id == transaction.previous_producer_id
            and expected.epoch >= PRODUCER_EPOCH_MAX
        )
    )


def _begin_epoch(state: TransactionState, event: InitRequested) -> Transition:
    transaction, expected = state.transaction, event.expected
    # The answer to the first request was lost, or an abort has fenced the producer.
    is_former = expected is not None and expected.epoch == state.last_epoch
    is_known = transaction.producer_epoch == NO_PRODUCER_EPOCH or (
        expected is None or is_former or expected.epoch == transaction.producer_epoch
    )
    if not is_known:
        return _answer(state, ErrorCode.PRODUCER_FENCED)
    begun = replace(
        transaction,
        status=Status.EMPTY,
        timeout_ms=event.timeout_ms,
        partitions=frozenset(),
        start_ms=NO_TIMESTAMP,
        last_update_ms=event.now_ms,
    )
    if is_former and transaction.producer_epoch <= PRODUCER_EPOCH_MAX:
        return _append(begun, Answer(ErrorCode.NONE, begun.producer), state, state.last_epoch)
    if not transaction.is_epoch_exhausted:
        begun = replace(begun, producer_epoch=transaction.producer_epoch + 1)
    elif event.spare_producer_id == NO_PRODUCER_ID:
        return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
    else:
        begun = replace(
            begun,
            producer_id=event.spare_producer_id,
            producer_epoch=0,
            previous_producer_id=transaction.producer_id,
        )
    last_epoch = NO_PRODUCER_EPOCH if expected is None else expected.epoch
    return _append(begun, Answer(ErrorCode.NONE, begun.producer), state, last_epoch)


def _fence(
    state: TransactionState, answer: Answer, event: InitRequested | TimeChecked
) -> Transition:
    """Abort an open transaction with the next epoch, which fences its producer.

    The producer itself may take over that epoch with InitProducerId (KIP-360, KIP-588).
    """
    transaction = state.transaction
    aborted = replace(
        transaction,
        status=Status.PREPARE_ABORT,
        producer_epoch=transaction.epoch_of_end,
        last_update_ms=event.now_ms,
    )
    return _append(aborted, answer, state, transaction.producer_epoch)


# Partitions ---------------------------------------------------------------------------------------


def _add_partitions(state: TransactionState, event: PartitionsAdded) -> Transition:
    transaction = state.transaction
    if is_changing(state, event.producer):
        return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
    error = _producer_error(transaction, event.producer)
    if error is not ErrorCode.NONE:
        return _answer(state, error)
    if transaction.status in PREPARED:
        return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
    is_open = transaction.status is Status.ONGOING
    if is_open and event.partitions <= transaction.partitions:
        return _answer(state, ErrorCode.NONE)
    added = replace(
        transaction,
        status=Status.ONGOING,
        partitions=transaction.partitions | event.partitions,
        start_ms=transaction.start_ms if is_open else event.now_ms,
        last_update_ms=event.now_ms,
        client_version=event.client_version,
    )
    return _append(added, Answer(ErrorCode.NONE), state, state.last_epoch)


def is_changing(state: TransactionState, producer: Producer) -> bool:
    """Return whether a producer cannot be judged yet: it repeats its request.

    A record is being appended, or the producer has the new id that the end of an exhausted epoch
    was answered with, and the transaction gets that id when its markers are written.
    """
    transaction = state.transaction
    has_next_id = (
        transaction.status in PREPARED
        and transaction.next_producer_id != NO_PRODUCER_ID
        and producer == Producer(transaction.next_producer_id, 0)
    )
    return state.pending is not None or has_next_id


def _producer_error(transaction: Transaction, producer: Producer) -> ErrorCode:
    if producer.producer_id != transaction.producer_id:
        return ErrorCode.INVALID_PRODUCER_ID_MAPPING
    if producer.epoch != transaction.producer_epoch:
        return ErrorCode.PRODUCER_FENCED
    return ErrorCode.NONE


# EndTxn -------------------------------------------------------------------------------------------


def _end(state: TransactionState, event: EndRequested) -> Transition:
    transaction, producer = state.transaction, event.producer
    if is_changing(state, producer):
        return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
    is_v2 = event.client_version.bumps_epoch
    is_repeated = is_v2 and _is_repeated_end(transaction, producer)
    if not is_repeated:
        error = _producer_error(transaction, producer)
        if error is not ErrorCode.NONE:
            return _answer(state, error)
    decided = Status.PREPARE_COMMIT if event.commit else Status.PREPARE_ABORT
    completed = Status.COMPLETE_COMMIT if event.commit else Status.COMPLETE_ABORT
    if transaction.status is Status.ONGOING:
        return _prepare(state, event, decided)
    if transaction.status is decided:
        return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
    if transaction.status is completed and (is_repeated or not is_v2):
        return Transition(state, (Answer(ErrorCode.NONE, transaction.producer),))
    may_be_empty = (
        is_v2
        and not event.commit
        and not is_repeated
        and (transaction.status is Status.EMPTY or transaction.status in COMPLETED)
    )
    if may_be_empty:  # a V2 producer aborts before it added a partition
        return _prepare(state, event, decided)
    return _answer(state, ErrorCode.INVALID_TXN_STATE)


def _is_repeated_end(transaction: Transaction, producer: Producer) -> bool:
    """Return whether a V2 client repeats an EndTxn whose answer, with the next epoch, was lost.

    It cannot once the next transaction is open: a request of the previous epoch comes late then, or
    from a former producer, and must not end that transaction.
    """
    if transaction.status not in PREPARED and transaction.status not in COMPLETED:
        return False
    bumped = (
        producer.producer_id == transaction.producer_id
        and transaction.producer_epoch == producer.epoch + 1
    )
    rotated = (
        producer.producer_id == transaction.previous_producer_id
        and producer.epoch == PRODUCER_EPOCH_MAX
        and transaction.producer_epoch == 0
    )
    return bumped or rotated


def _prepare(state: TransactionState, event: EndRequested, decided: Status) -> Transition:
    transaction = state.transaction
    is_open = transaction.status is Status.ONGOING
    prepared = replace(
        transaction,
        status=decided,
        client_version=event.client_version,
        start_ms=transaction.start_ms if is_open else event.now_ms,
        last_update_ms=event.now_ms,
    )
    last_epoch = state.last_epoch
    answer = Answer(ErrorCode.NONE, prepared.producer)
    if event.client_version.bumps_epoch:
        if transaction.is_epoch_exhausted and event.spare_producer_id == NO_PRODUCER_ID:
            return _answer(state, ErrorCode.CONCURRENT_TRANSACTIONS)
        last_epoch = transaction.producer_epoch
        prepared = replace(prepared, producer_epoch=transaction.epoch_of_end)
        answer = Answer(ErrorCode.NONE, prepared.producer)
        if transaction.is_epoch_exhausted:
            prepared = replace(prepared, next_producer_id=event.spare_producer_id)
            answer = Answer(ErrorCode.NONE, Producer(event.spare_producer_id, 0))
    return _append(prepared, answer, state, last_epoch)


# Timeouts -----------------------------------------------------------------------------------------


def _check_timeout(state: TransactionState, event: TimeChecked) -> Transition:
    transaction = state.transaction
    is_late = (
        state.pending is None
        and transaction.status is Status.ONGOING
        and (
            event.now_ms >= transaction.start_ms + transaction.timeout_ms
            # A wall clock that was set back must not keep the readers of its partitions waiting.
            or event.open_ms >= transaction.timeout_ms
        )
    )
    return _fence(state, Answer(ErrorCode.NONE), event) if is_late else Transition(state)
