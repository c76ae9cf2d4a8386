"""Requests of the members of a running consumer group that use the classic protocol.

The group keeps the deadlines of these members and performs the changes; the decisions are pure
functions in `consumer/classic_members.py`.
"""

import asyncio
from collections.abc import Callable, Hashable, Mapping

from broker.event_loop.loop_turns import Turns, run_in_turns
from broker.groups.classic.model import (
    NO_MEMBER_ID,
    HeartbeatReceived,
    JoinAnswer,
    JoinRequested,
    LeaveAnswer,
    LeaveRequested,
    SyncAnswer,
    SyncRequested,
)
from broker.groups.classic.subscription import (
    CONSUMER_PROTOCOL_TYPE,
    InvalidMetadataError,
    Subscription,
    decode_subscription_sliced,
)
from broker.groups.consumer import classic_members
from broker.groups.consumer.model import Assignment, ConsumerMember, GroupState, MembershipError
from broker.groups.consumer.reconciliation import reconciled
from broker.groups.live_consumer_group import LiveConsumerGroup
from protocol.errors import ErrorCode


class LiveClassicMembers:
    """The members of one consumer group that use the classic protocol."""

    def __init__(self, live: LiveConsumerGroup) -> None:
        self._live = live
        self._context = live.context

    async def join(
        self,
        request: JoinRequested,
        may_describe: Callable[[str], bool],
        client: Hashable | None = None,
    ) -> JoinAnswer:
        """Return the answer to JoinGroup when the changes that it reports are in the log.

        `may_describe` says which topics the client may describe: it can subscribe to no others.
        `client` is the principal that sent the request.
        """
        error = self._join_error(request)
        if error is not ErrorCode.NONE:
            return JoinAnswer(error, NO_MEMBER_ID)
        if not request.member_id and request.instance_id is None and request.id_required:
            return JoinAnswer(ErrorCode.MEMBER_ID_REQUIRED, request.new_member_id)
        try:
            subscription = await run_in_turns(decode_subscription_sliced(request.protocols[0][1]))
            async for topic in Turns().over(subscription.topics):
                if not may_describe(topic):
                    return JoinAnswer(ErrorCode.TOPIC_AUTHORIZATION_FAILED, NO_MEMBER_ID)
            owned = await run_in_turns(
                classic_members.owned_partitions_sliced(subscription, self._context.topics)
            )
            error = self._join_error(request)  # other tasks may have run
            if error is not ErrorCode.NONE:
                return JoinAnswer(error, NO_MEMBER_ID)
            return await self._join(request, subscription, owned, client)
        except InvalidMetadataError:
            return JoinAnswer(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, NO_MEMBER_ID)
        except MembershipError as refused:
            return JoinAnswer(refused.code, NO_MEMBER_ID)

    def _join_error(self, request: JoinRequested) -> ErrorCode:
        error = classic_members.join_error(
            self._live.group,
            request,
            self._context.rules.max_size,
            self._context.max_record_bytes(self._live.group.group_id),
        )
        if error is ErrorCode.NONE and self._live.is_dead:
            error = ErrorCode.COORDINATOR_NOT_AVAILABLE
        return error

    async def _join(
        self,
        request: JoinRequested,
        subscription: Subscription,
        owned: Assignment,
        client: Hashable | None,
    ) -> JoinAnswer:
        turns, attempt = Turns(), 0
        while True:
            attempt += 1
            if self._live.is_dead:
                return JoinAnswer(ErrorCode.COORDINATOR_NOT_AVAILABLE, NO_MEMBER_ID)
            updated, next_group = await self._live.update(
                lambda group: classic_members.update_member(group, request, subscription), turns
            )
            member_id, is_changed = updated.member.member_id, updated.is_changed
            is_last = not classic_members.uses_classic_only(self._live.group)
            is_static = request.instance_id is not None
            if not (is_last and is_static and self._live.may_downgrade(updated.group)):
                break
            # It takes the place of the static member that was the last to use the other protocol.
            member = updated.member
            if not is_changed:
                member = reconciled(updated.group, member, owned)
            group = updated.group.with_member(member)
            # A member that gets its target must not get what another has not revoked.
            is_changed = is_changed or group.state is not GroupState.STABLE
            append = await self._live.begin_downgrade(group, attempt, is_changed=is_changed)
            if append is not None:
                error = await asyncio.shield(append)
                is_done = error is ErrorCode.NONE
                return self._joined(member) if is_done else JoinAnswer(error, member_id)
        next_step = await self._live.take_step(next_group, member_id, owned, client, turns)
        if next_step is None:
            return JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID, member_id)
        self._live.deadlines.await_sync(next_step)
        await turns.take()
        error = await self._live.flush()
        return self._joined(next_step) if error is ErrorCode.NONE else JoinAnswer(error, member_id)

    @staticmethod
    def _joined(member: ConsumerMember) -> JoinAnswer:
        name = classic_members.protocol_name(member)
        return JoinAnswer(
            ErrorCode.NONE, member.member_id, member.epoch, CONSUMER_PROTOCOL_TYPE, name
        )

    async def sync(self, request: SyncRequested) -> SyncAnswer:
        """Return the answer to SyncGroup: the present assignment, which is in the log."""
        names = await self._topic_names()
        if self._live.is_dead:
            return SyncAnswer(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        try:
            member = classic_members.find_member(
                self._live.group, request.member_id, request.instance_id, request.generation
            )
        except MembershipError as refused:
            return SyncAnswer(refused.code)
        error = classic_members.sync_error(self._live.group, member, request)
        if error is ErrorCode.REBALANCE_IN_PROGRESS:
            self._live.deadlines.await_join(member)
        if error is not ErrorCode.NONE:
            return SyncAnswer(error)
        assignment = classic_members.current_assignment(member, names)
        self._live.deadlines.stop_sync(member.member_id)
        self._live.deadlines.start_session(member)
        error = await self._live.flush()
        if error is not ErrorCode.NONE:
            return SyncAnswer(error)
        name = classic_members.protocol_name(member)
        return SyncAnswer(ErrorCode.NONE, CONSUMER_PROTOCOL_TYPE, name, assignment)

    async def _topic_names(self) -> Mapping[bytes, str]:
        """Return the names of the group's topics that exist, by id."""
        names: dict[bytes, str] = {}
        async for name in Turns().over(self._live.group.all_topics()):
            topic = self._context.topics.topic(name)
            if topic is not None:
                names[topic.topic_id] = name
        return names

    def heartbeat(self, request: HeartbeatReceived) -> ErrorCode:
        """Return the answer to Heartbeat: REBALANCE_IN_PROGRESS if the member has to join again."""
        if self._live.is_dead:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        try:
            member = classic_members.find_member(
                self._live.group, request.member_id, request.instance_id, request.generation
            )
        except MembershipError as refused:
            return refused.code
        self._live.deadlines.start_session(member)
        if not classic_members.must_rejoin(self._live.group, member):
            return ErrorCode.NONE
        self._live.deadlines.await_join(member)
        return ErrorCode.REBALANCE_IN_PROGRESS

    async def leave(self, request: LeaveRequested) -> LeaveAnswer:
        """Return the answer to LeaveGroup, which may name members of both protocols."""
        if self._live.is_dead:
            return LeaveAnswer(ErrorCode.COORDINATOR_NOT_AVAILABLE)
        rows: list[tuple[str, str | None, ErrorCode]] = []
        leavers: set[str] = set()
        for member_id, instance_id in request.members:
            error = ErrorCode.NONE
            try:
                leavers.add(classic_members.find_leaver(self._live.group, member_id, instance_id))
            except MembershipError as refused:
                error = refused.code
            rows.append((member_id, instance_id, error))
        error = await self._live.remove(leavers) if leavers else ErrorCode.NONE
        return LeaveAnswer(error, tuple(rows) if error is ErrorCode.NONE else ())
