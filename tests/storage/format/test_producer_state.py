"""Producers of a log: sequences, epochs, transactions, snapshots; measured by Kafka's answers."""

import random
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import (
    CorruptSnapshotError,
    InvalidProducerEpochError,
    InvalidTransactionStateError,
    OutOfOrderSequenceError,
)
from storage.format import producer_state
from storage.format.batch import CONTROL, TRANSACTIONAL, BatchHeader, ControlType
from storage.format.producer_state import (
    KNOWN_BATCHES,
    PRODUCERS_MAX,
    Duplicate,
    LastRecords,
    ProducerStates,
)
from storage.format.txn_index import TxnIndexEntry
from tests.support.formats import START_MS, ask_kafka, golden_bytes

LARGEST_SEQUENCE = (1 << 31) - 1


def header(
    producer_id: int,
    epoch: int,
    sequence: int,
    count: int = 1,
    *,
    offset: int = 0,
    attributes: int = 0,
    timestamp_ms: int = START_MS,
) -> BatchHeader:
    return BatchHeader(
        base_offset=offset,
        batch_length=100,
        partition_leader_epoch=0,
        magic=2,
        crc=0,
        attributes=attributes,
        last_offset_delta=count - 1,
        base_timestamp=timestamp_ms,
        max_timestamp=timestamp_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        record_count=count,
    )


@dataclass
class Appender:
    """A log that holds nothing but the state of its producers."""

    states: ProducerStates = field(default_factory=ProducerStates)
    end: int = 0

    def data(
        self, producer_id: int, epoch: int, sequence: int, count: int = 1, *, txn: bool = False
    ) -> Duplicate | None:
        attributes = TRANSACTIONAL if txn else 0
        batch = header(producer_id, epoch, sequence, count, attributes=attributes)
        duplicate = self.states.check(batch, in_transaction=txn)
        if duplicate is None:
            self.states.update(batch, self.end, self.end + count - 1)
            self.end += count
        return duplicate

    def marker(
        self, producer_id: int, epoch: int, kind: ControlType, coordinator_epoch: int = 0
    ) -> TxnIndexEntry | None:
        batch = header(producer_id, epoch, -1, offset=self.end, attributes=TRANSACTIONAL | CONTROL)
        self.end += 1
        return self.states.update_from_log(batch, kind, coordinator_epoch=coordinator_epoch)


# Sequences


def test_of_too_many_producers_those_silent_longest_are_forgotten() -> None:
    log = Appender()
    log.data(1, 0, 0, txn=True)
    log.data(2, 0, 0)
    log.data(3, 0, 0)
    for number in range(PRODUCERS_MAX - 2):
        log.data(1000 + number, 0, 0)
    log.data(2, 0, 1)
    log.data(999_998, 0, 0)
    log.data(999_999, 0, 0)
    existing = {entry.producer_id for entry in log.states.producers}
    assert len(existing) == PRODUCERS_MAX + 1
    assert {1, 2, 999_998, 999_999} <= existing
    assert not {3, 1000} & existing
    log.data(3, 0, 7)  # as one that has expired


def test_a_marker_of_an_unknown_producer_counts_as_one_more() -> None:
    log = Appender()
    for number in range(PRODUCERS_MAX + 10):
        log.marker(number, 0, ControlType.ABORT)
    assert len(log.states) == PRODUCERS_MAX


def test_producers_with_an_open_transaction_stay_and_idle_ones_go_in_order() -> None:
    log = Appender()
    for producer_id in range(100):
        log.data(producer_id, 0, 0, txn=producer_id % 3 == 0)
    log.states.forget_idle(10)
    opened = set(range(0, 100, 3))
    assert {entry.producer_id for entry in log.states.producers} == opened | set(range(85, 100))
    log.states.forget_idle(0)
    assert {entry.producer_id for entry in log.states.producers} == opened
    log.marker(3, 0, ControlType.COMMIT)
    assert log.states.idle_count == 1


def test_a_search_for_idle_producers_does_not_pass_the_same_transactions_again() -> None:
    log = Appender()
    for producer_id in range(100):
        log.data(producer_id, 0, 0, txn=True)
    for producer_id in range(100, 300):
        log.data(producer_id, 0, 0)
    log.states.forget_idle(199)
    assert next(iter(log.states.producers)).producer_id == 101


