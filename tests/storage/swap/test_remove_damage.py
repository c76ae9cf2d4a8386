"""Cutting a damaged range out of a segment: all or nothing, whenever the machine loses power."""

import pytest

from storage.errors import DamagedSegmentError
from storage.format.filenames import LOG, file_name
from storage.log.log import Log
from storage.swap.remove_damage import SkipPlan, write_without_damage
from storage.swap.swap_journal import execute_swap, plan_swap
from tests.support.storage.logs import FOLDER, NOW_MS, batch_of, fill, open_log, overwrite, value_at
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

BATCH_BYTES = len(batch_of(value_at(0)))
PATH = f"{FOLDER}/{file_name(0, LOG)}"


def damaged_log(env: MemoryEnv) -> Log:
    """Six batches in a closed segment, the third of them damaged; one after it."""
    log = open_log(env)
    fill(log, 6)
    log.roll(NOW_MS)
    fill(log, 1)
    log.flush()
    overwrite(env, file_name(0, LOG), b"!", 2 * BATCH_BYTES + 80)
    env.settle()
    log.damage.mark(PATH, 2 * BATCH_BYTES, "bad CRC")
    return log


def skip(env: MemoryEnv, log: Log) -> SkipPlan:
    (damage,) = log.damage.ranges
    facts = log.segment_facts()[0]
    plan = SkipPlan(FOLDER, 0, facts.size_bytes, damage, "skip-1", ())
    output = write_without_damage(env, plan)
    assert output is not None
    log.swap.pin([0])
    swap = plan_swap(FOLDER, [facts], [output])
    execute_swap(env, swap)
    log.swap.attach(swap, log.swap.open_outputs(swap))
    return plan


def offsets_served(log: Log) -> list[int]:
    """The offsets that a reader gets; one that is refused is left out."""
    served = []
    for offset in range(log.log_start_offset, log.log_end_offset):
        try:
            if log.reader.read(offset, BATCH_BYTES, end_offset=offset + 1).length:
                served.append(offset)
        except DamagedSegmentError:
            continue
    return served


def test_the_rest_of_the_segment_is_byte_for_byte_what_it_was() -> None:
    env = MemoryEnv()
    log = damaged_log(env)
    before = env.read_file(PATH)
    plan = skip(env, log)
    cut = slice(2 * BATCH_BYTES, 3 * BATCH_BYTES)
    assert env.read_file(PATH) == before[: cut.start] + before[cut.stop :]
    assert env.read_file(f"{FOLDER}/{plan.kept_as}") == before[cut]
    assert log.damage.ranges == ()
    assert offsets_served(log) == [0, 1, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_of_power_during_a_skip_costs_no_other_record(seed: int) -> None:
    env = MemoryEnv(seed)
    damaged_log(env)
    steps = 0
    while True:
        env = MemoryEnv(seed)
        log = damaged_log(env)
        env.crash_at = env.operations + 1 + steps
        try:
            skip(env, log)
        except SimulatedCrash:
            steps += 1
        else:
            break
        again = open_log(env.crash(), recovery_point=7)
        again.damage.mark(PATH, 2 * BATCH_BYTES, "as the next reader finds")
        assert [item for item in offsets_served(again) if item != 2] == [0, 1, 3, 4, 5, 6], env
    assert steps > 5
