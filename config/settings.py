"""The settings file as frozen models: every key with its type and default.

A `Settings` object is always consistent: no two keys contradict each other, no listener is
reachable from other machines unless `allow_insecure` is true, and every topic config is a
canonical Kafka string. This module does not read files (loader.py) and does not know Kafka's
broker-wide names (broker_keys.py).
"""

import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic import field_validator as checks
from pydantic_core import PydanticCustomError

from config.address import (
    Address,
    parse_address,
    parse_kafka_address,
    parse_protocol_address,
)
from config.security.principal_rules import DEFAULT, PrincipalRule, parse_principal_rule
from config.security.secrets import SecretReference, parse_secret
from config.topics.keys import (
    INT_MAX,
    LONG_MAX,
    TOPIC_KEYS,
    InvalidTopicConfigError,
    TopicConfig,
    TopicLayers,
    parse_value,
    resolve,
    unknown_config,
)
from config.topics.names import InvalidTopicNameError, check_new_name, collision_key
from config.units import parse_duration_ms, parse_size

MIB: Final = 1 << 20
# No part of the broker needs this limit, but each partition costs two open files and about 20 KB.
PARTITIONS_PER_TOPIC_MAX: Final = 10_000
SASL_USERS_MAX: Final = 1_000  # of the settings file; the broker salts each at the start, in 5 ms
USER_NAME_LENGTH_MAX: Final = 1_000


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _duration(value: object) -> object:
    return parse_duration_ms(value) if isinstance(value, str) else value


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


_HttpAddress = Annotated[Address, BeforeValidator(parse_address)]
_KafkaAddress = Annotated[Address, BeforeValidator(parse_kafka_address)]
_Bytes = Annotated[int, BeforeValidator(_size)]
_Ms = Annotated[int, BeforeValidator(_duration), Field(ge=0, le=LONG_MAX)]
_PeriodMs = Annotated[int, BeforeValidator(_duration), Field(ge=10, le=INT_MAX)]
_Count = Annotated[int, Field(ge=1, le=INT_MAX)]
_FilePath = Annotated[str, Field(min_length=1, max_length=4096)]


class _Model(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True
    )


class SparkSettings(_Model):
    """Offload to Spark: the master, which partitions to offload, and what the jobs may use."""

    master: Annotated[str, Field(pattern=r"^[!-~]{1,1000}$")] = "local[*]"
    min_bytes: Annotated[_Bytes, Field(ge=0, le=LONG_MAX)] = 5 << 30
    transport: Literal["auto", "disk", "http"] = "auto"
    broker_url: Annotated[str, Field(pattern=r"^https?://[!-~]{1,1000}$")] | None = None
    memory_bytes: Annotated[_Bytes, Field(ge=512 * MIB, le=1 << 40)] = 2 << 30
    task_memory_bytes: Annotated[_Bytes, Field(ge=MIB, le=1 << 40)] = 1 << 30
    timeout_ms: Annotated[_PeriodMs, Field(ge=1_000)] = 21_600_000
    attempts: Annotated[int, Field(ge=1, le=100)] = 3


@dataclass(frozen=True, slots=True)
class OffloadRules:
    """Which partitions a system outside the broker cleans, and which system."""

    by_size: bool  # offload partitions larger than `min_bytes`, unless their topic says otherwise
    min_bytes: int
    system: str  # name of the system, for operators
    target: str  # its address
    attempts: int  # failures in a row after which the workers clean the partition
    timeout_ms: int
    options: SparkSettings  # of the system; a change makes earlier failures void


