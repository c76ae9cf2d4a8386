"""Appending: offsets, stamps, rolling, idempotence, and writes that fail."""

import errno
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from config.topics.keys import TopicConfig
from storage.errors import (
    InvalidProducerEpochError,
    LogClosedError,
    LogDirectoryError,
    NoRoomError,
    OutOfOrderSequenceError,
)
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
    read_header,
    verify_crc,
)
from storage.format.filenames import INDEX, LOG, SNAPSHOT, TIME_INDEX, TXN_INDEX
from storage.log.log import Log
from storage.log.roll import SMALL_ROLL_MS, SMALL_SEGMENT_BYTES, SMALL_SEGMENTS
from tests.support.draws import cases
from tests.support.storage.logs import (
    FOLDER,
    NOW_MS,
    SMALL,
    append,
    append_batch,
    batch_of,
    content,
    fill,
    offsets_in,
    open_log,
    read_records,
    segments_of,
)
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash


@pytest.fixture
def env() -> MemoryEnv:
    return MemoryEnv(seed=1)


def test_offsets_go_on_where_the_log_ends(env: MemoryEnv) -> None:
    log = open_log(env)
    first = append(log, b"a", b"b", b"c")
    second = append(log, b"d")
    assert (first.first_offset, first.last_offset) == (0, 2)
    assert (second.first_offset, second.last_offset) == (3, 3)
    assert (log.log_end_offset, log.high_watermark) == (4, 4)
    assert [record.value for record in read_records(log)] == [b"a", b"b", b"c", b"d"]


def test_a_batch_bears_its_offset_and_the_leader_epoch(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"a")
    log._state.leader_epoch = 7
    append(log, b"b")
    data = log.reader.read(1, 1000, end_offset=2).read()
    header = read_header(data)
    assert (header.base_offset, header.partition_leader_epoch) == (1, 7)
    assert verify_crc(data, 0, header)


def test_log_append_time_replaces_the_timestamp(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, message_timestamp_type="LogAppendTime"))
    info = append(log, b"a", b"b", timestamp=5, now_ms=NOW_MS)
    assert info.log_append_time_ms == NOW_MS
    assert [record.timestamp for record in read_records(log)] == [NOW_MS, NOW_MS]
    assert log.segment_facts()[0].largest_timestamp_ms == NOW_MS


def test_create_time_is_kept(env: MemoryEnv) -> None:
    log = open_log(env)
    assert append(log, b"a", timestamp=5).log_append_time_ms == -1
    assert [record.timestamp for record in read_records(log)] == [5]


def test_the_answer_names_the_log_start(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 3)
    log.delete_records(2)
    assert append(log, b"x").log_start_offset == 2


# --- rolling ------------------------------------------------------------------------------------


def test_a_batch_that_does_not_fit_begins_a_new_segment(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=2 * len(batch_of(b"0".ljust(100, b".")))))
    fill(log, 5)
    assert [base for base, _ in segments_of(log)] == [0, 2, 4]
    assert offsets_in(log) == [0, 1, 2, 3, 4]


def test_a_batch_larger_than_a_segment_goes_into_an_empty_one(env: MemoryEnv) -> None:
    log = open_log(env)
    append(log, b"x" * 5000)
    append(log, b"y" * 5000)
    assert [base for base, _ in segments_of(log)] == [0, 1]


def test_age_is_counted_by_the_records_own_time(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, segment_ms=1000))
    append(log, b"a", timestamp=5000)
    append(log, b"b", timestamp=6000, now_ms=NOW_MS + 50_000)
    assert len(log.segments) == 1
    append(log, b"c", timestamp=6001)
    assert [base for base, _ in segments_of(log)] == [0, 2]


def test_without_timestamps_age_is_counted_by_the_wall_clock(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, segment_ms=1000))
    append(log, b"a", timestamp=-1)
    append(log, b"b", timestamp=-1, now_ms=NOW_MS + 1000)
    assert len(log.segments) == 1
    append(log, b"c", timestamp=-1, now_ms=NOW_MS + 1001)
    assert len(log.segments) == 2


def test_an_empty_segment_never_rolls_by_age(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_ms=1000))
    assert not log.roller.roll_if_due(NOW_MS + 10**9)
    append(log, b"a", timestamp=NOW_MS + 10**9, now_ms=NOW_MS + 10**9)
    assert len(log.segments) == 1


