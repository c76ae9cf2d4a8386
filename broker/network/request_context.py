"""The parts of the broker that request handlers use, and the client of a request."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from broker.coordinators import Coordinators
from broker.counters import BrokerStats
from broker.damage.damaged_reads import DamageWatch
from broker.event_loop.directory_threads import DirectoryThreads
from broker.event_loop.fair_slots import FairSlots
from broker.event_loop.loop_turns import FreedLater
from broker.event_loop.unpack_threads import UnpackThreads
from broker.features import GROUP_VERSION, levels
from broker.groups.coordinator import GroupCoordinator
from broker.groups.topic_regex import EVERYTHING, TopicViewer
from broker.inspection.keyless_records import KeylessSampler
from broker.inspection.record_reader import RecordReader
from broker.network.fetch_sessions import FetchSessions
from broker.network.response_memory import ResponseMemory
from broker.quotas.client_quotas import ClientMeters, ClientQuotas
from broker.security.acls import CLUSTER_NAME, WILDCARD, Operation, ResourceType
from broker.security.audit import log_denied
from broker.security.authorizer import Authorizer
from broker.security.principal import ANONYMOUS, Principal, client_of
from broker.security.sasl import Authentication
from broker.topics.checkpoint_writer import CheckpointWriter
from broker.topics.cold_reads import ColdReads
from broker.topics.effective_settings import EffectiveSettings
from broker.topics.index_loads import IndexLoads
from broker.topics.metadata_service import MetadataService
from broker.topics.metadata_writer import MetadataWriter
from broker.topics.partition import Partition
from broker.topics.producer_ids import ProducerIds
from broker.topics.replica_moves import ReplicaMoves
from broker.topics.topics import Topic, Topics
from broker.transactions.coordinator import TransactionCoordinator
from broker.views.view_partition import ViewPartition
from broker.views.views import ViewCursors, Views, ViewTopic
from config.address import Address
from config.settings import ListenerSettings, Settings
from config.topics.names import NAME_LENGTH_MAX, RESERVED_SUFFIX
from protocol.errors import ErrorCode
from protocol.limits import RequestLimits
from storage.env import Env
from storage.manager.log_manager import LogManager


@dataclass(slots=True)
class Services:
    """The parts of the running broker that requests use, of Kafka clients and over HTTP."""

    settings: Settings
    env: Env
    manager: LogManager
    topics: Topics
    effective_settings: EffectiveSettings
    metadata_service: MetadataService
    metadata_writer: MetadataWriter
    authentication: Authentication
    producer_ids: ProducerIds
    views: Views
    coordinators: Coordinators
    sessions: FetchSessions
    stats: BrokerStats
    limits: RequestLimits
    damage: DamageWatch
    quotas: ClientQuotas
    moves: ReplicaMoves
    checkpoint_writer: CheckpointWriter
    unpack_threads: UnpackThreads
    directory_threads: DirectoryThreads
    index_loads: IndexLoads
    cold_reads: ColdReads
    record_reader: RecordReader
    keyless: KeylessSampler
    # Fetches of many partitions that read them at the same time, one of a client. Each takes a turn
    # in a round of the event loop, and more at a time are not faster: they share its thread.
    wide_fetches: FairSlots = field(default_factory=partial(FairSlots, 2))
    freed_later: FreedLater = field(default_factory=FreedLater)
    authorizer: Authorizer = field(init=False)  # set when the metadata is read

    @property
    def cluster_id(self) -> str:
        """Return the id of the cluster, which consists of this broker."""
        return self.manager.metadata.cluster_id

    @property
    def node_id(self) -> int:
        """Return the id of this broker."""
        return self.manager.metadata.node_id

    def allows(
        self, principal: Principal, host: str, operation: Operation, kind: ResourceType, name: str
    ) -> bool:
        """Return whether a client at address `host` may perform an operation on a resource.

        The permissions of a compacted view are those of its topic.
        """
        if kind is ResourceType.TOPIC:
            name = self.source_topic(name)
        return self.authorizer.allows(principal, host, operation, kind, name)

    def source_topic(self, name: str) -> str:
        """Return the topic of a view's name; otherwise the name itself."""
        if name.endswith(RESERVED_SUFFIX) and name not in self.topics:
            return name.removesuffix(RESERVED_SUFFIX)
        return name

    def readable(self, topic: str | bytes, index: int) -> Partition | ViewPartition | ErrorCode:
        """Return the partition of a topic or view by name or id, or the error."""
        partition_or_error = self.topics.find(topic, index)
        if isinstance(partition_or_error, Partition):
            return partition_or_error
        view = self.views.find(topic, index)
        if not isinstance(view, ViewPartition):
            return partition_or_error
        # Clients fetch metadata and try again, as for a leader that has moved.
        return ErrorCode.NOT_LEADER_OR_FOLLOWER if view.is_opening else view

    def topic(self, name: str) -> Topic | ViewTopic | None:
        """Return the topic or view with this name."""
        return self.topics.get(name) or self.views.get(name)


