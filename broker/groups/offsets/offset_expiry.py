"""Which committed offsets have expired. Pure; the rules are Kafka's (KIP-211)."""

from collections.abc import Mapping

from broker.groups.classic.model import Empty, Group, Stable, State
from broker.groups.classic.subscription import subscribed_topics
from broker.groups.offsets.offset_records import CommittedOffset
from broker.groups.offsets.offsets_store import TopicIndex


def expired_offsets(
    state: State,
    offsets: Mapping[TopicIndex, CommittedOffset],
    now_ms: int,
    retention_ms: int,
) -> list[TopicIndex]:
    """Return the keys of expired offsets.

    A group without a protocol type keeps each offset for `retention_ms` after its commit. An empty
    group keeps all offsets for that long after its last member left. A group with members keeps the
    offsets of topics that it is subscribed to. An expiry time in the commit request overrides this.
    """
    group = state.group
    match state:
        case _ if group.protocol_type is None:
            subscribed: frozenset[str] | None = frozenset()
        case Empty():
            subscribed = frozenset()
        case Stable():
            subscribed = subscribed_topics(group)
        case _:
            subscribed = None
    if subscribed is None:
        return []
    return [
        key
        for key, value in offsets.items()
        if key[0] not in subscribed and _is_old(state, group, value, now_ms, retention_ms)
    ]


def expired_unsubscribed(
    offsets: Mapping[TopicIndex, CommittedOffset],
    subscribed: frozenset[str],
    now_ms: int,
    retention_ms: int,
) -> list[TopicIndex]:
    """Return the keys of offsets committed `retention_ms` ago, of topics without a subscription."""
    return [
        key
        for key, (_, _, _, commit_timestamp_ms, _) in offsets.items()
        if key[0] not in subscribed and now_ms - commit_timestamp_ms >= retention_ms
    ]


def _is_old(
    state: State, group: Group, value: CommittedOffset, now_ms: int, retention_ms: int
) -> bool:
    _, _, _, base_ms, expire_timestamp_ms = value
    if expire_timestamp_ms >= 0:
        return now_ms >= expire_timestamp_ms
    if isinstance(state, Empty) and group.protocol_type is not None and group.since_ms >= 0:
        base_ms = group.since_ms
    return now_ms - base_ms >= retention_ms
