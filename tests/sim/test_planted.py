"""Faults that the broker once had, planted again: the simulation finds each of them.

This tells a simulation from one that cannot fail. The search begins shortly before a seed that is
known to find the fault; where the broker has changed since, it goes on for as long as it takes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest

from broker.damage.log_repair import LogRepair
from broker.erasure.partition_eraser import PartitionEraser, PartitionProgress
from broker.handlers import produce
from broker.topics.clock_watch import ClockWatch
from broker.topics.log_maintenance import LogMaintenance
from broker.topics.partition import Partition
from broker.views.compaction import ViewCompactor
from broker.views.views import Views
from cleaner.engine.two_pass.rewrite_pass import RewritePass
from cleaner.host import LogFacts, Undecided
from cleaner.job import CleanJob
from cleaner.key_search import KeySearch, KeySearchResult, PausedSearch
from cleaner.planning import dirty_section, plan
from storage.directory.log_directory import LogDirectory
from storage.errors import CorruptBatchError, LogDirectoryError
from storage.format import producer_state
from storage.format.batch import BatchHeader
from storage.format.producer_state import LastRecords, ProducerEntry, ProducerStates
from storage.format.validation import CheckedRecords, check_records
from storage.log.flush import FlushTask, LogFlusher
from storage.log.log import Log
from storage.log.log_producers import LogProducers
from storage.log.log_reader import LogReader
from storage.manager.partition_table import PartitionTable
from storage.recovery import load_log
from storage.segments.damage import DamagedSegment, DamageSearch
from storage.segments.segment import Segment
from tests.sim import interleaving, runs
from tests.sim.runs import broken_rule
from tests.sim.script import (
    CLOCK,
    ERASE,
    IDEMPOTENT,
    OPEN,
    QUICK,
    VERSIONS,
    VERY_SLOW,
    Script,
    make_script,
)
from tests.support.draws import cases

SEEDS = 300


def a_first_compaction_of_a_view_bounds_no_clean(patch: pytest.MonkeyPatch) -> None:
    """While there was no ledger the cleaner had no limit, and expiry had none ever."""
    expired_section = plan.expired_section

    def limit_of(self: Views, base: Partition) -> tuple[int, Undecided]:
        log = base.log
        view = self.partition(base.partition) if log.config.has_view else None
        has_ledger = view is not None and view.log.ledger is not None
        return view.log.horizon if has_ledger else log.log_end_offset, Undecided.VIEW

    def without_limit(facts: LogFacts, *args: Any) -> Any:
        return expired_section(replace(facts, undecided_offset=facts.log_end_offset), *args)

    patch.setattr(Views, "limit_of", limit_of)
    patch.setattr(plan, "expired_section", without_limit)


def what_cannot_be_cleaned_counts_as_damage(patch: pytest.MonkeyPatch) -> None:
    """Batches that were accepted were too large for the cleaner, and then for nobody to read."""

    def note_finding(self: Segment, position: int, reason: str, _end_offset: int) -> DamagedSegment:
        return self.note_damage(position, reason)

    def check_without_limit(*batch: Any, **_: Any) -> CheckedRecords:
        records, header, config, now_ms = batch
        ample = replace(config, varve_decompressed_batch_bytes=1 << 20)
        return check_records(records, header, ample, now_ms)

    patch.setattr(produce, "check_records", check_without_limit)
    patch.setattr(Segment, "note_finding", note_finding)


def retention_removes_before_the_log_start_is_durable(patch: pytest.MonkeyPatch) -> None:
    """After a loss of power a value's segment was there again, and not its tombstone's."""

    async def expire(self: LogMaintenance, only: LogDirectory | None = None) -> None:
        def work(partition: Partition) -> None:
            log = partition.log
            segments = len(log.segments)
            if log.retention.begin(self._env.wall_ms(), clock_trusted=self.clock_trusted()):
                log.retention.finish(self._env.wall_ms(), log.log_start_offset)
                self.stats.segments_expired += segments - len(log.segments)

        await self._for_each("retention", work, only)

    patch.setattr(LogMaintenance, "expire", expire)
    patch.setattr(LogFlusher, "has_unsynced_removals", False)


def a_batch_is_as_old_as_its_client_says(patch: pytest.MonkeyPatch) -> None:
    """Retention removed fresh records if the header of their batch had an old largest timestamp."""

    def believed(records: memoryview, header: BatchHeader, max_timestamp: int) -> BatchHeader:
        return header

    patch.setattr(produce, "correct_max_timestamp", believed)


def an_overlap_is_taken_for_damage(patch: pytest.MonkeyPatch) -> None:
    """Without a swap's journal recovery cut there, and removed all later segments."""
    recover_batch = load_log._recover_batch

    def cut(loading: Any, segment: Segment, batch: Any, following: int | None) -> Any:
        try:
            return recover_batch(loading, segment, batch, following)
        except load_log._OverlapError as error:
            raise CorruptBatchError("belongs elsewhere", batch.position, segment.path) from error

    patch.setattr(load_log, "_recover_batch", cut)


