"""A broker and workers for the pool, moved by the test."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from cleaner.engine.outcome import RewriteTotals
from cleaner.engine.shared.parts import (
    IndexPart,
    ListPart,
    MergePart,
    MergePartResult,
    NoSpace,
    OffsetsFile,
    Part,
    PartResult,
    RewritePartResult,
    RowsFile,
    RowsResult,
    Waited,
    WaitPart,
)
from cleaner.engine.spilled.checksums import Checksums
from cleaner.host import Foreground, JobInputs, LogFacts, PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from cleaner.workers.channel import (
    EndParts,
    GroupsCleaned,
    JobDone,
    JobFailed,
    JobStopped,
    Message,
    PartDone,
    Progressed,
    RunJob,
    RunPart,
    WorkerReady,
    encode,
)
from cleaner.workers.throttle import Direction, SharedMemory, Slots, WorkerSide
from config.topics.keys import TopicConfig
from storage.model import TopicPartition
from storage.segments.damage import DamagedSegment
from tests.support.cleaner.cleaner_jobs import group_of, report_of


@dataclass
class FakeHost:
    """Logs as facts; every call of the pool is noted."""

    logs: dict[TopicPartition, LogFacts] = field(default_factory=dict)
    offline: dict[TopicPartition, LogFacts] = field(default_factory=dict)
    outcome: PublishOutcome | Exception = PublishOutcome.PUBLISHED
    journal: asyncio.Event | None = None  # a publication waits for it
    published: list[tuple[TopicPartition, tuple[int, ...]]] = field(default_factory=list)
    checkpoints: list[tuple[TopicPartition, int]] = field(default_factory=list)
    done: list[tuple[CleanJob, CleanReport]] = field(default_factory=list)
    failures: list[tuple[TopicPartition, str, int]] = field(default_factory=list)
    repaired: list[TopicPartition] = field(default_factory=list)
    damages: list[tuple[TopicPartition, str]] = field(default_factory=list)  # that were news
    publishing: set[TopicPartition] = field(default_factory=set)
    broken: Exception | None = None  # raised by facts
    trusts_clock: bool = True
    load: Foreground = field(default_factory=lambda: Foreground(0, 0))

    def add(self, facts: LogFacts) -> None:
        self.logs[facts.partition] = facts

    def facts(self) -> Iterator[LogFacts]:
        if self.broken is not None:
            raise self.broken
        for partition in tuple(self.logs):
            if partition in self.logs:
                yield self.logs[partition]

    def facts_of(self, partition: TopicPartition) -> LogFacts | None:
        return self.logs.get(partition)

    def exists(self, partition: TopicPartition) -> bool:
        return partition in self.logs or partition in self.offline

    def data_directories(self) -> set[str]:
        logs = (*self.logs.values(), *self.offline.values())
        return {log.data_directory for log in logs if log.data_directory}

    def fail_directory(self, directory: str, error: OSError) -> None:
        raise AssertionError(f"{directory}: {error}")

    def go_offline(self, partition: TopicPartition) -> None:
        """Its folder cannot be opened."""
        self.offline[partition] = self.logs.pop(partition)

    def come_back(self, partition: TopicPartition) -> None:
        self.logs[partition] = self.offline.pop(partition)

    def clock_trusted(self) -> bool:
        return self.trusts_clock

    def config_of(self, partition: TopicPartition) -> TopicConfig:
        return self.logs[partition].config

    async def load_job_inputs(self, partition: TopicPartition) -> bool:
        return False

    def job_inputs(self, partition: TopicPartition, first: int, end: int) -> JobInputs:
        return JobInputs(bytes(16))

    def foreground(self) -> Foreground:
        return self.load

    def allow_checkpoints(self, first_dirty_offsets: Mapping[TopicPartition, int | None]) -> None:
        pass

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        log = self.logs.get(partition)
        if log is not None and log.generation == generation:
            self.checkpoints.append((partition, offset))
            self.logs[partition] = replace(log, checkpoint_offset=offset)

    async def publish(
        self, job: CleanJob, groups: tuple[CleanedGroup, ...]
    ) -> tuple[PublishOutcome, ...]:
        self.publishing.add(job.partition)
        try:
            if self.journal is not None:
                await self.journal.wait()
            if isinstance(self.outcome, Exception):
                raise self.outcome
            if self.outcome is PublishOutcome.PUBLISHED:
                self.published += ((job.partition, group.source_base_offsets) for group in groups)
            return (self.outcome,) * len(groups)
        finally:
            self.publishing.discard(job.partition)

    def finished(self, job: CleanJob, report: CleanReport, *, damage: str) -> None:
        self.done.append((job, report))
        if damage:
            self.damages.append((job.partition, damage))
        log = self.logs.get(job.partition)
        if log is not None and report.damaged:
            damages = {damage.path: damage for damage in log.damaged}
            for path, position, why in report.damaged:
                base = int(path.rpartition("/")[2].partition(".")[0])
                damages[path] = DamagedSegment(path, base, position, position + 1, why)
            self.add(replace(log, damaged=tuple(damages.values())))

    def failed(self, partition: TopicPartition, reason: str, retry_at_ms: int) -> None:
        self.failures.append((partition, reason, retry_at_ms))

    def repair_transaction_indexes(self, partition: TopicPartition) -> None:
        self.repaired.append(partition)


class FakeLink:
    """A worker that says what the test has it say."""

    def __init__(self, index: int, *, heeds_kill: bool = True) -> None:
        self.index = index
        self.pid = 1000 + index
        self.memory = SharedMemory()
        self.sent: list[RunJob | RunPart] = []
        self.ended: list[EndParts] = []
        self.killed = self.shut = self.closed = self.abandoned = self._gone = False
        self.heeds_kill = heeds_kill
        self.nice = 19
        self.nices: list[int] = []
        self.refuses_nice = False
        self.short_seconds: float | None = None
        self.is_stopped = False  # as by SIGSTOP
        self._beats = 0
        self._words: asyncio.Queue[Message | None] = asyncio.Queue()
        self._ordered = asyncio.Event()

    # What the pool sees.

    @property
    def slots(self) -> Slots:
        return self.memory.slots

    def send(self, message: Message) -> None:
        encode(message)
        assert not self.closed
        if isinstance(message, EndParts):
            self.ended.append(message)
            return
        assert isinstance(message, RunJob | RunPart)
        self.sent.append(message)
        self._ordered.set()

    async def receive(self) -> Message | None:
        return await self._words.get()

    def shutdown(self) -> None:
        self.shut = True
        self.die()

    def kill(self) -> None:
        self.killed = True
        if self.heeds_kill:
            self.die()

    def abandon(self) -> None:
        self.abandoned = True
        self._words.put_nowait(None)

    async def reap(self) -> str:
        await asyncio.sleep(0)
        return "killed by signal 9" if self._gone else "does not end"

    def close(self) -> None:
        self.closed = True
        self.memory.close()

    def is_gone(self) -> bool:
        return self._gone

    def set_nice(self, nice: int) -> None:
        if nice < self.nice and self.refuses_nice:
            raise PermissionError(1, "Operation not permitted")
        self.nice = nice
        self.nices.append(nice)

    def beats(self) -> int:
        self._beats += not self.is_stopped
        return self._beats

    def short_of_core_seconds(self) -> float | None:
        return self.short_seconds

    # What the test does.

    def die(self) -> None:
        self._gone = True
        self._words.put_nowait(None)

    def say(self, message: Message) -> None:
        self._words.put_nowait(message)

    async def job(self) -> CleanJob:
        """The next job it was given."""
        await self._ordered.wait()
        return self.sent[-1].job

    @property
    def run(self) -> int:
        return self.sent[-1].run

    def aborted(self) -> bool:
        return self.side.aborted()

    @property
    def side(self) -> WorkerSide:
        return WorkerSide(self.slots, self.run, lambda _: None)

    def charge(self, count: int) -> None:
        self.side.charge(Direction.READ, count)

    def ready(self) -> None:
        self.say(WorkerReady(self.pid, 0.1))

    async def part(self) -> Part:
        """The next part it was given."""
        await self._ordered.wait()
        return self.last_part

    @property
    def last_part(self) -> Part:
        sent = self.sent[-1]
        assert isinstance(sent, RunPart)
        return sent.part

    def part_done(self, result: PartResult | None = None) -> None:
        """Report the last part; None: a result without keys, damage or transactions."""
        order, self._ordered = self.sent[-1], asyncio.Event()
        assert isinstance(order, RunPart)
        result = result or empty_result(order.job, order.part)
        self.say(PartDone(order.run, order.part.number, result))

    def no_space(self) -> None:
        self.part_done(NoSpace("the disk is full"))

    def progress(self, stage: str, done: int, total: int) -> None:
        self.say(Progressed(self.run, stage, done, total))

    def group(self, index: int = 0) -> None:
        self.groups(index)

    def groups(self, *indexes: int) -> None:
        job = self.sent[-1].job
        self.say(GroupsCleaned(self.run, tuple(group_of(job, index) for index in indexes)))

    def done(self, **changes: object) -> None:
        run, self._ordered = self.run, asyncio.Event()
        self.say(JobDone(run, report_of(self.sent[-1].job, **changes)))

    def stopped(self) -> None:
        run, self._ordered = self.run, asyncio.Event()
        self.say(JobStopped(run))

    def failed(
        self,
        reason: str = "OSError: disk",
        *,
        file_missing: bool = False,
        index_wrong: bool = False,
    ) -> None:
        run, self._ordered = self.run, asyncio.Event()
        self.say(JobFailed(run, reason, "Traceback ...", file_missing, index_wrong))


def empty_result(job: CleanJob, part: Part) -> PartResult:
    match part:
        case IndexPart(number) | ListPart(number):
            pieces = ((0, (*range(part.shards), part.shards)),)  # one row in each shard
            file = RowsFile(number, Checksums(0, b""), pieces)
            return RowsResult(file, (), False, False, 100, 0.1)
        case MergePart(number):
            return MergePartResult(OffsetsFile(number, Checksums(0, b""), ()), 1, 0.1)
        case WaitPart():
            return Waited()
        case _:
            groups = tuple(group_of(job, place) for place in part.groups)
            return RewritePartResult(True, 1, groups, RewriteTotals(), (), False, 100, 0.1)


@dataclass
class FakeWorkerPool:
    """Makes the links, remembers them, and can refuse."""

    prepare: Callable[[FakeLink], None] = FakeLink.ready
    links: list[FakeLink] = field(default_factory=list)
    refusals: int = 0
    heeds_kill: bool = True

    async def __call__(self, nice: int) -> FakeLink:
        if self.refusals > 0:
            self.refusals -= 1
            raise OSError(11, "Resource temporarily unavailable")
        link = FakeLink(len(self.links), heeds_kill=self.heeds_kill)
        self.links.append(link)
        self.prepare(link)
        return link


async def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Let (virtual) time pass until the condition holds; look less often after a while."""
    step = 0.001
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(step)
            step = min(step * 1.1, 0.02)
