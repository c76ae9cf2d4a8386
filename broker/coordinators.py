"""The coordinators of groups and of transactions, with the internal topics that hold their state.

A coordinator has as many partitions as its topic. An existing topic keeps its number, so the
coordinators are built after the logs are open.
"""

from collections.abc import Iterator, Sequence

from broker.event_loop.directory_threads import DirectoryThreads
from broker.groups.clock import LoopClock
from broker.groups.coordinator import GroupCoordinator
from broker.groups.offsets.offsets_store import OFFSETS_TOPIC, LoadedPartition, OffsetsLoader
from broker.groups.settings import CoordinatorSettings
from broker.topics.internal_topic import InternalTopic, KeyedLog
from broker.topics.log_maintenance import LogMaintenance
from broker.topics.metadata_service import MetadataService
from broker.topics.producer_ids import ProducerIds
from broker.topics.topics import Topics
from broker.transactions.coordinator import TransactionCoordinator
from broker.transactions.hanging import HangingTransactions
from broker.transactions.markers import MarkerWriter
from broker.transactions.state_records import (
    TRANSACTION_TOPIC,
    LoadedTransactions,
    TransactionLoader,
)
from broker.views.subscribable import SubscribableTopics
from broker.views.views import Views
from config.settings import Settings
from storage.env import Env
from storage.model import TopicPartition


class Coordinators:
    """Both coordinators, which have to be built and started."""

    def __init__(
        self,
        settings: Settings,
        env: Env,
        topics: Topics,
        views: Views,
        *,
        metadata_service: MetadataService,
        producer_ids: ProducerIds,
        threads: DirectoryThreads,
    ) -> None:
        self._settings = settings
        self._env = env
        self._topics = topics
        self._views = views
        self._producer_ids = producer_ids
        self.offsets_topic: InternalTopic[LoadedPartition] = InternalTopic(
            OFFSETS_TOPIC,
            settings.groups.offsets_partitions,
            topics=topics,
            metadata_service=metadata_service,
            env=env,
            threads=threads,
            new_loader=OffsetsLoader,
        )
        self.transaction_topic: InternalTopic[LoadedTransactions] = InternalTopic(
            TRANSACTION_TOPIC,
            settings.transactions.state_partitions,
            topics=topics,
            metadata_service=metadata_service,
            env=env,
            threads=threads,
            new_loader=TransactionLoader,
        )
        self.groups: GroupCoordinator  # this and the following: set by `build`
        self.transactions: TransactionCoordinator
        self.hanging: HangingTransactions

    def build(self) -> None:
        """Construct the coordinators of the topics on disk."""
        wall_ms = self._env.wall_ms
        self.groups = GroupCoordinator(
            KeyedLog(
                self.offsets_topic.partition_count,
                self.offsets_topic.append,
                self.offsets_topic.max_batch_bytes,
            ),
            LoopClock(wall_ms),
            CoordinatorSettings.of(self._settings.groups),
            topics=SubscribableTopics(self._topics, self._views),
        )
        self.offsets_topic.coordinator = self.groups.loading
        self.transactions = TransactionCoordinator(
            KeyedLog(self.transaction_topic.partition_count, self.transaction_topic.append),
            MarkerWriter(self._topics, self.groups.offsets, wall_ms),
            new_producer_id=self._producer_ids.take,
            wall_ms=wall_ms,
            settings=self._settings.transactions,
        )
        self.transaction_topic.coordinator = self.transactions
        self.hanging = HangingTransactions(self.transactions, self.groups.offsets, wall_ms)

    def start(self, log_maintenance: LogMaintenance) -> None:
        """Load the internal topics in the background, and start the timers."""
        self.offsets_topic.start()
        self.transaction_topic.start()
        groups, transactions = self._settings.groups, self._settings.transactions
        log_maintenance.repeat(
            "expire offsets",
            groups.offsets_retention_check_interval_ms / 1000,
            self._expire_offsets,
            is_by_age=True,
        )
        log_maintenance.repeat(
            "abort transactions",
            transactions.timeout_check_interval_ms / 1000,
            self.transactions.abort_timed_out,
        )
        log_maintenance.repeat(
            "expire transactional ids",
            transactions.id_expiration_check_interval_ms / 1000,
            self.transactions.expire_ids,
            is_by_age=True,
        )

    def fail(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop serving the groups and transactions of partitions that are offline."""
        self.offsets_topic.fail(partitions)
        self.transaction_topic.fail(partitions)

    def failures(self) -> Iterator[tuple[TopicPartition, str]]:
        """Yield the partitions whose groups or transactions are not served, and why."""
        yield from self.offsets_topic.failures.items()
        yield from self.transaction_topic.failures.items()

    def reload_after_repair(self, partition: TopicPartition) -> None:
        """Load a partition again if damage prevented it before."""
        self.offsets_topic.reload_after_repair(partition)
        self.transaction_topic.reload_after_repair(partition)

    async def _expire_offsets(self) -> None:
        await self.groups.deletion.expire_offsets(self._env.wall_ms())
