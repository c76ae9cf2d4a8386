"""A script carried out by our log and our cleaner.

The jobs are planned by the planner and run by the cleaner as they are in a worker. `rule` says
which batch at the end of a round stays though it is empty: Kafka 4.3.0 keeps the last one of the
round, we keep the last one of the log (see docs/reference/compare-with-kafka.md). The seed says
whether keys are decided by key indexes. With a `slack`, cleans are selective where they can be.
"""

from dataclasses import replace
from enum import Enum
from pathlib import Path

from cleaner.engine.clean import run_clean
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.host import JobInputs, LogFacts
from cleaner.job import CleanedGroup
from cleaner.planning.findings import ClockReading
from cleaner.planning.grouping import plan_job
from cleaner.planning.plan import Strategy, assess
from cleaner.states import IDLE
from config.settings import CleanerSettings
from config.topics.keys import TopicConfig
from storage.env import RealEnv
from storage.format.batch import read_header
from storage.format.producer_state import ProducerEntry
from storage.log.log import Log
from storage.swap.swap_journal import execute_swap, plan_swap
from tests.compare.script import Case, Operation
from tests.support.cleaner.cleaning import HASH_KEY, Recorder
from tests.support.cleaner.key_indexes import small_records_are_indexed
from tests.support.cleaner.log_facts import facts_of
from tests.support.storage.logs import open_log

PRODUCER_EXPIRATION_MS = 86_400_000


class Rule(Enum):
    """Which batch stays, empty, because of where it stands."""

    LAST_OF_ROUND = "last of round"  # Apache Kafka 4.3.0
    LAST_OF_LOG = "last of log"  # ours


