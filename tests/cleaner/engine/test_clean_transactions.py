"""Transactions in a clean, rule by rule, over a real log: written, cleaned, published, reopened."""

import pytest

from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    read_header,
)
from storage.format.compression import NONE, ZSTD
from storage.format.filenames import LOG, file_name
from tests.support.cleaner.compacted_log import DELETE_RETENTION_MS, CompactedLog, Producer
from tests.support.storage.logs import FOLDER

# Aborted data


@pytest.mark.parametrize("codec", [NONE, ZSTD])
def test_records_of_aborted_transactions_go_and_supersede_nothing(codec: int) -> None:
    log = CompactedLog()
    first, second = Producer(1), Producer(2)
    log.write("a", "b")
    log.put(("a", "aborted"), ("c", "aborted"), by=first, codec=codec)
    log.put(("b", "committed"), by=second, codec=codec)
    log.abort(first)
    log.commit(second)
    log.put(("d", "after"), by=first)
    log.commit(first)
    log.roll()
    before = log.latest()
    aborted = log.aborted()
    report = log.clean()
    assert log.offsets() == [0, 4, 5, 6, 7, 8]
    assert log.latest() == before
    assert report.records_aborted == 2
    assert log.aborted() == aborted, "its marker is still there"
    assert log.txn_files() == [0]


def test_aborted_data_whose_marker_is_in_the_active_segment_goes() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a")
    log.write("a", by=producer)
    log.roll()
    log.write("b", by=producer)
    log.abort(producer)
    log.write("c")
    log.clean()
    assert log.offsets() == [0, 2, 3, 4], "the active segment does not change"
    assert [entry.last_offset for entry in log.aborted()] == [3]
    assert log.latest().keys() == {"a", "c"}


def test_data_of_an_open_transaction_beyond_the_section_decides_nothing() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a")
    log.roll()
    log.write("a", by=producer)
    log.roll()
    log.write("b", by=producer)
    log.roll()
    log.clean(end_offset=1)
    assert log.offsets() == [0, 1, 2]


def test_transactions_that_interleave_over_segments_are_told_apart() -> None:
    log = CompactedLog()
    first, second = Producer(1), Producer(2)
    log.write("a", by=first)
    log.write("b", by=second)
    log.write("c", by=first)
    log.abort(first)
    log.roll()
    log.write("d", by=first)
    log.write("e", by=second)
    log.abort(second)
    log.commit(first)
    log.roll()
    # Only the first segment: of the second producer's transaction all is known by now, too.
    log.clean(end_offset=4)
    assert log.markers() == [3, 6, 7]
    assert log.latest().keys() == {"d"}
    log.write("f")
    log.roll()
    log.clean()
    assert [offset for offset in log.offsets() if offset not in log.markers()] == [4, 8]
    assert log.reopened().latest() == log.latest()


def test_a_clean_may_begin_in_the_middle_of_a_transaction() -> None:
    log = CompactedLog()
    first, second = Producer(1), Producer(2)
    log.write("a", by=first)
    log.write("a", "b", by=second)
    log.write("b", by=first)
    log.write("c", by=second)
    log.abort(first)
    log.commit(second)
    log.roll()
    for dirty in range(8):
        compacted_log = log.reopened()
        before = compacted_log.latest()
        compacted_log.clean(first_dirty_offset=dirty)
        assert compacted_log.latest() == before, dirty
        assert compacted_log.markers() == [5, 6]
        # Below the section the index was not compared with the markers, so it is not used.
        assert (0 in compacted_log.offsets()) == (dirty > 1)
        assert (3 in compacted_log.offsets()) == (dirty > 3)


# Markers


