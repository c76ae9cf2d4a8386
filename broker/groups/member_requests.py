"""The requests of members: of classic groups, and of groups of the consumer protocol (KIP-848).

Rules. Only broker/groups/classic/state.py and broker/groups/consumer/state.py change a group's
state. Every wait ends: joins and syncs by the timers of the group, waits of a closed connection by
cancellation.
"""

import asyncio
import uuid
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Final

from broker.event_loop.loop_turns import yield_to_loop
from broker.groups.classic.members import Member
from broker.groups.classic.membership import outgrows_record
from broker.groups.classic.model import (
    NO_MEMBER_ID,
    ErrorAnswer,
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    LeaveAnswer,
    LeaveRequested,
    SyncAnswer,
    SyncRequested,
)
from broker.groups.consumer.model import (
    CONSUMER_MEMBER_BYTES,
    JOIN_EPOCH,
    NAME_BYTES,
    ConsumerGroup,
    Heartbeat,
    HeartbeatAnswer,
    MembershipError,
    ResolvedRegex,
)
from broker.groups.group_factory import GroupFactory
from broker.groups.group_log import are_names
from broker.groups.large_group_turns import LargeGroupTurns
from broker.groups.live_classic_group import LiveClassicGroup
from broker.groups.live_classic_members import LiveClassicMembers
from broker.groups.live_consumer_group import LiveConsumerGroup
from broker.groups.served_groups import AnyGroup, ServedGroups
from broker.groups.settings import CoordinatorSettings
from broker.groups.topic_regex import EVERYTHING, TopicRegexes, TopicViewer
from broker.quotas.memory_budget import MemoryBudget
from protocol.errors import ErrorCode

# Characters of a client's name in its member ids.
NAME_CHARS = 255
# How long a heartbeat waits for topics that an expression of its group matches by now.
SEARCH_SECONDS: Final = 0.2
# Of one heartbeat, while other members join or leave.
UPGRADE_ATTEMPTS: Final = 3


def random_id() -> str:
    """Return an id that no other member has."""
    return str(uuid.uuid4())


