"""Rounds of planning, cleaning and learning: a deleted key never comes back."""

from dataclasses import replace

import pytest

from cleaner import states as s
from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanJob, CleanReport
from cleaner.planning.cleaner_state import (
    CLOCK_STEP_MS,
    PartitionCleanerState,
    state_after_job,
    state_of_log,
)
from cleaner.planning.findings import ClockReading
from cleaner.planning.grouping import plan_job
from cleaner.planning.plan import Verdict, assess
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.format import filenames
from storage.format.compression import ZSTD
from tests.support.cleaner.cleaning import HASH_KEY
from tests.support.cleaner.compacted_log import CompactedLog
from tests.support.cleaner.log_facts import even, facts
from tests.support.storage.logs import FOLDER

CONFIG = TopicConfig(
    cleanup_policy=("compact",), min_cleanable_dirty_ratio=0, delete_retention_ms=10_000
)
YEAR_MS = 365 * 86_400_000


class Remembering:
    """A log, its checkpoint, and its cleaner state, as in the pool."""

    def __init__(self) -> None:
        self.log = CompactedLog()
        self.known = PartitionCleanerState()
        self.checkpoint: int | None = None
        self.config = CONFIG
        self.trusted = True
        self.damage_is_noted = True  # by the log, as until the broker starts anew

    @property
    def facts(self) -> LogFacts:
        log = self.log.log
        return replace(
            facts(
                log.segment_facts(),
                checkpoint=self.checkpoint,
                config=self.config,
                undecided=log.log_end_offset,
            ),
            directory=FOLDER,
            damaged=log.damage.left_by_cleaner,
            clock_trusted=self.trusted,
        )

    def verdict(self) -> Verdict:
        self.known = state_of_log(self.known, self.facts, self.log.now_ms)
        return assess(self.facts, s.IDLE, ClockReading(self.log.now_ms, 0), self.known)

    def clean(self) -> tuple[CleanJob, CleanReport] | None:
        """One round, if there is something to clean."""
        verdict = self.verdict()
        if verdict.checkpoint_offset is not None:
            self.checkpoint = verdict.checkpoint_offset
        self.log.runs += 1
        job = plan_job(
            self.facts,
            verdict,
            JobInputs(HASH_KEY),
            CleanerSettings(),
            job_id=f"run{self.log.runs}",
            now_ms=self.log.now_ms,
        )
        if job is None:
            return None
        report = self.log.publish(job)
        self.known, below = state_after_job(
            self.known, job, report, self.facts, dirty_bytes=1, alpha=0.3
        )
        if not job.expired_only or report.damaged:
            self.checkpoint = below
        for path, position, reason in report.damaged if self.damage_is_noted else ():
            self.log.log.damage.mark(path, position, reason)
        return job, report

    def settle(self) -> None:
        while self.clean() is not None:
            pass

    def restart(self) -> None:
        """Forget which segments of the log are damaged."""
        for segment in self.log.log.segments:
            segment.damages = segment.uncleanable = ()

    def flip(self, base_offset: int) -> None:
        """Flip a bit in the midst of a segment; once more puts it right."""
        path = f"{FOLDER}/{filenames.file_name(base_offset, filenames.LOG)}"
        self.log.log.flush()
        file = self.log.env.open(path, write=True)
        at = file.size() // 2
        file.pwrite(bytes([file.pread(1, at)[0] ^ 1]), at)
        file.close()


@pytest.mark.parametrize("restarts", ["after the repair", "before and after", "never"])
@pytest.mark.parametrize("rounds_in_between", [0, 1, 2])
def test_a_deleted_key_stays_deleted_when_damage_in_the_clean_part_is_repaired(
    restarts: str, rounds_in_between: int
) -> None:
    remembering = Remembering()
    log = remembering.log
    log.write("a", "k", "b", "c", "d")
    log.roll()
    remembering.settle()
    remembering.flip(0)
    log.put(("k", None), ("x", "1"))
    log.roll()
    remembering.settle()
    assert remembering.checkpoint == 0, "damage in the clean part takes the checkpoint back"
    for number in range(rounds_in_between):
        log.pass_retention()
        log.write(f"more{number}", "x")
        log.roll()
        remembering.settle()
        if restarts == "before and after":
            remembering.restart()
    remembering.flip(0)
    if restarts != "never":
        remembering.restart()
    for number in range(4):
        log.write(f"z{number}", "x")
        log.roll()
        remembering.settle()
        assert "k" not in log.latest()
        log.pass_retention()
        remembering.settle()
        assert "k" not in log.latest()
    remembering.restart()
    log.write("end")
    log.roll()
    remembering.settle()
    log.pass_retention()
    log.write("end")
    log.roll()
    remembering.settle()
    assert "k" not in log.latest()
    assert remembering.checkpoint == log.log.segment_facts()[-1].base_offset
    keys = [r.key for _, records in log.batches() for r in records]
    assert b"k" not in keys, "the repaired segment lost it, then the tombstone went"