def test_batches_without_a_producer_are_not_looked_at() -> None:
    log = Appender()
    assert log.data(-1, -1, -1) is None
    assert len(log.states) == 0


def test_the_first_batch_of_an_unknown_producer_may_start_anywhere() -> None:
    log = Appender()
    assert log.data(1, 4, 1000) is None
    assert log.data(1, 4, 1001) is None


@pytest.mark.parametrize("sequence", [0, 3, 5, 6])
def test_a_sequence_that_does_not_go_on_is_refused(sequence: int) -> None:
    log = Appender()
    log.data(1, 0, 0, 2)
    log.data(1, 0, 2, 2)
    with pytest.raises(OutOfOrderSequenceError) as caught:
        log.data(1, 0, sequence, 1)
    assert (caught.value.expected, caught.value.got) == (4, sequence)
    assert log.data(1, 0, 4) is None


def test_sequences_wrap_from_the_largest_to_zero() -> None:
    log = Appender()
    log.data(1, 0, LARGEST_SEQUENCE - 1, 2)
    assert log.data(1, 0, 0) is None
    over = Appender()
    over.data(1, 0, LARGEST_SEQUENCE - 1, 4)  # ends at 1
    assert over.data(1, 0, LARGEST_SEQUENCE - 1, 4) == Duplicate(0, 3, START_MS)
    assert over.data(1, 0, 2) is None


def test_the_last_five_batches_are_known_with_their_offsets() -> None:
    log = Appender()
    for n in range(KNOWN_BATCHES + 1):
        log.data(1, 0, 2 * n, 2)
    for n in range(1, KNOWN_BATCHES + 1):
        assert log.data(1, 0, 2 * n, 2) == Duplicate(2 * n, 2 * n + 1, START_MS)
    with pytest.raises(OutOfOrderSequenceError):
        log.data(1, 0, 0, 2)


def test_a_part_of_a_known_batch_is_no_duplicate() -> None:
    log = Appender()
    log.data(1, 0, 0, 4)
    for sequence, count in ((0, 3), (1, 3), (0, 5)):
        with pytest.raises(OutOfOrderSequenceError):
            log.data(1, 0, sequence, count)


def test_producers_do_not_disturb_each_other() -> None:
    log = Appender()
    log.data(1, 0, 0, 3)
    log.data(2, 0, 0, 1)
    assert log.data(1, 0, 3) is None
    assert log.data(2, 0, 1) is None


# Epochs


def test_an_older_epoch_is_fenced() -> None:
    log = Appender()
    log.data(1, 5, 0)
    with pytest.raises(InvalidProducerEpochError) as caught:
        log.data(1, 4, 1)
    assert (caught.value.current, caught.value.got) == (5, 4)


def test_a_newer_epoch_starts_at_zero() -> None:
    log = Appender()
    log.data(1, 0, 0, 7)
    with pytest.raises(OutOfOrderSequenceError) as caught:
        log.data(1, 1, 7)
    assert caught.value.expected == 0
    assert log.data(1, 1, 0) is None
    with pytest.raises(InvalidProducerEpochError):
        log.data(1, 0, 7)


def test_a_marker_may_raise_the_epoch() -> None:
    log = Appender()
    log.data(1, 0, 0, 3, txn=True)
    log.marker(1, 1, ControlType.ABORT)
    assert log.states.last_records() == {1: (1, -1)}
    assert log.data(1, 1, 0) is None


# Transactions


def test_the_first_undecided_offset_is_the_oldest_open_transactions() -> None:
    log = Appender()
    assert log.states.first_undecided_offset is None
    log.data(9, 0, 0, 3)
    log.data(1, 0, 0, 5, txn=True)
    log.data(2, 0, 0, 5, txn=True)
    log.data(1, 0, 5, 5, txn=True)
    assert log.states.first_undecided_offset == 3
    assert log.marker(1, 0, ControlType.COMMIT) is None
    assert log.states.first_undecided_offset == 8
    assert log.marker(2, 0, ControlType.ABORT) == TxnIndexEntry(2, 8, 19, 20)
    assert log.states.first_undecided_offset is None