def a_missing_folder_fails_its_directory(patch: pytest.MonkeyPatch) -> None:
    """A flush synced the folder of a partition that was just deleted."""

    def run(self: FlushTask) -> None:
        try:
            for file in self.files:
                file.sync()
            self.env.sync_dir(self.directory)
        except OSError as error:
            self.log_directory.fail(f"sync of {self.directory}: {error}")
            raise LogDirectoryError(self.log_directory.path, str(error)) from error

    patch.setattr(FlushTask, "run", run)


def offsets_that_go_back_are_asserted(patch: pytest.MonkeyPatch) -> None:
    """One closed segment stopped the start of the broker."""

    def why_misplaced(self: Segment, header: BatchHeader, position: int, next_offset: int) -> str:
        assert header.base_offset >= next_offset
        return ""

    patch.setattr(Segment, "why_misplaced", why_misplaced)


def leased_work_is_stamped_from_its_lease(patch: pytest.MonkeyPatch) -> None:
    """Its tombstones were published with horizons that had passed."""
    horizon = property(lambda job: job.now_ms + job.delete_retention_ms)
    patch.setattr(CleanJob, "delete_horizon_ms", horizon)
    patch.setattr(CleanJob, "is_late", lambda *_: False)


def staging_a_view_holds_the_cleaner(patch: pytest.MonkeyPatch) -> None:
    """Each compaction of a view gave up the clean of its topic."""
    staged = ViewCompactor._staged

    async def owned(self: ViewCompactor, view: Any, *args: Any, **kwargs: Any) -> Any:
        async with self._tools.pause(view.base.partition):
            return await staged(self, view, *args, **kwargs)

    patch.setattr(ViewCompactor, "_staged", owned)


def damage_reaches_to_the_end_of_its_segment(patch: pytest.MonkeyPatch) -> None:
    """One flipped byte made all batches after it unreadable."""
    patch.setattr(DamageSearch, "_end_of_damage", lambda self, *_: self._size_bytes)


def a_truncation_does_not_ask_the_view(patch: pytest.MonkeyPatch) -> None:
    """The view kept records that the operator had cut off."""
    check = LogRepair._check_truncation

    def without_view(self: LogRepair, *args: Any, **kwargs: Any) -> Any:
        self._view_horizon = lambda _: 0
        return check(self, *args, **kwargs)

    patch.setattr(LogRepair, "_check_truncation", without_view)


def a_truncation_takes_the_marker_of_what_stays(patch: pytest.MonkeyPatch) -> None:
    """Records that were committed, and had superseded others, were aborted later."""

    async def check_transactions(self: LogRepair, log: Log, offset: int) -> None:
        pass

    patch.setattr(LogRepair, "_check_transactions", check_transactions)


def the_cleaner_goes_by_offset_where_a_view_does_not(patch: pytest.MonkeyPatch) -> None:
    """Before the first compaction of a view it removed what the view calls the latest."""
    limit_of = Views._published_limit

    def by_offset(self: Views, base: Partition) -> tuple[int, Undecided]:
        view = self.partition(base.partition)
        if view is not None and view.log.is_known and view.log.ledger is None:
            return base.log.log_end_offset, Undecided.VIEW
        return limit_of(self, base)

    patch.setattr(Views, "_published_limit", by_offset)


def a_clean_is_taken_for_the_receipt_of_an_erasure(patch: pytest.MonkeyPatch) -> None:
    """Earlier versions of a view, and files that were leased, still had the values."""
    search = PartitionEraser._search

    async def trust(
        self: PartitionEraser, request: KeySearch, progress: PartitionProgress
    ) -> KeySearchResult | PausedSearch:
        is_cleaned = progress.cleans > 0
        result = await search(self, request, progress)
        if is_cleaned and isinstance(result, KeySearchResult):
            return replace(result, found=())
        return result

    patch.setattr(PartitionEraser, "_search", trust)


def a_batch_is_appended_again(patch: pytest.MonkeyPatch) -> None:
    """A producer that got no answer wrote its records twice."""
    patch.setattr(ProducerStates, "check", lambda *_, **__: None)


