"""Which topic names are legal, and which ones clients and YAML may not create."""

import re
from collections.abc import Container, Iterable
from typing import Final

NAME_LENGTH_MAX: Final = 249  # Kafka's limit; leaves room for "-<partition>" in a folder's name
INTERNAL_TOPICS: Final = frozenset(
    {"__consumer_offsets", "__transaction_state", "__cluster_metadata", "__share_group_state"}
)
RESERVED_SUFFIX: Final = ".compacted"  # names of compacted views
_LEGAL = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)


class InvalidTopicNameError(Exception):
    """A name that no topic may have; INVALID_TOPIC_EXCEPTION (17) on the wire."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"topic name {name[:300]!r}: {reason}")
        self.name = name
        self.reason = reason


def check_legal_name(name: str) -> None:
    """Kafka's rules for any topic name. Raises InvalidTopicNameError."""
    if not name:
        raise InvalidTopicNameError(name, "is empty")
    if name in (".", ".."):
        raise InvalidTopicNameError(name, 'may not be "." or ".."')
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidTopicNameError(name, f"is longer than {NAME_LENGTH_MAX} characters")
    if not _LEGAL.fullmatch(name):
        raise InvalidTopicNameError(name, "has other characters than a-z, A-Z, 0-9, '.', '_', '-'")


def check_new_name(name: str) -> None:
    """Rules for a topic that a client or the YAML wants to have. Raises InvalidTopicNameError."""
    check_legal_name(name)
    if name in INTERNAL_TOPICS:
        raise InvalidTopicNameError(name, "is internal to the broker")
    if name.endswith(RESERVED_SUFFIX):
        raise InvalidTopicNameError(name, f"names ending in {RESERVED_SUFFIX} are reserved")


def view_name(topic: str) -> str:
    """The name under which a topic's compacted view is read."""
    return topic + RESERVED_SUFFIX


def view_conflict(topic: str, container: Container[str]) -> str | None:
    """Why a topic cannot have a view beside the topics that are known, in words."""
    name = view_name(topic)
    if topic in INTERNAL_TOPICS:
        return "an internal topic has no view"
    if len(name) > NAME_LENGTH_MAX:
        return f"{name} would be longer than {NAME_LENGTH_MAX} characters"
    if name in container:
        return f"there is a topic named {name}"
    return None


def collision_key(name: str) -> str:
    """Topics with the same key collide in metric names, where '.' becomes '_' (as in Kafka)."""
    return name.replace(".", "_")


def colliding(name: str, others: Iterable[str]) -> str | None:
    """The first of `others` that differs from `name` only in '.' against '_'."""
    key = collision_key(name)
    return next((o for o in others if o != name and collision_key(o) == key), None)