# The topics that a connection may write or read, until the entries change: a check of Produce or
# Fetch is a look into a set. 100 take 15 KB; beyond that the authorizer decides again.
PERMITTED_MAX: Final = 100


@dataclass(slots=True)
class _Permitted:
    """The operations on topics that a principal was allowed with one state of the entries."""

    by: Principal
    generation: int
    topics: set[tuple[Operation, str | bytes]] = field(default_factory=set)


@dataclass(slots=True)
class RequestContext:
    """The client of one connection, with the services; created once per connection."""

    services: Services
    client_host: str
    reached_at: Address
    listener: ListenerSettings
    mute: Callable[[float], None]  # read no request for this many seconds (KIP-219)
    principal: Principal = ANONYMOUS
    has_left: Callable[[], bool] = lambda: False  # whether the client has closed the connection
    # Of the response that is being encoded; None for a request that came without a frame.
    response_memory: ResponseMemory | None = None
    cursors: ViewCursors = field(default_factory=ViewCursors)  # of this connection
    meters: ClientMeters | None = None  # of the present request; None if no quota is enforced
    _permitted: _Permitted = field(default_factory=lambda: _Permitted(ANONYMOUS, -1))

    @property
    def address(self) -> Address:
        """Return the advertised address; without one, the address that the client reached."""
        return self.listener.advertise or self.services.settings.advertise or self.reached_at

    def may(
        self,
        operation: Operation,
        resource_type: ResourceType,
        name: str,
        *,
        is_filter: bool = False,
    ) -> bool:
        """Return whether the client may perform an operation on a resource.

        A denial is logged, except with `is_filter`: the client did not name the resource.
        """
        principal, host = self.principal, self.client_host
        if self.services.authorizer.allows(principal, host, operation, resource_type, name):
            return True
        if not is_filter:
            log_denied(principal, host, operation, resource_type, name)
        return False

    def may_topic(self, operation: Operation, topic: str, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on a topic.

        The permissions of a compacted view are those of its topic.
        """
        source = self.services.source_topic(topic)
        return self.may(operation, ResourceType.TOPIC, source, is_filter=is_filter)

    def may_group(self, operation: Operation, group_id: str, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on a group."""
        return self.may(operation, ResourceType.GROUP, group_id, is_filter=is_filter)

    def may_ref(self, operation: Operation, topic: str | bytes) -> bool:
        """Return whether the client may perform an operation on a topic, by its name or id.

        Return True for an unknown id: the caller answers UNKNOWN_TOPIC_ID, which reveals nothing.
        """
        authorizer = self.services.authorizer
        if not authorizer.is_enabled:
            return True
        permitted = self._permitted
        if permitted.generation == authorizer.generation and permitted.by is self.principal:
            if (operation, topic) in permitted.topics:
                return True
        else:
            permitted = self._permitted = _Permitted(self.principal, authorizer.generation)
        name = topic if isinstance(topic, str) else self.topic_name(topic)
        if name is None:
            return True
        is_allowed = self.may_topic(operation, name)
        if is_allowed and len(name) <= NAME_LENGTH_MAX:
            if len(permitted.topics) >= PERMITTED_MAX:
                permitted.topics.clear()
            permitted.topics.add((operation, topic))
        return is_allowed

    def may_some(self, operation: Operation, resource_type: ResourceType) -> bool:
        """Return whether the client may perform an operation on some resource of a type."""
        principal, host = self.principal, self.client_host
        if self.services.authorizer.allows_some(principal, host, operation, resource_type):
            return True
        log_denied(principal, host, operation, resource_type, WILDCARD)
        return False

    def may_cluster(self, operation: Operation, *, is_filter: bool = False) -> bool:
        """Return whether the client may perform an operation on the cluster."""
        return self.may(operation, ResourceType.CLUSTER, CLUSTER_NAME, is_filter=is_filter)

    def may_write_markers(self, *, is_filter: bool = False) -> bool:
        """Return whether the client may send WriteTxnMarkers, as brokers may."""
        return self.may_cluster(Operation.ALTER, is_filter=True) or self.may_cluster(
            Operation.CLUSTER_ACTION, is_filter=is_filter
        )

    def topic_operations(self, topic: str) -> int:
        """Return what the client may do with a topic or view, as bits of Operation."""
        return self._operations(ResourceType.TOPIC, self.services.source_topic(topic))

    def group_operations(self, group_id: str) -> int:
        """Return what the client may do with a group, as bits of Operation."""
        return self._operations(ResourceType.GROUP, group_id)

    def cluster_operations(self) -> int:
        """Return what the client may do with the cluster; 0 if it may not describe it."""
        if not self.may_cluster(Operation.DESCRIBE, is_filter=True):
            return 0
        return self._operations(ResourceType.CLUSTER, CLUSTER_NAME)

    def _operations(self, resource_type: ResourceType, name: str) -> int:
        return self.services.authorizer.allowed_operations(
            self.principal, self.client_host, resource_type, name
        )

    def find_meters(self, client_id: str | None) -> ClientMeters:
        """Return the meters of the client that sent the present request."""
        self.meters = self.services.quotas.meters(self.principal.name, client_id or "")
        return self.meters

    def throttle(self, milliseconds: int) -> int:
        """Mute the connection for the throttle time of a response; return that time."""
        if milliseconds:
            self.mute(milliseconds / 1000)
        return milliseconds

    @property
    def java_client_host(self) -> str:
        """Return the client's address as Kafka's tools expect it.

        Java prints an address without a name with a slash.
        """
        host = self.client_host
        return host if host.startswith("/") else f"/{host}"

    @property
    def client(self) -> Hashable:
        """Return the client among which places are shared."""
        return client_of(self.principal, self.client_host)

    @property
    def creator(self) -> Principal | None:
        """Return who creates groups and transactional ids; None without authorization."""
        return self.principal if self.services.authorizer.is_enabled else None

    @property
    def viewer(self) -> TopicViewer:
        """Return which topics the client may describe, for regular expressions of groups."""
        if not self.services.authorizer.is_enabled:
            return replace(EVERYTHING, client=self.client, has_left=self.has_left)
        return TopicViewer(
            (self.principal, self.client_host),
            self.client,
            lambda topic: self.may_topic(Operation.DESCRIBE, topic, is_filter=True),
            self.has_left,
        )

    @property
    def coordinator(self) -> GroupCoordinator:
        """Return the groups of this broker."""
        return self.services.coordinators.groups

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
        return await self.services.coordinators.offsets_topic.ensure()

    async def wait_transaction_topic(self) -> ErrorCode:
        """Create __transaction_state if there is none."""
        return await self.services.coordinators.transaction_topic.ensure()

    @property
    def transactions(self) -> TransactionCoordinator:
        """Return the transactions of this broker."""
        return self.services.coordinators.transactions

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

    @property
    def has_consumer_groups(self) -> bool:
        """Return whether the consumer rebalance protocol is in effect (group.version)."""
        return levels(self.services.manager.metadata.features)[GROUP_VERSION] > 0

    def wall_ms(self) -> int:
        """Return the wall time in milliseconds since 1970."""
        return self.services.env.wall_ms()