def a_snapshot_has_no_sequences(patch: pytest.MonkeyPatch) -> None:
    """After a start a producer could not go on."""
    to_snapshot = ProducerStates.to_snapshot

    def without_batches(self: ProducerStates) -> bytes:
        copy = ProducerStates()
        copy._producers = {
            producer_id: replace(entry, batches=())
            for producer_id, entry in self._producers.items()
        }
        for entry in copy._producers.values():
            entry.pack()
        return to_snapshot(copy)

    patch.setattr(ProducerStates, "to_snapshot", without_batches)


def a_clean_takes_the_last_batch_of_a_producer(patch: pytest.MonkeyPatch) -> None:
    """Without the snapshot nothing said which sequence is next."""
    patch.setattr(LogProducers, "packed_last_records", lambda _: LastRecords())


def a_start_forgets_open_transactions(patch: pytest.MonkeyPatch) -> None:
    """Readers of committed records were shown what was aborted later."""
    entry_of = producer_state._entry_of

    def closed(fields: tuple[int, ...], path: str) -> ProducerEntry:
        return entry_of((*fields[:-1], -1), path)

    patch.setattr(producer_state, "_entry_of", closed)


def an_abort_is_told_to_nobody(patch: pytest.MonkeyPatch) -> None:
    """Readers of committed records were shown what was aborted, if only for a while."""
    patch.setattr(LogReader, "aborted_transactions", lambda *_: ())


def a_clean_passes_open_transactions(patch: pytest.MonkeyPatch) -> None:
    """Records were superseded by those of a transaction that was aborted later."""
    bound = dirty_section._bound

    def without_limit(facts: LogFacts, *args: Any) -> Any:
        return bound(replace(facts, undecided_offset=facts.log_end_offset), *args)

    patch.setattr(dirty_section, "_bound", without_limit)


def a_group_forgets_the_transactions_of_those_before_it(patch: pytest.MonkeyPatch) -> None:
    """The marker of a transaction over two groups was removed, and a batch of it was left."""
    rewrite_group = RewritePass._rewrite_group

    def forget_and_rewrite(self: RewritePass, group: Any) -> None:
        self._context.transactions.forget_open(self._context.state)
        rewrite_group(self, group)

    patch.setattr(RewritePass, "_rewrite_group", forget_and_rewrite)


def checkpoints_do_not_wait_for_the_cleaner_state(patch: pytest.MonkeyPatch) -> None:
    """A start after a kill took the checkpoint for that of another broker."""
    patch.setattr(
        PartitionTable,
        "_cleaner_checkpoint_of",
        lambda self, partition: self.cleaner_offsets.get(partition),
    )


def a_clean_does_not_wait_for_the_lag(patch: pytest.MonkeyPatch) -> None:
    """Consumers missed records that they were promised for a time."""
    patch.setattr(dirty_section, "newest_ms", lambda _: 0)


def a_clock_that_was_set_is_trusted(patch: pytest.MonkeyPatch) -> None:
    """Everything was as old at once as a wrong clock said."""
    patch.setattr(ClockWatch, "trusted", lambda *_: True)


def a_timer_never_waits(patch: pytest.MonkeyPatch) -> None:
    """No timer ran again, and no step of a script."""

    async def turn_for_ever(_: LogMaintenance) -> None:
        for _ in count():
            await asyncio.sleep(0)

    patch.setattr(LogMaintenance, "watch_clock", turn_for_ever)
    patch.setattr(interleaving, "TURNS_MAX", 20_000)


def a_loop_never_ends(patch: pytest.MonkeyPatch) -> None:
    """Nothing ran again, and no limit of steps was reached."""

    async def loop_for_ever(_: LogMaintenance) -> None:
        while True:
            pass

    patch.setattr(LogMaintenance, "watch_clock", loop_for_ever)
    patch.setattr(runs, "SECONDS_MAX", 2.0)


@dataclass(frozen=True)
class Planted:
    fault: Callable[[pytest.MonkeyPatch], None]
    rules: tuple[str, ...]  # one of these is broken
    has: tuple[str, ...] = ()
    config: tuple[tuple[str, str], ...] = ()
    first: int = 0  # seed
    has_slow_views: bool = False  # beside a quick cleaner


