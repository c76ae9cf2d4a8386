"""Compacted views as clients see them: read-only topics named `<topic>.compacted`.

Rules
- A view exists as long as its topic exists with `varve.view: compacted`. Nothing else records it. A
  real topic with its name takes precedence.
- Its partitions have the numbers, leader epochs and offsets of the topic. Offsets below the horizon
  are read from the ledger (storage/view/view_log.py).
- Its topic id is derived from that of the topic, so that it is the same after a restart.
- It is read-only. Groups may commit offsets for it.

Rules for the topic's own cleaner (`limit_of`)
- The cleaner removes a tombstone only below the durable horizon of the topic's view.
- The horizon of a running compaction counts from before its sources are linked until its manifest
  is durable or the compaction is aborted.
- Anything unknown blocks the cleaner: an unreadable or invalid ledger, a failed publication, files
  of a view that was switched off and is not removed yet. Only a folder that is known to have no
  ledger does not block.
"""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Final

import structlog

from broker.counters import BrokerStats
from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.loop_turns import Turns
from broker.quotas.memory_budget import MemoryBudget
from broker.topics.partition import Partition
from broker.topics.partition_rows import PartitionRows
from broker.topics.topics import Topic, Topics
from broker.views.opening import ViewOpener
from broker.views.view_partition import ViewPartition
from cleaner.host import Undecided
from config.topics.keys import TopicConfig, TopicLayers
from config.topics.names import RESERVED_SUFFIX, view_conflict, view_name
from protocol.errors import ErrorCode
from storage.env import Env
from storage.errors import InvalidViewError
from storage.format.filenames import DAMAGED_BYTES
from storage.log.log import Log
from storage.log.log_state import index_limits
from storage.model import TopicPartition
from storage.view.ledger import Ledger, has_view_folder, open_ledger
from storage.view.view_log import ViewCursor

READ_ONLY: Final = "a compacted view is read only; produce to the topic itself"
OFFSET_MAX: Final = (1 << 63) - 1
_ID_SALT: Final = b"varve compacted view"
# A cursor with its place in a dictionary. A thousand connections that read all partitions of large
# views would otherwise take gigabytes, and make each collection of garbage take seconds.
CURSOR_BYTES: Final = 150
CURSORS_BYTES_MAX: Final = 128 << 20  # of all connections; half of it for one user
_READERS: Final = itertools.count()

logger = structlog.get_logger("broker.views")


def view_id(topic_id: bytes) -> bytes:
    """Return the 16-byte id of the view of a topic."""
    return hashlib.sha256(_ID_SALT + topic_id).digest()[:16]


class ViewTopic:
    """The view of one topic, with the attributes of a topic."""

    is_internal: Final = False

    def __init__(self, base: Topic) -> None:
        self.base = base
        self.name = view_name(base.name)
        self.topic_id = view_id(base.topic_id)
        self.opened: dict[int, ViewPartition] = {}  # the others are opened when they are needed
        self.rows = PartitionRows()

    @property
    def partitions(self) -> dict[int, Partition]:
        """Return the partitions of the topic, opened as a view or not."""
        return self.base.partitions

    @property
    def offline(self) -> dict[int, str]:
        """Return the partitions that are not served, with the reason."""
        return self.base.offline

    @property
    def partition_count(self) -> int:
        """Return the partition count of the topic."""
        return self.base.partition_count

    @property
    def layers(self) -> TopicLayers:
        """Return the config of the topic, compacted: the view keeps what the topic drops."""
        layers = self.base.layers
        return replace(layers, dynamic={**layers.dynamic, "cleanup.policy": "compact"})

    @property
    def config(self) -> TopicConfig:
        """Return the config of the topic."""
        return self.base.config