def test_a_commit_marker_stays_with_its_data_then_for_delete_retention_then_goes() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", "b", by=producer)
    log.commit(producer)
    log.write("c", by=producer)
    log.commit(producer)
    log.roll()
    log.clean()
    assert log.offsets() == [0, 1, 2, 3, 4]
    log.write("a", "b")
    log.write("c", by=producer)
    log.commit(producer)
    log.roll()
    report = log.clean()
    assert log.offsets() == [2, 4, 5, 6, 7, 8], "the data was met in this clean"
    assert report.markers_removed == 0
    log.write("d")
    log.roll()
    log.clean()
    stamped = [header for header, _ in log.batches() if header.has_delete_horizon]
    assert [header.base_offset for header in stamped] == [2, 4]
    assert {header.base_timestamp for header in stamped} == {log.now_ms + DELETE_RETENTION_MS}
    assert log.clean().markers_removed == 0, "at the same time nothing goes"
    log.now_ms += DELETE_RETENTION_MS - 1
    log.clean()
    assert log.markers() == [2, 4, 8]
    log.now_ms += 1
    report = log.clean()
    assert report.markers_removed == 2
    assert log.offsets() == [5, 6, 7, 8, 9]


def test_a_stamped_marker_keeps_its_time_its_producer_and_its_meaning() -> None:
    log = CompactedLog()
    producer = Producer(1, epoch=3)
    log.write("a", by=producer)
    offset = log.end(producer, ControlType.ABORT, coordinator_epoch=9)
    log.write("a")
    log.roll()
    (before,) = [batch for batch in log.batches() if batch[0].is_control]
    log.write("x", by=producer)  # so that its first batch is not its last
    log.clean()
    log.clean()
    ((header, records),) = [batch for batch in log.batches() if batch[0].is_control]
    assert records == before[1]
    assert header.has_delete_horizon
    assert (header.base_offset, header.producer_epoch) == (offset, 3)
    assert header.max_timestamp == before[0].max_timestamp
    assert header.is_transactional


def test_an_abort_marker_and_its_entry_outlive_the_data_by_one_clean_then_the_horizon() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.write("b", by=producer)
    log.abort(producer)
    log.write("c", by=producer)
    log.commit(producer)
    log.roll()
    log.clean()
    assert log.offsets() == [2, 3, 4]
    assert len(log.aborted()) == 1
    log.clean()
    assert log.offsets() == [2, 3, 4], "stamped"
    assert log.aborted() == []
    assert log.txn_files() == []
    log.pass_retention()
    report = log.clean()
    assert log.offsets() == [3, 4]
    assert report.markers_removed == 1


def test_markers_of_transactions_without_data_are_stamped_at_once() -> None:
    log = CompactedLog()
    log.commit(Producer(1))
    log.abort(Producer(2))
    log.write("a")
    log.roll()
    no_producers: tuple[tuple[int, int, int], ...] = ()
    log.clean(last_records=no_producers)
    assert [header.has_delete_horizon for header, _ in log.batches()] == [True, True, False]
    log.pass_retention()
    log.clean(last_records=no_producers)
    assert log.offsets() == [2]


@pytest.mark.parametrize("kind", [ControlType.COMMIT, ControlType.ABORT])
def test_a_transaction_over_two_segments_keeps_its_marker_as_long_as_a_batch(
    kind: ControlType,
) -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.roll()
    log.end(producer, kind)
    log.roll()
    for _ in range(3):
        log.clean(singly=True)
        log.pass_retention()
        assert log.last_offsets() == [0, 1], "the producer's last batch stays, if need be empty"
        assert log.markers() == [1]
    assert log.offsets() == ([0, 1] if kind is ControlType.COMMIT else [1])
    assert len(log.aborted()) == (kind is ControlType.ABORT)
    assert log.reopened().log.last_stable_offset == 2


def test_a_commit_marker_stays_while_an_empty_batch_of_it_does() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.commit(producer)
    log.write("a")
    log.roll()
    for _ in range(3):
        log.clean()
        log.pass_retention()
        assert log.last_offsets() == [0, 1, 2]
        assert log.offsets() == [1, 2]
    log.write("b", by=producer)
    log.commit(producer)
    log.roll()
    log.clean()
    assert log.last_offsets() == [1, 2, 3, 4], "the empty batch goes, its marker has no horizon yet"
    log.clean()
    assert log.last_offsets() == [1, 2, 3, 4], "now it has one"
    log.pass_retention()
    log.clean()
    assert log.last_offsets() == [2, 3, 4]


