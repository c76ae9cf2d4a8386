"""A group coordinator with everything around it, under a clock that tests move."""

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import TypeVar

from broker.groups.classic.model import (
    CommitRequested,
    HeartbeatReceived,
    JoinAnswer,
    SyncAnswer,
    SyncRequested,
)
from broker.groups.consumer.model import TopicLookup
from broker.groups.coordinator import GroupCoordinator
from broker.groups.offsets.offset_records import committed_offset
from broker.groups.offsets.offsets_store import LoadedPartition
from broker.groups.settings import CoordinatorSettings
from broker.topics.internal_topic import KeyedLog, PartitionState
from protocol.errors import ErrorCode
from tests.support.broker.groups.group_machine import join_request
from tests.support.broker.groups.offsets_log import OffsetsLog
from tests.support.clocks.all_turns import take_all_turns
from tests.support.clocks.virtual_clock import VirtualClock, settle

T = TypeVar("T")
DAY_MS = 24 * 3600 * 1000
KEY = ("orders", 0)
# Version 0 of the consumer protocol: subscribed to "orders".
SUBSCRIBED = (("range", b"\x00\x00\x00\x00\x00\x01\x00\x06orders\x00\x00\x00\x00"),)


class World:
    """A coordinator with everything around it."""

    def __init__(
        self, partition_count: int = 1, topics: TopicLookup | None = None, **settings: object
    ) -> None:
        self.topics = topics
        self.clock = VirtualClock()
        self.log = OffsetsLog(partition_count)
        self.settings = CoordinatorSettings(**settings)  # type: ignore[arg-type]
        self.coordinator = self._coordinator()
        for partition in range(partition_count):
            take_all_turns(self.coordinator.loading.activate(partition, LoadedPartition()))

    def _coordinator(self) -> GroupCoordinator:
        ids = count()
        limit = lambda _partition: self.log.max_batch_bytes  # noqa: E731
        store = KeyedLog(len(self.log.batches), self.log.append, limit)
        new_id = lambda: f"id{next(ids)}"  # noqa: E731
        return GroupCoordinator(store, self.clock, self.settings, new_id, self.topics)

    def restart(self) -> None:
        for partition in range(len(self.log.batches)):
            # Stops its timers.
            self.coordinator.loading.deactivate(partition, PartitionState.OFFLINE)
        self.coordinator = self._coordinator()
        for partition in range(len(self.log.batches)):
            take_all_turns(self.coordinator.loading.activate(partition, self.log.load(partition)))

    async def begin(self, work: Coroutine[object, object, T]) -> "asyncio.Task[T]":
        task = asyncio.ensure_future(work)
        await settle()
        return task

    async def join(self, member_id: str = "", group_id: str = "g", **options: object) -> JoinAnswer:
        request = join_request(member_id, **options)  # type: ignore[arg-type]
        answer = await self.coordinator.members.join(group_id, request)
        if answer.error is ErrorCode.MEMBER_ID_REQUIRED:
            return await self.join(answer.member_id, group_id, **options)
        return answer

    async def sync(
        self, member_id: str, generation: int, group_id: str = "g", **assignments: bytes
    ) -> SyncAnswer:
        request = SyncRequested(0, member_id, None, generation, None, None, assignments)
        return await self.coordinator.members.sync(group_id, request)

    async def stable(self, group_id: str = "g", **options: object) -> str:
        answer = await self.join(group_id=group_id, **options)
        assert answer.error is ErrorCode.NONE
        request = SyncRequested(
            0, answer.member_id, None, answer.generation, None, None, {answer.member_id: b"a"}
        )
        synced = await self.coordinator.members.sync(group_id, request)
        assert synced.assignment == b"a"
        return answer.member_id

    def heartbeat(self, member_id: str, generation: int = 1, group_id: str = "g") -> ErrorCode:
        request = HeartbeatReceived(0, member_id, None, generation)
        return self.coordinator.members.heartbeat(group_id, request)

    async def commit(
        self,
        offset: int = 5,
        *,
        group_id: str = "g",
        member_id: str = "",
        generation: int = -1,
        key: tuple[str, int] = KEY,
        expire_timestamp_ms: int = -1,
    ) -> ErrorCode:
        value = committed_offset(offset, -1, "", self.clock.wall_ms(), expire_timestamp_ms)
        request = CommitRequested(0, member_id, None, generation)
        return await self.coordinator.offsets.commit(group_id, request, {key: value})

    def offsets(self, group_id: str = "g") -> dict[tuple[str, int], int]:
        error, offsets = self.coordinator.offsets.fetch(group_id)
        assert error is ErrorCode.NONE
        return {key: offset for key, (offset, *_) in offsets.items()}

    def state(self, group_id: str = "g") -> object:
        return self.coordinator.describe(group_id)[1]