class OurSide:
    """One log on disk, and the operations on it."""

    def __init__(
        self, folder: Path, rule: Rule, strategy: Strategy, slack: float | None = None
    ) -> None:
        self._env = RealEnv()
        self._folder = str(folder)
        self._rule = rule
        self._strategy: Strategy = strategy
        self._slack = slack
        self._config = TopicConfig()
        self._opened: Log | None = None
        self._checkpoint: int | None = None
        self._now_ms = 0
        self._runs = 0

    @property
    def log(self) -> Log:
        assert self._opened is not None, "the script begins with config"
        return self._opened

    def execute(self, operation: Operation) -> None:
        """Carry out anything but `dump`."""
        values = operation.values
        match operation.name:
            case "config":
                self._configure([str(value) for value in values])
            case "now":
                self._now_ms = int(values[0])
            case "append":
                assert isinstance(values[1], bytes)
                self._append(int(values[0]), bytearray(values[1]))
            case "roll":
                self.log._state.log_end_offset = int(values[0])
                self.log._state.high_watermark = self.log.log_end_offset
                self.log.roll(self._now_ms)
            case "delete-records":
                self.log.delete_records(int(values[0]))
            case "expire-producers":
                self.log.producers.expire(self._now_ms, PRODUCER_EXPIRATION_MS)
            case "retain":
                self.log.retention.expire(self._now_ms)
            case "reopen":
                self._reopen(was_clean=values[0] == "clean")
            case "clean":
                self._clean(int(values[0]), int(values[1]))
            case other:
                raise ValueError(other)

    def _configure(self, pairs: list[str]) -> None:
        values = dict(pair.split("=", 1) for pair in pairs)
        self._config = TopicConfig(
            cleanup_policy=tuple(values["cleanup.policy"].split(",")),
            segment_bytes=int(values["internal.segment.bytes"]),
            delete_retention_ms=int(values["delete.retention.ms"]),
            min_cleanable_dirty_ratio=float(values["min.cleanable.dirty.ratio"]),
            segment_ms=int(values["segment.ms"]),
            retention_ms=int(values["retention.ms"]),
            retention_bytes=int(values.get("retention.bytes", "-1")),
            max_message_bytes=int(values["max.message.bytes"]),
            index_interval_bytes=int(values["index.interval.bytes"]),
            file_delete_delay_ms=int(values["file.delete.delay.ms"]),
            min_compaction_lag_ms=int(values.get("min.compaction.lag.ms", "0")),
        )
        self._opened = open_log(self._env, self._config, was_clean=True, folder=self._folder)

    def _append(self, epoch: int, batch: bytearray) -> None:
        header = read_header(batch)
        self.log._state.leader_epoch = epoch
        self.log._state.log_end_offset = header.base_offset  # as a follower takes it: gaps and all
        self.log.append(batch, header, now_ms=self._now_ms, in_transaction=True)

    def _reopen(self, *, was_clean: bool) -> None:
        start = self.log.log_start_offset
        self.log.close()
        self._opened = open_log(
            self._env,
            self._config,
            was_clean=was_clean,
            log_start_offset=start,
            folder=self._folder,
        )

    # Cleaning, as the pool and the broker do it between them

    def _clean(self, slots: int, buffer_bytes: int) -> None:
        log = self.log
        facts = self._facts()
        moment = ClockReading(self._now_ms, self._now_ms)
        verdict = assess(facts, IDLE, moment, strategy=self._strategy)
        if verdict.checkpoint_offset is not None:
            self._checkpoint = verdict.checkpoint_offset
        if not verdict.to_clean or verdict.expired is not None:
            return  # without dirty data Kafka's cleaner does nothing, whatever has expired
        assert verdict.section is not None
        end = verdict.section.end_offset
        last = tuple(
            (owner, epoch, at) for owner, (epoch, at) in log.producers.last_records().items()
        )
        aborted = tuple(log.reader.aborted_transactions(log.log_start_offset, end))
        self._runs += 1
        job = plan_job(
            facts,
            verdict,
            JobInputs(HASH_KEY, last, aborted),
            CleanerSettings(),
            job_id=f"run{self._runs}",
            now_ms=self._now_ms,
        )
        assert job is not None
        job = replace(
            job,
            dedupe_buffer_bytes=slots * SLOT_WORDS * 8,
            read_buffer_bytes=buffer_bytes,
            slack=self._slack,
            log_end_offset_is_end=self._rule is Rule.LAST_OF_ROUND or job.log_end_offset_is_end,
        )
        control = Recorder()
        report = run_clean(self._env, job, control)
        for group in control.groups:
            self._publish(group)
        self._checkpoint = report.next_dirty_offset

    def _facts(self) -> LogFacts:
        return facts_of(self.log, self._checkpoint)

    def _publish(self, group: CleanedGroup) -> None:
        log = self.log
        facts = {segment.base_offset: segment for segment in log.segment_facts()[:-1]}
        outputs = [group.output] if group.output is not None else []
        sources = [facts[base] for base in group.source_base_offsets]
        swap = plan_swap(log.directory, sources, outputs)
        log.flush()
        log.swap.pin(group.source_base_offsets)
        execute_swap(self._env, swap)
        log.swap.attach(swap, log.swap.open_outputs(swap))

    # What is left

    def content(self) -> bytes:
        """The log files, one after the other."""
        names = (f"{facts.base_offset:020}.log" for facts in self.log.segment_facts())
        return b"".join(self._env.read_file(f"{self._folder}/{name}") for name in names)

    def state(self) -> str:
        """The state in the words of the Java side."""
        log = self.log
        lines = [
            f"start {log.log_start_offset}",
            f"end {log.log_end_offset}",
            f"stable {log.last_stable_offset}",
            f"dirty {-1 if self._checkpoint is None else self._checkpoint}",
        ]
        facts = log.segment_facts()
        lines += [f"segment {segment.base_offset} {segment.size_bytes}" for segment in facts]
        aborted = log.reader.aborted_transactions(0, log.log_end_offset)
        lines += [f"aborted {' '.join(map(str, entry))}" for entry in aborted]
        producers = log.producers.states.producers
        lines += [
            _producer(entry) for entry in sorted(producers, key=lambda entry: entry.producer_id)
        ]
        return "".join(f"{line}\n" for line in lines)

    def close(self) -> None:
        """Leave the folder."""
        self.log.close()


def _producer(entry: ProducerEntry) -> str:
    first = entry.transaction_first_offset
    return (
        f"producer {entry.producer_id} epoch={entry.epoch} sequence={entry.last_sequence} "
        f"offset={entry.last_offset} open={-1 if first is None else first} "
        f"coordinator={entry.coordinator_epoch}"
    )


def run_ours(case: Case, home: Path, rule: Rule, *, slack: float | None = None) -> None:
    """Leaves NN.log and NN.state of each `dump` in `home`."""
    home.mkdir(parents=True)
    folder = home / "topic-0"
    by_index = slack is not None or case.seed % 2 == 1
    side = OurSide(folder, rule, "generational" if by_index else "dirty-ratio", slack)
    with small_records_are_indexed():
        _execute(case, home, side)
    side.close()


def _execute(case: Case, home: Path, side: OurSide) -> None:
    dumps = 0
    for operation in case.operations:
        if operation.name != "dump":
            side.execute(operation)
            continue
        (home / f"{dumps:02}.log").write_bytes(side.content())
        (home / f"{dumps:02}.state").write_text(side.state())
        dumps += 1
