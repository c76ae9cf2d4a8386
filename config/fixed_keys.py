"""Configs of groups, loggers and client metrics, which clients see and cannot change.

Names, kinds and synonyms are those of Apache Kafka 4.3.
"""

from typing import Final

from config.settings import GroupSettings, Settings
from config.topics.keys import ConfigEntry, ConfigSource, ConfigSynonym, ValueKind

ROOT_LOGGER: Final = "root"
# What Kafka shows for a name without a subscription: no metric is requested.
_CLIENT_METRICS: Final = (
    ("interval.ms", "300000", ValueKind.INT, "How often clients would send metrics."),
    ("match", "", ValueKind.LIST, "The clients of the subscription."),
    ("metrics", "", ValueKind.LIST, "The metrics of the subscription: none."),
)


def describe_group(settings: Settings) -> list[ConfigEntry]:
    """Return the configs of a group of the consumer protocol, which are those of all groups."""
    entries, defaults = [], GroupSettings()
    for name, text in (
        ("consumer.session.timeout.ms", "After this silence, a member is removed from the group."),
        ("consumer.heartbeat.interval.ms", "How often members send a heartbeat."),
    ):
        field = name.replace(".", "_")
        value = getattr(settings.groups, field)
        is_default = value == getattr(defaults, field)
        source = ConfigSource.DEFAULT if is_default else ConfigSource.STATIC_BROKER
        entries.append(
            _entry(name, str(value), ValueKind.INT, text, source, synonym=f"group.{name}")
        )
    return entries


def describe_loggers(settings: Settings) -> list[ConfigEntry]:
    """Return the level of the only logger."""
    level = settings.logging.level.upper().replace("WARNING", "WARN")  # as Log4j writes it
    return [
        _entry(ROOT_LOGGER, level, ValueKind.STRING, "The level of the log.", ConfigSource.LOGGER)
    ]


def describe_client_metrics() -> list[ConfigEntry]:
    """Return a subscription to no metric (KIP-714)."""
    return [
        _entry(name, value, kind, text, ConfigSource.DEFAULT)
        for name, value, kind, text in _CLIENT_METRICS
    ]


def _entry(
    name: str,
    value: str,
    kind: ValueKind,
    text: str,
    source: ConfigSource,
    *,
    synonym: str | None = None,
) -> ConfigEntry:
    return ConfigEntry(
        name=name,
        value=value,
        source=source,
        is_default=source is ConfigSource.DEFAULT,
        synonyms=() if synonym is None else (ConfigSynonym(synonym, value, source),),
        kind=kind,
        text=text,
        read_only=True,
    )