def test_the_index_holds_the_last_stable_offset_at_the_marker() -> None:
    log = Appender()
    log.data(1, 0, 0, 8, txn=True)
    log.data(2, 0, 0, 3, txn=True)
    assert log.marker(1, 0, ControlType.ABORT) == TxnIndexEntry(1, 0, 11, 8)


def test_an_empty_transaction_leaves_no_trace_in_the_index() -> None:
    log = Appender()
    assert log.marker(1, 0, ControlType.ABORT, coordinator_epoch=7) is None
    [entry] = log.states.producers
    assert (entry.epoch, entry.coordinator_epoch) == (0, 7)


def test_a_transactional_batch_needs_a_transaction() -> None:
    states = ProducerStates()
    with pytest.raises(InvalidTransactionStateError):
        states.check(header(1, 0, 0, attributes=TRANSACTIONAL))


def test_no_other_batch_while_a_transaction_is_open() -> None:
    log = Appender()
    log.data(1, 0, 0, txn=True)
    with pytest.raises(InvalidTransactionStateError):
        log.data(1, 0, 1)
    log.marker(1, 0, ControlType.COMMIT)
    assert log.data(1, 0, 1) is None


def test_an_emptied_control_batch_tells_its_producers_epoch_and_nothing_else() -> None:
    states = ProducerStates()
    data = header(1, 3, 0, 5, offset=100)
    emptied = header(1, 4, -1, offset=110, attributes=TRANSACTIONAL | CONTROL)
    states.update_from_log(data)
    assert states.update_from_log(emptied._replace(record_count=0)) is None
    assert states.last_records() == {1: (4, -1)}
    states.update_from_log(data._replace(producer_epoch=5))
    states.update_from_log(emptied._replace(record_count=0))
    assert states.last_records() == {1: (5, 104)}, "an epoch never goes back"


def test_an_emptied_control_batch_of_the_present_epoch_keeps_its_producer_from_expiring() -> None:
    states = ProducerStates()
    states.update_from_log(header(1, 3, 0))
    later_ms = START_MS + 500
    emptied = header(1, 3, -1, attributes=TRANSACTIONAL | CONTROL, timestamp_ms=later_ms)
    states.update_from_log(emptied._replace(record_count=0))
    assert states.expire(later_ms + 999, 1000) == 0
    assert states.expire(later_ms + 1000, 1000) == 1


def test_unreadable_control_batches_and_unknown_types_say_nothing() -> None:
    states = ProducerStates()
    control = header(1, 3, -1, attributes=TRANSACTIONAL | CONTROL)
    for kind in (None, ControlType.LEADER_CHANGE, 99):
        assert states.update_from_log(control, kind) is None
    assert len(states) == 0


# Recovery


def test_a_batch_thinned_out_by_compaction_counts_in_full() -> None:
    states = ProducerStates()
    thinned = header(1, 0, 10, 5, offset=100)._replace(record_count=0)
    states.update_from_log(thinned)
    assert states.check(header(1, 0, 10, 5)) == Duplicate(100, 104, START_MS)
    assert states.check(header(1, 0, 15)) is None
    assert states.last_records() == {1: (0, 104)}


def test_what_the_log_says_is_taken_as_it_is() -> None:
    states = ProducerStates()
    for sequence in (0, 7, 3):
        states.update_from_log(header(1, 5 - sequence % 2, sequence))
    assert states.last_records() == {1: (4, 0)}


def test_clearing_forgets_transactions_too() -> None:
    log = Appender()
    log.data(1, 0, 0, txn=True)
    log.states.clear()
    assert len(log.states) == 0
    assert log.states.first_undecided_offset is None


# Expiry


def test_idle_producers_are_forgotten_unless_a_transaction_is_open() -> None:
    log = Appender()
    log.data(1, 0, 0)
    log.data(2, 0, 0, txn=True)
    assert log.states.expire(START_MS + 999, 1000) == 0
    assert log.states.expire(START_MS + 1000, 1000) == 1
    assert log.states.last_records() == {2: (0, 1)}


