"""What a request handler may use: the parts of the broker, and who is asking."""

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
    """The parts of the running broker that handlers reach."""

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
        """What may be read under a topic's name or id: a partition, or one of a view."""
        partition_or_error = self.topics.find(topic, index)
        if isinstance(partition_or_error, Partition):
            return partition_or_error
        view = self.views.find(topic, index)
        return view if isinstance(view, ViewPartition) else partition_or_error

    def topic(self, name: str) -> Topic | ViewTopic | None:
        """A topic, or a view, by its name."""
        return self.topics.get(name) or self.views.get(name)


@dataclass(slots=True)
class RequestContext:
    """One connection's view of the broker. Cheap: made once per connection."""

    services: Services
    client_host: str
    reached_at: Address
    client_software: tuple[str, str] = ("", "")
    cursors: Cursors = field(default_factory=dict)  # where this connection reads views

    @property
    def address(self) -> Address:
        """Where clients are told to connect: as configured, else the address they came by."""
        return self.services.settings.advertise or self.reached_at

    # What broker/handlers/groups.py asks for.

    @property
    def coordinator(self) -> GroupCoordinator:
        """The groups of this broker."""
        return self.services.groups

    @property
    def node_id(self) -> int:
        """The id of this broker."""
        return self.services.node_id

    @property
    def host(self) -> str:
        """The host by which this client is to reach this broker."""
        return self.address.host

    @property
    def port(self) -> int:
        """The port by which this client is to reach this broker."""
        return self.address.port

    async def wait_offsets_topic(self) -> ErrorCode:
        """Create __consumer_offsets if it is not there yet."""
        return await self.services.offsets_topic.ensure()

    def partition_count(self, topic: str) -> int | None:
        """How many partitions a topic has; None if there is no such topic."""
        result = self.services.topic(topic)
        return result.partition_count if result is not None else None

    def topic_name(self, topic_id: bytes) -> str | None:
        """The name of the topic, or of the view, with this id; None if there is none."""
        topic = self.services.topics.by_id(topic_id) or self.services.views.by_id(topic_id)
        return None if topic is None else topic.name

    def topic_id(self, name: str) -> bytes | None:
        """The id of the topic, or of the view, with this name; None if there is none."""
        topic = self.services.topic(name)
        return None if topic is None else topic.topic_id

    def wall_ms(self) -> int:
        """Milliseconds since 1970."""
        return self.services.env.wall_ms()
