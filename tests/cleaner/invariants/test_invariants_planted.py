"""Faults planted in the cleaner and around it: the machine of test_invariants.py finds each.

This tells a test from one that cannot fail. Faults that show only after many runs are planted into
a story of few steps instead, which the same checks watch.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from cleaner.engine.clean import run_clean
from cleaner.engine.kernels import fields
from cleaner.engine.transactions import Transactions
from cleaner.engine.two_pass.group_accounting import GroupAccounting
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport, JobControl
from storage.env import Env
from storage.format.batch import ControlType, Record
from storage.log.flush import FlushTask
from storage.log.log import Log
from storage.recovery import load_log
from storage.swap.swap_journal import recover_swap
from tests.support.cleaner import living_log
from tests.support.cleaner.compacted_log import Producer
from tests.support.cleaner.living_log import LivingLog
from tests.support.cleaner.partition_machine import STEPS, Partition
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

EXAMPLES = 4000  # these faults are found within a few hundred
Fault = Callable[[pytest.MonkeyPatch], None]


def of_jobs(**changes: Callable[[CleanJob], Any]) -> Fault:
    """The engine gets another job than the one that was planned."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def run(env: Env, job: CleanJob, control: JobControl) -> CleanReport:
            other = {name: change(job) for name, change in changes.items()}
            return run_clean(env, replace(job, **other), control)

        patch.setattr(living_log, "run_clean", run)

    return plant


def of_reports(change: Callable[[CleanJob, CleanReport], CleanReport]) -> Fault:
    def plant(patch: pytest.MonkeyPatch) -> None:
        def run(env: Env, job: CleanJob, control: JobControl) -> CleanReport:
            return change(job, run_clean(env, job, control))

        patch.setattr(living_log, "run_clean", run)

    return plant


def newest_first(patch: pytest.MonkeyPatch) -> None:
    """Groups are published in the wrong order, and the job is given up after the first."""

    def run(env: Env, job: CleanJob, control: Any) -> CleanReport:
        groups: list[CleanedGroup] = []
        publish, control.groups_cleaned = control.groups_cleaned, groups.extend
        run_clean(env, job, control)
        publish((groups[-1],))
        raise CleanAbortedError

    patch.setattr(living_log, "run_clean", run)


def index_entries_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Transactions, "kept_entries", lambda self: [])


def each_group_forgets_whose_batches_it_met(patch: pytest.MonkeyPatch) -> None:
    begin = GroupAccounting.begin

    def forget(self: GroupAccounting, group: Any) -> None:
        self._context.space.open_producers.fill(0)
        self._context.state[fields.OPEN_COUNT] = 0
        begin(self, group)

    patch.setattr(GroupAccounting, "begin", forget)


def open_transactions_are_cleaned(patch: pytest.MonkeyPatch) -> None:
    existing = LivingLog.facts
    patch.setattr(
        LivingLog, "facts", lambda self: replace(existing(self), undecided_offset=1 << 62)
    )


def the_minimum_lag_is_ignored(patch: pytest.MonkeyPatch) -> None:
    existing = LivingLog.facts

    def facts(self: LivingLog) -> Any:
        facts = existing(self)
        return replace(facts, config=replace(facts.config, min_compaction_lag_ms=0))

    patch.setattr(LivingLog, "facts", facts)


def journals_are_not_finished(patch: pytest.MonkeyPatch) -> None:
    def recover(env: MemoryEnv, directory: str, **options: Any) -> Any:
        for name in env.listdir(directory):
            if name.endswith(".journal"):
                env.unlink(f"{directory}/{name}")
        return recover_swap(env, directory, **options)

    patch.setattr(load_log, "recover_swap", recover)


def names_are_not_synced(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryEnv, "_is_ignored", lambda self, operation, path: operation == "sync_dir")


def flushes_sync_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FlushTask, "run", lambda self: None)


def what_a_job_went_by_is_not_flushed(patch: pytest.MonkeyPatch) -> None:
    publish = LivingLog.publish

    def unflushed(self: LivingLog, job: CleanJob, group: CleanedGroup) -> bool:
        self.flushed_for = job.job_id
        return publish(self, job, group)

    patch.setattr(LivingLog, "publish", unflushed)


def truncation_keeps_the_generation(patch: pytest.MonkeyPatch) -> None:
    truncate = Log.truncate_to

    def same(self: Log, offset: int, *, now_ms: int) -> bool:
        before = self.generation
        done = truncate(self, offset, now_ms=now_ms)
        self._state.generation = before
        return done

    patch.setattr(Log, "truncate_to", same)