def test_a_clock_that_is_set_back_delays_a_roll_by_one_age_at_most(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_ms=1000))
    append(log, b"a")
    assert not log.roller.roll_if_due(NOW_MS - 10**9)
    assert not log.roller.roll_if_due(NOW_MS - 10**9 + 1000)
    assert log.roller.roll_if_due(NOW_MS - 10**9 + 1001)


def test_an_idle_segment_rolls_on_a_timer(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_ms=1000))
    append(log, b"a")
    assert not log.roller.roll_if_due(NOW_MS + 1000)
    assert log.roller.roll_if_due(NOW_MS + 1001)
    assert [base for base, _ in segments_of(log)] == [0, 1]
    assert not log.roller.roll_if_due(NOW_MS + 10**6)


@pytest.mark.parametrize(
    "config", [replace(SMALL, policy_known=False), replace(SMALL, cleanup_policy=())]
)
def test_an_idle_segment_that_nobody_will_clean_or_expire_stays(
    env: MemoryEnv, config: TopicConfig
) -> None:
    log = open_log(env, replace(config, segment_ms=1000))
    append(log, b"a")
    assert not log.roller.roll_if_due(NOW_MS + 10**6)


def test_a_backfill_of_old_records_does_not_roll_on_every_tick(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, segment_ms=1000))
    for tick in range(5):
        append(log, b"a", timestamp=1000 + tick, now_ms=NOW_MS + tick)
        assert not log.roller.roll_if_due(NOW_MS + tick)


@pytest.mark.parametrize(("policy", "rolls"), [(("compact",), True), (("delete",), False)])
def test_compaction_lag_bounds_the_age_of_compacted_topics(
    env: MemoryEnv, policy: tuple[str, ...], rolls: bool
) -> None:
    config = replace(SMALL, cleanup_policy=policy, max_compaction_lag_ms=1000)
    log = open_log(env, config)
    append(log, b"a")
    assert log.roller.roll_if_due(NOW_MS + 1001) is rolls


@pytest.mark.parametrize("step_ms", [cases(few=20, many=1), 2000])
def test_small_segments_roll_by_age_ten_times_and_then_every_ten_seconds(
    env: MemoryEnv, step_ms: int
) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 30, segment_ms=1))
    appends = 60_000 // step_ms
    for step in range(appends):
        now_ms = NOW_MS + step * step_ms
        append(log, b"a", timestamp=step * 1000, now_ms=now_ms)
        log.roller.roll_if_due(now_ms)
    rolls = len(log.segments) - 1
    assert rolls == pytest.approx(10 + 60_000 // SMALL_ROLL_MS, abs=1)
    assert offsets_in(log) == list(range(appends))


def test_a_log_that_may_not_roll_by_age_still_rolls_when_a_segment_is_full(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_ms=1))
    for step in range(100):
        append(log, b"v" * 100, timestamp=step * 1000)
    assert max(segment.size_bytes for segment in log.segments) <= SMALL.segment_bytes


def test_a_segment_that_is_not_small_rolls_by_age_at_any_time(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 30, segment_ms=1))
    for step in range(20):
        append(log, b"v" * SMALL_SEGMENT_BYTES, timestamp=step * 1000)
    assert len(log.segments) == 20


def test_the_time_of_the_next_roll_is_the_one_at_which_it_happens(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_ms=1))
    for step in range(20):
        append(log, b"a", timestamp=step * 1000)
    due_ms = log.roller.due_ms
    assert due_ms == NOW_MS + SMALL_ROLL_MS
    assert not log.roller.roll_if_due(due_ms - 1)
    assert log.roller.roll_if_due(due_ms)


def test_while_descriptors_are_scarce_only_a_log_with_few_segments_closes_small_ones(
    env: MemoryEnv,
) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 30, segment_ms=1))
    env.half_of_descriptors_is_free = False
    step = 0
    while step < 50:
        step += 1
        append(log, b"a", timestamp=step * 1000, now_ms=NOW_MS + step * SMALL_ROLL_MS)
    assert len(log.segments) == SMALL_SEGMENTS + 1
    env.half_of_descriptors_is_free = True
    append(log, b"a", timestamp=NOW_MS, now_ms=NOW_MS + (step + 1) * SMALL_ROLL_MS)
    assert len(log.segments) == SMALL_SEGMENTS + 2


