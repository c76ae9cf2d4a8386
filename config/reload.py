"""Reload of the settings file: which changes take effect while the broker runs.

Dynamic configs (AlterConfigs) override the file. `hidden_keys` lists the keys of the file that
have no effect for this reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from config.settings import Settings
from config.topics.keys import TOPIC_KEYS

# Sections that take effect while the broker runs. All others need a restart.
LIVE: Final = frozenset(
    {
        "topics",
        "topic_defaults",
        "cleaner",
        "auto_create_topics",
        "delete_topics",
        "http_token_file",
        "metrics",
        "tls",
        "sasl",
    }
)
# Keys of these sections that need a restart all the same.
FIXED_INSIDE: Final = frozenset({"cleaner.enabled"})
# The file's keys (section, name) by the broker key that hides them (config/broker_keys.py).
_HIDDEN_BY: Final = {
    "log.cleaner.threads": (("cleaner", "workers"),),
    "log.cleaner.dedupe.buffer.size": (("cleaner", "dedupe_buffer_bytes"),),
    "log.cleaner.io.buffer.size": (("cleaner", "read_buffer_bytes"),),
    "log.cleaner.io.max.bytes.per.second": (
        ("cleaner", "read_bytes_per_second"),
        ("cleaner", "write_bytes_per_second"),
    ),
    "log.cleaner.backoff.ms": (("cleaner", "backoff_ms"),),
    "max.connections": (("limits", "connections"),),
    "max.connections.per.ip": (("limits", "connections_per_ip"),),
    "producer.id.expiration.ms": (("", "producer_id_expiration_ms"),),
}


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The result of a reload. Keys have dots between levels, in the order of the file."""

    settings: Settings
    changed: tuple[str, ...]  # keys that take effect
    fixed: tuple[str, ...]  # keys that differ and need a restart


@dataclass(frozen=True, slots=True)
class Hidden:
    """A key of the file that has no effect because a dynamic config overrides it."""

    key: str  # its name in the file
    value: str  # its value in the file
    by: str  # the dynamic config
    dynamic_value: str


def reloaded(running: Settings, file: Settings) -> Reloaded:
    """Return the running settings with the changes of the file that take effect.

    Raises pydantic.ValidationError if the new values contradict values that need a restart.
    """
    changed: list[str] = []
    fixed: list[str] = []
    values = {name: getattr(running, name) for name in Settings.model_fields}
    for key in _differences(running, file):
        section = key.partition(".")[0]
        (changed if section in LIVE and key not in FIXED_INSIDE else fixed).append(key)
    for name in LIVE:
        values[name] = getattr(file, name)
    enabled = running.cleaner.enabled
    values["cleaner"] = file.cleaner.model_copy(update={"enabled": enabled})
    return Reloaded(Settings.model_validate(values), tuple(changed), tuple(fixed))


def hidden_keys(
    file: Settings,
    topics_dynamic: Mapping[str, Mapping[str, str]],
    broker_dynamic: Mapping[str, str],
) -> Iterator[Hidden]:
    """Yield the keys of the file that a dynamic config with another value overrides."""
    for name, topic in file.topics.items():
        dynamic = topics_dynamic.get(name, {})
        for key, value in topic.keys.items():
            if dynamic.get(key, value) != value:
                yield Hidden(f"topics.{name}.{key}", value, key, dynamic[key])
    for key, value in file.topic_defaults.keys.items():
        synonym = TOPIC_KEYS[key].synonym
        if broker_dynamic.get(synonym, value) != value:
            yield Hidden(f"topic_defaults.{key}", value, synonym, broker_dynamic[synonym])
    for synonym, keys in _HIDDEN_BY.items():
        for section, name in keys if synonym in broker_dynamic else ():
            values = getattr(file, section) if section else file
            # A key that the file does not set is not hidden.
            if name in values.model_fields_set:
                key = f"{section}.{name}" if section else name
                value = str(getattr(values, name))
                yield Hidden(key, value, synonym, broker_dynamic[synonym])


def _differences(old: BaseModel, new: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys whose values differ; for topics, the names of their configs."""
    for name in type(old).model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if before == after:
            continue
        key = f"{prefix}{name}"
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _differences(before, after, f"{key}.")
        elif isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _mapping_differences(before, after, prefix if name == "keys" else f"{key}.")
        else:
            yield key


def _mapping_differences(
    old: Mapping[str, object], new: Mapping[str, object], prefix: str
) -> Iterator[str]:
    for name in dict.fromkeys((*old, *new)):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if isinstance(before, BaseModel) and isinstance(after, BaseModel):
            yield from _differences(before, after, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