class CleanerSettings(_Model):
    """The cleaner workers and the resources that they may use."""

    enabled: bool = True
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    dedupe_buffer_bytes: Annotated[_Bytes, Field(ge=MIB, le=64 << 30)] = 128 * MIB
    spill_bytes_max: Annotated[_Bytes, Field(ge=0, le=1 << 50)] = 64 << 30
    read_buffer_bytes: Annotated[_Bytes, Field(ge=64 << 10, le=256 * MIB)] = 4 * MIB
    read_bytes_per_second: Annotated[_Bytes, Field(ge=64 << 10)] | None = None
    write_bytes_per_second: Annotated[_Bytes, Field(ge=64 << 10)] | None = None
    floor_bytes_per_second: Annotated[_Bytes, Field(ge=MIB)] = 64 * MIB
    strategy: Literal["dirty-ratio", "survivorship", "generational"] = "generational"
    survivorship_alpha: Annotated[float, Field(gt=0, le=1)] = 0.3
    verify: bool = False
    backoff_ms: _PeriodMs = 1_000
    retry_backoff_ms: _PeriodMs = 10_000
    retry_backoff_max_ms: _PeriodMs = 3_600_000
    nice: Annotated[int, Field(ge=0, le=19)] = 19
    engine: Literal["local", "spark"] = "local"
    spark: SparkSettings = Field(default_factory=SparkSettings)

    @property
    def offload(self) -> OffloadRules:
        """Return the rules for offloading that these settings imply."""
        return OffloadRules(
            by_size=self.engine == "spark",
            min_bytes=self.spark.min_bytes,
            system="Spark",
            target=self.spark.master,
            attempts=self.spark.attempts,
            timeout_ms=self.spark.timeout_ms,
            options=self.spark,
        )

    @model_validator(mode="after")
    def _agree(self) -> "CleanerSettings":
        if self.retry_backoff_ms > self.retry_backoff_max_ms:
            raise contradiction(
                f"is above retry_backoff_max_ms, {self.retry_backoff_max_ms}", ("retry_backoff_ms",)
            )
        return self


class TopicSettings(_Model):
    """One topic of the settings file: its partition count and its configs, as canonical strings."""

    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_PER_TOPIC_MAX)] | None = None
    keys: Mapping[str, str] = Field(default_factory=dict)

    @checks("keys", mode="before")
    @classmethod
    def _canonical(cls, keys: object) -> dict[str, str]:
        return _canonical_keys(keys)


class TopicDefaults(_Model):
    """The defaults of topics that set nothing else."""

    partitions: Annotated[int, Field(ge=1, le=PARTITIONS_PER_TOPIC_MAX)] = 1
    keys: Mapping[str, str] = Field(default_factory=dict)

    @checks("keys", mode="before")
    @classmethod
    def _canonical(cls, keys: object) -> dict[str, str]:
        return _canonical_keys(keys)


class LimitSettings(_Model):
    """Limits on the memory and files that clients can make the broker use."""

    connections: _Count = 4_096
    connections_per_ip: _Count = INT_MAX
    connection_idle_ms: _PeriodMs = 600_000
    first_request_ms: _PeriodMs = 30_000
    queued_request_bytes: Annotated[_Bytes, Field(ge=MIB, le=LONG_MAX)] = 256 * MIB
    request_bytes: Annotated[_Bytes, Field(ge=1 << 10, le=INT_MAX)] = 100 * MIB
    fetch_bytes: Annotated[_Bytes, Field(ge=1 << 10, le=INT_MAX)] = 55 * MIB
    fetch_sessions: _Count = 1_000
    partitions: _Count = 10_000


class GroupSettings(_Model):
    """Consumer groups and their committed offsets."""

    # Kafka's code has 3000, the server.properties that it ships has 0. With 0 the first poll of a
    # single consumer returns at once; each consumer that starts later costs one short rebalance.
    initial_rebalance_delay_ms: Annotated[_Ms, Field(le=INT_MAX)] = 0
    min_session_timeout_ms: _PeriodMs = 6_000
    max_session_timeout_ms: _PeriodMs = 1_800_000
    # Kafka's group.consumer.session.timeout.ms and group.consumer.heartbeat.interval.ms (KIP-848).
    consumer_session_timeout_ms: _PeriodMs = 45_000
    consumer_heartbeat_interval_ms: _PeriodMs = 5_000
    # Kafka's group.consumer.migration.policy.
    consumer_migration_policy: Literal["bidirectional", "upgrade", "downgrade", "disabled"] = (
        "bidirectional"
    )
    members: _Count = 2_000
    offsets_partitions: Annotated[int, Field(ge=1, le=PARTITIONS_PER_TOPIC_MAX)] = 50
    offsets_retention_minutes: _Count = 10_080
    offsets_retention_check_interval_ms: _PeriodMs = 600_000
    offset_metadata_bytes: Annotated[_Bytes, Field(ge=0, le=MIB)] = 4_096

    @model_validator(mode="after")
    def _agree(self) -> "GroupSettings":
        if self.min_session_timeout_ms > self.max_session_timeout_ms:
            raise contradiction(
                f"is above max_session_timeout_ms, {self.max_session_timeout_ms}",
                ("min_session_timeout_ms",),
            )
        if self.consumer_heartbeat_interval_ms >= self.consumer_session_timeout_ms:
            raise contradiction(  # as in Kafka: members would expire between two heartbeats
                f"is not below consumer_session_timeout_ms, {self.consumer_session_timeout_ms}",
                ("consumer_heartbeat_interval_ms",),
            )
        return self


