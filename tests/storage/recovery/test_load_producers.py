"""Producers and transactions after a start: from snapshots, transaction indexes and the log."""

import pytest

from storage.env import Env
from storage.format.batch import ControlType, build_batch, marker_record
from storage.format.filenames import (
    LOG,
    SNAPSHOT,
    TXN_INDEX,
    file_name,
)
from storage.log.log import Log
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    append,
    append_batch,
    batch_of,
    content,
    fill,
    open_log,
    open_with_notes,
    overwrite,
    publish,
    resize,
)
from tests.support.storage.memory_env import MemoryEnv


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=4)


def names(env: Env) -> list[str]:
    return env.listdir(FOLDER)


def idempotent(log: Log, sequence: int, producer_id: int = 5) -> None:
    append(log, b"v", producer_id=producer_id, producer_epoch=0, base_sequence=sequence)


def test_producers_are_read_from_the_newest_usable_snapshot(env: MemoryEnv) -> None:
    log = open_log(env)
    for sequence in range(3):
        idempotent(log, sequence)
    log.roll(NOW_MS)
    idempotent(log, 3)
    log.close()
    assert file_name(4, SNAPSHOT) in names(env)
    resize(env, file_name(4, SNAPSHOT), 30)
    again = open_log(env, was_clean=True, recovery_point=4)
    assert again.producers.last_records() == {5: (0, 3)}
    assert file_name(4, SNAPSHOT) not in names(env)


def test_without_any_snapshot_producers_are_read_from_the_log(env: MemoryEnv) -> None:
    log = open_log(env)
    idempotent(log, 0)
    idempotent(log, 0, producer_id=6)
    log.close()
    for name in names(env):
        if name.endswith(SNAPSHOT):
            env.unlink(f"{FOLDER}/{name}")
    assert open_log(env, was_clean=True, recovery_point=2).producers.last_records() == {
        5: (0, 0),
        6: (0, 1),
    }


def test_snapshots_beyond_the_end_are_removed(env: MemoryEnv) -> None:
    log = open_log(env)
    idempotent(log, 0)
    idempotent(log, 1)
    log.close()
    resize(env, file_name(0, LOG), len(batch_of(b"v")))
    again = open_log(env)
    assert again.log_end_offset == 1
    assert again.producers.last_records() == {5: (0, 0)}
    assert file_name(2, SNAPSHOT) not in names(env)


def test_of_snapshots_beside_the_segments_the_newest_stays(env: MemoryEnv) -> None:
    log = open_log(env, was_clean=True)
    for _ in range(3):
        fill(log, 1)
        log.close()
        log = open_log(env, was_clean=True, recovery_point=log.log_end_offset)
    assert [name for name in names(env) if name.endswith(SNAPSHOT)] == [file_name(3, SNAPSHOT)]


def transaction(log: Log, producer_id: int, sequence: int, *, commits: bool | None) -> None:
    """One batch of a transaction, and its marker unless it stays open."""
    append_batch(
        log,
        batch_of(b"t", producer_id=producer_id, producer_epoch=0, base_sequence=sequence,
                 attributes=0x10),
        in_transaction=True,
    )  # fmt: skip
    if commits is not None:
        kind = ControlType.COMMIT if commits else ControlType.ABORT
        marker = build_batch(
            [marker_record(kind, 0, NOW_MS)],
            producer_id=producer_id,
            producer_epoch=0,
            attributes=0x30,
        )
        append_batch(log, marker)


def transactional_log(env: MemoryEnv) -> Log:
    log = open_log(env)
    transaction(log, 1, 0, commits=True)  # 0, marker 1
    transaction(log, 2, 0, commits=False)  # 2, marker 3
    log.roll(NOW_MS)
    fill(log, 1)  # 4
    transaction(log, 1, 1, commits=False)  # 5, marker 6
    transaction(log, 3, 0, commits=None)  # 7
    fill(log, 1)  # 8
    return log


def _aborted(log: Log, first: int, end: int) -> list[tuple[int, int]]:
    return [
        (entry.producer_id, entry.first_offset)
        for entry in log.reader.aborted_transactions(first, end)
    ]


def check_transactions(log: Log) -> None:
    assert log.last_stable_offset == 7
    assert log.high_watermark == 9
    assert _aborted(log, 0, 9) == [(2, 2), (1, 5)]
    assert _aborted(log, 4, 9) == [(1, 5)]
    assert _aborted(log, 0, 2) == []
    assert [facts.has_transactions for facts in log.segment_facts()] == [True, True]


def test_transactions_are_known_while_they_are_written(env: MemoryEnv) -> None:
    check_transactions(transactional_log(env))


@pytest.mark.parametrize("was_clean", [True, False])
@pytest.mark.parametrize("lost", ["nothing", "transaction indexes", "garbage in them", "snapshots"])
def test_transactions_are_known_after_a_restart(env: MemoryEnv, was_clean: bool, lost: str) -> None:
    log = transactional_log(env)
    if was_clean:
        log.close()
    for name in names(env):
        if lost == "transaction indexes" and name.endswith(TXN_INDEX) and not was_clean:
            env.unlink(f"{FOLDER}/{name}")
        if lost == "garbage in them" and name.endswith(TXN_INDEX):
            overwrite(env, name, b"garbage")
        if lost == "snapshots" and name.endswith(SNAPSHOT):
            env.unlink(f"{FOLDER}/{name}")
    again = open_log(env, was_clean=was_clean, recovery_point=9 if was_clean else 0)
    check_transactions(again)


