"""Transactions, event by event, as Kafka 4.3.0's coordinator decides them."""

from dataclasses import replace

import pytest

from broker.topics.producer_ids import Producer
from broker.transactions.model import (
    EPOCH_MAX,
    NO_PRODUCER_ID,
    PRODUCER_EPOCH_MAX,
    Answer,
    Appended,
    AppendFailed,
    AppendRecord,
    EndRequested,
    InitRequested,
    MarkersWritten,
    PartitionsAdded,
    Status,
    TimeChecked,
    TransactionState,
    TransactionVersion,
    WriteMarkers,
)
from broker.transactions.state import new_transaction, restored, transition
from broker.transactions.state_records import encode_value
from protocol.errors import ErrorCode
from storage.model import TopicPartition

T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
V0, V2 = TransactionVersion.V0, TransactionVersion.V2
TIMEOUT_MS, SPARE = 60_000, 900


def apply(state: TransactionState, event: object) -> tuple[TransactionState, Answer | None]:
    """Send an event and complete its append, if it makes one."""
    result = transition(state, event)  # type: ignore[arg-type]
    if any(isinstance(effect, AppendRecord) for effect in result.effects):
        result = transition(result.state, Appended())
    answers = [effect for effect in result.effects if isinstance(effect, Answer)]
    return result.state, answers[0] if answers else None


def init(
    state: TransactionState, expected: Producer | None = None, now_ms: int = 0
) -> tuple[TransactionState, Answer | None]:
    return apply(state, InitRequested(TIMEOUT_MS, expected, SPARE, now_ms))


def begun() -> TransactionState:
    return init(new_transaction("id", 7, TIMEOUT_MS))[0]


def opened(version: TransactionVersion = V0) -> TransactionState:
    state = begun()
    producer = state.transaction.producer
    return apply(state, PartitionsAdded(producer, frozenset({T0}), version, 5))[0]


def ended(version: TransactionVersion, *, commit: bool) -> TransactionState:
    state = opened(version)
    state, _ = apply(state, EndRequested(state.transaction.producer, commit, version, SPARE, 9))
    return apply(state, MarkersWritten(10))[0]


def error_of(answer: Answer | None) -> ErrorCode:
    assert answer is not None
    return answer.error


def test_a_new_id_begins_with_epoch_zero() -> None:
    state, answer = init(new_transaction("id", 7, TIMEOUT_MS))
    assert answer == Answer(ErrorCode.NONE, Producer(7, 0))
    assert state.transaction.status is Status.EMPTY


def test_each_start_of_a_producer_increments_the_epoch() -> None:
    _, answer = init(begun())
    assert answer == Answer(ErrorCode.NONE, Producer(7, 1))


def test_a_start_during_a_transaction_aborts_it_with_the_next_epoch() -> None:
    state, answer = init(opened())
    assert error_of(answer) is ErrorCode.CONCURRENT_TRANSACTIONS
    assert state.transaction.status is Status.PREPARE_ABORT
    assert state.transaction.producer == Producer(7, 1)
    state, _ = apply(state, MarkersWritten(10))
    state, answer = init(state)
    assert answer == Answer(ErrorCode.NONE, Producer(7, 2))


def test_a_producer_that_starts_again_in_its_transaction_gets_the_epoch_that_aborts_it() -> None:
    state, answer = init(opened(), Producer(7, 0))
    assert error_of(answer) is ErrorCode.CONCURRENT_TRANSACTIONS
    state, _ = apply(state, MarkersWritten(10))
    state, answer = init(state, Producer(7, 0))
    assert answer == Answer(ErrorCode.NONE, Producer(7, 1))
    assert init(state, Producer(7, 0))[1] == answer, "the answer was lost"


def test_a_producer_whose_transaction_timed_out_may_start_again_unless_another_one_did() -> None:
    state, _ = apply(opened(), TimeChecked(5 + TIMEOUT_MS, 0))
    state, _ = apply(state, MarkersWritten(10 + TIMEOUT_MS))
    assert init(state, Producer(7, 0))[1] == Answer(ErrorCode.NONE, Producer(7, 1))
    state, _ = init(state)
    assert error_of(init(state, Producer(7, 0))[1]) is ErrorCode.PRODUCER_FENCED


def test_a_former_producer_gets_no_producer_id_once_the_epoch_is_exhausted() -> None:
    state = begun()
    last = replace(state.transaction, producer_epoch=PRODUCER_EPOCH_MAX)
    state = replace(state, transaction=last)
    assert error_of(init(state, Producer(7, 5))[1]) is ErrorCode.PRODUCER_FENCED
    state, answer = init(state, Producer(7, PRODUCER_EPOCH_MAX))
    assert answer == Answer(ErrorCode.NONE, Producer(SPARE, 0))
    assert init(state, Producer(7, PRODUCER_EPOCH_MAX))[1] == answer, "the answer was lost"