def test_a_deleted_key_stays_deleted_when_a_limit_that_hid_it_is_raised() -> None:
    remembering = Remembering()
    log = remembering.log
    log.put(("k", "x" * 200_000), codec=ZSTD)
    log.roll()
    remembering.settle()
    log.put(("k", None))
    log.roll()
    remembering.config = replace(CONFIG, varve_decompressed_batch_bytes=10_000)
    remembering.settle()
    assert not log.log.damage.ranges, "readers get it all the same"
    assert log.log.damage.uncleanable
    remembering.config = CONFIG
    remembering.restart()  # as a change of the limit does
    for _ in range(4):
        log.write("a", "b")
        log.roll()
        remembering.settle()
        assert "k" not in log.latest()
        log.pass_retention()
        remembering.restart()


def test_damage_found_by_a_job_over_what_has_expired_takes_the_checkpoint_back() -> None:
    remembering = Remembering()
    log = remembering.log
    for _ in range(2):
        log.put(("k", None), ("a", "1"), ("b", "1"), ("c", "1"))
        log.roll()
        log.put((f"t{log.log.log_end_offset}", None))
        log.roll()
    remembering.config = replace(CONFIG, segment_bytes=1)
    remembering.settle()
    assert remembering.checkpoint == 10
    log.pass_retention()
    remembering.flip(5)
    done = remembering.clean()
    assert done is not None
    job, report = done
    assert job.expired_only
    assert [path[-5:] for path, _, _ in report.damaged] == ["5.log"]
    assert remembering.checkpoint == 5
    assert all(first >= 6 for first, _ in remembering.known.cleaned)


def test_behind_known_damage_nothing_expires_by_time() -> None:
    remembering = Remembering()
    log = remembering.log
    log.write("a", "k", "b")
    log.roll()
    log.put(("k", None))
    log.roll()
    remembering.config = replace(CONFIG, segment_bytes=1)
    remembering.settle()
    log.pass_retention()
    expired = remembering.verdict().expired
    assert expired is not None
    assert expired.base_offsets == (3,)
    path = f"{FOLDER}/{filenames.file_name(0, filenames.LOG)}"
    remembering.flip(0)
    log.log.damage.mark(path, 0, "found by a reader")
    assert remembering.verdict().expired is None


def test_a_tombstone_with_a_foreign_horizon_stays_in_a_segment_that_is_clean_in_part() -> None:
    remembering = Remembering()
    log = remembering.log
    log.write("k", "a", "b", "c")
    log.roll()
    log.write("d", "e", "f")
    log.put(("k", None))
    log.put(("g", "1" * 400))
    log.roll()
    log.write("tail")
    log.roll()
    # As Kafka leaves it where its map was full before the tombstone.
    log.clean(first_dirty_offset=log.log.segment_facts()[-1].base_offset, singly=True)
    log.pass_retention()
    remembering.checkpoint = 6
    remembering.config = replace(CONFIG, min_cleanable_dirty_ratio=0.99)
    remembering.known = PartitionCleanerState(
        generation=remembering.facts.generation,
        horizons={(seg.base_offset, seg.size_bytes): 5 for seg in remembering.facts.segments},
    )
    expired = remembering.verdict().expired
    assert expired is not None
    assert expired.base_offsets == (0,)
    remembering.settle()
    assert "k" not in log.latest()


def test_nothing_is_stamped_while_the_clock_is_not_trusted() -> None:
    remembering = Remembering()
    log = remembering.log
    log.write("k")
    log.roll()
    remembering.settle()
    log.put(("k", None))
    log.roll()
    remembering.trusted = False
    log.now_ms -= YEAR_MS
    remembering.settle()
    assert not any(header.has_delete_horizon for header, _ in log.batches())
    remembering.trusted = True
    log.now_ms += YEAR_MS
    remembering.settle()
    assert b"k" in [record.key for _, records in log.batches() for record in records]
    log.write("a")
    log.roll()
    remembering.settle()
    log.pass_retention()
    remembering.settle()
    assert b"k" not in [record.key for _, records in log.batches() for record in records]


def test_times_of_a_clock_that_was_ahead_are_forgotten() -> None:
    log = facts(even(3), checkpoint=30, config=CONFIG)
    now_ms = 1_800_000_000_000
    ahead_ms = now_ms + 10 * YEAR_MS
    horizons = {(0, 100): ahead_ms, (10, 100): -1, (20, 100): -1}
    cleaner_state = PartitionCleanerState(
        b"", log.generation, ahead_ms, (), horizons, expired_at_ms=ahead_ms,
        paused_since_ms=ahead_ms, learned_at_ms=ahead_ms,
    )  # fmt: skip
    after = state_of_log(cleaner_state, log, now_ms)
    assert state_of_log(after, log, now_ms) is after
    times = after.first_seen_ms, after.expired_at_ms, after.paused_since_ms, after.learned_at_ms
    assert times == (now_ms,) * 4
    later_ms = now_ms + CONFIG.delete_retention_ms + 1
    assert assess(
        log, s.IDLE, ClockReading(later_ms, 0), replace(after, paused_since_ms=None)
    ).expired


def test_a_small_step_of_the_clock_costs_no_horizon() -> None:
    log = facts(even(3), checkpoint=30, config=CONFIG)
    cleaner_state = PartitionCleanerState(
        b"", log.generation, 5, (), {(0, 100): 9}, learned_at_ms=1000 + CLOCK_STEP_MS
    )
    assert state_of_log(cleaner_state, log, 1000).horizons == {(0, 100): 9}