def test_an_abort_marker_and_its_entry_stay_while_an_empty_batch_of_it_does() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.abort(producer)
    log.roll()
    for _ in range(3):
        log.clean()
        log.pass_retention()
        assert log.last_offsets() == [0, 1]
        assert log.offsets() == [1]
        assert len(log.aborted()) == len(log.reopened().aborted()) == 1
    log.write("b", by=producer)
    log.commit(producer)
    log.roll()
    log.clean()
    assert (log.last_offsets(), len(log.aborted())) == ([1, 2, 3], 1)
    log.clean()
    assert (log.last_offsets(), len(log.aborted())) == ([1, 2, 3], 0)
    log.pass_retention()
    log.clean()
    assert log.last_offsets() == [2, 3]


def test_a_producers_last_word_stays_as_an_empty_control_batch() -> None:
    log = CompactedLog()
    log.commit(Producer(1, epoch=5))
    log.write("a")
    log.roll()
    log.clean()
    log.pass_retention()
    report = log.clean()
    assert report.markers_removed == 1
    for _ in range(3):
        (header, records), _ = log.batches()
        assert (header.is_control, header.producer_epoch, records) == (True, 5, [])
        assert (
            log.reopened().log.producers.last_records()
            == {1: (5, -1)}
            == log.log.producers.last_records()
        )
        log.clean()
        assert log.groups_replaced == 0
    log.write("b", by=Producer(1, epoch=6))
    log.commit(Producer(1, epoch=6))
    log.roll()
    log.clean()
    assert log.last_offsets() == [1, 2, 3]


def test_of_a_producer_without_data_only_markers_of_its_epoch_stay() -> None:
    log = CompactedLog()
    log.abort(Producer(1, epoch=4))
    log.abort(Producer(1, epoch=5))
    log.roll()
    log.clean()
    log.pass_retention()
    log.clean()
    assert [header.producer_epoch for header, _ in log.batches()] == [5]


def test_markers_are_not_matched_by_key_with_data_nor_data_with_markers() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.commit(producer)
    marker = log.batches()[1][1][0]
    assert marker.key is not None
    log.append(build_batch([Record(0, log.now_ms, marker.key, b"data")]))
    log.write("b", by=producer)
    log.commit(producer)
    log.roll()
    report = log.clean()
    assert log.offsets() == [0, 1, 2, 3, 4]
    assert report.keys_indexed == 3


def test_control_records_that_are_no_markers_stay_for_good() -> None:
    log = CompactedLog()
    leader = Record(0, log.now_ms, b"\0\0\0\2", b"leader")
    unknown = Record(0, log.now_ms, b"\0\0\0\x63", b"?")
    for record in (leader, unknown):
        log.append(build_batch([record], attributes=CONTROL))
    short = Record(0, log.now_ms, b"\0", b"?")
    log.append(build_batch([short], attributes=CONTROL | TRANSACTIONAL, producer_id=1))
    log.write("a")
    log.roll()
    for _ in range(3):
        log.clean()
        log.pass_retention()
    assert log.offsets() == [0, 1, 2, 3]


def test_a_marker_below_the_start_of_the_log_goes_by_its_own_rules() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.commit(producer)
    log.write("b")
    log.roll()
    # The producer's last batch stays, empty: without its marker the transaction would seem open.
    log.clean(log_start_offset=2, first_dirty_offset=2)
    assert log.last_offsets() == [0, 1, 2]
    assert log.offsets() == [1, 2]
    assert log.reopened().log.last_stable_offset == 3


# Partial progress


def test_a_small_map_cleans_transactions_in_several_passes() -> None:
    log = CompactedLog()
    first, second, third = Producer(1), Producer(2), Producer(3)
    for producer, keys in ((first, "ab"), (second, "ac"), (first, "de"), (third, "ae")):
        log.write(*keys, by=producer)
    log.abort(second)
    log.commit(third)
    log.write("f", "a", by=second)
    log.abort(first)
    log.commit(second)
    log.write("b", "c", "d")
    log.roll()
    before = log.latest()
    reached = []
    while log.dirty < log.log.log_end_offset:
        log.clean(keys=2)
        reached.append(log.dirty)
        assert log.latest() == before
        assert len(reached) < 20
    assert reached == sorted(set(reached))
    assert [offset for offset in log.offsets() if offset not in log.markers()] == [
        *(offset for offset, _ in sorted(before.values())),
    ]
    log.pass_retention()
    log.clean()
    log.clean()
    assert log.reopened().latest() == before


