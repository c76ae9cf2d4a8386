"""Topic configs: typed values, the source of each value, and which source takes precedence.

The settings file, CreateTopics, AlterConfigs, DescribeConfigs and docs/reference/configuration.md
use this module. The table is in table.py and the check of one value in values.py;
import both from here.

Rules
- A value in a layer is the canonical Kafka string that `parse_value` returned.
- Precedence, highest first: dynamic topic config (AlterConfigs), the topic in the settings file,
  dynamic broker config, `topic_defaults`, built-in default.
- Ranges apply to clients and to the settings file. `TopicConfig` accepts any value: tests build
  logs with tiny segments.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Final, NamedTuple

from config.topics.table import (
    DAY_MS,
    INT_MAX,
    LONG_MAX,
    MIB,
    TOPIC_KEYS,
    Effect,
    TopicKey,
    ValueKind,
)
from config.topics.values import InvalidTopicConfigError, parse_value, unknown_config

__all__ = [
    "INT_MAX",
    "LONG_MAX",
    "TOPIC_KEYS",
    "ConfigEntry",
    "ConfigSource",
    "ConfigSynonym",
    "Effect",
    "InvalidTopicConfigError",
    "TopicConfig",
    "TopicKey",
    "TopicLayers",
    "ValueKind",
    "check",
    "describe",
    "parse_value",
    "resolve",
    "unknown_config",
]


# The broker grants I/O to the workers every 50 ms; at a lower rate, cleaning would advance in
# visible steps. The limits of the settings file have the same minimum (config/settings.py).
CLEANER_RATE_MIN: Final = 64 << 10


class ConfigSource(IntEnum):
    """The source of a value; the numbers are those of `config_source` in DescribeConfigs.

    The config of a topic in the settings file counts as STATIC_BROKER, because a client cannot
    delete it there.
    """

    UNKNOWN = 0  # of a cleanup policy that is unknown
    DYNAMIC_TOPIC = 1
    DYNAMIC_BROKER = 2
    STATIC_BROKER = 4
    DEFAULT = 5
    LOGGER = 6


# With both, a segment has 1.3 MiB when an index is full. Otherwise the owner of a topic could let
# it roll at each batch, and have indexes in memory that are as large as a quarter of the log.
INDEX_INTERVAL_BYTES_MIN: Final = 1 << 10
SEGMENT_INDEX_BYTES_MIN: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The resolved, typed configs of one topic. A test compares the defaults with the table.

    Accepts any value: only `parse_value` and `resolve` check ranges.
    """

    cleanup_policy: tuple[str, ...] = ("delete",)
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = LONG_MAX
    delete_retention_ms: int = DAY_MS
    retention_ms: int = 7 * DAY_MS
    retention_bytes: int = -1
    file_delete_delay_ms: int = 60_000
    segment_bytes: int = 1 << 30
    segment_ms: int = 7 * DAY_MS
    segment_jitter_ms: int = 0
    segment_index_bytes: int = 10 * MIB
    index_interval_bytes: int = 4096
    flush_messages: int = LONG_MAX
    flush_ms: int = LONG_MAX
    max_message_bytes: int = 1_048_588
    compression_type: str = "producer"
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9
    compression_zstd_level: int = 3
    message_timestamp_type: str = "CreateTime"
    message_timestamp_before_max_ms: int = LONG_MAX
    message_timestamp_after_max_ms: int = 3_600_000
    preallocate: bool = False
    min_insync_replicas: int = 1
    unclean_leader_election_enable: bool = False
    varve_flush_on_ack: bool = False
    varve_cleaner_engine: str = "default"
    varve_cleaner_strategy: str = "default"
    varve_compaction_slack: float = 0.5
    varve_cleaner_io_max_bytes_per_second: int = -1
    varve_decompressed_batch_bytes: int = 64 * MIB
    varve_view: str = "none"
    varve_view_min_bytes: int = 64 * MIB
    varve_view_null_key: str = "keep"
    varve_view_strategy: str = "offset"
    varve_view_version_header: str = ""
    policy_known: bool = True  # False for a folder taken over: do not clean it, do not expire it

    @property
    def is_offloaded(self) -> bool | None:
        """Return whether the topic chooses or forbids offloading; None leaves it to the size."""
        return {"spark": True, "local": False}.get(self.varve_cleaner_engine)

    @property
    def compacts(self) -> bool:
        """Return whether the cleaner compacts the topic."""
        return self.policy_known and "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        """Return whether retention by time and size applies."""
        return self.policy_known and "delete" in self.cleanup_policy

    @property
    def cleaner_bytes_per_second_max(self) -> int | None:
        """Return the maximum bytes per second that cleaning reads and writes; None for no limit."""
        limit = self.varve_cleaner_io_max_bytes_per_second
        return limit if limit > 0 else None

    @property
    def has_view(self) -> bool:
        """Return whether the topic has a compacted view."""
        return self.varve_view == "compacted"


class ConfigSynonym(NamedTuple):
    """One source of a value. DescribeConfigs lists them with the effective one first."""

    name: str
    value: str
    source: ConfigSource


class ConfigEntry(NamedTuple):
    """One row of DescribeConfigs."""

    name: str
    value: str | None
    source: ConfigSource
    is_default: bool
    synonyms: tuple[ConfigSynonym, ...]
    kind: ValueKind
    text: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class TopicLayers:
    """The configs that were set for one topic, by layer, as canonical strings.

    The keys are topic config names, except in `broker_dynamic`: it has Kafka's broker-wide names
    (`log.cleaner.min.cleanable.ratio`), as clients set them on the broker (broker_keys.py).
    """

    dynamic: Mapping[str, str] = field(default_factory=dict)
    yaml: Mapping[str, str] = field(default_factory=dict)
    topic_defaults: Mapping[str, str] = field(default_factory=dict)
    broker_dynamic: Mapping[str, str] = field(default_factory=dict)
    # The policy is unknown until someone sets it:
    taken_over: bool = False  # a folder found on disk
    left_by_file: bool = False  # see `is_left_by_file`


def resolve(layers: TopicLayers) -> TopicConfig:
    """Return the typed configs of a topic. Raises InvalidTopicConfigError for contradictions."""
    values = {key: synonyms[0].value for key, synonyms in _resolved(layers)}
    typed = {
        key.field_name: _typed(key, values[key.name])
        for key in TOPIC_KEYS.values()
        if key.field_name in _FIELD_NAMES
    }
    for key_name, minimum in (
        ("index.interval.bytes", INDEX_INTERVAL_BYTES_MIN),
        ("segment.index.bytes", SEGMENT_INDEX_BYTES_MIN),
    ):
        typed[TOPIC_KEYS[key_name].field_name] = max(int(values[key_name]), minimum)
    config = TopicConfig(**typed, policy_known=policy_known(layers))  # type: ignore[arg-type]
    check(config, remote_storage=values["remote.storage.enable"] == "true")
    return config


def policy_known(layers: TopicLayers) -> bool:
    """Return whether the cleanup policy was set for this topic itself; defaults do not count."""
    if layers.left_by_file:
        return False
    return not layers.taken_over or "cleanup.policy" in {**layers.yaml, **layers.dynamic}


def retention_of_file(layers: TopicLayers) -> dict[str, str]:
    """Return the configs with which the settings file decides what is deleted from a topic.

    A view that is switched off loses records that the log has no more.
    """
    if not policy_known(layers):
        return {}
    return {
        name: values[0].value
        for name in ("cleanup.policy", "retention.ms", "varve.view")
        if (values := _set_values(layers, TOPIC_KEYS[name]))
        and values[0].source is ConfigSource.STATIC_BROKER
    }


def is_left_by_file(layers: TopicLayers, former: Mapping[str, str]) -> bool:
    """Return whether built-in defaults would delete what the settings file used to keep.

    `former`: what `retention_of_file` returned at an earlier start or reload.
    """
    unset = {name for name in former if not _set_values(layers, TOPIC_KEYS[name])}
    policies = _set_values(layers, TOPIC_KEYS["cleanup.policy"])
    default = TOPIC_KEYS["cleanup.policy"].default
    policy = policies[0].value if policies else default
    retention_ms = int(TOPIC_KEYS["retention.ms"].default)
    if "varve.view" in unset and former["varve.view"] != TOPIC_KEYS["varve.view"].default:
        return True
    return ("cleanup.policy" in unset and former["cleanup.policy"] != default) or (
        "delete" in policy.split(",")
        and "retention.ms" in unset
        and not 0 <= int(former["retention.ms"]) <= retention_ms
    )


def check(config: TopicConfig, *, remote_storage: bool = False) -> None:
    """Raise InvalidTopicConfigError if values contradict each other."""
    if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
        raise InvalidTopicConfigError(
            "min.compaction.lag.ms",
            f"{config.min_compaction_lag_ms} is above max.compaction.lag.ms, "
            f"{config.max_compaction_lag_ms}",
        )
    limit = config.varve_cleaner_io_max_bytes_per_second
    if limit != -1 and limit < CLEANER_RATE_MIN:
        raise InvalidTopicConfigError(
            "varve.cleaner.io.max.bytes.per.second",
            f"{limit} is below the minimum of {CLEANER_RATE_MIN}; use -1 for no limit",
        )
    if config.varve_view_strategy == "header" and not config.varve_view_version_header:
        raise InvalidTopicConfigError(
            "varve.view.version.header", "is required by varve.view.strategy=header"
        )
    if remote_storage:
        raise InvalidTopicConfigError(
            "remote.storage.enable", "must be false: this broker has no tiered storage"
        )


def describe(layers: TopicLayers) -> list[ConfigEntry]:
    """Return the rows of DescribeConfigs for a topic, in the order of the table, unchecked.

    Synonyms start with the effective one. Each has the name that its source uses: the topic config
    name for the topic's own values, the broker-wide name for defaults.
    """
    entries = []
    for name, synonyms in _resolved(layers):
        key, winner = TOPIC_KEYS[name], synonyms[0]
        is_default = winner.source is ConfigSource.DEFAULT
        entries.append(
            ConfigEntry(name, winner.value, winner.source, is_default, synonyms, key.kind, key.text)
        )
    return entries


_FIELD_NAMES: Final = frozenset(field_.name for field_ in fields(TopicConfig))


def _resolved(layers: TopicLayers) -> Iterator[tuple[str, tuple[ConfigSynonym, ...]]]:
    policy = _set_values(layers, TOPIC_KEYS["cleanup.policy"])
    compacts = "compact" in (policy[0].value if policy else "").split(",")
    for key in TOPIC_KEYS.values():
        builtin = _compact_default(layers, key) if compacts else key.default
        default = ConfigSynonym(key.synonym, builtin, ConfigSource.DEFAULT)
        yield key.name, (*_set_values(layers, key), default)


def _set_values(layers: TopicLayers, key: TopicKey) -> list[ConfigSynonym]:
    if key.name == "cleanup.policy" and not policy_known(layers):
        # An empty policy keeps everything. Show it instead of a default.
        return [ConfigSynonym(key.name, "", ConfigSource.UNKNOWN)]
    places = (
        (layers.dynamic, key.name, key.name, ConfigSource.DYNAMIC_TOPIC),
        (layers.yaml, key.name, key.name, ConfigSource.STATIC_BROKER),
        (layers.broker_dynamic, key.synonym, key.synonym, ConfigSource.DYNAMIC_BROKER),
        (layers.topic_defaults, key.name, key.synonym, ConfigSource.STATIC_BROKER),
    )
    return [
        ConfigSynonym(shown_name, values[name], source)
        for values, name, shown_name, source in places
        if name in values
    ]


def _compact_default(layers: TopicLayers, key: TopicKey) -> str:
    """Return the default of a compacted topic; it never contradicts a value that was set."""
    if key.compact_default is None:
        return key.default
    default = int(key.compact_default)
    if key.name == "max.compaction.lag.ms":
        default = min(default + _set_number(layers, "min.compaction.lag.ms"), LONG_MAX)
    if key.name == "segment.bytes":
        default = max(default, _set_number(layers, "max.message.bytes"))
    return str(default)


def _set_number(layers: TopicLayers, name: str) -> int:
    values = _set_values(layers, TOPIC_KEYS[name])
    return int(values[0].value if values else TOPIC_KEYS[name].default)


def _typed(key: TopicKey, value: str) -> bool | int | float | str | tuple[str, ...]:
    match key.kind:
        case ValueKind.BOOLEAN:
            return value == "true"
        case ValueKind.INT | ValueKind.LONG:
            return int(value)
        case ValueKind.DOUBLE:
            return float(value)
        case ValueKind.LIST:
            return tuple(value.split(",")) if value else ()
        case ValueKind.STRING:
            return value
