"""Starts groups of both protocols, and converts a group from one protocol to the other (KIP-848).

A group keeps its committed offsets when its protocol changes.
"""

import asyncio
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Final

import structlog

from broker.event_loop.loop_turns import run_in_turns, yield_to_loop
from broker.groups.classic.model import Empty, Group, Stable, State
from broker.groups.clock import Clock
from broker.groups.consumer.classic_members import downgraded_sliced, upgraded_sliced
from broker.groups.consumer.model import ConsumerGroup, Heartbeat, MembershipError, TopicLookup
from broker.groups.group_log import GroupLog
from broker.groups.large_group_turns import LargeGroupTurns
from broker.groups.live_classic_group import GroupContext, GroupStats, LiveClassicGroup
from broker.groups.live_consumer_group import (
    ConsumerGroupContext,
    LiveConsumerGroup,
    PreparedDowngrade,
)
from broker.groups.offsets.committed_offsets import CommittedOffsets
from broker.groups.offsets.offsets_store import group_record_sliced
from broker.groups.served_groups import AnyGroup, L, ServedGroups
from broker.groups.settings import CoordinatorSettings
from broker.logging import RateLimitedLogger
from broker.quotas.memory_budget import MemoryBudget
from broker.topics.internal_topic import LogRecord
from protocol.errors import ErrorCode

# Clients cause these lines: members that join with another protocol.
limited_logger: Final = RateLimitedLogger(structlog.get_logger("broker.groups"))


class GroupFactory:
    """Makes the groups that are served."""

    def __init__(
        self,
        served: ServedGroups,
        log: GroupLog,
        *,
        settings: CoordinatorSettings,
        clock: Clock,
        topics: TopicLookup,
        metadata: MemoryBudget,
        stats: GroupStats,
        turns: LargeGroupTurns,
    ) -> None:
        self._served = served
        self._log = log
        self._consumer_rules = settings.consumer_rules
        self._clock = clock
        self._topics = topics
        self._context = GroupContext(
            settings.rules, clock, log.append_group, served.remove_if_void, metadata.note, stats
        )
        self._consumer_context = ConsumerGroupContext(
            settings.consumer_rules,
            clock,
            topics,
            log.append,
            stats,
            self._prepare_downgrade,
            self._downgrade,
            metadata.note,
            served.max_record_bytes,
            turns,
        )

    def classic(self, state: State, offsets: CommittedOffsets) -> LiveClassicGroup:
        """Return a classic group; its caller serves it."""
        return LiveClassicGroup(state, self._context, offsets)

    def consumer(
        self,
        group: ConsumerGroup,
        offsets: CommittedOffsets,
        replaced: Sequence[LogRecord] = (),
    ) -> LiveConsumerGroup:
        """Return a consumer group; its caller serves it. See LiveConsumerGroup for `replaced`."""
        return LiveConsumerGroup(group, self._consumer_context, offsets, replaced)

    def create_classic(self, group_id: str, creator: Hashable | None) -> LiveClassicGroup:
        """Create and serve an empty classic group."""
        return self._served.add(self._empty_classic(group_id, CommittedOffsets()), creator)

    def create_consumer(self, group_id: str, creator: Hashable | None) -> LiveConsumerGroup:
        """Create and serve an empty consumer group."""
        created = self.consumer(ConsumerGroup(group_id), CommittedOffsets())
        return self._served.add(created, creator)

    def replace_by_classic(self, empty: LiveConsumerGroup) -> LiveClassicGroup:
        """Put a classic group in place of a consumer group without members."""
        return self._replace(empty, self._empty_classic(empty.group.group_id, empty.offsets))

    def replace_by_consumer(self, empty: AnyGroup) -> LiveConsumerGroup:
        """Put a consumer group in place of a group without members."""
        return self._replace(
            empty, self.consumer(ConsumerGroup(empty.group.group_id), empty.offsets)
        )

    async def upgrade(
        self, classic: LiveClassicGroup, request: Heartbeat, may_describe: Callable[[str], bool]
    ) -> None:
        """Put a consumer group in place of a classic group with members.

        `may_describe` says which topics the client may describe. Members are read in turns; nothing
        happens if the group changes meanwhile. The records of the group are written although the
        heartbeat that follows may be refused, or its client may leave. Raises MembershipError.
        """
        group_id, rules = classic.group.group_id, self._consumer_rules
        if not rules.allows_upgrade:
            text = f"classic group {group_id} cannot become a consumer group: a setting forbids it"
            raise MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        before = classic.group
        group = await run_in_turns(upgraded_sliced(before, self._topics, may_describe))
        await yield_to_loop()  # the next step goes on with the heartbeat
        is_served = self._served.get(group_id) is classic and not classic.is_dead
        if not is_served or not classic.group.has_assignments_of(before):
            return
        is_replacement = request.instance_id is not None and group.static_member(
            request.instance_id
        )
        if len(group.members) + (not is_replacement) > rules.max_size:
            text = f"the group has more than {rules.max_size} members, the limit"
            raise MembershipError(ErrorCode.GROUP_MAX_SIZE_REACHED, text)
        live = self._served.put(self.consumer(group, classic.offsets, classic.tombstones()))
        classic.close(ErrorCode.REBALANCE_IN_PROGRESS)
        live.note_size()
        live.start_sessions()
        live.flush_soon()
        limited_logger.info(
            "group upgraded",
            subject=group_id,
            group=group_id,
            epoch=group.epoch,
            members=len(group.members),
        )

    def _prepare_downgrade(
        self, live: LiveConsumerGroup, group: ConsumerGroup
    ) -> Generator[None, None, PreparedDowngrade]:
        """See ConsumerGroupContext.prepare_downgrade."""
        classic = yield from downgraded_sliced(group, self._topics, self._clock.wall_ms())
        record = yield from group_record_sliced(classic)
        yield
        tombstones = yield from live.tombstones_sliced()
        return PreparedDowngrade(classic, (*tombstones, record))

    def _downgrade(
        self, live: LiveConsumerGroup, prepared: PreparedDowngrade, is_changed: bool
    ) -> "asyncio.Future[ErrorCode]":
        """See ConsumerGroupContext.downgrade."""
        classic, group_id = prepared.group, prepared.group.group_id
        appended = self._log.append(group_id, prepared.records)
        replacement = self._served.put(self.classic(Stable(classic), live.offsets))
        live.close()
        replacement.note_size()
        replacement.begin(is_changed=is_changed)
        limited_logger.info(
            "group downgraded",
            subject=group_id,
            group=group_id,
            generation=classic.generation,
            members=len(classic.members),
        )
        return appended

    def _replace(self, empty: AnyGroup, live: L) -> L:
        self._log.append(empty.group.group_id, empty.tombstones())
        self._served.put(live)
        empty.close()
        live.note_size()
        return live

    def _empty_classic(self, group_id: str, offsets: CommittedOffsets) -> LiveClassicGroup:
        return self.classic(Empty(Group(group_id, since_ms=self._clock.wall_ms())), offsets)