class TransactionSettings(_Model):
    """Transactional producers and the log of their transactions."""

    state_partitions: Annotated[int, Field(ge=1, le=PARTITIONS_PER_TOPIC_MAX)] = 50
    max_timeout_ms: Annotated[int, Field(ge=1, le=INT_MAX)] = 900_000
    timeout_check_interval_ms: _PeriodMs = 10_000
    id_expiration_ms: Annotated[int, Field(ge=1, le=INT_MAX)] = 604_800_000
    id_expiration_check_interval_ms: _PeriodMs = 3_600_000


class LoggingSettings(_Model):
    """The log lines on standard error, and the audit log."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = "auto"
    audit_level: Literal["info", "off"] = "info"
    audit_file: _FilePath | None = None


class MetricsSettings(_Model):
    """Optional contents of /metrics."""

    exporter_names: bool = False


class TracingSettings(_Model):
    """Traces by OpenTelemetry: where they are sent, and the share of requests that has one."""

    endpoint: Annotated[str, Field(pattern=r"^https?://[!-~]{1,1000}$")] | None = None
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 0.01
    service_name: Annotated[str, Field(min_length=1, max_length=255)] = "varve"


class ListenerSettings(_Model):
    """One listener: its name, protocol, and the addresses to listen on and to advertise."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,40}$")]
    protocol: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
    address: _HttpAddress
    advertise: _HttpAddress | None = None

    def __str__(self) -> str:
        return f"{self.name}://{self.address}"

    @property
    def uses_tls(self) -> bool:
        """Return whether clients connect with TLS."""
        return self.protocol in ("SSL", "SASL_SSL")

    @property
    def uses_sasl(self) -> bool:
        """Return whether clients authenticate with SASL."""
        return self.protocol in ("SASL_PLAINTEXT", "SASL_SSL")


def parse_listener(value: object) -> object:
    """Read PROTOCOL://HOST:PORT or HOST:PORT, or return the keys of a listener unchanged.

    Raises ValueError.
    """
    if isinstance(value, ListenerSettings | Mapping):
        return value
    protocol, address = parse_protocol_address(value)
    return {"name": protocol, "protocol": protocol, "address": address}


_Listener = Annotated[ListenerSettings, BeforeValidator(parse_listener)]
_Secret = Annotated[SecretReference, BeforeValidator(parse_secret)]
_UserName = Annotated[str, Field(min_length=1, max_length=USER_NAME_LENGTH_MAX)]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"]
_ClaimText = Annotated[str, Field(min_length=1, max_length=1_000)]
# Mechanisms whose first message is a reusable secret.
_CLEAR_TEXT_MECHANISMS: Final = frozenset(("PLAIN", "OAUTHBEARER"))


class TlsSettings(_Model):
    """The certificates of the listeners with TLS, and what they demand of clients."""

    certificate_file: _FilePath | None = None
    key_file: _FilePath | None = None
    key_password: Annotated[SecretReference | None, BeforeValidator(parse_secret)] = None
    ca_file: _FilePath | None = None
    client_auth: Literal["none", "requested", "required"] = "none"
    min_version: Literal["TLSv1.2", "TLSv1.3"] = "TLSv1.2"
    principal_mapping_rules: Annotated[
        tuple[Annotated[PrincipalRule, BeforeValidator(parse_principal_rule)], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1, max_length=100),
    ] = (PrincipalRule(DEFAULT),)

    @model_validator(mode="after")
    def _agree(self) -> "TlsSettings":
        if self.client_auth != "none" and self.ca_file is None:
            raise contradiction(
                f"{self.client_auth} needs ca_file, the certificates that sign those of clients",
                ("client_auth",),
            )
        return self


