"""Broker configs under Kafka's names: what DescribeConfigs shows and AlterConfigs changes.

Static configs are computed from Settings. Dynamic ones are broker-wide defaults of topic configs
(`log.cleaner.min.cleanable.ratio`), configs of the cleaner (`log.cleaner.threads`) and limits
(`max.connections`); a stored dynamic value overrides the file. Names, kinds and ranges are those
of Apache Kafka 4.3.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from config.settings import CleanerSettings, Settings
from config.topics.keys import (
    INT_MAX,
    LONG_MAX,
    TOPIC_KEYS,
    ConfigEntry,
    ConfigSource,
    ConfigSynonym,
    InvalidTopicConfigError,
    TopicKey,
    ValueKind,
    parse_value,
)

# Java's text of the largest double, which is Kafka's default: no limit.
UNLIMITED: Final = "1.7976931348623157E308"
QUOTA_SAMPLES: Final = 11  # broker/quotas/rates.py
OFFSETS_SEGMENT_BYTES: Final = 100 << 20  # offsets.topic.segment.bytes
AUTHORIZER_CLASS: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
PROTOCOL_VERSION: Final = "4.3-IV0"  # the newest Kafka version whose requests are supported
STORED_ONLY: Final = "Accepted and stored for compatibility with tools; has no effect."
_MIB: Final = 1 << 20
_NOT_BROKER_WIDE: Final = ("remote.", "leader.", "follower.")


@dataclass(frozen=True, slots=True)
class BrokerKey:
    """One broker config. `value` computes it from the settings file and the built-in defaults."""

    name: str
    kind: ValueKind
    value: Callable[[Settings], str | None]
    text: str
    dynamic: bool = False
    minimum: float = 0
    maximum: float = LONG_MAX


def _static_keys() -> Iterator[BrokerKey]:
    integer, long, lists, boolean = (
        ValueKind.INT, ValueKind.LONG, ValueKind.LIST, ValueKind.BOOLEAN,
    )  # fmt: skip
    rows: tuple[tuple[str, ValueKind, Callable[[Settings], str | None], str], ...] = (
        ("listeners", lists, lambda s: ",".join(map(str, s.listeners)), "Where clients connect."),
        ("advertised.listeners", lists, _advertised,
         "The address that clients connect to; for a wildcard, the address that they reached."),
        ("listener.security.protocol.map", ValueKind.STRING, _protocol_map,
         "The protocol of each listener."),
        ("ssl.client.auth", ValueKind.STRING, lambda s: s.tls.client_auth,
         "Whether clients need a certificate."),
        ("sasl.enabled.mechanisms", lists, lambda s: ",".join(s.sasl.mechanisms),
         "How clients of SASL listeners may authenticate."),
        ("connections.max.reauth.ms", long, lambda s: str(s.sasl.max_reauth_ms),
         "How long an authentication is valid; 0 for ever."),
        ("connection.failed.authentication.delay.ms", integer,
         lambda s: str(s.sasl.failure_delay_ms),
         "How long the broker delays the response to a failed authentication."),
        ("ssl.principal.mapping.rules", ValueKind.STRING,
         lambda s: ",".join(map(str, s.tls.principal_mapping_rules)),
         "Rules that turn the name of a client's certificate into its principal."),
        ("log.dirs", lists, lambda s: ",".join(s.log_dirs), "Data directories."),
        ("log.dir", lists, lambda _: None, "Always empty: log.dirs names the data directories."),
        ("process.roles", lists, lambda _: "broker,controller",
         "The roles of this node, which is a cluster of its own."),
        ("broker.rack", ValueKind.STRING, lambda _: None, "Always empty: a single node."),
        ("controller.quorum.voters", lists, lambda _: "", "Always empty: a single node."),
        ("controller.listener.names", lists, lambda _: "", "Always empty: a single node."),
        ("inter.broker.listener.name", ValueKind.STRING, lambda _: None,
         "Always empty: a single node."),
        ("security.inter.broker.protocol", ValueKind.STRING, lambda _: "PLAINTEXT",
         "Without effect: a single node."),
        ("auto.leader.rebalance.enable", boolean, lambda _: "false",
         "Always false: a single node."),
        ("remote.log.storage.system.enable", boolean, lambda _: "false",
         "Always false: there is no tiered storage."),
        ("auto.create.topics.enable", boolean, lambda s: _java(s.auto_create_topics),
         "Create a topic when a client first uses it."),
        ("delete.topic.enable", boolean, lambda s: _java(s.delete_topics),
         "Clients may delete topics."),
        ("num.partitions", integer, lambda s: str(s.topic_defaults.partitions),
         "Partitions of a new topic whose creator names no number."),
        ("default.replication.factor", integer, lambda _: "1", "Always one: a single node."),
        ("inter.broker.protocol.version", ValueKind.STRING, lambda _: PROTOCOL_VERSION,
         "Kafka version whose protocol the broker supports, for tools that ask."),
        ("authorizer.class.name", ValueKind.STRING,
         lambda s: AUTHORIZER_CLASS if s.authorization.enabled else "",
         "Kafka's authorizer, whose rules apply, or empty without authorization."),
        ("super.users", ValueKind.STRING, lambda s: ";".join(s.authorization.super_users),
         "Principals that may do everything."),
        ("allow.everyone.if.no.acl.found", boolean,
         lambda s: _java(s.authorization.allow_everyone_if_no_acl_found),
         "Whether everyone may use a resource that has no ACL."),
        ("log.cleaner.enable", boolean, lambda s: _java(s.cleaner.enabled), "Run the cleaner."),
        ("log.cleaner.io.buffer.load.factor", ValueKind.DOUBLE, lambda _: "0.9",
         "How full the key map of a clean may get; fixed."),
        ("log.retention.hours", integer, lambda s: _in_units(s, "retention.ms", 3_600_000),
         "retention.ms of the settings file in hours; log.retention.ms is the exact value."),
        ("log.retention.minutes", integer, lambda _: None,
         "Always empty: log.retention.ms is the exact value."),
        ("log.roll.hours", integer, lambda s: _in_units(s, "segment.ms", 3_600_000),
         "segment.ms of the settings file in hours; log.roll.ms is the exact value."),
        ("log.roll.jitter.hours", integer, lambda s: _in_units(s, "segment.jitter.ms", 3_600_000),
         "segment.jitter.ms of the settings file in hours."),
        ("quota.window.num", integer, lambda _: str(QUOTA_SAMPLES),
         "Samples of the rate of a client quota."),
        ("quota.window.size.seconds", integer, lambda _: "1", "Length of a sample."),
        ("controller.quota.window.num", integer, lambda _: str(QUOTA_SAMPLES),
         "Seconds of changes that a client may make at once."),
        ("controller.quota.window.size.seconds", integer, lambda _: "1", "Length of a sample."),
        ("max.request.partition.size.limit", integer, lambda _: "2000",
         "Maximum number of partitions in a response of DescribeTopicPartitions."),
        ("log.retention.check.interval.ms", long, lambda s: str(s.retention_check_interval_ms),
         "How often the broker checks retention."),
        ("log.flush.offset.checkpoint.interval.ms", integer,
         lambda s: str(s.checkpoint_interval_ms), "How often recovery points are written."),
        ("log.flush.start.offset.checkpoint.interval.ms", integer,
         lambda s: str(s.checkpoint_interval_ms), "How often log start offsets are written."),
        ("offsets.topic.num.partitions", integer, lambda s: str(s.groups.offsets_partitions),
         "Partitions of __consumer_offsets at its creation."),
        ("offsets.topic.replication.factor", integer, lambda _: "1", "Always one."),
        ("offsets.topic.segment.bytes", integer, lambda _: str(OFFSETS_SEGMENT_BYTES),
         "segment.bytes of __consumer_offsets."),
        ("offsets.retention.minutes", integer, lambda s: str(s.groups.offsets_retention_minutes),
         "How long the offsets of an empty group are kept."),
        ("offsets.retention.check.interval.ms", long,
         lambda s: str(s.groups.offsets_retention_check_interval_ms),
         "How often the broker checks for expired offsets."),
        ("offset.metadata.max.bytes", integer, lambda s: str(s.groups.offset_metadata_bytes),
         "Maximum length of the metadata of a committed offset."),
        ("group.initial.rebalance.delay.ms", integer,
         lambda s: str(s.groups.initial_rebalance_delay_ms),
         "How long an empty group waits for more members."),
        ("group.min.session.timeout.ms", integer, lambda s: str(s.groups.min_session_timeout_ms),
         "Minimum session timeout of a member."),
        ("group.max.session.timeout.ms", integer, lambda s: str(s.groups.max_session_timeout_ms),
         "Maximum session timeout of a member."),
        ("group.consumer.session.timeout.ms", integer,
         lambda s: str(s.groups.consumer_session_timeout_ms),
         "Silence after which a member of the consumer protocol leaves its group."),
        ("group.consumer.heartbeat.interval.ms", integer,
         lambda s: str(s.groups.consumer_heartbeat_interval_ms),
         "How often members of the consumer protocol send a heartbeat."),
        ("group.consumer.migration.policy", ValueKind.STRING,
         lambda s: s.groups.consumer_migration_policy,
         "Whether groups with members may change to the consumer protocol (upgrade), back"
         " (downgrade), both (bidirectional) or not (disabled)."),
        ("group.consumer.assignors", lists, lambda s: "uniform,range",
         "The assignors of the consumer protocol; the first is the default."),
        ("group.coordinator.rebalance.protocols", lists, lambda s: "classic,consumer",
         "The protocols that groups may use."),
        ("group.max.size", integer, lambda s: str(s.groups.members),
         "Maximum number of members of a group."),
        ("transaction.state.log.num.partitions", integer,
         lambda s: str(s.transactions.state_partitions),
         "Partitions of __transaction_state at its creation."),
        ("transaction.state.log.replication.factor", integer, lambda _: "1", "Always one."),
        ("transaction.state.log.min.isr", integer, lambda _: "1", "Always one."),
        ("transaction.state.log.segment.bytes", integer, lambda _: str(OFFSETS_SEGMENT_BYTES),
         "segment.bytes of __transaction_state."),
        ("transaction.max.timeout.ms", integer, lambda s: str(s.transactions.max_timeout_ms),
         "Maximum timeout that a transactional producer may request."),
        ("transaction.abort.timed.out.transaction.cleanup.interval.ms", integer,
         lambda s: str(s.transactions.timeout_check_interval_ms),
         "How often the broker aborts transactions that exceed their timeout."),
        ("transactional.id.expiration.ms", integer, lambda s: str(s.transactions.id_expiration_ms),
         "How long the broker keeps a transactional id that no producer uses."),
        ("transaction.remove.expired.transaction.cleanup.interval.ms", integer,
         lambda s: str(s.transactions.id_expiration_check_interval_ms),
         "How often the broker checks for expired transactional ids."),
        ("transaction.two.phase.commit.enable", boolean, lambda _: "false",
         "Always false: transactions that only their client ends are not supported."),
        ("queued.max.request.bytes", long, lambda s: str(s.limits.queued_request_bytes),
         "Maximum memory for requests that are being received."),
        ("connections.max.idle.ms", long, lambda s: str(s.limits.connection_idle_ms),
         "How long an idle connection stays open."),
        ("socket.request.max.bytes", integer, lambda s: str(s.limits.request_bytes),
         "Maximum size of a request."),
        ("fetch.max.bytes", integer, lambda s: str(s.limits.fetch_bytes),
         "Maximum size of a fetch response."),
        ("max.incremental.fetch.session.cache.slots", integer,
         lambda s: str(s.limits.fetch_sessions), "Maximum number of fetch sessions."),
    )  # fmt: skip
    for name, kind, value, text in rows:
        yield BrokerKey(name, kind, value, text)


def _limit_keys() -> Iterator[BrokerKey]:
    # Kafka allows 0. We do not: no client could then connect to raise the limit again.
    for name, value, text in (
        ("max.connections", lambda s: str(s.limits.connections),
         "Maximum number of connections. A lowered limit closes none."),
        ("max.connections.per.ip", lambda s: str(s.limits.connections_per_ip),
         "Maximum number of connections from one address. A lowered limit closes none."),
        ("max.connection.creation.rate", lambda _: str(INT_MAX),
         "New connections per second, over all clients; those above it wait."),
        ("producer.id.expiration.ms", lambda s: str(s.producer_id_expiration_ms),
         "How long the broker keeps the sequence numbers of an idle producer."),
    ):  # fmt: skip
        yield BrokerKey(name, ValueKind.INT, value, text, True, 1, INT_MAX)
    yield BrokerKey(
        "replica.alter.log.dirs.io.max.bytes.per.second",
        ValueKind.LONG,
        _constant(str(LONG_MAX)),
        "Maximum bytes per second that moves of replicas between data directories copy.",
        True,
        1,
    )


def _cleaner_keys() -> Iterator[BrokerKey]:
    rows: tuple[tuple[str, ValueKind, Callable[[Settings], str], float, float, str], ...] = (
        ("log.cleaner.threads", ValueKind.INT, lambda s: str(s.cleaner.workers), 1, 64,
         "Cleaner worker processes."),
        ("log.cleaner.dedupe.buffer.size", ValueKind.LONG,
         lambda s: str(s.cleaner.dedupe_buffer_bytes * s.cleaner.workers), _MIB, LONG_MAX,
         "Bytes of key maps, over all workers."),
        ("log.cleaner.io.buffer.size", ValueKind.INT,
         lambda s: str(min(s.cleaner.read_buffer_bytes * s.cleaner.workers, INT_MAX)),
         64 << 10, INT_MAX, "Bytes of read buffers, over all workers."),
        ("log.cleaner.io.max.bytes.per.second", ValueKind.DOUBLE, _io_limit, 128 << 10,
         float(UNLIMITED),
         "Maximum bytes per second that the cleaner reads and writes; half for each."),
        ("log.cleaner.backoff.ms", ValueKind.LONG, lambda s: str(s.cleaner.backoff_ms), 10,
         INT_MAX, "How long the cleaner waits when no partition is dirty."),
    )  # fmt: skip
    for name, kind, value, minimum, maximum, text in rows:
        yield BrokerKey(name, kind, value, text, True, minimum, maximum)


def _stored_keys() -> Iterator[BrokerKey]:
    """Yield dynamic configs of Kafka 4.3 for features that this broker does not have.

    Tools set them on every broker of a fleet, so the broker accepts, stores and shows them.
    """
    integer, long, boolean = ValueKind.INT, ValueKind.LONG, ValueKind.BOOLEAN
    for name, kind, default, minimum in (
        ("background.threads", integer, "10", 1),
        ("num.io.threads", integer, "8", 1),
        ("num.network.threads", integer, "3", 1),
        ("num.recovery.threads.per.data.dir", integer, "2", 1),
        ("num.replica.fetchers", integer, "1", 1),
        ("leader.replication.throttled.rate", long, str(LONG_MAX), 0),
        ("follower.replication.throttled.rate", long, str(LONG_MAX), 0),
        ("transaction.partition.verification.enable", boolean, "true", 0),
        ("group.consumer.assignment.interval.ms", integer, "1000", 0),
        ("group.share.assignment.interval.ms", integer, "1000", 0),
        ("group.streams.assignment.interval.ms", integer, "1000", 0),
        ("group.coordinator.cached.buffer.max.bytes", integer, "1048588", 512 << 10),
        ("share.coordinator.cached.buffer.max.bytes", integer, "1048588", 512 << 10),
        ("follower.fetch.last.tiered.offset.enable", boolean, "false", 0),
        ("remote.fetch.max.wait.ms", integer, "500", 1),
        ("remote.list.offsets.request.timeout.ms", long, "30000", 1),
        ("remote.log.index.file.cache.total.size.bytes", long, str(1 << 30), 1),
        ("remote.log.manager.copier.thread.pool.size", integer, "10", 1),
        ("remote.log.manager.copy.max.bytes.per.second", long, str(LONG_MAX), 1),
        ("remote.log.manager.expiration.thread.pool.size", integer, "10", 1),
        ("remote.log.manager.fetch.max.bytes.per.second", long, str(LONG_MAX), 1),
        ("remote.log.manager.follower.thread.pool.size", integer, "2", 1),
        ("remote.log.reader.threads", integer, "10", 1),
    ):
        maximum = INT_MAX if kind is integer else LONG_MAX
        yield BrokerKey(name, kind, _constant(default), STORED_ONLY, True, minimum, maximum)


def _constant(value: str) -> Callable[[Settings], str]:
    return lambda _settings: value


def _topic_default_keys() -> Iterator[BrokerKey]:
    for key in TOPIC_KEYS.values():
        if not key.name.startswith(_NOT_BROKER_WIDE):
            yield BrokerKey(key.synonym, key.kind, _topic_default(key), key.text, True)


def _topic_default(key: TopicKey) -> Callable[[Settings], str]:
    return lambda settings: settings.topic_defaults.keys.get(key.name, key.default)


def _in_units(settings: Settings, key: str, unit: int) -> str:
    """Return a duration in whole units; -1 means for ever."""
    value = int(settings.topic_defaults.keys.get(key, TOPIC_KEYS[key].default))
    return str(min(value // unit, INT_MAX)) if value >= 0 else "-1"


def _io_limit(settings: Settings) -> str:
    read, write = settings.cleaner.read_bytes_per_second, settings.cleaner.write_bytes_per_second
    return UNLIMITED if read is None or write is None else repr(float(read + write))


def _protocol_map(settings: Settings) -> str:
    protocols = {listener.name: listener.protocol for listener in settings.listeners}
    return ",".join(f"{name}:{protocol}" for name, protocol in protocols.items())


def _advertised(settings: Settings) -> str:
    addresses = (
        f"{listener.name}://{listener.advertise or settings.advertise or listener.address}"
        for listener in settings.listeners
    )
    return ",".join(dict.fromkeys(addresses))


def _java(value: bool) -> str:
    return "true" if value else "false"


BROKER_KEYS: Final[dict[str, BrokerKey]] = {
    key.name: key
    for key in (
        *_static_keys(),
        *_limit_keys(),
        *_cleaner_keys(),
        *_stored_keys(),
        *_topic_default_keys(),
    )
}
_TOPIC_KEY_OF: Final = {key.synonym: key.name for key in TOPIC_KEYS.values()}


def topic_key_of(name: str) -> TopicKey | None:
    """Return the topic config of which this broker config is the broker-wide default, if any."""
    return TOPIC_KEYS[_TOPIC_KEY_OF[name]] if name in _TOPIC_KEY_OF else None


def describe_broker(
    settings: Settings, dynamic: Mapping[str, str], *, node_id: int | None = None
) -> list[ConfigEntry]:
    """Return the rows of DescribeConfigs for a broker.

    Stored dynamic values override the file, and the file overrides the defaults.
    """
    defaults = Settings()
    entries = []
    if node_id is not None:
        entries += [_node_entry(name, node_id) for name in ("node.id", "broker.id")]
    for key in BROKER_KEYS.values():
        value, default = key.value(settings), key.value(defaults)
        source = ConfigSource.DEFAULT if value == default else ConfigSource.STATIC_BROKER
        places = [(value, source)]
        if key.name in dynamic:
            places.insert(0, (dynamic[key.name], ConfigSource.DYNAMIC_BROKER))
        if source is not ConfigSource.DEFAULT:
            places.append((default, ConfigSource.DEFAULT))
        entries.append(_entry(key, places))
    return entries


def _entry(key: BrokerKey, places: list[tuple[str | None, ConfigSource]]) -> ConfigEntry:
    value, source = places[0]
    return ConfigEntry(
        name=key.name,
        value=value,
        source=source,
        is_default=source is ConfigSource.DEFAULT,
        synonyms=tuple(ConfigSynonym(key.name, v, s) for v, s in places if v is not None),
        kind=key.kind,
        text=key.text,
        read_only=not key.dynamic,
    )


def _node_entry(name: str, node_id: int) -> ConfigEntry:
    value, source = str(node_id), ConfigSource.STATIC_BROKER
    synonyms = (ConfigSynonym(name, value, source),)
    return ConfigEntry(
        name, value, source, False, synonyms, ValueKind.INT, "Id of this node.", read_only=True
    )


def parse_broker_value(name: str, raw: object) -> str:
    """Return the canonical string of a dynamic broker config.

    Raises InvalidTopicConfigError for a name that is unknown or not dynamic, for a wrong type and
    for a value out of range.
    """
    key = BROKER_KEYS.get(name)
    if key is None:
        raise InvalidTopicConfigError(name[:100], "unknown broker config")
    if not key.dynamic:
        raise InvalidTopicConfigError(name, "cannot be altered while the broker runs")
    if name in _TOPIC_KEY_OF:
        try:
            return parse_value(_TOPIC_KEY_OF[name], raw)
        except InvalidTopicConfigError as error:
            raise InvalidTopicConfigError(name, error.reason) from None
    if key.kind is ValueKind.BOOLEAN:
        text = str(raw).strip().lower()
        if text not in ("true", "false"):
            raise InvalidTopicConfigError(name, f"expected true or false, not {text[:40]!r}")
        return text
    return _number(key, raw)


def _number(key: BrokerKey, raw: object) -> str:
    text = str(raw).strip() if isinstance(raw, int | float | str) else ""
    if len(text) > 40:  # no valid number is longer
        raise InvalidTopicConfigError(key.name, "expected a number")
    try:
        value = float(text) if key.kind is ValueKind.DOUBLE else int(text)
    except ValueError:
        raise InvalidTopicConfigError(key.name, f"expected a number, not {text!r}") from None
    if not key.minimum <= value <= key.maximum:
        raise InvalidTopicConfigError(
            key.name, f"{text} is outside {key.minimum:g} to {key.maximum:g}"
        )
    return repr(value)


@dataclass(frozen=True, slots=True)
class BrokerLimits:
    """The limits that clients may change while the broker runs."""

    connections: int
    connections_per_ip: int
    connection_creation_rate: int | None  # per second; None: unlimited
    producer_id_expiration_ms: int


def broker_limits(settings: Settings, dynamic: Mapping[str, str]) -> BrokerLimits:
    """Return the limits; stored dynamic values override the file."""

    def value(name: str) -> int:
        return int(dynamic.get(name) or BROKER_KEYS[name].value(settings) or 0)

    rate = value("max.connection.creation.rate")
    return BrokerLimits(
        connections=value("max.connections"),
        connections_per_ip=value("max.connections.per.ip"),
        connection_creation_rate=None if rate == INT_MAX else rate,
        producer_id_expiration_ms=value("producer.id.expiration.ms"),
    )


def cleaner_settings(settings: Settings, dynamic: Mapping[str, str]) -> CleanerSettings:
    """Return the settings of the cleaner; stored dynamic values override the file.

    Kafka's sizes are for all threads and are divided among the workers; its one rate is divided
    between reading and writing. Raises InvalidTopicConfigError if a worker would get too little.
    """
    cleaner = settings.cleaner
    changed: dict[str, int | None] = {}
    workers = int(dynamic.get("log.cleaner.threads", cleaner.workers))
    changed["workers"] = workers
    if "log.cleaner.backoff.ms" in dynamic:
        changed["backoff_ms"] = int(dynamic["log.cleaner.backoff.ms"])
    if "log.cleaner.dedupe.buffer.size" in dynamic:
        share = int(dynamic["log.cleaner.dedupe.buffer.size"]) // workers
        if share < _MIB:
            raise InvalidTopicConfigError(
                "log.cleaner.dedupe.buffer.size", f"is below 1 MiB for each of {workers} workers"
            )
        changed["dedupe_buffer_bytes"] = share
    if "log.cleaner.io.buffer.size" in dynamic:
        share = int(dynamic["log.cleaner.io.buffer.size"]) // workers
        changed["read_buffer_bytes"] = max(share, 64 << 10)
    if "log.cleaner.io.max.bytes.per.second" in dynamic:
        rate = float(dynamic["log.cleaner.io.max.bytes.per.second"])
        half = None if rate >= LONG_MAX else int(rate / 2)
        changed["read_bytes_per_second"] = changed["write_bytes_per_second"] = half
    return cleaner.model_copy(update=changed)
