"""Topic names: which are legal, and which are reserved for the broker."""

import re
from collections.abc import Container
from typing import Final

NAME_LENGTH_MAX: Final = 249  # Kafka's limit; leaves room for "-<partition>" in a folder's name
INTERNAL_TOPICS: Final = frozenset(
    {"__consumer_offsets", "__transaction_state", "__cluster_metadata", "__share_group_state"}
)
RESERVED_SUFFIX: Final = ".compacted"  # names of compacted views
_LEGAL = re.compile(r"[a-zA-Z0-9._-]+", re.ASCII)


class InvalidTopicNameError(Exception):
    """The topic name is invalid; INVALID_TOPIC_EXCEPTION (17) on the wire."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"topic name {name[:300]!r}: {reason}")
        self.name = name
        self.reason = reason


def can_exist(name: str) -> bool:
    """Return whether a topic may have this name, by its memory: others can take 130 KB."""
    return len(name) <= NAME_LENGTH_MAX and name.isascii()


def check_legal_name(name: str) -> None:
    """Check Kafka's rules for topic names. Raises InvalidTopicNameError."""
    if not name:
        raise InvalidTopicNameError(name, "is empty")
    if name in (".", ".."):
        raise InvalidTopicNameError(name, 'may not be "." or ".."')
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidTopicNameError(name, f"is longer than {NAME_LENGTH_MAX} characters")
    if not _LEGAL.fullmatch(name):
        raise InvalidTopicNameError(
            name, "contains a character other than a-z, A-Z, 0-9, '.', '_', '-'"
        )


def check_new_name(name: str) -> None:
    """Check the name of a topic to be created. Raises InvalidTopicNameError."""
    check_legal_name(name)
    if name in INTERNAL_TOPICS:
        raise InvalidTopicNameError(name, "is internal to the broker")
    if name.endswith(RESERVED_SUFFIX):
        raise InvalidTopicNameError(
            name, f"ends in {RESERVED_SUFFIX}, which is reserved for compacted views"
        )


def view_name(topic: str) -> str:
    """Return the name of a topic's compacted view."""
    return topic + RESERVED_SUFFIX


def view_conflict(topic: str, container: Container[str]) -> str | None:
    """Return why a topic cannot have a view beside the other topics; None if it can."""
    name = view_name(topic)
    if topic in INTERNAL_TOPICS:
        return "an internal topic has no view"
    if len(name) > NAME_LENGTH_MAX:
        return f"{name} would be longer than {NAME_LENGTH_MAX} characters"
    if name in container:
        return f"a topic named {name} exists"
    return None


def collision_key(name: str) -> str:
    """Return the name in metrics, where '.' becomes '_' (as in Kafka); equal ones collide."""
    return name.replace(".", "_")