class MemberRequests:
    """Joins, assignments, heartbeats and departures of the members of all groups."""

    def __init__(
        self,
        served: ServedGroups,
        factory: GroupFactory,
        *,
        settings: CoordinatorSettings,
        metadata: MemoryBudget,
        regexes: TopicRegexes,
        turns: LargeGroupTurns,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self._served = served
        self._factory = factory
        self._settings = settings
        self._metadata = metadata
        self._regexes = regexes
        self._new_id = new_id
        self._turns = turns
        self._searches = set[asyncio.Task[Mapping[str, ResolvedRegex]]]()

    def stop(self) -> None:
        """Stop the searches for expressions."""
        for search in self._searches:
            search.cancel()

    async def join(
        self,
        group_id: str,
        request: JoinRequested,
        creator: Hashable | None = None,
        viewer: TopicViewer = EVERYTHING,
    ) -> JoinAnswer:
        """Answer JoinGroup when the next generation forms. Sets `waiter` and `new_member_id`."""
        error = self._join_error(group_id, request)
        if error is not ErrorCode.NONE:
            return JoinAnswer(error, request.member_id)
        await self._wait_turn(group_id)
        live = self._served.get(group_id)
        if not self._admits(group_id, live, request, creator):
            return JoinAnswer(ErrorCode.POLICY_VIOLATION, request.member_id)
        if isinstance(live, LiveClassicGroup) and self._outgrows_record(live, request):
            return JoinAnswer(ErrorCode.UNKNOWN_SERVER_ERROR, request.member_id)
        name = request.client_id if request.instance_id is None else request.instance_id
        request = replace(request, new_member_id=f"{name[:NAME_CHARS]}-{self._new_id()}")
        if isinstance(live, LiveConsumerGroup):
            if live.is_dead:  # its tombstones are being appended
                return JoinAnswer(ErrorCode.COORDINATOR_NOT_AVAILABLE, request.member_id)
            if not live.is_empty:
                self._metadata.own(group_id, creator)
                return await LiveClassicMembers(live).join(request, viewer.may_describe, creator)
        if not isinstance(live, LiveClassicGroup) and request.member_id != NO_MEMBER_ID:
            return JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID, request.member_id)
        if isinstance(live, LiveConsumerGroup):
            live = self._factory.replace_by_classic(live)
        if live is None:
            if not self._served.may_add(creator):
                return JoinAnswer(ErrorCode.POLICY_VIOLATION)
            live = self._factory.create_classic(group_id, creator)
        self._metadata.own(group_id, creator)
        waiter = live.new_waiter()
        try:
            answer = await live.wait_answer(replace(request, waiter=waiter), waiter)
        finally:
            self._served.remove_if_void(live)
        assert isinstance(answer, JoinAnswer)
        return answer

    async def _wait_turn(self, group_id: str) -> None:
        live = self._served.get(group_id)
        await self._turns.wait(group_id, 0 if live is None else len(live.group.members))

    def _outgrows_record(self, live: LiveClassicGroup, request: JoinRequested) -> bool:
        group = live.group
        before = group.members.get(request.member_id)
        if request.instance_id is not None:
            before = group.static_member(request.instance_id) or before
        return outgrows_record(
            group.members.protocols,
            () if before is None else before.protocols,
            request.protocols,
            assignment_bytes=live.assignment_bytes,
            limit_bytes=self._served.max_record_bytes(group.group_id),
        )

    def _admits(
        self,
        group_id: str,
        live: AnyGroup | None,
        request: JoinRequested,
        creator: Hashable | None,
    ) -> bool:
        """Return whether there is memory for a member."""
        more_bytes = request.memory_bytes
        if live is not None:
            member = live.group.members.get(request.member_id)
            if member is None and request.instance_id is not None:
                member = live.group.static_member(request.instance_id)
            if isinstance(member, Member):
                more_bytes -= member.memory_bytes
            elif member is not None and member.classic is not None:
                more_bytes -= member.classic.memory_bytes
        return self._metadata.admits(group_id, more_bytes, creator)

    def _join_error(self, group_id: str, request: JoinRequested) -> ErrorCode:
        limits = self._settings
        if not group_id or not are_names(group_id):
            return ErrorCode.INVALID_GROUP_ID
        timeouts_ms = (limits.group_min_session_timeout_ms, limits.group_max_session_timeout_ms)
        if not timeouts_ms[0] <= request.session_timeout_ms <= timeouts_ms[1]:
            return ErrorCode.INVALID_SESSION_TIMEOUT
        metadata_bytes = sum(len(metadata) for _, metadata in request.protocols)
        if metadata_bytes > limits.max_member_metadata_bytes:
            return ErrorCode.INVALID_REQUEST
        if len(request.protocols) > limits.max_protocols:
            return ErrorCode.INVALID_REQUEST
        names = [name for name, _ in request.protocols]
        if not are_names(
            request.protocol_type, request.instance_id or "", request.client_id, *names
        ):
            return ErrorCode.INVALID_REQUEST
        return self._served.availability(group_id)

    async def sync(self, group_id: str, request: SyncRequested) -> SyncAnswer:
        """Answer SyncGroup when the leader's assignment is stored. Sets `waiter`."""
        await self._wait_turn(group_id)
        live, error = self._live(group_id)
        if live is None:
            return SyncAnswer(error)
        if isinstance(live, LiveConsumerGroup):
            return await LiveClassicMembers(live).sync(request)
        size_bytes = sum(map(len, request.assignments.values()))
        if not self._metadata.admits(group_id, size_bytes):
            return SyncAnswer(ErrorCode.POLICY_VIOLATION)
        waiter = live.new_waiter()
        answer = await live.wait_answer(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, SyncAnswer)
        return answer

    def heartbeat(self, group_id: str, request: HeartbeatReceived) -> ErrorCode:
        """Answer Heartbeat. Sets `waiter`."""
        live, error = self._live(group_id)
        if live is None:
            return error
        if isinstance(live, LiveConsumerGroup):
            return LiveClassicMembers(live).heartbeat(request)
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, ErrorAnswer)
        return answer.error

    async def leave(self, group_id: str, request: LeaveRequested) -> LeaveAnswer:
        """Answer LeaveGroup. Sets `waiter`."""
        await self._wait_turn(group_id)
        live, error = self._live(group_id)
        if live is None and error is ErrorCode.UNKNOWN_MEMBER_ID:
            unknown = tuple((member, instance, error) for member, instance in request.members)
            return LeaveAnswer(ErrorCode.NONE, unknown)
        if live is None:
            return LeaveAnswer(error)
        if isinstance(live, LiveConsumerGroup):
            return await LiveClassicMembers(live).leave(request)
        waiter = live.new_waiter()
        answer = live.answer_nowait(replace(request, waiter=waiter), waiter)
        assert isinstance(answer, LeaveAnswer)
        self._served.remove_if_void(live)
        return answer

    def _live(self, group_id: str) -> tuple[AnyGroup | None, ErrorCode]:
        if not group_id:
            return None, ErrorCode.INVALID_GROUP_ID
        error = self._served.availability(group_id)
        if error is not ErrorCode.NONE:
            return None, error
        return self._served.get(group_id), ErrorCode.UNKNOWN_MEMBER_ID

    def new_member_id(self) -> str:
        """Return an id for a member that has chosen none (ConsumerGroupHeartbeat 0)."""
        return self._new_id()

    async def consumer_heartbeat(
        self,
        group_id: str,
        request: Heartbeat,
        viewer: TopicViewer = EVERYTHING,
        creator: Hashable | None = None,
    ) -> HeartbeatAnswer:
        """Answer ConsumerGroupHeartbeat when the changes that it reports are in the log."""
        error = self._heartbeat_error(group_id, request)
        if error is not ErrorCode.NONE:
            return HeartbeatAnswer(error)
        try:
            regexes = await self._resolve(group_id, request, viewer)
            if not request.reports_nothing:
                waiting = self._served.get(group_id)
                if isinstance(waiting, LiveConsumerGroup):
                    waiting.keep_alive(request.member_id)
                await self._wait_turn(group_id)
            await self._upgrade(group_id, request, viewer)
            live = self._consumer_group(group_id, request, creator)
        except MembershipError as refused:
            return HeartbeatAnswer(refused.code, refused.reason)
        try:
            if not self._admits_consumer(live.group, request, creator):
                text = "the broker has no memory for more members or subscriptions of this size"
                return HeartbeatAnswer(ErrorCode.POLICY_VIOLATION, text)
            self._metadata.own(group_id, creator)
            return await live.heartbeat(request, regexes, creator)
        finally:
            self._served.remove_if_void(live)

    def _admits_consumer(
        self, group: ConsumerGroup, request: Heartbeat, creator: Hashable | None
    ) -> bool:
        """Return whether there is memory for a new member, and for the names of a subscription."""
        topics, member, more_bytes = request.topics, group.members.get(request.member_id), 0
        if member is None and request.epoch == JOIN_EPOCH:
            more_bytes += CONSUMER_MEMBER_BYTES
        if topics is not None and group.shared(topics) is topics:
            more_names = len(topics) - (0 if member is None else len(member.topics))
            more_bytes += NAME_BYTES * more_names
        return self._metadata.admits(group.group_id, more_bytes, creator)

    def _heartbeat_error(self, group_id: str, request: Heartbeat) -> ErrorCode:
        texts = (group_id, request.member_id, request.instance_id or "", request.rack_id or "")
        if not are_names(*texts, request.client_id):
            return ErrorCode.INVALID_REQUEST
        return self._served.availability(group_id)

    async def _resolve(
        self, group_id: str, request: Heartbeat, viewer: TopicViewer
    ) -> Mapping[str, ResolvedRegex]:
        """Return the topics of the request's expression, and new ones of the group's others.

        They are those that the client which sent the request sees. A group keeps its topics for a
        while, so that members with different permissions do not cause a rebalance with each
        heartbeat. It keeps them for good for an expression that a Kafka broker has stored and that
        is refused here. Raises MembershipError for the expression of the request.
        """
        live, expression = self._served.get(group_id), request.regex
        stored = live.regexes() if isinstance(live, LiveConsumerGroup) else {}
        own = stored.get(expression) if expression else None
        if expression and (own is None or self._is_outdated(own)):
            if isinstance(live, LiveConsumerGroup):
                live.keep_alive(request.member_id)
            own = await self._regexes.resolve(expression, viewer)
        resolved: dict[str, ResolvedRegex] = {}
        if isinstance(live, LiveConsumerGroup) and not request.leaves:
            found = await self._refreshed(live, viewer)
            stored = live.regexes()  # other members may have brought newer topics meanwhile
            outdated = [each for each in found.keys() & stored if self._is_outdated(stored[each])]
            resolved = {each: found[each] for each in outdated}
        return resolved if expression is None or own is None else resolved | {expression: own}

    def _is_outdated(self, resolved: ResolvedRegex) -> bool:
        return not self._regexes.is_recent(resolved)

    async def _refreshed(
        self, live: LiveConsumerGroup, viewer: TopicViewer
    ) -> Mapping[str, ResolvedRegex]:
        """Return what a search for the outdated expressions of a group found, if it ends soon.

        It goes on beside the heartbeats, and a later one takes the result: the members of a group
        do not wait for the expressions of others.
        """
        search = live.search
        if search is None:
            resolved = live.regexes()
            outdated = [each for each in resolved if self._is_outdated(resolved[each])]
            if not outdated:
                return {}
            # Whoever asked: each client would cost a search of all names.
            search = live.search = asyncio.create_task(
                self._regexes.resolve_all(outdated, viewer), name="match topics again"
            )
            self._searches.add(search)
            search.add_done_callback(self._searches.discard)
        await asyncio.wait((search,), timeout=SEARCH_SECONDS)
        if not search.done():
            return {}
        if live.search is search:
            live.search = None
        return search.result()

    async def _upgrade(self, group_id: str, request: Heartbeat, viewer: TopicViewer) -> None:
        """Upgrade a classic group that has members if a member joins with the other protocol.

        Raises MembershipError.
        """
        for _ in range(UPGRADE_ATTEMPTS):
            live = self._served.get(group_id)
            if not isinstance(live, LiveClassicGroup) or live.is_dead or not live.has_members:
                return
            if request.epoch != JOIN_EPOCH:
                return
            await self._factory.upgrade(live, request, viewer.may_describe)
            if self._served.get(group_id) is not live:
                return  # the heartbeat goes on with the new group in this step
            await yield_to_loop()

    def _consumer_group(
        self, group_id: str, request: Heartbeat, creator: Hashable | None
    ) -> LiveConsumerGroup:
        live = self._served.get(group_id)
        if isinstance(live, LiveConsumerGroup) and not live.is_dead:
            return live
        is_join = request.epoch == JOIN_EPOCH
        if live is not None and (not is_join or live.is_dead):
            text = f"group {group_id} is not a consumer group"
            raise MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        if isinstance(live, LiveClassicGroup) and live.has_members:  # also after `_upgrade`
            text = f"members of group {group_id} joined or left while it was upgraded: try again"
            raise MembershipError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, text)
        if live is not None:
            return self._factory.replace_by_consumer(live)
        if not is_join:
            text = f"there is no group {group_id}"
            raise MembershipError(ErrorCode.GROUP_ID_NOT_FOUND, text)
        if not self._served.may_add(creator):
            text = f"the broker has at most {self._settings.max_groups} groups, half for one user"
            raise MembershipError(ErrorCode.POLICY_VIOLATION, text)
        return self._factory.create_consumer(group_id, creator)