COMPACT = ("cleanup_policy", "compact")
VIEW = ("varve_view", "compacted")
AT_ONCE = ("delete_retention_ms", "0")
PLANTED = [
    Planted(
        a_first_compaction_of_a_view_bounds_no_clean,
        ("latest-view",),
        ("view",),
        (COMPACT, VIEW, AT_ONCE),
        first=20,
        has_slow_views=True,
    ),
    Planted(
        what_cannot_be_cleaned_counts_as_damage,
        ("damaged", "readable"),
        ("big", "alter"),
        (("cleanup_policy", "delete"),),
        first=17,
    ),
    Planted(
        retention_removes_before_the_log_start_is_durable,
        ("latest-log",),
        ("end",),
        (("cleanup_policy", "compact,delete"), ("retention_ms", "8000"), ("segment_bytes", "400")),
        first=1052,
    ),
    Planted(
        an_overlap_is_taken_for_damage,
        ("acknowledged", "latest-log"),
        ("end in swap",),
        (COMPACT, ("segment_bytes", "1048576")),
        first=15,
    ),
    Planted(a_missing_folder_fails_its_directory, ("directory",), ("replace topic",), first=10),
    Planted(offsets_that_go_back_are_asserted, ("no mistakes",), ("end",), first=12),
    Planted(
        leased_work_is_stamped_from_its_lease, ("tombstone",), ("lease",), (COMPACT,), first=2130
    ),
    Planted(
        damage_reaches_to_the_end_of_its_segment,
        ("latest-log", "readable"),
        ("rot", "skip"),
        first=26,
    ),
    Planted(
        a_truncation_does_not_ask_the_view,
        ("latest-view",),
        ("truncate", "view"),
        (VIEW,),
        first=6,
    ),
    Planted(
        a_truncation_takes_the_marker_of_what_stays,
        ("latest-log", "tombstone"),
        ("truncate", "transaction"),
        (COMPACT, ("min_cleanable_dirty_ratio", "0")),
        first=205,
    ),
    Planted(
        the_cleaner_goes_by_offset_where_a_view_does_not,
        ("latest-view",),
        (VERSIONS, "view"),
        (COMPACT,),
    ),
    Planted(
        a_clean_is_taken_for_the_receipt_of_an_erasure,
        ("erased",),
        (ERASE, "view"),
        (COMPACT, VIEW),
        first=38,
    ),
    Planted(staging_a_view_holds_the_cleaner, ("undisturbed",), ("view",), (COMPACT, VIEW)),
    Planted(a_batch_is_appended_again, ("producer",), (IDEMPOTENT,)),
    Planted(a_snapshot_has_no_sequences, ("producer",), (IDEMPOTENT, "end")),
    Planted(a_clean_takes_the_last_batch_of_a_producer, ("producer",), (IDEMPOTENT,), (COMPACT,)),
    Planted(a_start_forgets_open_transactions, ("stable",), (OPEN, "transaction", "end")),
    Planted(an_abort_is_told_to_nobody, ("committed",), ("transaction",)),
    Planted(
        a_clean_passes_open_transactions, ("undecided",), (OPEN, "transaction"), (COMPACT, AT_ONCE)
    ),
    Planted(
        a_group_forgets_the_transactions_of_those_before_it,
        ("marker",),
        ("transaction",),
        (COMPACT, AT_ONCE, ("segment_bytes", "400"), ("min_cleanable_dirty_ratio", "0")),
    ),
    Planted(
        checkpoints_do_not_wait_for_the_cleaner_state,
        ("checkpoint",),
        ("end",),
        (COMPACT,),
        first=7,
    ),
    Planted(
        a_clean_does_not_wait_for_the_lag,
        ("lag",),
        ("alter",),
        (COMPACT, ("min_compaction_lag_ms", "3000")),
    ),
    Planted(a_clock_that_was_set_is_trusted, ("tombstone", "expired"), (CLOCK,)),
    Planted(
        a_batch_is_as_old_as_its_client_says,
        ("expired", "acknowledged", "latest-log"),
        (),
        (("cleanup_policy", "compact,delete"), ("retention_ms", "8000"), ("segment_bytes", "400")),
    ),
    Planted(a_timer_never_waits, ("ends",)),
    Planted(a_loop_never_ends, ("ends",)),
]


def script_of(planted: Planted, seed: int) -> Script:
    script = make_script(seed, has=planted.has, **dict(planted.config))
    if planted.has_slow_views:
        script = replace(script, worker=QUICK, other_worker=VERY_SLOW)
    return script


def seeds_to_find(planted: Planted, seeds: int) -> int | None:
    """How many seeds it took."""
    for seed in range(planted.first, planted.first + seeds):
        error, _ = broken_rule(script_of(planted, seed))
        if error is not None and error.rule in planted.rules:
            return seed - planted.first + 1
    return None


@pytest.mark.parametrize(
    "planted",
    cases(few=PLANTED[::3], many=PLANTED),
    ids=lambda planted: planted.fault.__name__,
)
def test_a_planted_fault_is_found(planted: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.fault(monkeypatch)
    result = seeds_to_find(planted, SEEDS)
    print(f"{planted.fault.__name__}: after {result} seeds")
    assert result is not None