class Views:
    """All views, created on first use.

    A view may have thousands of partitions. Only `open_all`, in turns, and callers that name a
    partition open them.
    """

    def __init__(
        self,
        env: Env,
        topics: Topics,
        threads: DirectoryThreads,
        stats: BrokerStats,
        *,
        cleaned_elsewhere_end: Callable[[Log], int],
    ) -> None:
        """`cleaned_elsewhere_end` returns the end of another broker's cleans of a log, or 0."""
        self._env = env
        self._cleaned_elsewhere_end = cleaned_elsewhere_end
        self._topics = topics
        self._threads = threads
        self._stats = stats
        self.cursor_memory = MemoryBudget(CURSORS_BYTES_MAX)
        self._opener = ViewOpener(self.load, threads, self._note_failure)
        self._by_name: dict[str, ViewTopic] = {}
        self._by_id: dict[bytes, ViewTopic] = {}
        self._ended = deque[ViewTopic]()  # with partitions that `forget` has to drop
        self._staged: dict[TopicPartition, int] = {}  # horizons of running compactions
        # Partitions that could not be read, in order; `failures` drops those that can, or are gone.
        self._failed: dict[TopicPartition, None] = {}
        # Partitions without a view that are known to have no view files.
        self._clear: dict[TopicPartition, Partition] = {}

    def __iter__(self) -> Iterator[ViewTopic]:
        for topic in self._topics:
            # Most topics never have a view, and there may be thousands.
            if topic.config.has_view or view_name(topic.name) in self._by_name:
                view = self._view_of(topic)
                if view is not None:
                    yield view

    def get(self, name: str) -> ViewTopic | None:
        """Return the view of that name."""
        if not name.endswith(RESERVED_SUFFIX):
            return None
        topic = self._topics.get(name.removesuffix(RESERVED_SUFFIX))
        return None if topic is None else self._view_of(topic)

    def by_id(self, topic_id: bytes) -> ViewTopic | None:
        """Return the view of that id."""
        view = self._by_id.get(topic_id)
        return view if view is not None and self.get(view.name) is view else None

    def partition(self, base: TopicPartition) -> ViewPartition | None:
        """Return the view of a partition of a topic, by the topic's own name."""
        view = self.get(view_name(base.topic))
        return None if view is None else self._partition_of(view, base.partition)

    def partitions_of(self, view: ViewTopic) -> Iterator[ViewPartition]:
        """Yield the partitions of a view; other tasks may run in between."""
        for index in tuple(view.partitions):
            view_partition = self.partition(TopicPartition(view.base.name, index))
            if view_partition is not None:
                yield view_partition

    def failures(self) -> Iterator[tuple[TopicPartition, InvalidViewError]]:
        """Yield the partitions of views that cannot be read, and why."""
        for partition in tuple(self._failed):
            view = self.get(partition.topic)
            opened = None if view is None else self._partition_of(view, partition.partition)
            if opened is not None and opened.log.failure is not None and not opened.is_opening:
                yield partition, opened.log.failure
            else:
                del self._failed[partition]

    def find(self, topic: str | bytes, index: int) -> ViewPartition | ErrorCode:
        """Like Topics.find; opens this partition only, because a fetch may name many."""
        by_id = isinstance(topic, bytes)
        view = self.by_id(topic) if isinstance(topic, bytes) else self.get(topic)
        if view is None:
            unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return ErrorCode.UNKNOWN_TOPIC_ID if by_id else unknown
        view_partition = self._partition_of(view, index)
        if view_partition is not None:
            return view_partition
        offline = index in view.offline
        return ErrorCode.KAFKA_STORAGE_ERROR if offline else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    def horizon_of(self, partition: TopicPartition) -> int:
        """Return the end of the offsets that a partition's view has, or is being compacted to.

        0 without a view; the largest offset if the version on disk is unknown.
        """
        view = self.partition(partition)
        staged = self._staged.get(partition, 0)
        if view is None:
            return staged
        if not view.log.is_known or view.log.failure is not None:
            return OFFSET_MAX
        return max(view.log.horizon, staged)

    # The limit of the topic's own cleaner

    def limit_of(self, base: Partition) -> tuple[int, Undecided]:
        """Return the offset up to which the cleaner may clean the log, and the reason.

        Without a ledger the log is the view, and with the strategy `offset` the cleaner may clean
        all of it. With another strategy it could remove the record that is the latest one for the
        view. With a ledger, the manifest must say first that the log is compacted.
        """
        if not base.log.config.compacts:
            return base.log.log_end_offset, Undecided.VIEW
        published, reason = self._published_limit(base)
        staged = self._staged.get(base.partition)
        if staged is not None and staged < published:
            return staged, Undecided.VIEW
        return published, reason

    def _published_limit(self, base: Partition) -> tuple[int, Undecided]:
        log, config = base.log, base.log.config
        view = self.partition(base.partition) if config.has_view else None
        if view is None:
            is_known = self.is_clear(base)
        else:
            is_known = view.log.failure is None and view.log.is_known
        if not is_known:
            return log.log_start_offset, Undecided.VIEW_UNKNOWN
        if view is not None and view.log.ledger is not None:
            is_noted = view.log.ledger.manifest.log_compacted
            return view.log.horizon if is_noted else log.log_start_offset, Undecided.VIEW
        holds_all = view is not None and config.varve_view_strategy != "offset"
        return log.log_start_offset if holds_all else log.log_end_offset, Undecided.VIEW

    def stage(self, partition: TopicPartition, horizon: int) -> None:
        """Limit the cleaner to the horizon of a compaction that is about to link its sources."""
        self._staged[partition] = horizon

    def unstage(self, partition: TopicPartition) -> None:
        """Remove the limit of a compaction that is published or aborted."""
        self._staged.pop(partition, None)

    def is_clear(self, base: Partition) -> bool:
        """Return whether a partition without a view is known to have no view files.

        The first call for a partition reads the disk. If that fails, the next call reads it again.
        """
        if self._clear.get(base.partition) is base:
            return True
        try:
            has_files = has_view_folder(self._env, base.log.directory)
        except OSError:
            return False
        if not has_files:
            self._clear[base.partition] = base
        return not has_files

    def files_removed(self, base: Partition) -> None:
        """Record that the files of a switched-off view are removed durably."""
        view = self.partition(base.partition)
        if view is None:
            self._clear[base.partition] = base
        else:  # it was switched on again meanwhile, and may have opened removed files
            view.change_over(None)

    async def forget(self, present: Collection[TopicPartition]) -> None:
        """Drop the state of deleted and offline partitions, and views that are off or deleted.

        In turns: a log and a ledger close their files with their last reference.
        """
        turns = Turns()
        for partition in self._clear.keys() - present:
            self._clear.pop(partition, None)
            await turns.take()
        for name, view in tuple(self._by_name.items()):
            for index in view.opened.keys() - view.partitions.keys():
                if index not in view.partitions:
                    view.opened.pop(index, None)
                await turns.take()
            if self._is_of_deleted_topic(name):
                self._forget(name)
            await turns.take()
        while self._ended:
            view = self._ended.popleft()
            while view.opened:
                view.opened.popitem()
                await turns.take()

    def _is_of_deleted_topic(self, name: str) -> bool:
        view = self._by_name.get(name)
        return view is not None and self._topics.get(view.base.name) is not view.base

    def reopen(self, base: Partition) -> None:
        """Open the view of a partition again, because the replica is in another directory."""
        view = self.get(view_name(base.partition.topic))
        if view is not None:
            view.opened.pop(base.partition.partition, None)
            self._partition_of(view, base.partition.partition)

    def conflict(self, topic: Topic) -> str | None:
        """Return why a topic with `varve.view: compacted` has no view, as text."""
        name = view_name(topic.name)
        return view_conflict(topic.name, (name,) if self._topics.get(name) else ())

    def _view_of(self, topic: Topic) -> ViewTopic | None:
        if not topic.config.has_view or self.conflict(topic) is not None:
            self._forget(view_name(topic.name))
            return None
        view = self._by_name.get(view_name(topic.name))
        if view is None or view.base is not topic:
            self._forget(view_name(topic.name))  # of a deleted topic with the same name
            view = ViewTopic(topic)
            self._by_name[view.name] = view
            self._by_id[view.topic_id] = view
        return view

    def _partition_of(self, view: ViewTopic, index: int) -> ViewPartition | None:
        base = view.partitions.get(index)
        view_partition = view.opened.get(index)
        if base is None:
            view.opened.pop(index, None)
            return None
        if view_partition is None or view_partition.base is not base:
            view_partition = view.opened[index] = self._open(view.name, base)
        return view_partition

    def _forget(self, name: str) -> None:
        view = self._by_name.pop(name, None)
        if view is not None:
            self._by_id.pop(view.topic_id, None)
            self._ended.append(view)
            self._stats.drop_topic(name)

    def _open(self, name: str, base: Partition) -> ViewPartition:
        """Return a partition of a view; its version on disk is read, or is being read."""
        opened = ViewPartition(base, self._stats.topics[name])
        self._clear.pop(base.partition, None)
        self._opener.open_nowait(opened)
        return opened

    async def open_all(self, topics: Iterable[Topic]) -> None:
        """Open the views of these topics, and wait until their versions on disk are read."""
        turns, directories = Turns(), set[str]()
        for topic in tuple(topics):
            view = self._view_of(topic)
            if view is None:
                continue
            for index, base in tuple(topic.partitions.items()):
                self._partition_of(view, index)
                directories.add(base.log.log_directory.path)
                await turns.take()
        await self._opener.wait_opened(directories)

    def _note_failure(self, view: ViewPartition) -> None:
        self._failed[view.partition] = None

    async def read_again(self, view: ViewPartition) -> None:
        """Read the version on disk if it is unknown; keep the current one if that fails.

        Call it with the lock for the files of the view.
        """
        await self._opener.wait_opened([view.base.log.log_directory.path])
        if view.log.is_known:
            return
        where = str(view.base.partition)
        try:
            ledger = await self._threads.run(view.log.directory, partial(self.load, view.base))
        except InvalidViewError as error:
            view.change_over(None, error)
            self._note_failure(view)
            logger.error("view cannot be used", partition=where, reason=str(error))
        except OSError as error:  # logged at the first failure; the next round tries again
            logger.debug("view cannot be read", partition=where, reason=str(error))
        else:
            view.change_over(ledger)
            logger.info("view recovered", partition=where, horizon=view.log.horizon)

    def load(self, base: Partition) -> Ledger | None:
        """Return the ledger on disk, checked with its log. Raises InvalidViewError, OSError.

        If the log was cut below the horizon, later records have other contents than the ledger:
        their leader epoch is newer, because each start after a kill, and each truncation, begins
        one. Another broker, such as Kafka, may have removed a tombstone above the horizon that the
        ledger has not applied. Then return None if the log has all records of the ledger, so that
        the view is built from the log again.
        """
        log = base.log
        ledger = open_ledger(self._env, log.directory, log.topic_id, index_limits(log.config))
        if ledger is not None and ledger.horizon > log.log_end_offset:
            raise InvalidViewError(
                log.directory,
                f"its horizon is {ledger.horizon}, beyond the log's end, {log.log_end_offset}",
            )
        if ledger is None:
            return None
        epoch = ledger.manifest.leader_epoch
        if 0 <= epoch < log.reader.epoch_of(ledger.horizon - 1):
            raise InvalidViewError(
                log.directory,
                f"the log was cut below its horizon, {ledger.horizon}, and has other records there",
            )
        end = min(self._cleaned_elsewhere_end(log), log.log_end_offset)
        if end <= ledger.horizon:
            return ledger
        is_replaced = _has_all_records(log, ledger, self._env.listdir(log.directory))
        logger.warning(
            "view discarded" if is_replaced else "view may have deleted keys",
            partition=str(base.partition),
            reason=(
                f"another broker, such as Kafka, cleaned the log up to offset {end}, beyond the "
                f"horizon of the view, {ledger.horizon}"
            ),
            remedy=(
                "none: the broker rebuilds the view from the log"
                if is_replaced
                else f"varve view compact {base.partition.topic} --from-scratch"
            ),
        )
        return None if is_replaced else ledger