def test_jitter_only_makes_a_segment_younger(env: MemoryEnv) -> None:
    config = replace(SMALL, segment_ms=1000, segment_jitter_ms=400, segment_bytes=1 << 20)
    ages = set()
    for seed in range(20):
        log = open_log(MemoryEnv(seed=seed), config)
        append(log, b"a", timestamp=0)
        while len(log.segments) == 1:
            append(log, b"b", timestamp=log.log_end_offset * 10)
        ages.add((log.log_end_offset - 1) * 10)
    assert all(600 <= age <= 1010 for age in ages)
    assert len(ages) > 5


def test_full_indexes_begin_a_new_segment(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20, segment_index_bytes=48))
    fill(log, 10)
    # 48 bytes hold 6 offset entries, but of 4 time entries one is kept for the end. Equal
    # timestamps make one time entry only.
    assert [base for base, _ in segments_of(log)] == [0, 7]


def test_an_offset_too_far_from_the_base_begins_a_new_segment(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    append(log, b"a")
    far = build_batch([Record(0, NOW_MS, b"k", b"v")], last_offset_delta=2**31 - 2)
    append_batch(log, far)  # offsets 1 to 2^31 - 1: the last one that fits
    assert len(log.segments) == 1
    append(log, b"b")
    assert [base for base, _ in segments_of(log)] == [0, 2**31]


def test_a_roll_leaves_a_snapshot_and_complete_indexes(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, index_interval_bytes=1 << 20))
    append(log, b"a", timestamp=NOW_MS, producer_id=9, producer_epoch=0, base_sequence=0)
    append(log, b"b", timestamp=NOW_MS + 5)
    log.roll(NOW_MS)
    # The only time entry is the one that closes the segment: largest timestamp, its offset.
    assert content(env, 0, TIME_INDEX) == (NOW_MS + 5).to_bytes(8, "big") + (1).to_bytes(4, "big")
    assert len(content(env, 2, SNAPSHOT)) == 10 + 46
    assert content(env, 2, INDEX) == b""


def test_a_roll_of_an_empty_segment_does_nothing(env: MemoryEnv) -> None:
    log = open_log(env)
    log.roll(NOW_MS)
    assert len(log.segments) == 1
    fill(log, 1)
    log.roll(NOW_MS)
    log.roll(NOW_MS)
    assert [base for base, _ in segments_of(log)] == [0, 1]


# --- producers ----------------------------------------------------------------------------------


def send(log: object, sequence: int, *, epoch: int = 0, count: int = 1) -> tuple[int, int, bool]:
    info = append(
        log,  # type: ignore[arg-type]
        *[b"v"] * count,
        producer_id=42,
        producer_epoch=epoch,
        base_sequence=sequence,
    )
    return info.first_offset, info.last_offset, info.duplicate


def test_a_repeated_batch_is_answered_with_its_old_offsets(env: MemoryEnv) -> None:
    log = open_log(env)
    assert send(log, 0, count=3) == (0, 2, False)
    assert send(log, 3) == (3, 3, False)
    assert send(log, 0, count=3) == (0, 2, True)
    assert log.log_end_offset == 4


def test_a_gap_in_the_sequence_is_refused_and_nothing_is_written(env: MemoryEnv) -> None:
    log = open_log(env)
    send(log, 0)
    with pytest.raises(OutOfOrderSequenceError):
        send(log, 2)
    assert log.log_end_offset == 1
    assert send(log, 1) == (1, 1, False)


def test_an_older_epoch_is_fenced(env: MemoryEnv) -> None:
    log = open_log(env)
    send(log, 0, epoch=3)
    with pytest.raises(InvalidProducerEpochError):
        send(log, 1, epoch=2)


@pytest.mark.parametrize("was_clean", [True, False])
def test_a_duplicate_is_known_after_a_restart(env: MemoryEnv, was_clean: bool) -> None:
    log = open_log(env)
    send(log, 0, count=2)
    send(log, 2, count=2)
    if was_clean:
        log.close()
    again = open_log(env, was_clean=was_clean, recovery_point=4 if was_clean else 0)
    assert send(again, 2, count=2) == (2, 3, True)
    assert send(again, 4) == (4, 4, False)


