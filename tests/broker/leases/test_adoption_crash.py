"""Power fails, or the process is killed, at every operation of a hand-back, from the manifest on.

What is found at the next start is the old log or the new one, never a mixture. Nothing of a run is
left but a live lease, and one that is can be adopted to its end.
"""

import copy
from collections import Counter
from contextlib import suppress
from itertools import count
from typing import Literal

import pytest
from structlog.testing import capture_logs

from broker.leases.lease_folder import write_manifest
from broker.leases.model import LeaseError
from cleaner.remote_compaction import AdoptOutcome, LeasePlan, encode_manifest
from tests.support.broker.leases import (
    KEYS,
    RECORDS,
    adopted,
    carried_out,
    fill,
    latest,
    leasing_broker,
    log_files,
    opened,
    served,
    staged,
)
from tests.support.draws import cases, seed_of_test
from tests.support.storage.logs import offsets_in
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

Fate = Literal["power", "kill"]
SEGMENTS = 3
OLD = list(range(SEGMENTS * RECORDS))
NEW = list(range(SEGMENTS * RECORDS - KEYS, SEGMENTS * RECORDS))
LATEST = {b"k%d" % (offset % KEYS): b"v%d" % offset for offset in NEW}


def remains(env: MemoryEnv, fate: Fate) -> MemoryEnv:
    """What is found, whatever the broker that is gone does with its memory of a disk."""
    after = env.crash() if fate == "power" else env.kill()
    if fate == "kill":
        after._root = copy.deepcopy(env._root)
    env._dead, env.crash_at = False, None  # so that its sockets and tasks end in order
    return after


async def crashed(seed: int, crash_at: int, fate: Fate) -> tuple[MemoryEnv, LeasePlan, bool]:
    """The disk when the crash struck at that operation, and whether the adoption had returned."""
    env = MemoryEnv(seed)
    async with leasing_broker(env) as broker:
        fill(env, broker, SEGMENTS)
        plan = await opened(broker)
        made = carried_out(env, plan)
        env.settle()
        env.operations = 0
        env.crash_at = crash_at
        returned = False
        # Without the lines: a traceback of the crash is told at length.
        with suppress(SimulatedCrash, LeaseError), capture_logs():
            write_manifest(env, made.run_folder, encode_manifest(made.manifest))
            result = await adopted(broker, plan)
            assert result.outcome in (AdoptOutcome.ADOPTED, AdoptOutcome.STALE), result
            returned = result.outcome is AdoptOutcome.ADOPTED
        return remains(env, fate), plan, returned


async def judged(env: MemoryEnv, plan: LeasePlan) -> str:
    """Start on what was left; adopt what is still leased."""
    async with leasing_broker(env) as broker:
        log = served(broker).log
        results = offsets_in(log)
        assert results in (OLD, NEW), results
        assert log.log_end_offset == SEGMENTS * RECORDS
        assert latest(served(broker)) == LATEST
        assert [name for name in log_files(env) if "cleaned" in name or "journal" in name] == []
        outcome = "old" if results == OLD else "new"
        compactions = [compaction.compaction_id for compaction in broker.leases.table.alive()]
        assert staged(env) == compactions
        if not compactions:
            return f"{outcome}, swept"
        assert results == OLD
        result = await adopted(broker, plan)
        if result.outcome is AdoptOutcome.NOTHING:  # it crashed before the manifest was there
            broker.leases.abandon(plan.compaction_id)
            return "old, to be handed back"
        assert result.outcome is AdoptOutcome.ADOPTED, result
        assert offsets_in(log) == NEW
        return "old, adopted later"


@pytest.mark.parametrize(("fate", "first"), [("power", 1), ("kill", cases(few=3, many=1))])
async def test_a_hand_back_that_is_cut_off_leaves_the_old_log_or_the_new_one(
    fate: Fate, first: int
) -> None:
    """By default, every second operation: power fails at one, and the process ends at another."""
    seed = seed_of_test(41)
    outcomes = Counter[str]()
    for crash_at in count(first, cases(few=4, many=1)):
        env, plan, returned = await crashed(seed + crash_at, crash_at, fate)
        outcome = await judged(env, plan)
        assert not (returned and outcome.startswith("old")), crash_at  # it was reported as done
        outcomes[outcome] += 1
        if returned:
            break
    print(crash_at, outcomes)
    assert crash_at > 30
    assert min(outcomes["new, swept"], outcomes["old, adopted later"]) > 5