@pytest.mark.parametrize("codec", [NONE, ZSTD])
def test_aborted_data_behind_the_end_of_a_full_map_goes_in_the_next_clean(codec: int) -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a")
    log.write("b")
    log.put(("c", "x"), ("d", "x"), by=producer, codec=codec)
    log.abort(producer)
    log.write("e", by=producer)
    log.commit(producer)
    log.roll()
    report = log.clean(keys=1)
    assert report.next_dirty_offset == 1
    assert log.offsets() == [0, 1, 2, 3, 4, 5, 6]
    log.clean()
    assert log.offsets() == [0, 1, 4, 5, 6]


# Producers


def test_emptied_batches_keep_each_producers_last_sequence() -> None:
    log = CompactedLog()
    producers = [Producer(n, is_transactional=False, epoch=2) for n in (1, 2, 3)]
    log.write("a", "b", by=producers[0])
    log.write("a", "c", by=producers[1])
    log.write("b", by=producers[2])
    log.write("a", "b", "c")
    log.roll()
    existing = log.log.producers.last_records()
    log.clean()
    assert log.last_offsets() == [1, 3, 4, 7]
    assert log.offsets() == [5, 6, 7]
    assert (
        log.log.producers.last_records() == log.reopened().log.producers.last_records() == existing
    )


def test_an_aborted_batch_keeps_its_producers_last_sequence_until_it_writes_again() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", "b", by=producer)
    log.abort(producer)
    log.write("c")
    log.roll()
    log.clean()
    assert (log.last_offsets(), log.offsets()) == ([1, 2, 3], [2, 3])
    assert log.reopened().log.producers.last_records() == {1: (0, 1)}
    log.write("d", by=producer)
    log.commit(producer)
    log.roll()
    log.clean()
    assert log.last_offsets() == [2, 3, 4, 5]


def test_duplicates_are_recognised_after_a_clean_and_a_restart_from_the_log_alone() -> None:
    log = CompactedLog()
    producers = [Producer(n, is_transactional=False) for n in (1, 2, 3)]
    sent = []
    for producer, keys in zip([*producers, producers[0]], ["abc", "ade", "af", "bg"], strict=True):
        base = producer.sequence
        offset = log.write(*keys, by=producer)
        sent.append((producer, base, keys, offset))
    log.roll()
    log.clean()
    assert log.offsets() == [2, 4, 5, 6, 7, 8, 9]
    for compacted_log in (log, log.reopened()):
        end = compacted_log.log.log_end_offset
        for producer, base, keys, offset in sent[1:]:
            again = build_batch(
                [Record(i, compacted_log.now_ms, key.encode(), b"") for i, key in enumerate(keys)],
                producer_id=producer.producer_id,
                producer_epoch=0,
                base_sequence=base,
            )
            info = compacted_log.log.append(again, read_header(again), now_ms=compacted_log.now_ms)
            assert (info.first_offset, info.duplicate) == (offset, True)
        assert compacted_log.log.log_end_offset == end


def test_batches_of_a_producer_that_starts_over_with_sequence_0_go_as_any_others() -> None:
    log = CompactedLog()
    producer = Producer(1, starts_over=True)
    for keys in ("a", "a", "b"):
        log.write(keys, by=producer)
        log.commit(producer)
    log.roll()
    log.clean()
    assert log.last_offsets() == [1, 2, 3, 4, 5]
    log.clean()
    log.pass_retention()
    log.clean()
    assert log.last_offsets() == [2, 3, 4, 5]
    assert log.offsets() == [2, 3, 4, 5]


