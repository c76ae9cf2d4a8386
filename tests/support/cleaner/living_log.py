"""A partition with everything a clean needs around it, in memory, and a history to check it by.

Planner, what the cleaner remembers, engine, publication, retention, truncation, checkpoints, loss
of power and restarts are the real ones; what only the broker's loop does (publishing a group,
saving checkpoints) is done here in its way, in one thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cleaner.engine.clean import run_clean
from cleaner.host import JobInputs, LogFacts, OpenTransaction
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, CleanReport
from cleaner.planning.cleaner_state import (
    FRESH,
    PartitionCleanerState,
    state_after_job,
    state_of_log,
)
from cleaner.planning.findings import ClockReading
from cleaner.planning.grouping import plan_job
from cleaner.planning.plan import assess
from cleaner.states import Idle
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.format import filenames
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
    read_header,
    walk_headers,
)
from storage.log.log import Log
from storage.model import AppendInfo
from storage.segments.content_ids import write_content_ids
from storage.swap.swap_journal import discard_outputs, execute_swap, plan_swap
from tests.support.cleaner.cleaning import HASH_KEY, Recorder
from tests.support.cleaner.compacted_log import SLOT_BYTES, Producer
from tests.support.cleaner.history import Batch, History, committed, decoded
from tests.support.cleaner.log_facts import facts_of
from tests.support.storage.logs import FOLDER, open_log
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash
from tests.support.storage.swaps import put

CONFIG = TopicConfig(
    cleanup_policy=("compact",),
    segment_bytes=700,
    index_interval_bytes=100,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=10_000,
    file_delete_delay_ms=0,
    retention_ms=-1,
)
SETTINGS = CleanerSettings()
ALPHA = 0.3


@dataclass(frozen=True)
class Saved:
    """What the checkpoint files say, and so what a start after a crash knows."""

    recovery_point: int = 0
    log_start: int | None = None
    dirty: int | None = None
    memory: dict[str, Any] | None = None


@dataclass(frozen=True)
class Publication:
    """A group whose files are being exchanged: what its offsets hold before and after."""

    first: int
    end: int
    old: dict[int, bytes]
    new: dict[int, bytes]


class LivingLog:
    """One log. `history` is the model; every step that shortens or restarts checks against it."""

    def __init__(self, seed: int, config: TopicConfig = CONFIG) -> None:
        self.env = MemoryEnv(seed)
        self.config = config
        self.history = History()
        self.log: Log = open_log(self.env, config)
        self.saved = Saved()
        self.dirty: int | None = None
        self.known: PartitionCleanerState = FRESH
        self.clock_trusted = True
        self.runs = 0
        self.flushed_for = ""
        self.expired: dict[int, int] = {}  # producer id -> where the log ended then
        self.expired_below = 0
        self.relied_on = 0  # nothing below was undecided when something was last published
        self.cleans = 0  # that ended, with something published
        self.selective_cleans = 0
        self.publishing: Publication | None = None
        self.meanwhile: Callable[[], object] | None = None  # between two groups of a clean

    # Writing ------------------------------------------------------------------------------

    def put(self, records: list[Record], *, by: Producer | None = None, codec: int = 0) -> None:
        """Append a batch; offsets and times of the records are given here."""
        now_ms = self.env.wall_ms()
        placed = [record._replace(offset=at, timestamp=now_ms) for at, record in enumerate(records)]
        fields: dict[str, int] = {}
        if by is not None:
            fields = {
                "producer_id": by.producer_id,
                "producer_epoch": by.epoch,
                "base_sequence": by.sequence,
                "attributes": TRANSACTIONAL if by.is_transactional else 0,
            }
            by.sequence += len(records)
        batch = build_batch(placed, codec=codec, **fields)
        self.append(batch, placed, in_transaction=by is not None and by.is_transactional)

    def end_transaction(self, producer: Producer, kind: ControlType) -> None:
        """Append a marker."""
        record = marker_record(kind, 0, self.env.wall_ms())
        batch = build_batch(
            [record],
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            attributes=TRANSACTIONAL | CONTROL,
        )
        self.append(batch, [record], marker=kind)

    def abort_open(self) -> None:
        """Abort what is open, as a coordinator does for producers that do not come back."""
        while (pending := self.log.producers.open_transaction()) is not None:
            epoch, _ = self.log.producers.last_records()[pending[0]]
            self.end_transaction(Producer(pending[0], epoch=epoch + 1), ControlType.ABORT)

    def append(
        self,
        batch: bytearray,
        records: list[Record],
        *,
        in_transaction: bool = False,
        marker: ControlType | None = None,
    ) -> AppendInfo:
        """Write a batch and remember it."""
        header = read_header(batch)
        now_ms = self.env.wall_ms()
        info = self.log.append(batch, header, now_ms=now_ms, in_transaction=in_transaction)
        first = info.first_offset
        placed = tuple(record._replace(offset=first + record.offset) for record in records)
        self.history.add(Batch(header._replace(base_offset=first), placed, marker))
        return info

    def roll(self) -> None:
        self.log.roll(self.env.wall_ms())

    def leave_gap(self, offsets: int) -> None:
        """Go on at a later offset, as a log that Kafka wrote may."""
        self.log._state.log_end_offset += offsets
        self.log._state.raise_high_watermark(self.log.log_end_offset)

    # Cleaning -----------------------------------------------------------------------------

    def facts(self) -> LogFacts:
        log = self.log
        pending = log.producers.open_transaction()
        return facts_of(
            log,
            self.dirty,
            damaged=log.damage.ranges,
            clock_trusted=self.clock_trusted,
            open_transaction=None if pending is None else OpenTransaction(*pending),
        )

    def plan(self) -> tuple[CleanJob | None, int]:
        """Judge the partition as a look of the pool does: (job, dirty bytes)."""
        facts = self.facts()
        now_ms = self.env.wall_ms()
        self.known = state_of_log(self.known, facts, now_ms)
        moment = ClockReading(now_ms, int(self.env.monotonic() * 1000))
        verdict = assess(facts, Idle(), moment, self.known)
        if verdict.checkpoint_offset is not None:
            self.dirty = verdict.checkpoint_offset
        self.runs += 1
        first, end = facts.log_start_offset, facts.log_end_offset
        last = tuple(
            (owner, epoch, at) for owner, (epoch, at) in self.log.producers.last_records().items()
        )
        inputs = JobInputs(HASH_KEY, last, tuple(self.log.reader.aborted_transactions(first, end)))
        job = plan_job(facts, verdict, inputs, SETTINGS, job_id=f"run{self.runs}", now_ms=now_ms)
        section = verdict.section
        return job, 0 if section is None else section.dirty_bytes

    def clean(
        self,
        *,
        keys: int | None = None,
        buffer_bytes: int = 1 << 16,
        abort_after: int = -1,
    ) -> CleanReport | None:
        """One attempt, checked; None if there was nothing to do or it was given up."""
        job, dirty_bytes = self.plan()
        if job is None:
            return None
        buffer = SLOT_BYTES * 4096 if keys is None else (keys + 1) * SLOT_BYTES
        job = replace(job, dedupe_buffer_bytes=buffer, read_buffer_bytes=buffer_bytes)
        if self.runs % 2:  # keys that do not fit wait for another clean, or are spilled
            job = replace(job, spill_bytes_max=0)
        self._check_job(job)
        before = self.batches()
        untouched = self._untouched(job)
        log_end = self.log.log_end_offset
        self.history.permit(job, before, job.end_offset)
        control = _Publisher(self, job, abort_after=abort_after)
        try:
            report = run_clean(self.env, job, control)
        except CleanAbortedError:
            discard_outputs(self.env, FOLDER, job.job_id)
            self.check(f"{job.job_id}, given up")
            return None
        self.cleans += 1
        assert self.log.log_end_offset >= log_end, "2: the log end offset went back"
        for base, data in untouched.items():
            if base < self.log.segments.first_base_offset:
                continue  # retention took it meanwhile
            result = self._content(base)
            assert result is not None, f"3: segment {base} is after the first uncleanable offset"
            assert result.startswith(data), f"3: segment {base} is after the first uncleanable one"
        self._check_horizons(job, before)
        self._finish(job, report, dirty_bytes)
        write_content_ids(self.env, FOLDER, self.log.segments.closed)
        return report

    def _finish(self, job: CleanJob, report: CleanReport, dirty_bytes: int) -> None:
        """As the pool does at the end of a run."""
        after = self.facts()
        if after.generation == job.generation:
            self.known, clean_below = state_after_job(
                state_of_log(self.known, after, self.env.wall_ms()),
                job,
                report,
                after,
                dirty_bytes=dirty_bytes,
                alpha=ALPHA,
            )
            if not job.expired_only:
                if report.resolved_end is not None:
                    self.selective_cleans += 1
                    assert report.next_dirty_offset == job.first_dirty_offset
                assert report.resolved_end or report.next_dirty_offset > job.first_dirty_offset, (
                    f"12: a clean from {job.first_dirty_offset} with a map of"
                    f" {job.dedupe_buffer_bytes} bytes got nowhere"
                )
                assert not report.damaged
                self.dirty = clean_below
                batches = self.batches()
                self.history.check_compacted(
                    batches, self.log.log_start_offset, clean_below, job.job_id
                )
        self.check(job.job_id)

    def publish(self, job: CleanJob, groups: tuple[CleanedGroup, ...]) -> bool:
        """Put groups in the place of their sources, as the broker does; whether to go on."""
        log = self.log
        sources = tuple(base for group in groups for base in group.source_base_offsets)
        is_first, self.flushed_for = self.flushed_for != job.job_id, job.job_id
        if is_first or not log.swap.are_flushed(sources):
            log.flush()
        if log.generation != job.generation:
            return False
        facts = {segment.base_offset: segment for segment in log.segment_facts()[:-1]}
        present = tuple(base for base in sources if base in facts)
        if not present:
            return True
        assert present == sources[-len(present) :]
        cleaned_groups = [group for group in groups if group.source_base_offsets[-1] in facts]
        front_is_gone = cleaned_groups[0].source_base_offsets[0] not in facts
        log.swap.pin(present)
        outputs = [group.output for group in cleaned_groups if group.output is not None]
        plan = plan_swap(
            FOLDER, [facts[base] for base in present], outputs, front_is_gone=front_is_gone
        )
        if len(present) < len(sources) or (
            is_first and job.log_start_offset > log.segments.first_base_offset
        ):
            self.checkpoint()
        self.relied_on = log.log_end_offset
        self.publishing = None if front_is_gone else self._publication(cleaned_groups, facts)
        execute_swap(self.env, plan)
        log.swap.attach(plan, log.swap.open_outputs(plan))
        self.publishing = None
        return True

    def _publication(self, groups: list[CleanedGroup], facts: dict[int, Any]) -> Publication:
        first = groups[0].source_base_offsets[0]
        end = facts[groups[-1].source_base_offsets[-1]].next_base_offset
        # Between two groups may stand segments that are left as they are.
        old = {base: self._content(base) or b"" for base in facts if first <= base < end}
        new = dict(old)
        for group in groups:
            for base in group.source_base_offsets:
                del new[base]
            if group.output is not None:
                name = next(
                    file.name
                    for file in group.output.files
                    if f".{filenames.LOG[1:]}." in file.name
                )
                new[group.output.base_offset] = self.env.read_file(f"{FOLDER}/{name}")
        return Publication(first, end, old, new)

    # Shortening ---------------------------------------------------------------------------

    def expire(self) -> int:
        """A round of retention; segments that went."""
        gone = self.log.retention.expire(self.env.wall_ms(), clock_trusted=self.clock_trusted)
        self.log.retention.purge_deleted(self.env.wall_ms())
        if gone:
            self.expired_below = self.log.segments.first_base_offset
        self.check("retention")
        return len(gone)

    def expire_producers(self, idle_ms: int) -> set[int]:
        """Forget producers that were idle for so long; who is left."""
        before = self.log.producers.last_records().keys()
        self.log.producers.expire(self.env.wall_ms(), idle_ms)
        keys = self.log.producers.last_records().keys()
        self.expired |= dict.fromkeys(before - keys, self.log.log_end_offset)
        return set(keys)

    def delete_records(self, offset: int) -> None:
        self.log.delete_records(offset)
        self.check("delete records")

    def truncate(self, offset: int) -> None:
        """Cut the end, as Kafka does around its cleaner: the checkpoint goes back, too.

        What a published clean went by is never cut: it lay below a high watermark.
        """
        offset = max(offset, self.relied_on)
        if not self.log.truncate_to(offset, now_ms=self.env.wall_ms()):
            return
        self._cut(offset)
        self.expired_below = min(self.expired_below, offset)
        base = self.log.segment_facts()[-1].base_offset
        self.dirty = None if self.dirty is None else min(self.dirty, base)
        self.checkpoint()
        self.abort_open()
        self.check("truncation")

    def _cut(self, offset: int) -> None:
        self.history.cut(offset)
        self.expired = {owner: min(end, offset) for owner, end in self.expired.items()}

    # Restarting ---------------------------------------------------------------------------

    def checkpoint(self) -> None:
        """Save what the broker saves now and then."""
        log = self.log
        start = (
            log.log_start_offset if log.log_start_offset != log.segments.first_base_offset else None
        )
        self.saved = Saved(log.recovery_point, start, self.dirty, self.known.to_json())

    def close(self) -> None:
        """An orderly stop and a start."""
        self.log.close()
        self.checkpoint()
        self.env.settle()
        end = self.log.log_end_offset
        self._open(was_clean=True)
        assert self.log.log_end_offset == end, "2: the log end offset after an orderly stop"
        self.check("orderly restart")

    def crash(self, *, kill: bool = False, crash_again_at: int | None = None) -> None:
        """Lose power, or the process; perhaps again while the log is being opened."""
        durable, end = self.log.recovery_point, self.log.log_end_offset
        self.env = self.env.kill() if kill else self.env.crash()
        if crash_again_at is not None:
            self.env.crash_at = self.env.operations + crash_again_at
            try:
                self._open(was_clean=False)
            except SimulatedCrash:
                self.env = self.env.crash()
                self._open(was_clean=False)
            self.env.crash_at = None
        else:
            self._open(was_clean=False)
        result = self.log.log_end_offset
        assert durable <= result <= end, f"2: the log ends at {result}, not in [{durable}, {end}]"
        if kill and crash_again_at is None:
            assert result == end, "2: the log end offset after a kill"
        self._cut(result)
        self._check_swap()
        start = self.log.log_start_offset  # what is hidden below it is there all the same
        self.log._state.log_start_offset = min(start, self.log.segments.first_base_offset)
        self.history.keep_only({batch.base for batch in self.batches()}, durable)
        self.log._state.log_start_offset = start
        self.log.flush()
        if self.log.log_start_offset < min(self.expired_below, result):
            # A start that was not saved goes back, and what retention took comes back in part:
            # it is taken again before anybody looks, transactions cut in two are aborted.
            self.log.delete_records(min(self.expired_below, result))
            self.abort_open()
        self.check("crash")

    def _open(self, *, was_clean: bool) -> None:
        saved = self.saved
        self.log = open_log(
            self.env,
            self.config,
            was_clean=was_clean,
            recovery_point=saved.recovery_point,
            log_start_offset=saved.log_start,
        )
        self.dirty = saved.dirty
        self.known = (
            FRESH if saved.memory is None else PartitionCleanerState.from_json(saved.memory)
        )
        self.clock_trusted = True

    def reconfigure(self, **changes: object) -> None:
        self.config = replace(self.config, **changes)  # type: ignore[arg-type]
        self.log.update_config(self.config)

    # Looking ------------------------------------------------------------------------------

    def batches(self, log: Log | None = None) -> list[Batch]:
        """Every batch from the log start to the end."""
        log = self.log if log is None else log
        batches: list[Batch] = []
        offset = log.log_start_offset
        while offset < log.log_end_offset:
            data = log.reader.read(offset, 1 << 20, end_offset=log.log_end_offset).read()
            if not data:
                break
            for position, header in walk_headers(data):
                batches.append(decoded(data[position : position + header.size_bytes]))
                offset = header.next_offset
        return batches

    def committed(self, log: Log | None = None, batches: list[Batch] | None = None) -> list[Record]:
        """What a read_committed consumer gets from the log start on, by Kafka's own algorithm."""
        log = self.log if log is None else log
        stable = log.last_stable_offset
        start = log.log_start_offset  # a reader throws away what comes before it
        aborted = log.reader.aborted_transactions(start, stable)
        return committed(self.batches(log) if batches is None else batches, aborted, start, stable)

    def reopened(self) -> Log:
        """The log as another broker finds it that has nothing but its `.log` files."""
        env = MemoryEnv()
        env.mkdir(FOLDER)
        for name in self.env.listdir(FOLDER):
            if name.endswith(filenames.LOG):
                put(env, f"{FOLDER}/{name}", self.env.read_file(f"{FOLDER}/{name}"))
        start = self.log.log_start_offset
        return open_log(env, self.config, log_start_offset=start)

    def _content(self, base: int) -> bytes | None:
        path = f"{FOLDER}/{filenames.file_name(base, filenames.LOG)}"
        return self.env.read_file(path) if self.env.exists(path) else None

    # Checking -----------------------------------------------------------------------------

    def check(self, when: str) -> None:
        """Everything a reader may rely on."""
        log, history = self.log, self.history
        when = f"{when}, {self.env!r}"
        batches = self.batches()
        start = log.log_start_offset
        offsets = [record.offset for batch in batches for record in batch.records]
        assert offsets == sorted(set(offsets)), f"2: offsets {offsets} ({when})"
        history.check(batches, start, when)
        markers = [
            entry.last_offset for entry in log.reader.aborted_transactions(0, log.log_end_offset)
        ]
        history.check_markers(batches, markers, start, when)
        stable = log.last_stable_offset
        # After a start, a transaction begins with what is left of it, or is readable of it.
        assert stable in self._stable_from(0, log.segments.first_base_offset, start), (
            f"4: the last stable offset is {stable}, first open {history.first_open()} ({when})"
        )
        seen = self.committed(batches=batches)
        history.check_committed(seen, batches, start, stable, when)
        history.check_latest(seen, start, stable, when)

    def _stable_from(self, *lowest: int) -> set[int]:
        """The last stable offset where transactions begin with what is left from there on."""
        end, start = self.log.high_watermark, self.log.log_start_offset
        results = {self.history.first_open(low) for low in lowest}
        return {end if at is None else max(at, start) for at in results}

    def check_log_alone(self) -> None:
        """2, 4, 7: indexes, snapshots and checkpoints can all be had from the log again."""
        again, log = self.reopened(), self.log
        assert again.log_end_offset == log.log_end_offset, "2: the log end offset, from the log"
        # It cannot say that a transaction is open of which nothing is readable.
        start, stable = log.log_start_offset, again.last_stable_offset
        allowed = {log.last_stable_offset, *self._stable_from(start)}
        assert stable in allowed, "5: the last stable offset, from the log alone"
        seen = self.committed(again)
        self.history.check_committed(seen, self.batches(), start, stable, "from the log alone")
        if stable == log.last_stable_offset:
            assert seen == self.committed(), "4: read_committed, from the log alone"
        for producer, (epoch, last) in log.producers.last_records().items():
            on_progress = [b.base for b in self.history if b.header.producer_id == producer]
            word = last if last >= 0 else max(on_progress, default=-1)
            if word < max(log.segments.first_base_offset, self.expired.get(producer, 0)):
                continue  # retention took it; or it comes from a snapshot, and had expired since
            results = again.producers.last_records().get(producer)
            assert results == (epoch, last), (
                f"7: producer {producer} is {results}, not {epoch, last}"
            )
            if last >= 0:
                self._check_duplicate(again, last)

    def _check_duplicate(self, again: Log, last: int) -> None:
        header = next(b.header for b in self.history if b.header.last_offset == last)
        batch = bytearray(
            build_batch(
                [Record(at, 0, b"k", b"again") for at in range(header.last_offset_delta + 1)],
                producer_id=header.producer_id,
                producer_epoch=header.producer_epoch,
                base_sequence=header.base_sequence,
            )
        )
        info = again.append(batch, read_header(batch), now_ms=self.env.wall_ms())
        assert (info.first_offset, info.last_offset, info.duplicate) == (
            header.base_offset,
            last,
            True,
        ), f"7: a duplicate of {header} was appended at {info}"

    def _check_job(self, job: CleanJob) -> None:
        """3: nothing undecided, nothing young, and not the active segment."""
        assert job.end_offset <= self.log.segment_facts()[-1].base_offset, "3: the active segment"
        first_open = self.history.first_open(self.log.log_start_offset)
        assert first_open is None or job.end_offset <= first_open, "3: an open transaction"
        lag_ms = self.config.min_compaction_lag_ms
        if lag_ms and not job.expired_only:
            oldest_ms = self.env.wall_ms() - lag_ms
            assert all(
                batch.header.max_timestamp <= oldest_ms
                for batch in self.batches()
                if job.first_dirty_offset <= batch.base < job.end_offset
            ), "3: a record younger than min.compaction.lag.ms"

    def _untouched(self, job: CleanJob) -> dict[int, bytes]:
        return {
            facts.base_offset: self._content(facts.base_offset) or b""
            for facts in self.log.segment_facts()
            if facts.base_offset >= job.end_offset
        }

    def _check_horizons(self, job: CleanJob, before: list[Batch]) -> None:
        """8: a horizon is given once, counted from the clean that gives it."""
        old = {batch.base: batch.header for batch in before}
        for batch in self.batches():
            header = batch.header
            was = old.get(batch.base)
            if not header.has_delete_horizon or was is None:
                continue
            expected = job.now_ms + job.delete_retention_ms
            if was.has_delete_horizon:
                expected = was.base_timestamp
            assert header.base_timestamp == expected, (
                f"8: the batch at {batch.base} has horizon {header.base_timestamp}, not {expected}"
            )

    def _check_swap(self) -> None:
        """10: what was being published when the power went is all old or all new."""
        swap, self.publishing = self.publishing, None
        if swap is None:
            return
        bases = [facts.base_offset for facts in self.log.segment_facts()]
        inside = {b: self._content(b) for b in bases if swap.first <= b < swap.end}
        assert inside in (swap.old, swap.new), (
            f"10: after a crash [{swap.first}, {swap.end}) is neither old nor new: {sorted(inside)}"
        )


class _Publisher(Recorder):
    """A job's control: publishes each group as it comes, and lets things happen in between."""

    def __init__(self, world: LivingLog, job: CleanJob, *, abort_after: int) -> None:
        super().__init__(abort_after=abort_after)
        self._world = world
        self._job = job

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        meanwhile, self._world.meanwhile = self._world.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        if not self._world.publish(self._job, groups):
            raise CleanAbortedError