class OauthSettings(_Model):
    """Which tokens the mechanism OAUTHBEARER accepts, and where the keys are that sign them."""

    jwks_file: _FilePath | None = None
    # Without encryption an attacker could add keys, so only loopback may have http.
    jwks_url: (
        Annotated[
            str,
            Field(
                max_length=1_000,
                pattern=r"^(https://|http://(localhost|127\.0\.0\.1|\[::1\])[:/])[!-~]+$",
            ),
        ]
        | None
    ) = None
    jwks_refresh_ms: _PeriodMs = 3_600_000
    issuer: _ClaimText | None = None
    audience: Annotated[
        tuple[_ClaimText, ...], BeforeValidator(_as_tuple), Field(max_length=64)
    ] = ()
    required_scope: _ClaimText | None = None
    principal_claim: _ClaimText = "sub"
    clock_skew_ms: Annotated[_Ms, Field(le=3_600_000)] = 30_000


class SaslSettings(_Model):
    """How clients of SASL listeners authenticate, and the users of the settings file."""

    mechanisms: Annotated[
        tuple[SaslMechanism, ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=8)
    ] = ("SCRAM-SHA-256", "SCRAM-SHA-512")
    users: Annotated[Mapping[_UserName, _Secret], Field(max_length=SASL_USERS_MAX)] = Field(
        default_factory=dict
    )
    # Kafka's connections.max.reauth.ms and connection.failed.authentication.delay.ms.
    max_reauth_ms: Annotated[_Ms, Field(le=LONG_MAX)] = 0
    failure_delay_ms: Annotated[_Ms, Field(le=60_000)] = 100
    oauthbearer: OauthSettings = OauthSettings()

    @model_validator(mode="after")
    def _agree(self) -> "SaslSettings":
        if "OAUTHBEARER" in self.mechanisms:
            oauth = self.oauthbearer
            if (oauth.jwks_file is None) == (oauth.jwks_url is None):
                raise contradiction(
                    "OAUTHBEARER needs either oauthbearer.jwks_file or oauthbearer.jwks_url",
                    ("mechanisms",),
                )
            if not (oauth.audience or oauth.required_scope):
                raise contradiction(
                    "OAUTHBEARER needs oauthbearer.audience or oauthbearer.required_scope: "
                    "otherwise tokens for other services would be valid here",
                    ("mechanisms",),
                )
        return self


def _check_principal(text: str) -> str:
    if not re.fullmatch("[^:]+:.+", text):
        raise ValueError(f"expected a principal such as User:{text[:80] or 'alice'}")
    return text


_Principal = Annotated[str, Field(max_length=4096), AfterValidator(_check_principal)]


class SchemaRegistrySettings(_Model):
    """The schema registry that the console asks, through the broker."""

    url: Annotated[str, Field(pattern=r"^https?://[!-~]{1,1000}$")] | None = None
    user: Annotated[str, Field(min_length=1, max_length=255)] | None = None
    password: _Secret | None = None

    @model_validator(mode="after")
    def _agree(self) -> "SchemaRegistrySettings":
        if (self.user is None) != (self.password is None):
            raise contradiction("set both user and password, or neither", ("password",))
        return self


class AuthorizationSettings(_Model):
    """Whether access control lists apply, and to whom they do not."""

    enabled: bool = False
    super_users: Annotated[
        tuple[_Principal, ...], BeforeValidator(_as_tuple), Field(max_length=1000)
    ] = ()
    allow_everyone_if_no_acl_found: bool = False

    @model_validator(mode="after")
    def _agree(self) -> "AuthorizationSettings":
        if self.enabled and not (self.super_users or self.allow_everyone_if_no_acl_found):
            raise contradiction("without a super user, nobody could add an ACL", ("super_users",))
        return self


