"""The parts of the broker that request handlers use, and the client of a request."""

from dataclasses import dataclass, field

from broker.counters import BrokerStats
from broker.damage.damaged_reads import DamageWatch
from broker.groups.coordinator import GroupCoordinator
from broker.groups.offsets_topic import OffsetsTopic
from broker.network.fetch_sessions import FetchSessions
from broker.topics.effective_settings import EffectiveSettings
from broker.topics.metadata_service import MetadataService
from broker.topics.partition import Partition
from broker.topics.producer_ids import ProducerIds
from broker.topics.topics import Topic, Topics
from broker.views.views import Cursors, ViewPartition, Views, ViewTopic
from config.address import Address
from config.settings import Settings
from protocol.errors import ErrorCode
from protocol.limits import RequestLimits
from storage.env import Env
from storage.manager.log_manager import LogManager


@dataclass(slots=True)
class Services:
    """The parts of the running broker that handlers use."""

    settings: Settings
    env: Env
    manager: LogManager
    topics: Topics
    effective_settings: EffectiveSettings
    metadata_service: MetadataService
    producer_ids: ProducerIds
    views: Views
    groups: GroupCoordinator
    offsets_topic: OffsetsTopic
    sessions: FetchSessions
    stats: BrokerStats
    limits: RequestLimits
    damage: DamageWatch
    cluster_id: str
    node_id: int

    def readable(self, topic: str | bytes, index: int) -> Partition | ViewPartition | ErrorCode:
        """Return the partition of a topic or view by name or id, or the error."""
        partition_or_error = self.topics.find(topic, index)
        if isinstance(partition_or_error, Partition):
            return partition_or_error
        view = self.views.find(topic, index)
        return view if isinstance(view, ViewPartition) else partition_or_error

    def topic(self, name: str) -> Topic | ViewTopic | None:
        """Return the topic or view with this name."""
        return self.topics.get(name) or self.views.get(name)


@dataclass(slots=True)
class RequestContext:
    """The client of one connection, with the services; created once per connection."""

    services: Services
    client_host: str
    reached_at: Address
    client_software: tuple[str, str] = ("", "")
    cursors: Cursors = field(default_factory=dict)  # positions of this connection in views

    @property
    def address(self) -> Address:
        """The advertised address: as configured, else the address that the client connected to."""
        return self.services.settings.advertise or self.reached_at

    # The following implement GroupContext of broker/handlers/groups.py.

    @property
    def coordinator(self) -> GroupCoordinator:
        """Return the groups of this broker."""
        return self.services.groups

    @property
    def node_id(self) -> int:
        """Return the id of this broker."""
        return self.services.node_id

    @property
    def host(self) -> str:
        """Return the advertised host."""
        return self.address.host

    @property
    def port(self) -> int:
        """Return the advertised port."""
        return self.address.port

    async def wait_offsets_topic(self) -> ErrorCode:
        """Create __consumer_offsets if there is none."""
        return await self.services.offsets_topic.ensure()

    def partition_count(self, topic: str) -> int | None:
        """Return the number of partitions of a topic or view; None if there is none."""
        topic_or_view = self.services.topic(topic)
        return None if topic_or_view is None else topic_or_view.partition_count

    def topic_name(self, topic_id: bytes) -> str | None:
        """Return the name of the topic or view with this id; None if there is none."""
        topic = self.services.topics.by_id(topic_id) or self.services.views.by_id(topic_id)
        return None if topic is None else topic.name

    def topic_id(self, name: str) -> bytes | None:
        """Return the id of the topic or view with this name; None if there is none."""
        topic = self.services.topic(name)
        return None if topic is None else topic.topic_id

    def wall_ms(self) -> int:
        """Return the wall time in milliseconds since 1970."""
        return self.services.env.wall_ms()