def test_a_producer_with_the_last_epoch_that_starts_again_in_its_transaction_gets_an_id() -> None:
    state = opened()
    last = replace(state.transaction, producer_epoch=PRODUCER_EPOCH_MAX)
    state, _ = init(replace(state, transaction=last), Producer(7, PRODUCER_EPOCH_MAX))
    state, _ = apply(state, MarkersWritten(10))
    state, answer = init(state, Producer(7, PRODUCER_EPOCH_MAX))
    assert answer == Answer(ErrorCode.NONE, Producer(SPARE, 0))
    assert init(state, Producer(7, PRODUCER_EPOCH_MAX))[1] == answer, "the answer was lost"


def test_a_producer_that_lost_the_answer_of_its_last_end_may_start_again() -> None:
    state, _ = apply(exhausted(), MarkersWritten(10))
    _, answer = init(state, Producer(7, PRODUCER_EPOCH_MAX))
    assert answer == Answer(ErrorCode.NONE, Producer(SPARE, 0))


def test_the_version_of_the_request_decides_how_an_end_is_repeated() -> None:
    by_v2, by_v1 = ended(V2, commit=True), ended(V0, commit=True)
    v1_again = EndRequested(by_v2.transaction.producer, True, V0, SPARE, 11)
    assert error_of(apply(by_v2, v1_again)[1]) is ErrorCode.NONE
    v2_next = EndRequested(by_v1.transaction.producer, True, V2, SPARE, 11)
    assert error_of(apply(by_v1, v2_next)[1]) is ErrorCode.INVALID_TXN_STATE


def test_a_repeated_bump_of_the_epoch_gets_the_same_answer() -> None:
    state, answer = init(begun(), Producer(7, 0))
    assert answer == Answer(ErrorCode.NONE, Producer(7, 1))
    assert init(state, Producer(7, 0))[1] == answer


def test_a_producer_that_is_not_the_ids_is_fenced() -> None:
    state, _ = init(begun())
    assert error_of(init(state, Producer(8, 0))[1]) is ErrorCode.PRODUCER_FENCED
    state, _ = init(state)
    assert error_of(init(state, Producer(7, 0))[1]) is ErrorCode.PRODUCER_FENCED


def test_an_exhausted_epoch_takes_another_producer_id() -> None:
    state = begun()
    last = replace(state.transaction, producer_epoch=PRODUCER_EPOCH_MAX)
    state, answer = init(replace(state, transaction=last))
    assert answer == Answer(ErrorCode.NONE, Producer(SPARE, 0))
    assert state.transaction.previous_producer_id == 7


@pytest.mark.parametrize("version", [V0, V2])
@pytest.mark.parametrize("commit", [True, False])
def test_an_end_is_decided_first_and_complete_after_its_markers(
    version: TransactionVersion, commit: bool
) -> None:
    state = opened(version)
    event = EndRequested(state.transaction.producer, commit, version, SPARE, 9)
    result = transition(transition(state, event).state, Appended())
    (answer, markers) = result.effects
    assert isinstance(answer, Answer)
    assert isinstance(markers, WriteMarkers)
    assert markers.transaction.partitions == {T0}
    decided = Status.PREPARE_COMMIT if commit else Status.PREPARE_ABORT
    assert markers.transaction.status is decided
    state, _ = apply(result.state, MarkersWritten(10))
    assert state.transaction.status is (Status.COMPLETE_COMMIT if commit else Status.COMPLETE_ABORT)
    assert state.transaction.partitions == frozenset()


def test_version_two_increments_the_epoch_at_each_end() -> None:
    state = ended(V2, commit=True)
    assert state.transaction.producer == Producer(7, 1)
    assert ended(V0, commit=True).transaction.producer == Producer(7, 0)


def test_version_two_changes_an_exhausted_producer_id_at_the_end() -> None:
    state = opened(V2)
    last = replace(state.transaction, producer_epoch=PRODUCER_EPOCH_MAX)
    state = replace(state, transaction=last)
    end = EndRequested(Producer(7, PRODUCER_EPOCH_MAX), True, V2, SPARE, 9)
    state, answer = apply(state, end)
    assert answer == Answer(ErrorCode.NONE, Producer(SPARE, 0))
    assert state.transaction.producer == Producer(7, PRODUCER_EPOCH_MAX + 1), "of the markers"
    state, _ = apply(state, MarkersWritten(10))
    assert state.transaction.producer == Producer(SPARE, 0)
    assert apply(state, end)[1] == Answer(ErrorCode.NONE, Producer(SPARE, 0)), "repeated"