def test_an_idle_producer_is_forgotten(env: MemoryEnv) -> None:
    log = open_log(env)
    send(log, 0)
    assert log.producers.expire(NOW_MS + 1000, 1000) == 1
    assert log.producers.last_records() == {}
    assert send(log, 17) == (1, 1, False)


# --- failing writes -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EIO])
@pytest.mark.parametrize("kind", [LOG, INDEX, TIME_INDEX])
def test_a_failed_write_leaves_the_log_as_it_was(env: MemoryEnv, error: int, kind: str) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    for offset in range(3):
        append(log, b"v", timestamp=NOW_MS + offset)
    before = {kind: content(env, 0, kind) for kind in (LOG, INDEX, TIME_INDEX)}
    fault = env.fail_on(lambda op, path: op == "pwrite" and path.endswith(kind), error)
    with pytest.raises(LogDirectoryError if error == errno.EIO else NoRoomError) as caught:
        append(log, b"lost", timestamp=NOW_MS + 10)
    assert FOLDER in str(caught.value)
    fault.remove()
    assert {kind: content(env, 0, kind) for kind in (LOG, INDEX, TIME_INDEX)} == before
    assert (log.log_end_offset, log.high_watermark) == (3, 3)
    assert log.segment_facts()[0].largest_timestamp_ms == NOW_MS + 2
    assert append(log, b"next", timestamp=NOW_MS + 11).first_offset == 3
    assert offsets_in(log) == [0, 1, 2, 3]
    assert offsets_in(open_log(env)) == [0, 1, 2, 3]


def test_a_failed_write_does_not_come_back_in_front_of_the_next_segment() -> None:
    """Its batch is whole where the index had no room, and recovery refuses two of one offset."""
    for seed in range(60):
        env = MemoryEnv(seed)
        log = open_log(env)
        fill(log, 3)
        log.flush()
        fault = env.fail_on(lambda op, path: op == "pwrite" and path.endswith(INDEX), errno.ENOSPC)
        with pytest.raises(NoRoomError):
            append(log, b"lost")
        fault.remove()
        env.crash_at = env.operations + 1 + seed % 12
        with suppress(SimulatedCrash):
            log.roll(NOW_MS)
            append(log, b"next")
        env.crash_at = None
        assert offsets_in(open_log(env.crash()))[:3] == [0, 1, 2], env


def test_a_segment_that_a_failed_roll_made_refuses_no_record_if_it_comes_back() -> None:
    for seed in range(20):
        env = MemoryEnv(seed)
        log = open_log(env)
        fill(log, 3)
        log.flush()
        fault = env.fail_on(
            lambda op, path: op == "pwrite" and path.endswith(SNAPSHOT), errno.ENOSPC
        )
        with pytest.raises(NoRoomError):
            log.roll(NOW_MS)
        fault.remove()
        append(log, b"next")
        log.flush()
        after = open_log(env.crash(), recovery_point=log.recovery_point)
        assert offsets_in(after) == [0, 1, 2, 3], env
        assert append(after, b"x").first_offset == 4


def test_a_failed_write_forgets_no_producer_and_learns_none(env: MemoryEnv) -> None:
    log = open_log(env)
    send(log, 0)
    fault = env.fail_on(lambda op, path: op == "pwrite" and path.endswith(LOG), errno.ENOSPC)
    with pytest.raises(NoRoomError):
        send(log, 1)
    fault.remove()
    assert send(log, 1) == (1, 1, False)


def test_what_cannot_be_cut_back_ends_all_appending(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 2)
    faults = [
        env.fail_on(lambda op, path: op == "pwrite" and path.endswith(LOG), errno.EIO),
        env.fail_on(lambda op, path: op == "truncate", errno.EIO),
    ]
    with pytest.raises(LogDirectoryError):
        append(log, b"lost")
    for fault in faults:
        fault.remove()
    with pytest.raises(LogDirectoryError, match="undoing a failed append"):
        append(log, b"refused")
    assert log.log_end_offset == 2


def test_what_was_written_without_room_and_cannot_be_cut_back_ends_all_appending(
    env: MemoryEnv,
) -> None:
    log = open_log(env)
    fill(log, 2)
    env.fail_on(lambda op, path: op == "pwrite" and path.endswith(LOG), errno.ENOSPC)
    env.fail_on(lambda op, path: op == "truncate", errno.EIO)
    with pytest.raises(LogDirectoryError):
        append(log, b"lost")
    with pytest.raises(LogDirectoryError, match="undoing a failed append"):
        append(log, b"refused")


