"""A log under loss of power and kill -9, at every operation, and again while it is opened."""

import errno
import random
from contextlib import suppress
from dataclasses import replace

import pytest

from storage.errors import DamagedSegmentError, LogDirectoryError
from storage.format.filenames import LOG
from storage.log.log import Log
from tests.support.storage.logs import (
    NOW_MS,
    SMALL,
    append,
    fill,
    offsets_in,
    open_log,
    publish,
    read_records,
    value_at,
)
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

SMALLER = replace(SMALL, segment_bytes=600, index_interval_bytes=200)
FLUSHED = replace(SMALLER, varve_flush_on_ack=True)


class Witness:
    """What a client was told: which offsets are in the log for good, and which are gone for good.

    The value of every record tells its offset, so one that moved shows.
    """

    def __init__(self) -> None:
        self.acked_end = 0  # below it all is flushed
        self.visible_end = 0  # a reader has been shown this much
        self.appended_end = 0
        self.start = 0
        self.recovery_point = 0  # as the last checkpoint has it
        self.lost: set[int] = set()  # by an earlier crash, before they were flushed

    def see(self, log: Log) -> None:
        self.acked_end = max(self.acked_end, log.recovery_point)
        self.visible_end = max(self.visible_end, log.high_watermark)
        self.appended_end = max(self.appended_end, log.log_end_offset)
        self.start = max(self.start, log.log_start_offset)

    def check(self, log: Log, *, visible_is_durable: bool) -> None:
        durable = max(self.acked_end, self.visible_end if visible_is_durable else 0)
        records = read_records(log)
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        assert all(record.value == value_at(record.offset) for record in records)
        retained = set(range(max(self.start, log.log_start_offset), durable)) - self.lost
        assert retained <= set(offsets), (retained, offsets)
        # Of what was never flushed a crash may take any part, as it does in Kafka.
        self.lost |= set(range(durable, log.log_end_offset)) - set(offsets)
        assert log.log_end_offset >= durable
        assert log.log_end_offset <= self.appended_end
        assert not log.damage.ranges


def work(log: Log, rng: random.Random, witness: Witness, steps: int) -> None:
    for _ in range(steps):
        subject = rng.random()
        if subject < 0.6:
            count = rng.randrange(1, 4)
            base = log.log_end_offset
            witness.appended_end = max(witness.appended_end, base + count)
            append(log, *[value_at(base + at) for at in range(count)], timestamp=NOW_MS + base)
        elif subject < 0.8:
            log.flush()
        elif subject < 0.85:
            log.roll(NOW_MS)
        elif subject < 0.9:
            offset = rng.randrange(log.log_start_offset, log.high_watermark + 1)
            witness.start = max(witness.start, offset)
            log.delete_records(offset)
            log.retention.expire(NOW_MS)
        elif subject < 0.93:
            clean(log, rng, witness)
        elif subject < 0.96:
            log.retention.purge_deleted(NOW_MS + 10**9)
        else:
            witness.recovery_point = log.recovery_point
        witness.see(log)


def clean(log: Log, rng: random.Random, witness: Witness) -> None:
    """Publish two neighbours as one, without some of their records."""
    bases = [facts.base_offset for facts in log.segment_facts()]
    if len(bases) < 3:
        return
    first = rng.randrange(len(bases) - 2)
    inside = range(bases[first], bases[first + 2])
    if inside.stop > log.high_watermark:
        return
    present = {record.offset for record in read_records(log) if record.offset in inside}
    keep = {offset for offset in present if rng.random() < 0.5}
    witness.lost |= present - keep  # from now on either is right
    publish(log._state.env, log, bases[first : first + 2], keep)


def reopen(env: MemoryEnv, config: object, witness: Witness, rng: random.Random) -> Log:
    """Open after a crash; sometimes crash while doing so, and open again."""
    if rng.random() < 0.5:
        env.crash_at = env.operations + rng.randrange(40)
        try:
            open_log(env, config, recovery_point=witness.recovery_point)  # type: ignore[arg-type]
        except SimulatedCrash:
            env = env.crash() if rng.random() < 0.5 else env.kill()
        env.crash_at = None
    log = open_log(env, config, recovery_point=witness.recovery_point)  # type: ignore[arg-type]
    if log.high_watermark < log.log_end_offset:
        log.flush()
    return log