def exhausted() -> TransactionState:
    """A transaction of version two that is committed with the last epoch of its producer id."""
    state = opened(V2)
    last = replace(state.transaction, producer_epoch=PRODUCER_EPOCH_MAX)
    end = EndRequested(Producer(7, PRODUCER_EPOCH_MAX), True, V2, SPARE, 9)
    return apply(replace(state, transaction=last), end)[0]


@pytest.mark.parametrize("completes", [False, True])
def test_a_producer_with_its_next_id_waits_for_the_markers(completes: bool) -> None:
    state = exhausted()
    if completes:  # the record of the completion is being appended
        state = transition(state, MarkersWritten(10)).state
    producer = Producer(SPARE, 0)
    concurrent = (Answer(ErrorCode.CONCURRENT_TRANSACTIONS),)
    for event in (
        PartitionsAdded(producer, frozenset({T1}), V2, 11),
        EndRequested(producer, False, V2, SPARE, 11),
        InitRequested(TIMEOUT_MS, producer, SPARE, 11),
    ):
        assert transition(state, event).effects == concurrent, event


def test_a_repeated_end_waits_while_the_completion_is_appended() -> None:
    state = opened(V2)
    end = EndRequested(state.transaction.producer, True, V2, SPARE, 9)
    state, _ = apply(state, end)
    completing = transition(state, MarkersWritten(10)).state
    assert transition(completing, end).effects == (Answer(ErrorCode.CONCURRENT_TRANSACTIONS),)
    completed = transition(completing, Appended()).state
    assert transition(completed, end).effects == (Answer(ErrorCode.NONE, Producer(7, 1)),)


def test_an_epoch_that_became_exhausted_meanwhile_takes_no_missing_producer_id() -> None:
    state = begun()
    last = replace(state.transaction, producer_epoch=PRODUCER_EPOCH_MAX)
    state = replace(state, transaction=last)
    answer = init(state)[1]
    assert answer == Answer(ErrorCode.NONE, Producer(SPARE, 0))
    for event in (
        InitRequested(TIMEOUT_MS, None, NO_PRODUCER_ID, 6),
        EndRequested(last.producer, False, V2, NO_PRODUCER_ID, 6),
    ):
        effects = transition(state, event).effects
        assert effects == (Answer(ErrorCode.CONCURRENT_TRANSACTIONS),), event


@pytest.mark.parametrize("commit", [True, False])
def test_a_repeated_end_of_version_two_gets_the_answer_again(commit: bool) -> None:
    state = ended(V2, commit=commit)
    before = Producer(7, 0)
    _, answer = apply(state, EndRequested(before, commit, V2, SPARE, 11))
    assert answer == Answer(ErrorCode.NONE, Producer(7, 1))
    _, answer = apply(state, EndRequested(before, not commit, V2, SPARE, 11))
    assert error_of(answer) is ErrorCode.INVALID_TXN_STATE


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("restarts", [True, False])
def test_an_end_of_the_previous_epoch_does_not_end_the_next_transaction(
    restarts: bool, commit: bool
) -> None:
    state = ended(V2, commit=True)
    former = Producer(7, 0)  # its answer was lost, and its request comes again
    if restarts:
        former = state.transaction.producer
        state, _ = init(state)
    late = EndRequested(former, commit, V2, SPARE, 12)
    fenced = (Answer(ErrorCode.PRODUCER_FENCED),)
    if restarts:
        assert transition(state, late).effects == fenced, "before the next transaction"
    producer = state.transaction.producer
    state, _ = apply(state, PartitionsAdded(producer, frozenset({T1}), V2, 11))
    assert transition(state, late).effects == fenced


def test_a_late_end_does_not_end_the_transaction_of_the_next_producer_id() -> None:
    state, _ = apply(exhausted(), MarkersWritten(10))
    added = PartitionsAdded(Producer(SPARE, 0), frozenset({T1}), V2, 11)
    state, _ = apply(state, added)
    late = EndRequested(Producer(7, PRODUCER_EPOCH_MAX), True, V2, SPARE, 12)
    refused = transition(state, late)
    assert refused.state == state
    assert refused.effects == (Answer(ErrorCode.INVALID_PRODUCER_ID_MAPPING),)


def test_a_repeated_end_of_version_one_succeeds_only_for_the_same_decision() -> None:
    state = ended(V0, commit=True)
    producer = state.transaction.producer
    assert error_of(apply(state, EndRequested(producer, True, V0, SPARE, 11))[1]) is ErrorCode.NONE
    refused = apply(state, EndRequested(producer, False, V0, SPARE, 11))[1]
    assert error_of(refused) is ErrorCode.INVALID_TXN_STATE