@pytest.mark.parametrize("seed", range(20))
def test_appends_that_find_no_room_are_refused_until_there_is_some(seed: int) -> None:
    """Whatever part of a refused write stood in the files, none of it is ever seen."""
    print(f"seed={seed}")
    rng = random.Random(seed)
    env = MemoryEnv(seed)
    log = open_log(env, replace(SMALL, segment_bytes=600, index_interval_bytes=1))
    reported: list[int] = []
    refused = 0
    for _ in range(150):
        share = rng.choice((0.0, 0.2))

        def strikes(op: str, path: str, share: float = share) -> bool:
            return op in ("open", "pwrite") and rng.random() < share

        full = env.fail_on(strikes, rng.choice((errno.ENOSPC, errno.EMFILE, errno.EDQUOT)))
        try:
            reported.append(append(log, rng.randbytes(rng.randrange(90))).first_offset)
        except NoRoomError:
            refused += 1
        full.remove()
    assert refused
    assert reported == list(range(len(reported)))
    assert offsets_in(log) == reported
    log.flush()
    for after in (env.kill(), env.crash()):
        assert offsets_in(open_log(after, replace(SMALL, segment_bytes=600))) == reported


def test_a_log_grows_on_in_its_segment_while_no_descriptor_is_to_spare(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=200, segment_ms=1000))
    append(log, b"v" * 100)
    env.spare_descriptors = False
    for _ in range(5):
        append(log, b"v" * 100, timestamp=NOW_MS + 10_000)
    assert len(log.segments) == 1
    with pytest.raises(NoRoomError, match="too many open files"):
        log.roll(NOW_MS)
    append(open_log(env, folder="/data/new-0"), b"v")  # new logs may use half of the reserve
    env.spare_descriptors = True
    append(log, b"v")
    assert len(log.segments) == 2
    assert offsets_in(log) == offsets_in(open_log(env)) == list(range(7))


def test_a_segment_grows_on_no_further_than_its_index_permits(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_index_bytes=24, index_interval_bytes=0))
    env.spare_descriptors = False
    while not log.segments.active.is_full:
        append(log, b"v")
    with pytest.raises(NoRoomError):
        append(log, b"v")
    env.spare_descriptors = True
    append(log, b"v")
    assert len(log.segments) == 2


STEPS_OF_A_ROLL = (
    ("open", "0003.log"),
    ("open", "0003.index"),
    ("open", "0003.timeindex"),
    ("open", "0003.snapshot"),
    ("pwrite", "0003.snapshot"),
    ("pwrite", "0000.timeindex"),
)


@pytest.mark.parametrize("step", STEPS_OF_A_ROLL)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE, errno.ENFILE])
def test_a_roll_that_finds_no_room_changes_nothing(
    env: MemoryEnv, step: tuple[str, str], error: int
) -> None:
    log = open_log(env, replace(SMALL, index_interval_bytes=1 << 20))
    for offset in range(3):
        append(log, b"v", timestamp=NOW_MS + offset)

    def files() -> tuple[list[str], bytes]:
        names = [name for name in env.listdir(FOLDER) if not name.endswith(SNAPSHOT)]
        return names, content(env, 0, TIME_INDEX)

    before = files()
    full = env.fail_on(lambda op, path: (op, path[-len(step[1]) :]) == step, error)
    with pytest.raises(NoRoomError):
        log.roll(NOW_MS)
    full.remove()
    assert full.hits
    assert files() == before
    assert append(log, b"v").first_offset == 3
    log.roll(NOW_MS)
    assert append(log, b"v").first_offset == 4
    assert offsets_in(log) == offsets_in(open_log(env)) == [0, 1, 2, 3, 4]


def test_an_epoch_that_finds_no_room_is_entered_by_a_later_append(env: MemoryEnv) -> None:
    log = open_log(env)
    full = env.fail_on(lambda op, path: op == "pwrite" and "leader-epoch" in path, errno.ENOSPC)
    with pytest.raises(NoRoomError):
        append(log, b"v")
    full.remove()
    append(log, b"v")
    again = open_log(env)
    assert again.reader.epoch_of(0) == log.leader_epoch