class Settings(_Model):
    """The whole settings file."""

    listeners: Annotated[
        tuple[_Listener, ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1, max_length=64),
    ] = (
        ListenerSettings(
            name="PLAINTEXT", protocol="PLAINTEXT", address=Address("127.0.0.1", 9092)
        ),
    )
    advertise: _KafkaAddress | None = None
    tls: TlsSettings = TlsSettings()
    sasl: SaslSettings = SaslSettings()
    authorization: AuthorizationSettings = AuthorizationSettings()
    http: _HttpAddress = Address("127.0.0.1", 9644)
    http_tls: bool = False
    http_users: bool = False
    http_token_file: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    log_dirs: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=4096)], ...],
        BeforeValidator(_as_tuple),
        Field(min_length=1, max_length=64),
    ] = ("./data",)
    allow_insecure: bool = False
    auto_create_topics: bool = True
    delete_topics: bool = True
    topic_defaults: TopicDefaults = TopicDefaults()
    topics: Mapping[str, TopicSettings] = Field(default_factory=dict)
    cleaner: CleanerSettings = CleanerSettings()
    limits: LimitSettings = LimitSettings()
    groups: GroupSettings = GroupSettings()
    transactions: TransactionSettings = TransactionSettings()
    retention_check_interval_ms: _PeriodMs = 300_000
    checkpoint_interval_ms: _PeriodMs = 60_000
    producer_id_expiration_ms: _PeriodMs = 86_400_000
    shutdown_timeout_ms: _PeriodMs = 30_000
    logging: LoggingSettings = LoggingSettings()
    metrics: MetricsSettings = MetricsSettings()
    tracing: TracingSettings = TracingSettings()
    schema_registry: SchemaRegistrySettings = SchemaRegistrySettings()

    @model_validator(mode="after")
    def _agree(self, info: ValidationInfo) -> "Settings":
        """Check sections against each other, except those that `info.context` calls invalid."""
        invalid = frozenset(info.context or ())
        problems = [
            problem
            for sections, check in _CHECKS.items()
            if invalid.isdisjoint(sections)
            for problem in check(self)
        ]
        if problems:
            raise _error_of(problems)
        return self

    def layers(self, topic: str) -> TopicLayers:
        """Return the layers of one topic that come from the file."""
        own = self.topics.get(topic)
        return TopicLayers(yaml=own.keys if own else {}, topic_defaults=self.topic_defaults.keys)

    def partitions(self, topic: str) -> int:
        """Return the partition count of a new topic whose creator names none."""
        own = self.topics.get(topic)
        return (own.partitions if own else None) or self.topic_defaults.partitions

    def topic_config(self, topic: str) -> TopicConfig:
        """Return the config of one topic according to the file alone."""
        return resolve(self.layers(topic))


# What is wrong, and the paths of the keys that it is about.
Problem: TypeAlias = tuple[str, tuple[tuple[str, ...], ...]]


def _problem(reason: str, *paths: tuple[str, ...]) -> Problem:
    return reason, paths


def contradiction(reason: str, *paths: tuple[str, ...]) -> PydanticCustomError:
    """Return an error about the keys at `paths`, for a check that compares several keys."""
    return _error_of([(reason, paths)])


def _error_of(problems: Sequence[Problem]) -> PydanticCustomError:
    """Return one error with all problems; loader.py shows each."""
    context: dict[str, Any] = {"problems": problems, "reason": problems[0][0]}
    return PydanticCustomError("contradiction", "{reason}", context)


def _canonical_keys(keys: object) -> dict[str, str]:
    if not isinstance(keys, Mapping):
        raise ValueError("expected topic configs and their values")
    canonical: dict[str, str] = {}
    problems: list[Problem] = []
    for key, raw in keys.items():
        try:
            if key in ("compact", "delete"):  # from {cleanup.policy: compact,delete}
                reason = 'write cleanup.policy: "compact,delete" with quotes'
                raise InvalidTopicConfigError(key, reason)
            if key not in TOPIC_KEYS:
                raise unknown_config(str(key), (*TOPIC_KEYS, "partitions"))
            canonical[key] = parse_value(key, raw, units=True)
        except InvalidTopicConfigError as error:
            problems.append(_problem(error.reason, (str(key),)))
    if problems:
        raise _error_of(problems)
    return canonical


def _check_addresses(settings: Settings) -> Iterator[Problem]:
    for listener in settings.listeners:
        yield from _check_listener(settings, listener)
    http = settings.http
    is_authenticated = settings.http_users or settings.http_token_file is not None
    is_protected = settings.http_tls and is_authenticated
    if not (http.is_loopback or is_protected or settings.allow_insecure):
        yield _problem(
            f"{http} can be reached from other machines: set http_tls: true, and http_users: true "
            "or a token in http_token_file; or set allow_insecure: true in the settings file to "
            "accept requests without them",
            ("http",),
        )
    if settings.http_tls and settings.tls.certificate_file is None:
        yield _problem("needs tls.certificate_file", ("http_tls",))
    bound = [*(listener.address for listener in settings.listeners), http]
    fixed = [address for address in bound if address.port]
    for index, address in enumerate(fixed):
        if address in fixed[:index]:
            keys = (("listeners",), ("http",)) if address == settings.http else (("listeners",),)
            yield _problem(f"{address} is used twice", *keys)
    yield from _check_advertised(settings.advertise, "advertise")
    if settings.advertise and len({listener.protocol for listener in settings.listeners}) > 1:
        yield _problem(
            "one address cannot serve several protocols; set `advertise` of each listener instead",
            ("advertise",),
        )


