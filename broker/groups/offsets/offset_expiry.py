"""Which committed offsets have expired. Pure; the rules are Kafka's (KIP-211)."""

from collections.abc import Generator
from typing import Final

from broker.groups.classic.model import Empty, Stable, State
from broker.groups.classic.subscription import subscribed_topics_sliced
from broker.groups.offsets.offset_records import CommittedOffset

_NO_TOPICS: Final = frozenset[str]()


def kept_topics_sliced(state: State) -> Generator[None, None, frozenset[str] | None]:
    """Return the topics whose offsets a classic group keeps; None for all. Pauses.

    A group with members keeps the offsets of topics that it is subscribed to, and all of them
    during a rebalance.
    """
    if state.group.protocol_type is None or isinstance(state, Empty):
        return _NO_TOPICS
    if isinstance(state, Stable):
        return (yield from subscribed_topics_sliced(state.group))
    return None


def is_expired(state: State, value: CommittedOffset, now_ms: int, retention_ms: int) -> bool:
    """Return whether an offset of a classic group has expired, unless its topic is kept.

    A group without a protocol type keeps each offset for `retention_ms` after its commit. An empty
    group keeps all offsets for that long after its last member left. An expiry time in the commit
    request overrides this.
    """
    group = state.group
    _, _, _, base_ms, expire_timestamp_ms = value
    if expire_timestamp_ms >= 0:
        return now_ms >= expire_timestamp_ms
    if isinstance(state, Empty) and group.protocol_type is not None and group.since_ms >= 0:
        base_ms = group.since_ms
    return now_ms - base_ms >= retention_ms