@pytest.mark.parametrize(("operation", "error"), [("open", errno.EMFILE), ("pwrite", errno.ENOSPC)])
def test_an_aborted_transaction_is_indexed_though_its_index_could_not_be_written_at_once(
    env: MemoryEnv, operation: str, error: int
) -> None:
    log = open_log(env)
    full = env.fail_on(lambda op, path: op == operation and path.endswith(TXN_INDEX), error)
    entries = []
    for producer_id in (1, 2):
        begun = log.log_end_offset
        append_by(log, producer_id, TRANSACTIONAL)
        marker = append_by(log, producer_id, TRANSACTIONAL | CONTROL)
        entries.append((producer_id, begun, marker))
    assert full.hits
    assert aborted_of(log) == entries
    with pytest.raises(NoRoomError):
        log.roll(NOW_MS)
    full.remove()
    append_by(log, 3, 0)
    log.roll(NOW_MS)
    log.close()
    assert aborted_of(open_log(env)) == entries


def append_by(log: Log, producer_id: int, attributes: int) -> int:
    """A batch of a producer, or its abort marker; where it stands."""
    record = Record(0, NOW_MS, b"k", b"v", ())
    if attributes & CONTROL:
        record = marker_record(ControlType.ABORT, 0, NOW_MS)
    data = build_batch(
        [record], producer_id=producer_id, producer_epoch=0, base_sequence=0, attributes=attributes
    )
    header = read_header(data)
    in_transaction = bool(attributes & TRANSACTIONAL) and not attributes & CONTROL
    return log.append(
        memoryview(data), header, now_ms=NOW_MS, in_transaction=in_transaction
    ).first_offset


def aborted_of(log: Log) -> list[tuple[int, int, int]]:
    entries = log.reader.aborted_transactions(0, log.log_end_offset)
    return [(entry.producer_id, entry.first_offset, entry.last_offset) for entry in entries]


def test_a_read_without_a_descriptor_is_refused_and_the_next_one_is_served(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, index_interval_bytes=0))
    fill(log, 20)
    log.flush()
    for segment in log.segments:
        segment.drop_idle_indexes()
        segment.drop_idle_indexes()
    full = env.fail_on(lambda op, path: op == "read_file", errno.EMFILE)
    with pytest.raises(NoRoomError):
        log.reader.read(2, 1000, end_offset=20)
    full.remove()
    assert full.hits
    assert offsets_in(log) == list(range(20))


def test_a_flush_without_a_descriptor_can_be_run_again(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 7)
    task = log.flusher.begin()
    full = env.fail_on(lambda op, path: op == "sync_dir", errno.EMFILE)
    with pytest.raises(NoRoomError):
        task.run()
    full.remove()
    task.run()
    log.flusher.done(task)
    assert log.flusher.is_flushed
    append(log, b"v")


def test_a_roll_that_fails_leaves_what_was_acknowledged(env: MemoryEnv) -> None:
    log = open_log(env)
    fill(log, 3)
    fault = env.fail_on(lambda op, path: op == "open" and "0003.log" in path, errno.EIO)
    with pytest.raises(LogDirectoryError):
        log.roll(NOW_MS)
    fault.remove()
    assert log.log_end_offset == 3
    assert offsets_in(open_log(env)) == [0, 1, 2]


def test_a_closed_log_takes_nothing(env: MemoryEnv) -> None:
    log = open_log(env)
    log.mark_deleted()
    with pytest.raises(LogClosedError):
        append(log, b"v")


# --- settings -----------------------------------------------------------------------------------


def test_a_change_of_policy_begins_a_new_generation(env: MemoryEnv) -> None:
    log = open_log(env)
    before = log.generation
    log.update_config(replace(SMALL, segment_bytes=5000))
    assert log.generation == before
    log.update_config(replace(SMALL, cleanup_policy=("compact",)))
    assert log.generation != before


def test_new_settings_hold_for_the_active_segment(env: MemoryEnv) -> None:
    log = open_log(env, replace(SMALL, segment_bytes=1 << 20))
    fill(log, 5)
    log.update_config(replace(SMALL, segment_bytes=10))
    fill(log, 1)
    assert [base for base, _ in segments_of(log)] == [0, 5]