def _check_listener(settings: Settings, listener: ListenerSettings) -> Iterator[Problem]:
    is_protected = listener.address.is_loopback or settings.allow_insecure
    has_certificates = listener.protocol == "SSL" and settings.tls.client_auth == "required"
    if not (listener.uses_sasl or has_certificates or is_protected):
        yield _problem(
            f"{listener.address} can be reached from other machines without authentication: use "
            "SASL_SSL://, or SSL:// with tls.client_auth: required, or set allow_insecure: true in "
            "the settings file to accept this",
            ("listeners",),
        )
    revealed = sorted(_CLEAR_TEXT_MECHANISMS.intersection(settings.sasl.mechanisms))
    if listener.protocol == "SASL_PLAINTEXT" and revealed and not is_protected:
        yield _problem(
            f"{listener.address} can be reached from other machines, and {revealed[0]} sends "
            "secrets without encryption: use SASL_SSL://, or remove it from sasl.mechanisms, or "
            "set allow_insecure: true in the settings file to accept this",
            ("listeners",),
        )
    if listener.uses_tls and settings.tls.certificate_file is None:
        yield _problem(f"{listener} needs tls.certificate_file", ("listeners",))
    names = [other.name for other in settings.listeners if other.protocol != listener.protocol]
    if listener.name in names:
        yield _problem(
            f"two listeners with different protocols are named {listener.name}", ("listeners",)
        )
    yield from _check_advertised(listener.advertise, "listeners")


def _check_advertised(address: Address | None, key: str) -> Iterator[Problem]:
    if address is not None and (address.is_wildcard or not address.port):
        yield _problem(f"{address} is not an address that a client can connect to", (key,))


def _check_log_dirs(settings: Settings) -> Iterator[Problem]:
    folders = [os.path.abspath(path) for path in settings.log_dirs]
    for index, folder in enumerate(folders):
        for other in folders[:index]:
            if folder == other:
                yield _problem(f"{settings.log_dirs[index]} is named twice", ("log_dirs",))
            elif os.path.commonpath((folder, other)) in (folder, other):
                reason = f"one of {folder} and {other} contains the other"
                yield _problem(reason, ("log_dirs",))


def _check_topics(settings: Settings) -> Iterator[Problem]:
    seen: dict[str, str] = {}  # by collision key
    of_defaults = list(_check_resolved(settings, settings.layers(""), "topic_defaults"))
    yield from of_defaults
    for name in settings.topics:
        path = ("topics", name)
        try:
            check_new_name(name)
        except InvalidTopicNameError as error:
            yield _problem(f"topic name {error.reason}", path)
        twin = seen.setdefault(collision_key(name), name)
        if twin != name:
            yield _problem(f"differs from topic {twin} only in '.' and '_'", path)
        if not of_defaults:  # each topic would repeat them
            yield from _check_resolved(settings, settings.layers(name), *path)
    total = sum(settings.partitions(name) for name in settings.topics)
    if total > settings.limits.partitions:
        yield _problem(
            f"the topics have {total} partitions, more than limits.partitions allows "
            f"({settings.limits.partitions})",
            ("topics",),
        )


def _check_resolved(settings: Settings, layers: TopicLayers, *path: str) -> Iterator[Problem]:
    try:
        config = resolve(layers)
    except InvalidTopicConfigError as error:
        yield _problem(error.reason, (*path, error.key))
        return
    if config.max_message_bytes > settings.limits.request_bytes:
        yield _problem(
            f"{config.max_message_bytes} is above limits.request_bytes, "
            f"{settings.limits.request_bytes}: the broker could not receive such a batch",
            (*path, "max.message.bytes"),
        )


# The sections that a check reads, and the check.
_CHECKS: Final[dict[tuple[str, ...], Callable[[Settings], Iterator[Problem]]]] = {
    (
        "listeners",
        "advertise",
        "tls",
        "sasl",
        "http",
        "http_tls",
        "http_users",
        "http_token_file",
        "allow_insecure",
    ): _check_addresses,
    ("log_dirs",): _check_log_dirs,
    ("topics", "topic_defaults", "limits"): _check_topics,
}