FAULTS: dict[str, tuple[Fault, str]] = {
    "last batches of producers go": (of_jobs(last_records=lambda job: ()), "7:"),
    "aborted data is taken for committed": (of_jobs(aborted=lambda job: ()), "."),
    "tombstones go at once": (of_jobs(now_ms=lambda job: job.now_ms + 10**9), "8"),
    "horizons are too early": (of_jobs(delete_retention_ms=lambda job: 0), "8:"),
    "the checkpoint is too far": (
        of_reports(lambda job, report: replace(report, next_dirty_offset=job.end_offset)),
        ".",
    ),
    "the checkpoint does not move": (
        of_reports(lambda job, report: replace(report, next_dirty_offset=job.first_dirty_offset)),
        "12:",
    ),
    "the first dirty offset is ignored": (
        of_jobs(first_dirty_offset=lambda job: job.end_offset - 1),
        ".",
    ),
    "open transactions are cleaned": (open_transactions_are_cleaned, "3:"),
    "names are not synced": (names_are_not_synced, "."),
    "flushes sync nothing": (flushes_sync_nothing, "."),
    "what a job went by is not flushed": (what_a_job_went_by_is_not_flushed, "."),
    "a truncation keeps the generation": (truncation_keeps_the_generation, "."),
}


# Draws that find a fault in a fraction of a second, where the usual ones take many examples.
SEEDS = {
    "last batches of producers go": 0,
    "the checkpoint is too far": 8,
    "a truncation keeps the generation": 25,
    "what a job went by is not flushed": 72,
}


@pytest.mark.timeout(400)  # a fault that recovery makes up for takes long to find
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message = FAULTS[name]
    plant(monkeypatch)
    machine: type = Partition
    if name in SEEDS:
        machine = seed(SEEDS[name])(type("SeededPartition", (Partition,), {}))
    with pytest.raises(Exception, match=message) as info:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
    print(f"{name}: {str(info.value)[:200]}")


# Stories ------------------------------------------------------------------------------------


def value(key: bytes, content: bytes | None = b"v") -> list[Record]:
    return [Record(0, 0, key, content)]


def an_aborted_last_batch(world: LivingLog) -> None:
    world.put(value(b"a"), by=Producer(1))
    world.end_transaction(Producer(1), ControlType.ABORT)
    world.put(value(b"b"))
    world.roll()
    world.clean()


def a_tombstone_while_the_clock_is_in_doubt(world: LivingLog) -> None:
    world.put(value(b"a", None))
    world.roll()
    world.clean()
    world.clock_trusted = False
    world.env.advance_ms(20_000)
    world.put(value(b"b"))
    world.roll()
    world.clean()


def a_second_clean(world: LivingLog) -> None:
    for key in (b"a", b"b"):
        world.put(value(key))
        world.roll()
        world.clean()


def a_young_segment(world: LivingLog) -> None:
    world.reconfigure(min_compaction_lag_ms=5_000)
    world.put(value(b"a"))
    world.roll()
    world.clean()


def two_cleans_given_up(world: LivingLog) -> None:
    """The tombstone's group is published twice, that of the value before it never."""
    world.reconfigure(segment_bytes=1)
    world.put(value(b"a"))
    world.roll()
    world.put(value(b"a", None))
    world.put(value(b"b"))
    world.roll()
    for _ in range(2):
        world.clean()
        world.env.advance_ms(20_000)
    world.check("after two cleans")


def a_transaction_over_two_groups(world: LivingLog) -> None:
    world.reconfigure(segment_bytes=1)
    world.put(value(b"a"), by=Producer(1))
    world.roll()
    world.end_transaction(Producer(1), ControlType.COMMIT)
    world.roll()
    for _ in range(3):
        world.put(value(b"b"))
        world.roll()
        world.clean()
        world.env.advance_ms(20_000)


def a_power_failure_at_each_operation_of_a_clean(world: LivingLog) -> None:
    for operation in range(1, 60):
        for content in (b"old", b"new"):
            world.put(value(b"a", content))
            world.put(value(b"b", content))
            world.roll()
        world.env.crash_at = world.env.operations + operation
        with suppress(SimulatedCrash):
            world.clean()
        world.env.crash_at = None
        world.crash()


STORIES: dict[str, tuple[Fault, Callable[[LivingLog], None], str]] = {
    "entries of the transaction index go": (
        index_entries_are_dropped,
        an_aborted_last_batch,
        "4: the batch at 0 was aborted, and no index tells so",
    ),
    "markers go before their batches": (
        each_group_forgets_whose_batches_it_met,
        a_transaction_over_two_groups,
        "5, 8: the COMMIT at 1",
    ),
    "a clock in doubt removes tombstones": (
        of_jobs(drop_expired_tombstones=lambda job: True),
        a_tombstone_while_the_clock_is_in_doubt,
        "8: the record at 0",
    ),
    "journals are not finished": (
        journals_are_not_finished,
        a_power_failure_at_each_operation_of_a_clean,
        "10:",
    ),
    "the log start is one too high": (
        of_jobs(log_start_offset=lambda job: min(job.log_start_offset + 1, job.first_dirty_offset)),
        a_second_clean,
        "1, 3, 5, 8: the record at 0",
    ),
    "the minimum lag is ignored": (the_minimum_lag_is_ignored, a_young_segment, "3: a record"),
    "groups are published newest first": (newest_first, two_cleans_given_up, "1: the last values"),
}


@pytest.mark.parametrize("name", STORIES)
def test_a_planted_fault_is_found_in_its_story(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, transitions, message = STORIES[name]
    transitions(LivingLog(1))
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        transitions(LivingLog(1))
