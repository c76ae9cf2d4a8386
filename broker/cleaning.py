"""The broker's side of the cleaner: facts for the planner, publication of what workers made.

Publication: check that the log is still the one the job was planned for and that its sources are
still there, execute the swap by journal in a thread (it fsyncs), then switch the log in memory.
The pool keeps truncation, deletion and policy changes away meanwhile; retention may run, and wins.
"""

import asyncio
import os.path
from collections.abc import Callable, Iterable

import structlog

from broker.partition import Partition
from broker.topics import Topics
from cleaner.host import Foreground, JobInputs, LogFacts, OpenTransaction, PublishOutcome
from cleaner.job import CleanedGroup, CleanJob, CleanReport
from storage.env import Env
from storage.errors import LogDirectoryError, SwapRefusedError
from storage.log_manager import LogManager
from storage.model import TopicPartition
from storage.swap import execute_swap, plan_swap

log = structlog.get_logger("broker.cleaning")


class Cleaning:
    """Implements cleaner.host.CleanerHost over the broker's topics and logs."""

    def __init__(
        self,
        env: Env,
        manager: LogManager,
        topics: Topics,
        *,
        fail_directory: Callable[[LogDirectoryError], None],
        clock_trusted: Callable[[], bool],
        foreground: Callable[[], Foreground],
    ) -> None:
        self._env = env
        self._manager = manager
        self._topics = topics
        self._fail_directory = fail_directory
        self._clock_trusted = clock_trusted
        self._foreground = foreground

    def facts(self) -> Iterable[LogFacts]:
        """Every partition that is served; of one that is offline there is nothing to clean."""
        trusted = self._clock_trusted()
        for partition in self._topics.partitions():
            yield self._facts_of(partition, clock_trusted=trusted)

    def facts_of(self, partition: TopicPartition) -> LogFacts | None:
        """One partition's facts, if it is served."""
        found = self._topics.partition(partition)
        return None if found is None else self._facts_of(found, clock_trusted=self._clock_trusted())

    def _facts_of(self, partition: Partition, *, clock_trusted: bool) -> LogFacts:
        one = partition.log
        pending = one.open_transaction()
        return LogFacts(
            partition=one.partition,
            directory=one.directory,
            config=one.config,
            segments=one.segment_facts(),
            log_start_offset=one.log_start_offset,
            log_end_offset=one.log_end_offset,
            undecided_offset=min(one.high_watermark, one.last_stable_offset),
            checkpoint_offset=self._manager.cleaner_offsets.get(one.partition),
            generation=one.generation,
            damaged=one.damaged,
            clock_trusted=clock_trusted,
            topic_id=one.topic_id,
            data_directory=os.path.dirname(one.directory),
            open_transaction=None if pending is None else OpenTransaction(*pending),
        )

    def job_inputs(self, partition: TopicPartition, first: int, end: int) -> JobInputs:
        """The hash key, last records of live producers, aborted transactions of [first, end)."""
        found = self._topics.partition(partition)
        assert found is not None, partition
        last = found.log.last_records()
        return JobInputs(
            self._manager.metadata.hash_key,
            tuple((producer_id, epoch, offset) for producer_id, (epoch, offset) in last.items()),
            tuple(found.log.aborted_transactions(first, end)),
        )

    def foreground(self) -> Foreground:
        """What was done for clients so far."""
        return self._foreground()

    def checkpoint(self, partition: TopicPartition, generation: str, offset: int) -> None:
        """Remember the first dirty offset, unless the log is another one by now."""
        found = self._topics.partition(partition)
        if found is not None and found.log.generation == generation:
            self._manager.set_cleaner_offset(partition, offset)

    async def publish(self, job: CleanJob, group: CleanedGroup) -> PublishOutcome:
        """Put one group in the place of its sources. Raises SwapRefusedError, LogDirectoryError."""
        found = self._topics.partition(job.partition)
        if found is not None and not found.log.are_flushed(group.source_base_offsets):
            await found.flush()
        if found is None or found.log.generation != job.generation:
            return PublishOutcome.STALE
        facts = {segment.base_offset: segment for segment in found.log.segment_facts()[:-1]}
        if not all(base in facts for base in group.source_base_offsets):
            return PublishOutcome.SOURCES_GONE
        sources = [facts[base] for base in group.source_base_offsets]
        outputs = [group.output] if group.output is not None else []
        plan = plan_swap(found.log.directory, sources, outputs)
        found.log.pin(group.source_base_offsets)
        try:
            await asyncio.to_thread(execute_swap, self._env, plan)
        except SwapRefusedError:
            found.log.unpin(group.source_base_offsets)
            raise  # pinned sources do not go by themselves: something else is wrong
        except OSError as error:
            failed = self._manager.directory_error(found.log.directory, error)
            self._fail_directory(failed)
            raise failed from error
        found.log.replace_segments(plan)
        return PublishOutcome.PUBLISHED

    def finished(self, job: CleanJob, report: CleanReport) -> None:
        """One line per job, with the numbers Kafka prints and ours."""
        seconds = report.map_seconds + report.rewrite_seconds
        log.info(
            "cleaned",
            partition=str(job.partition),
            first_dirty_offset=job.first_dirty_offset,
            next_dirty_offset=report.next_dirty_offset,
            bytes_before=report.bytes_before,
            bytes_after=report.bytes_after,
            records_before=report.records_before,
            records_after=report.records_after,
            keys=report.keys_indexed,
            tombstones_kept=report.tombstones_kept,
            tombstones_removed=report.tombstones_removed,
            bytes_read=report.bytes_read,
            bytes_written=report.bytes_written,
            map_full=report.map_full,
            seconds=round(seconds, 3),
            damaged=len(report.damaged),
        )
        found = self._topics.partition(job.partition)
        for path, position, reason in report.damaged:
            log.error(
                "damaged segment is left as it is", path=path, position=position, reason=reason
            )
            if found is not None and found.log.generation == job.generation:
                found.log.mark_damaged(path, position, reason)  # readers get an error there

    def failed(self, partition: TopicPartition, reason: str, retry_at_ms: int) -> None:
        """One line per failed attempt."""
        log.error("clean failed", partition=str(partition), reason=reason, retry_at_ms=retry_at_ms)