def test_a_producer_of_old_records_is_not_idle() -> None:
    states = ProducerStates()
    states.update(header(1, 0, 0, timestamp_ms=5), 0, 0, seen_ms=START_MS)
    assert states.expire(START_MS + 999, 1000) == 0
    assert states.expire(START_MS + 1000, 1000) == 1


def test_a_time_stamped_by_the_log_replaces_the_producers() -> None:
    states = ProducerStates()
    states.update(header(1, 0, 0, timestamp_ms=5), 0, 0, timestamp_ms=START_MS)
    assert states.check(header(1, 0, 0)) == Duplicate(0, 0, START_MS)


# Snapshots


def test_kafkas_snapshot_is_read_and_written_byte_for_byte() -> None:
    raw = golden_bytes("00000000000000000016.snapshot")
    states = ProducerStates.from_snapshot(raw)
    assert states.last_records() == {5: (0, 12), 6: (3, 15)}
    assert states.first_undecided_offset == 14
    assert states.check(header(5, 0, 0, 3)) == Duplicate(10, 12, START_MS + 12)
    assert states.to_snapshot() == raw
    written = ProducerStates()
    written.update(header(5, 0, 0, 3, timestamp_ms=START_MS + 12), 10, 12)
    batch = header(6, 3, 8, 2, attributes=TRANSACTIONAL, timestamp_ms=START_MS + 15)
    written.update(batch, 14, 15)
    assert written.to_snapshot() == raw


def test_a_snapshot_of_nothing() -> None:
    raw = ProducerStates().to_snapshot()
    assert len(raw) == 10
    assert len(ProducerStates.from_snapshot(raw)) == 0