def test_more_producers_than_a_first_guess_are_kept_in_mind() -> None:
    log = CompactedLog()
    producers = [Producer(n) for n in range(500)]
    for producer in producers:
        log.write(f"k{producer.producer_id}", by=producer)
    log.roll()
    for producer in producers:
        log.end(producer, ControlType(producer.producer_id % 2))
    log.roll()
    before = log.latest()
    log.clean(singly=True, read_buffer_bytes=1024)
    assert log.latest() == before
    assert len(log.aborted()) == 250
    assert log.markers() == list(range(500, 1000))


# Damage


def test_behind_a_damaged_segment_no_marker_goes_and_none_is_stamped() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a")
    log.roll()
    log.write("b", by=producer)
    log.roll()
    log.commit(producer)
    log.abort(Producer(2))
    log.roll()
    log.log.flush()
    path = f"{FOLDER}/{file_name(1, LOG)}"
    file = log.env.open(path, write=True)
    file.pwrite(b"?", 70)
    for _ in range(2):
        report = log.clean(first_dirty_offset=0, singly=True, last_records=())
        assert log.groups_replaced == 0
        assert report.next_dirty_offset == 1
        assert report.cleaned == ((2, 4),)
        assert [horizon.horizon_ms for horizon in report.horizons] == [-1, -2, -2]
        log.pass_retention()


def test_data_behind_a_damaged_abort_marker_is_not_taken_for_aborted() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.roll()
    log.abort(producer)
    log.roll()
    log.write("b", by=producer)
    log.commit(producer)
    log.roll()
    log.log.flush()
    file = log.env.open(f"{FOLDER}/{file_name(1, LOG)}", write=True)
    file.pwrite(b"?", 70)
    report = log.clean(singly=True)
    assert report.records_aborted == 1
    assert log.aborted()[0].last_offset == 1
    data = log.env.read_file(f"{FOLDER}/{file_name(2, LOG)}")
    assert read_header(data).record_count == 1


# What has expired


def test_what_has_expired_goes_without_anything_being_dirty() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.write("a", by=producer)
    log.abort(producer)
    log.put(("b", None), ("c", "1"))
    log.roll()
    log.write("a", by=producer)
    log.commit(producer)
    log.roll()
    log.clean(singly=True)
    report = log.clean(singly=True)
    horizon_ms = log.now_ms + DELETE_RETENTION_MS
    assert [horizon.horizon_ms for horizon in report.horizons] == [horizon_ms, -1]
    report = log.clean_expired(0)
    assert (log.groups_replaced, report.passes) == (0, 1), "not yet"
    assert [horizon.horizon_ms for horizon in report.horizons] == [horizon_ms]
    log.now_ms = horizon_ms
    report = log.clean_expired(0)
    assert (report.markers_removed, report.tombstones_removed) == (1, 1)
    assert log.offsets() == [3, 4, 5]
    assert [horizon.horizon_ms for horizon in report.horizons] == [-1]
    assert report.next_dirty_offset == 4
    assert log.clean_expired(0).groups == 0


def test_a_job_over_what_has_expired_touches_nothing_else() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.put(("a", "1"), (None, "keyless"), ("a", "2"))
    log.put(("t", None))
    log.write("b", by=producer)
    log.abort(producer)
    log.put(("t", None), ("t", "3"))
    log.roll()
    log.put(("a", None))
    log.roll()
    before = log.batches()
    report = log.clean_expired()
    assert log.batches() == before
    assert log.groups_replaced == 0
    assert (report.keys_indexed, report.records_aborted, report.records_without_key) == (0, 0, 0)
    assert [horizon.horizon_ms for horizon in report.horizons] == [-1, -1], "nothing is stamped"
    assert len(log.aborted()) == 1


def test_the_index_entry_of_a_marker_that_stays_survives_a_job_over_what_has_expired() -> None:
    log = CompactedLog()
    producer = Producer(1)
    log.put(("t", None))
    log.write("b", by=producer)
    log.abort(producer)
    log.roll()
    log.clean()
    assert len(log.aborted()) == 1
    log.pass_retention()
    report = log.clean_expired()
    assert report.tombstones_removed == 1
    assert len(log.aborted()) == len(log.reopened().aborted()) == 1
    assert log.markers() == [2]