def test_without_a_transaction_only_version_two_may_abort() -> None:
    state = begun()
    producer = state.transaction.producer
    for commit, version in ((True, V0), (False, V0), (True, V2)):
        answer = apply(state, EndRequested(producer, commit, version, SPARE, 9))[1]
        assert error_of(answer) is ErrorCode.INVALID_TXN_STATE
    state, answer = apply(state, EndRequested(producer, False, V2, SPARE, 9))
    assert answer == Answer(ErrorCode.NONE, Producer(7, 1))
    assert state.transaction.status is Status.PREPARE_ABORT


def test_old_epochs_are_fenced_and_other_producers_are_unknown() -> None:
    state = init(begun())[0]
    old, other = Producer(7, 0), Producer(8, 1)
    for producer, error in (
        (old, ErrorCode.PRODUCER_FENCED),
        (other, ErrorCode.INVALID_PRODUCER_ID_MAPPING),
    ):
        added = PartitionsAdded(producer, frozenset({T0}), V0, 5)
        assert error_of(apply(state, added)[1]) is error
        assert error_of(apply(state, EndRequested(producer, True, V0, SPARE, 9))[1]) is error


def test_a_decided_transaction_takes_no_partition_and_no_other_decision() -> None:
    state = opened()
    producer = state.transaction.producer
    state, _ = apply(state, EndRequested(producer, True, V0, SPARE, 9))
    concurrent = ErrorCode.CONCURRENT_TRANSACTIONS
    added = PartitionsAdded(producer, frozenset({T1}), V0, 9)
    assert error_of(apply(state, added)[1]) is concurrent
    assert error_of(apply(state, EndRequested(producer, True, V0, SPARE, 9))[1]) is concurrent
    other = apply(state, EndRequested(producer, False, V0, SPARE, 9))[1]
    assert error_of(other) is ErrorCode.INVALID_TXN_STATE
    assert error_of(init(state)[1]) is concurrent


def test_while_a_record_is_appended_others_are_answered_to_try_again() -> None:
    state = begun()
    producer = state.transaction.producer
    state = transition(state, PartitionsAdded(producer, frozenset({T0}), V0, 5)).state
    for event in (
        InitRequested(TIMEOUT_MS, None, SPARE, 6),
        PartitionsAdded(producer, frozenset({T1}), V0, 6),
        EndRequested(producer, True, V0, SPARE, 6),
    ):
        answer = transition(state, event).effects
        assert answer == (Answer(ErrorCode.CONCURRENT_TRANSACTIONS),)


def test_a_failed_append_changes_nothing() -> None:
    state = opened()
    added = PartitionsAdded(state.transaction.producer, frozenset({T1}), V0, 6)
    pending = transition(state, added).state
    failed = transition(pending, AppendFailed(ErrorCode.KAFKA_STORAGE_ERROR))
    assert failed.state == state
    assert failed.effects == (Answer(ErrorCode.KAFKA_STORAGE_ERROR),)


def test_a_known_partition_is_answered_without_a_record() -> None:
    state = opened()
    added = PartitionsAdded(state.transaction.producer, frozenset({T0}), V0, 6)
    assert transition(state, added).effects == (Answer(ErrorCode.NONE),)


def test_a_transaction_that_exceeds_its_timeout_is_aborted_and_fenced() -> None:
    state = opened()
    assert transition(state, TimeChecked(5 + TIMEOUT_MS - 1)).state == state
    assert transition(state, TimeChecked(5, open_ms=TIMEOUT_MS - 1)).state == state
    set_back, _ = apply(state, TimeChecked(-10 * TIMEOUT_MS, open_ms=TIMEOUT_MS))
    assert set_back.transaction.status is Status.PREPARE_ABORT, "the wall clock was set back"
    state, _ = apply(state, TimeChecked(5 + TIMEOUT_MS))
    assert state.transaction.status is Status.PREPARE_ABORT
    assert state.transaction.producer == Producer(7, 1)


def test_a_record_with_the_last_epoch_of_all_is_ended_with_it() -> None:
    transaction = replace(opened().transaction, producer_epoch=EPOCH_MAX)
    aborted, _ = apply(restored(transaction).state, TimeChecked(10 * TIMEOUT_MS))
    assert aborted.transaction.producer_epoch == EPOCH_MAX
    event = EndRequested(transaction.producer, True, V2, SPARE, 9)
    committed, _ = apply(restored(transaction).state, event)
    assert committed.transaction.producer_epoch == EPOCH_MAX
    assert encode_value(aborted.transaction)
    assert encode_value(committed.transaction)


@pytest.mark.parametrize("commit", [True, False])
def test_a_decided_transaction_goes_on_after_a_restart(commit: bool) -> None:
    state = opened()
    state, _ = apply(state, EndRequested(state.transaction.producer, commit, V0, SPARE, 9))
    assert restored(state.transaction).effects == (WriteMarkers(state.transaction),)
    assert restored(opened().transaction).effects == ()
