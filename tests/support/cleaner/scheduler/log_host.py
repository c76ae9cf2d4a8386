"""A broker for the pool that has nothing but logs: real facts, real swaps."""

import asyncio
from collections.abc import Iterator, Mapping

from broker.cleaning.cleaner_host import release_in_background
from cleaner.host import Foreground, JobInputs, LogFacts, PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from config.topics.keys import TopicConfig
from storage.env import Env
from storage.manager.log_manager import LogManager
from storage.model import TopicPartition
from storage.swap.swap_journal import execute_swap, plan_swap
from tests.support.cleaner.log_facts import facts_of


class LogHost:
    def __init__(self, env: Env, manager: LogManager) -> None:
        self.env = env
        self.manager = manager
        self.done: list[tuple[CleanJob, CleanReport]] = []
        self.failures: list[tuple[TopicPartition, str, int]] = []
        self.damages: list[tuple[TopicPartition, str]] = []
        self.published = 0

    def facts(self) -> Iterator[LogFacts]:
        for partition, log in list(self.manager.table.logs.items()):
            checkpoint = self.manager.table.cleaner_offsets.get(partition)
            yield facts_of(log, checkpoint, damaged=log.damage.left_by_cleaner)

    def facts_of(self, partition: TopicPartition) -> LogFacts | None:
        return next((facts for facts in self.facts() if facts.partition == partition), None)

    def exists(self, partition: TopicPartition) -> bool:
        return partition in self.manager.table.logs

    def data_directories(self) -> list[str]:
        return [
            directory.path for directory in self.manager.table.directories if directory.is_online
        ]

    def fail_directory(self, directory: str, error: OSError) -> None:
        raise AssertionError(f"{directory}: {error}")

    def clock_trusted(self) -> bool:
        return True

    def config_of(self, partition: TopicPartition) -> TopicConfig:
        return self.manager.table.logs[partition].config

    async def load_job_inputs(self, partition: TopicPartition) -> bool:
        return False

    def job_inputs(self, partition: TopicPartition, first: int, end: int) -> JobInputs:
        log = self.manager.table.logs[partition]
        last = tuple(
            (owner, epoch, at) for owner, (epoch, at) in log.producers.last_records().items()
        )
        return JobInputs(bytes(16), last, tuple(log.reader.aborted_transactions(first, end)))

    def foreground(self) -> Foreground:
        return Foreground(0, 0)

    def allow_checkpoints(self, first_dirty_offsets: Mapping[TopicPartition, int | None]) -> None:
        pass

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        if self.manager.table.logs[partition].generation == generation:
            self.manager.table.cleaner_offsets[partition] = offset

    async def publish(
        self, job: CleanJob, groups: tuple[CleanedGroup, ...]
    ) -> tuple[PublishOutcome, ...]:
        log = self.manager.table.logs[job.partition]
        if log.generation != job.generation:
            return (PublishOutcome.STALE,) * len(groups)
        facts = {segment.base_offset: segment for segment in log.segment_facts()[:-1]}
        sources = [b for group in groups for b in group.source_base_offsets if b in facts]
        cleaned_groups = [group for group in groups if group.source_base_offsets[-1] in facts]
        gone = (PublishOutcome.SOURCES_GONE,) * (len(groups) - len(cleaned_groups))
        if not cleaned_groups:
            return gone
        plan = plan_swap(
            log.directory,
            [facts[base] for base in sources],
            [group.output for group in cleaned_groups if group.output is not None],
            front_is_gone=cleaned_groups[0].source_base_offsets[0] not in facts,
        )
        log.flush()
        log.swap.pin(sources)
        await asyncio.to_thread(execute_swap, self.env, plan)
        replaced = log.swap.attach(plan, log.swap.open_outputs(plan))
        release_in_background(replaced)
        self.published += len(cleaned_groups)
        return gone + (PublishOutcome.PUBLISHED,) * len(cleaned_groups)

    def finished(self, job: CleanJob, report: CleanReport, *, damage: str) -> None:
        self.done.append((job, report))
        if damage:
            self.damages.append((job.partition, damage))
        for path, position, reason in report.damaged:
            self.manager.table.logs[job.partition].damage.mark(path, position, reason)

    def failed(self, partition: TopicPartition, reason: str, retry_at_ms: int) -> None:
        self.failures.append((partition, reason, retry_at_ms))

    def repair_transaction_indexes(self, partition: TopicPartition) -> None:
        self.manager.table.logs[partition].damage.repair_txn_indexes()