def _has_all_records(log: Log, ledger: Ledger, names: Iterable[str]) -> bool:
    """Return whether a cleaned log still has the latest record of each key of a ledger.

    `names` are those of the files in the folder of the log.
    """
    if log.damage.ranges or any(name.endswith(DAMAGED_BYTES) for name in names):
        return False  # damaged or skipped records may be in the ledger
    strategies = {ledger.manifest.strategy, log.config.varve_view_strategy}
    is_complete = log.log_start_offset <= ledger.manifest.first_offset
    return strategies == {"offset"} and log.config.compacts and is_complete


class ViewCursors:
    """The positions of one connection in partitions of views; they persist between fetches."""

    def __init__(self) -> None:
        self._cursors: dict[TopicPartition, ViewCursor] = {}
        self._name = str(next(_READERS))
        self._memory: MemoryBudget | None = None  # of the cursors of all connections

    def find(
        self, view: ViewPartition, memory: MemoryBudget, client: Hashable
    ) -> ViewCursor | None:
        """Return the cursor in a partition; None if there is no memory for a new one."""
        cursor = self._cursors.get(view.partition)
        if cursor is None:
            if not memory.admits(self._name, CURSOR_BYTES, client):
                return None
            memory.own(self._name, client)
            memory.note(self._name, CURSOR_BYTES * (len(self._cursors) + 1))
            self._memory = memory
        if cursor is None or not cursor.is_of(view.log):
            cursor = self._cursors[view.partition] = ViewCursor(view.log)
        return cursor

    def clear(self) -> None:
        """Forget all positions: the files that they read may be removed now."""
        self._cursors.clear()
        if self._memory is not None:
            self._memory.remove(self._name)