def test_a_transaction_of_which_compaction_left_nothing_is_not_open_again(env: MemoryEnv) -> None:
    log = open_log(env)
    transaction(log, 1, 0, commits=None)  # 0
    log.roll(NOW_MS)  # with a snapshot that says: open
    transaction(log, 1, 1, commits=True)  # 1, marker 2
    fill(log, 1)  # 3
    log.roll(NOW_MS)
    fill(log, 1)
    publish(env, log, [0], keep=[])
    publish(env, log, [1], keep=[3])
    again = open_log(env, recovery_point=0)
    assert again.last_stable_offset == 5
    assert again.producers.open_transaction() is None


def test_a_transaction_of_which_a_batch_is_left_stays_open(env: MemoryEnv) -> None:
    log = open_log(env)
    transaction(log, 1, 0, commits=None)  # 0
    log.roll(NOW_MS)
    fill(log, 1)  # 1
    log.flush()
    again = open_log(env, recovery_point=1)
    assert again.last_stable_offset == 0


@pytest.mark.parametrize("was_clean", [True, False])
def test_an_open_transaction_below_the_log_start_stays_open_over_an_orderly_stop_only(
    env: MemoryEnv, was_clean: bool
) -> None:
    """An orderly stop has noted what is open. After another one its marker may have gone."""
    log = open_log(env)
    transaction(log, 1, 0, commits=None)  # 0
    log.roll(NOW_MS)
    fill(log, 2)  # 1, 2
    log.delete_records(1)
    if was_clean:
        log.close()
    again = open_log(env, was_clean=was_clean, recovery_point=3, log_start_offset=1)
    assert again.producers.open_transaction() == ((1, 0, NOW_MS) if was_clean else None)
    assert again.last_stable_offset == (1 if was_clean else 3)


def test_a_segment_file_begins_with_the_entries_of_its_own_markers(env: MemoryEnv) -> None:
    transactional_log(env)
    assert len(content(env, 0, TXN_INDEX)) == 34
    assert len(content(env, 4, TXN_INDEX)) == 34
    assert content(env, 0, TXN_INDEX)[:10] == bytes(2) + (2).to_bytes(8, "big")


LYING_ENTRIES = {
    "empty": lambda raw: b"",
    "zeroed": lambda raw: bytes(len(raw)),
    "another producer": lambda raw: raw[:9] + bytes([raw[9] ^ 1]) + raw[10:],
    "another first batch": lambda raw: raw[:17] + bytes([raw[17] ^ 2]) + raw[18:],
    "no marker": lambda raw: raw[:25] + bytes([raw[25] ^ 1]) + raw[26:],
}


@pytest.mark.parametrize("how", LYING_ENTRIES)
@pytest.mark.parametrize("base", [0, 4])
def test_a_transaction_index_that_contradicts_the_log_is_made_anew(
    env: MemoryEnv, how: str, base: int
) -> None:
    """Readers with read_committed would see aborted records, or miss committed ones."""
    transactional_log(env).close()
    raw = content(env, base, TXN_INDEX)
    resize(env, file_name(base, TXN_INDEX), 0)
    overwrite(env, file_name(base, TXN_INDEX), LYING_ENTRIES[how](raw))
    check_transactions(open_log(env, was_clean=True, recovery_point=9))
    assert content(env, base, TXN_INDEX) == raw


def test_a_transaction_whose_first_batch_was_removed_is_no_contradiction(env: MemoryEnv) -> None:
    log = open_log(env)
    transaction(log, 2, 0, commits=None)  # 0
    fill(log, 1)  # 1
    log.roll(NOW_MS)
    transaction(log, 2, 1, commits=False)  # 2, marker 3
    log.roll(NOW_MS)
    publish(env, log, [0], keep=[1])
    log.close()
    again, loaded = open_with_notes(env, was_clean=True, recovery_point=4)
    assert loaded.notes == ()
    assert _aborted(again, 0, 4) == [(2, 0)]


@pytest.mark.parametrize(("offset", "other"), [(4, 2), (10, 4), (4, 10)])
def test_a_snapshot_of_another_offset_changes_no_aborted_transaction(
    env: MemoryEnv, offset: int, other: int
) -> None:
    """Its checksum is right. Readers would see aborted records, or miss committed ones."""
    log = open_log(env)
    transaction(log, 1, 0, commits=True)  # 0, marker 1
    log.roll(NOW_MS)
    transaction(log, 1, 1, commits=None)  # 2
    transaction(log, 2, 0, commits=None)  # 3
    log.roll(NOW_MS)
    transaction(log, 1, 2, commits=False)  # 4, marker 5
    transaction(log, 2, 1, commits=True)  # 6, marker 7
    transaction(log, 2, 2, commits=False)  # 8, marker 9
    log.roll(NOW_MS)
    transaction(log, 2, 3, commits=False)  # 10, marker 11
    log.flush()
    entries = log.reader.aborted_transactions(0, 12)
    assert [entry[:3] for entry in entries] == [(1, 2, 5), (2, 8, 9), (2, 10, 11)]
    raw = content(env, other, SNAPSHOT)
    resize(env, file_name(offset, SNAPSHOT), 0)
    overwrite(env, file_name(offset, SNAPSHOT), raw)
    for _ in range(2):
        again = open_log(env.kill(), recovery_point=offset + 1)
        assert again.reader.aborted_transactions(0, 12) == entries
        assert again.last_stable_offset == 12
        assert again.producers.last_records() == log.producers.last_records()
