"""Deletes groups and committed offsets: on request, after their retention, with their topic.

Rule. The tombstones are in the log before a group or an offset is gone. While a group is being
deleted, no other record of it is appended.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import structlog

from broker.event_loop.loop_turns import Turns
from broker.groups.classic.subscription import CONSUMER_PROTOCOL_TYPE
from broker.groups.consumer.model import TopicLookup
from broker.groups.group_log import GroupLog, chunks_of
from broker.groups.live_classic_group import GroupStats
from broker.groups.offsets.offset_records import OffsetKey, encode_offset_key
from broker.groups.offsets.offsets_store import TopicIndex
from broker.groups.served_groups import AnyGroup, ServedGroups
from broker.topics.internal_topic import LogRecord
from protocol.errors import ErrorCode

logger = structlog.get_logger("broker.groups")


class GroupDeletion:
    """Deletes groups and committed offsets from the log, then from memory."""

    def __init__(
        self,
        served: ServedGroups,
        log: GroupLog,
        topics: TopicLookup,
        stats: GroupStats,
        *,
        retention_ms: int,
    ) -> None:
        self._served = served
        self._log = log
        self._topics = topics
        self._stats = stats
        self._retention_ms = retention_ms
        # Deleted topics that still have offsets, as far as these are loaded: the broker was killed
        # after it had deleted the topic.
        self._deleted_topics: set[str] = set()
        self._new_topics: set[str] = set()  # created while a partition was not loaded
        self._forgetting: set[asyncio.Task[int]] = set()

    def stop(self) -> None:
        """Cancel the deletions of offsets that precede their topic."""
        for task in self._forgetting:
            task.cancel()

    # At a request -------------------------------------------------------------------------------

    async def delete_group(self, group_id: str) -> ErrorCode:
        """Answer DeleteGroups when the tombstones of the group and its offsets are in the log."""
        error = self._served.availability(group_id)
        if error is not ErrorCode.NONE:
            return error
        live = self._served.get(group_id)
        if live is None or live.is_dead:
            return ErrorCode.GROUP_ID_NOT_FOUND
        if live.has_members:
            return ErrorCode.NON_EMPTY_GROUP
        return await self._delete(live)

    async def delete_offsets(
        self, group_id: str, keys: Sequence[TopicIndex]
    ) -> tuple[ErrorCode, Mapping[TopicIndex, ErrorCode]]:
        """Answer OffsetDelete: an error for the whole request, or one for each key."""
        error = self._served.availability(group_id)
        if error is not ErrorCode.NONE:
            return error, {}
        live = self._served.get(group_id)
        if live is None or live.is_dead:
            return ErrorCode.GROUP_ID_NOT_FOUND, {}
        protocol_type = live.summary().protocol_type
        if live.has_members and protocol_type != CONSUMER_PROTOCOL_TYPE:
            return ErrorCode.NON_EMPTY_GROUP, {}
        subscribed = await live.subscribed_topics()
        if self._served.get(group_id) is not live or live.is_dead:  # deleted or upgraded meanwhile
            return ErrorCode.COORDINATOR_NOT_AVAILABLE, {}
        errors = {
            key: ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
            if subscribed is None or key[0] in subscribed
            else ErrorCode.NONE
            for key in keys
        }
        deletable = [
            key for key in keys if errors[key] is ErrorCode.NONE and live.offsets.is_written(key)
        ]
        return await self._delete_offsets(live, deletable), errors

    # Past their retention -----------------------------------------------------------------------

    async def expire_offsets(self, now_ms: int) -> int:
        """Delete offsets past their retention, and empty groups; return the number of offsets.

        A timer calls this (Kafka: every 10 minutes), only while the wall clock is trusted.
        """
        expired, turns = 0, Turns()
        for group_id in self._served.ids():
            await turns.take()
            live = self._served.get(group_id)
            if live is None or self._served.availability(group_id) is not ErrorCode.NONE:
                continue
            expired += await self._expire_offsets_of(live, now_ms)
            if live.is_empty and not live.is_dead and not live.offsets:
                await self._delete(live)
        self._stats.offsets_expired += expired
        if expired:
            logger.info("offsets expired", offsets=expired)
        return expired

    async def _expire_offsets_of(self, live: AnyGroup, now_ms: int) -> int:
        group_id, members, expired = live.group.group_id, live.group.members, 0
        old = await live.expired_offsets(now_ms, self._retention_ms)
        for chunk in chunks_of(list(old)):
            # Meanwhile the group may have been deleted, or a member may have subscribed to a topic.
            if self._served.get(group_id) is not live or live.group.members is not members:
                break
            offsets = live.offsets
            keys = [
                key
                for key in chunk
                if offsets.acknowledged.get(key) is old[key] and not offsets.is_changing(key)
            ]
            if await self._delete_offsets(live, keys) is not ErrorCode.NONE:
                break
            expired += len(keys)
        return expired

    # With their topic ---------------------------------------------------------------------------

    async def forget_topics(
        self, topics: Collection[str], give_way: Callable[[], Awaitable[None]] | None = None
    ) -> int:
        """Delete all committed offsets of deleted topics; return their number.

        `give_way` is called after each group with such offsets, of which there may be thousands.
        """
        forgotten, names = 0, frozenset(topics)
        turns = Turns()
        self._new_topics -= names
        for live in self._served:
            await turns.take()
            keys = [key for key in live.offsets.written() if key[0] in names]
            if not keys:
                continue
            for chunk in chunks_of(keys):
                if await self._delete_offsets(live, chunk) is ErrorCode.NONE:
                    forgotten += len(chunk)
                else:
                    self._deleted_topics.update(topic for topic, _ in chunk)
            if give_way is not None:
                await give_way()
        return forgotten

    async def forget_earlier_topic(self, topic: str) -> None:
        """Delete offsets that a deleted topic has left, before a new one gets its name."""
        if topic in self._deleted_topics:
            self._deleted_topics.discard(topic)
            await self.forget_topics([topic])
        if not self._served.partitions.all_active:
            self._new_topics.add(topic)

    def note_loaded(self, topics: Iterable[str]) -> None:
        """Note the topics of the offsets of a loaded partition; delete offsets of earlier topics.

        A topic is new if its creation began while the partition was not loaded.
        """
        new_topics = []
        for topic in topics:
            if topic in self._new_topics:
                new_topics.append(topic)
            elif self._topics.topic(topic) is None:
                self._deleted_topics.add(topic)
        if self._served.partitions.all_active:
            self._new_topics.clear()
        if new_topics:
            task = asyncio.create_task(self.forget_topics(new_topics), name="forget offsets")
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    # Tombstones ---------------------------------------------------------------------------------

    async def _delete(self, live: AnyGroup) -> ErrorCode:
        group_id = live.group.group_id
        *first_chunks, last_chunk = chunks_of(list(live.offsets.written()))
        live.begin_deletion()
        error = ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            for chunk in first_chunks:
                error = await self._delete_offsets(live, chunk)
                if error is not ErrorCode.NONE:
                    return error
            error = ErrorCode.NONE
        finally:
            if error is not ErrorCode.NONE:  # or this task was cancelled
                live.fail_deletion()
        keys = [encode_offset_key(OffsetKey(group_id, *key)) for key in last_chunk]
        tombstones: list[LogRecord] = [(key, None) for key in keys]
        tombstones += live.tombstones()

        def appended(error: ErrorCode) -> None:
            if error is not ErrorCode.NONE:
                live.fail_deletion()
            elif self._served.remove(live):
                self._stats.groups_deleted += 1

        return await self._log.append(group_id, tombstones, appended)

    async def _delete_offsets(self, live: AnyGroup, keys: Sequence[TopicIndex]) -> ErrorCode:
        if not keys:
            return ErrorCode.NONE
        group_id = live.group.group_id
        tombstones = [(encode_offset_key(OffsetKey(group_id, *key)), None) for key in keys]
        append = live.offsets.begin({})

        def appended(error: ErrorCode) -> None:
            if error is ErrorCode.NONE:
                # Appends end in order, so these offsets were committed before their tombstones.
                live.offsets.forget(append, keys)
                self._served.note_offsets(live)

        return await self._log.append(group_id, tombstones, appended)