@pytest.mark.parametrize("config", [SMALLER, FLUSHED], ids=["default", "flush on ack"])
@pytest.mark.parametrize("seed", range(60))
def test_what_was_flushed_survives_any_crash(config: object, seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    witness = Witness()
    log = open_log(env, config)  # type: ignore[arg-type]
    for _ in range(4):
        env.crash_at = env.operations + rng.randrange(1, 120)
        with suppress(SimulatedCrash):
            work(log, rng, witness, 60)
        env.crash_at = None
        env = env.crash()
        log = reopen(env, config, witness, rng)
        env = log._state.env  # type: ignore[assignment]
        witness.check(log, visible_is_durable=config is FLUSHED)
        witness.appended_end = witness.visible_end = log.log_end_offset
        witness.see(log)


@pytest.mark.parametrize("seed", range(20))
def test_a_kill_loses_nothing_that_was_appended(seed: int) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    env = MemoryEnv(seed)
    witness = Witness()
    log = open_log(env, SMALLER)
    work(log, rng, witness, 80)
    env = env.kill()
    log = open_log(env, SMALLER, recovery_point=witness.recovery_point)
    witness.check(log, visible_is_durable=True)
    assert log.log_end_offset == witness.appended_end


def test_what_a_kill_left_unsynced_is_not_visible_until_it_is_synced() -> None:
    env = MemoryEnv(9)
    log = open_log(env, FLUSHED)
    fill(log, 3)
    log.flush()
    fill(log, 2)
    again = open_log(env.kill(), FLUSHED, recovery_point=3)
    assert (again.log_end_offset, again.high_watermark) == (5, 3)
    again.flush()
    assert again.high_watermark == 5


# --- flush --------------------------------------------------------------------------------------


def test_with_flush_on_ack_nothing_is_visible_before_its_sync() -> None:
    log = open_log(MemoryEnv(1), FLUSHED)
    fill(log, 2)
    assert (log.high_watermark, log.log_end_offset) == (0, 2)
    assert log.reader.read(0, 1000, end_offset=log.high_watermark).length == 0
    task = log.flusher.begin()
    fill(log, 1)
    task.run()
    assert log.high_watermark == 0
    log.flusher.done(task)
    assert (log.high_watermark, log.recovery_point, log.log_end_offset) == (2, 2, 3)
    assert offsets_in(log) == [0, 1]


def test_without_it_appends_are_visible_at_once_and_flushes_move_the_recovery_point() -> None:
    log = open_log(MemoryEnv(1))
    fill(log, 2)
    assert (log.high_watermark, log.recovery_point) == (2, 0)
    log.flush()
    assert log.recovery_point == 2


def test_turning_flush_on_ack_off_shows_everything() -> None:
    log = open_log(MemoryEnv(1), FLUSHED)
    fill(log, 2)
    log.update_config(SMALLER)
    assert log.high_watermark == 2


def test_a_flush_that_began_before_a_truncation_says_nothing() -> None:
    log = open_log(MemoryEnv(1), FLUSHED)
    fill(log, 5)
    task = log.flusher.begin()
    task.run()
    log.truncate_to(2, now_ms=NOW_MS)
    fill(log, 3)
    log.flusher.done(task)
    assert log.recovery_point <= 2
    assert log.high_watermark <= 2


def test_a_flush_covers_closed_segments_with_their_indexes() -> None:
    env = MemoryEnv(1)
    log = open_log(env)
    fill(log, 12)
    synced = len(env.history)
    log.flush()
    files = [path for operation, path in env.history[synced:] if operation == "sync"]
    assert sum(path.endswith(LOG) for path in files) == 3
    assert sum(path.endswith("index") for path in files) == 4
    synced = len(env.history)
    fill(log, 1)
    log.flush()
    assert [op for op, _ in env.history[synced:] if op.startswith("sync")] == ["sync"]


def test_a_sync_that_failed_is_never_tried_again() -> None:
    env = MemoryEnv(1)
    log = open_log(env)
    fill(log, 2)
    task = log.flusher.begin()
    fault = env.fail_on(lambda op, path: op == "sync", errno.EIO)
    with pytest.raises(LogDirectoryError) as caught:
        task.run()
    assert caught.value.directory == "/data"
    fault.remove()
    for again in (task.run, log.flusher.begin, log.flush, lambda: fill(log, 1)):
        with pytest.raises(LogDirectoryError):
            again()
    assert log.recovery_point == 0
    assert fault.hits == 1


@pytest.mark.parametrize(
    ("config", "due_at", "not_due_at"),
    [
        (replace(SMALL, flush_messages=3), (3, 0), (2, 10**6)),
        (replace(SMALL, flush_ms=1000), (1, 1000), (1, 999)),
    ],
)
def test_flushes_are_due_by_messages_and_by_time(
    config: object, due_at: tuple[int, int], not_due_at: tuple[int, int]
) -> None:
    for (messages, later_ms), due in ((due_at, True), (not_due_at, False)):
        env = MemoryEnv(1)
        log = open_log(env, config)  # type: ignore[arg-type]
        log.flush()
        assert not log.flusher.is_due(env.wall_ms() + 10**9)
        fill(log, messages)
        assert log.flusher.is_due(env.wall_ms() + later_ms) is due


def test_a_clock_that_is_set_back_delays_a_flush_by_flush_ms_at_most() -> None:
    env = MemoryEnv(1)
    log = open_log(env, replace(SMALL, flush_ms=1000))
    fill(log, 1)
    past_ms = env.wall_ms() - 10**9
    assert not log.flusher.is_due(past_ms)
    assert not log.flusher.is_due(past_ms + 999)
    assert log.flusher.is_due(past_ms + 1000)


def test_a_closed_segment_waits_for_a_flush() -> None:
    env = MemoryEnv(1)
    log = open_log(env)
    fill(log, 2)
    assert not log.flusher.is_due(env.wall_ms())
    log.roll(NOW_MS)
    assert log.flusher.is_due(env.wall_ms())
    log.flush()
    assert not log.flusher.is_due(env.wall_ms())


def test_damage_is_told_apart_from_a_crash() -> None:
    env = MemoryEnv(1)
    log = open_log(env)
    fill(log, 5)
    log.flush()
    after = env.crash()
    file = after.open("/data/orders-0/00000000000000000000.log", write=True)
    file.pwrite(b"!!", 200)
    again = open_log(after, recovery_point=5)
    assert again.log_end_offset == 5
    with pytest.raises(DamagedSegmentError):
        again.reader.read(1, 1000, end_offset=5)