def test_a_snapshot_of_many_open_transactions_packs_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The append that rolls a segment writes it: 20,000 producers blocked the loop for 20 ms."""
    log = Appender()
    for producer_id in range(100):
        log.data(producer_id, 0, 0, txn=True)
    snapshot = log.states.to_snapshot()
    monkeypatch.setattr(producer_state, "_SNAPSHOT_ENTRY", None)
    assert log.states.to_snapshot() == snapshot


@pytest.mark.parametrize("seed", range(5))
def test_a_snapshot_has_the_present_state_of_each_producer(seed: int) -> None:
    print(f"seed {seed}")
    rng, log, opened = random.Random(seed), Appender(), set[int]()
    for _ in range(500):
        producer_id = rng.randrange(8)
        entry = log.states.producer(producer_id)
        epoch = 0 if entry is None else max(entry.epoch, 0)
        if producer_id in opened and rng.random() < 0.5:
            opened.remove(producer_id)
            if rng.random() < 0.3:
                log.states.forget_transaction(producer_id)
            else:
                kind = rng.choice((ControlType.ABORT, ControlType.COMMIT))
                log.marker(producer_id, epoch + rng.randrange(2), kind, rng.randrange(9))
        elif producer_id not in opened and rng.random() < 0.2:
            kind = TRANSACTIONAL | CONTROL
            log.states.update_from_log(
                header(producer_id, epoch + 1, -1, 0, offset=log.end, attributes=kind)
            )
        else:
            sequence = 0 if entry is None else entry.last_sequence + 1
            is_open = producer_id in opened or rng.random() < 0.5
            log.data(producer_id, epoch, sequence, rng.randrange(1, 4), txn=is_open)
            opened |= {producer_id} if is_open else set()
        for each in log.states.producers:
            packed = each.packed
            each.pack()
            assert packed == each.packed
        last = log.states.last_records()
        rows = [(producer_id, epoch, offset) for producer_id, (epoch, offset) in last.items()]
        assert log.states.packed_last_records() == rows == list(LastRecords(rows))


def sealed(count: int, body: bytes) -> bytes:
    covered = struct.pack(">i", count) + body
    return struct.pack(">hI", 1, crc32c(covered)) + covered


ENTRY = struct.Struct(">qhiqiqiq")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        bytes(9),
        bytes(10),
        golden_bytes("00000000000000000016.snapshot")[:-1],
        golden_bytes("00000000000000000016.snapshot") + b"\0",
        b"\0\2" + golden_bytes("00000000000000000016.snapshot")[2:],
        sealed(1, b""),
        sealed(-1, b""),
        sealed((1 << 31) - 1, ENTRY.pack(1, 0, 0, 0, 0, 0, 0, -1)),
        sealed(1, ENTRY.pack(-1, 0, 0, 0, 0, 0, 0, -1)),
        sealed(1, ENTRY.pack(1, 0, 0, 5, 6, 0, 0, -1)),
        sealed(1, ENTRY.pack(1, 0, 0, 5, -1, 0, 0, -1)),
        sealed(2, b"".join(ENTRY.pack(n, 0, 0, 9, 0, 0, 0, 3) for n in (1, 2))),
    ],
)
def test_snapshots_that_cannot_be_believed_are_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptSnapshotError) as caught:
        ProducerStates.from_snapshot(raw, "a.snapshot")
    assert caught.value.path == "a.snapshot"


@given(st.data())
def test_a_flipped_bit_in_a_snapshot_is_noticed(data: st.DataObject) -> None:
    raw = bytearray(golden_bytes("00000000000000000016.snapshot"))
    bit = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptSnapshotError):
        ProducerStates.from_snapshot(raw)


def random_history(rng: random.Random, steps: int) -> list[str]:
    """Steps for KafkaFormats `producers`: plausible ones, with retries, gaps and zombies."""
    lines = []
    expected: dict[tuple[int, int], int] = {}
    recent: list[str] = []
    for _ in range(steps):
        producer_id, epoch = rng.randrange(3), rng.choice([0, 0, 0, 1, 1, 2])
        kind = rng.random()
        if kind < 0.2:
            subject = rng.choice(["commit", "abort"])
            lines.append(f"end {producer_id} {epoch} 0 {subject}")
            continue
        if kind < 0.35 and recent:
            lines.append(rng.choice(recent[-8:]))
            continue
        wrap = LARGEST_SEQUENCE - 2 if epoch == 1 else 0
        sequence = expected.get((producer_id, epoch), wrap if rng.random() < 0.5 else 0)
        sequence += rng.choice([0, 0, 0, 0, 0, 0, 1, 5])
        sequence &= LARGEST_SEQUENCE
        count = rng.randint(1, 3)
        is_open = rng.random() < 0.5
        lines.append(f"data {producer_id} {epoch} {sequence} {count} {str(is_open).lower()}")
        recent.append(lines[-1])
        expected[producer_id, epoch] = sequence + count
    return lines


def our_answers(history: list[str]) -> list[str]:
    log = Appender()
    answers = []
    for line in history:
        words = line.split()
        before = log.end
        if words[0] == "end":
            kind = ControlType.ABORT if words[4] == "abort" else ControlType.COMMIT
            entry = log.marker(int(words[1]), int(words[2]), kind, int(words[3]))
            answer = (
                "appended" if entry is None else f"appended aborted {' '.join(map(str, entry))}"
            )
        else:
            numbers = [int(word) for word in words[1:5]]
            try:
                duplicate = log.data(*numbers, txn=words[5] == "true")
                answer = (
                    "appended" if duplicate is None else f"duplicate {duplicate[0]} {duplicate[1]}"
                )
            except OutOfOrderSequenceError:
                answer = "OutOfOrderSequenceException"
            except InvalidProducerEpochError:
                answer = "InvalidProducerEpochException"
            except InvalidTransactionStateError:
                answer = "InvalidTxnStateException"
        if not answer.startswith("appended"):
            assert log.end == before
        undecided = log.states.first_undecided_offset
        answers.append(f"{answer} undecided {-1 if undecided is None else undecided}")
    return answers


def test_random_histories_are_answered_as_by_kafka(tmp_path: Path) -> None:
    seed = 20260101
    rng = random.Random(seed)
    histories = [random_history(rng, 60) for _ in range(200)]
    script = tmp_path / "script"
    script.write_text("\n\n".join("\n".join(history) for history in histories) + "\n")
    remote = [block.split("\n") for block in ask_kafka("producers", script).strip().split("\n\n")]
    assert len(remote) == len(histories)
    for number, history in enumerate(histories):
        local = our_answers(history)
        for step, (line, our, their) in enumerate(zip(history, local, remote[number], strict=True)):
            assert our == their, f"seed {seed}, history {number}, step {step}: {line}"
