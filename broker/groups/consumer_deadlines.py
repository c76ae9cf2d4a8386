"""The deadlines of the members of one consumer group.

A member has a session timeout for its next request. Its rebalance timeout limits how long it may
take to revoke partitions that others wait for and, if it uses the classic protocol, to send the
next JoinGroup or SyncGroup.
"""

from collections.abc import Callable, Collection, Mapping

from broker.groups.clock import Clock
from broker.groups.consumer.model import ConsumerMember, MemberState
from broker.groups.member_deadlines import MemberDeadlines


class ConsumerDeadlines:
    """Calls `expired`, a method of the group, with the members that missed a deadline."""

    def __init__(
        self, clock: Clock, session_timeout_ms: int, expired: Callable[[tuple[str, ...]], None]
    ) -> None:
        """`session_timeout_ms` is that of members of the consumer protocol."""
        self._session_timeout_ms = session_timeout_ms
        self._sessions = MemberDeadlines(clock, expired)
        self._revocations = MemberDeadlines(clock, expired)
        self._revoking_since: dict[str, int] = {}  # the member epoch at which it began
        self._joins = MemberDeadlines(clock, expired)
        self._syncs = MemberDeadlines(clock, expired)
        self._all = (self._sessions, self._revocations, self._joins, self._syncs)

    def start(self, members: Mapping[str, ConsumerMember]) -> None:
        """Start the sessions and revocations of a group that was loaded or upgraded.

        All at once: one after the other, 2,000 of them took 5 ms.
        """
        revoking = {key: member for key, member in members.items() if _is_revoking(member)}
        self._sessions.start({key: self._session_ms(member) for key, member in members.items()})
        self._revocations.start(
            {key: member.rebalance_timeout_ms for key, member in revoking.items()}
        )
        self._revoking_since |= {key: member.epoch for key, member in revoking.items()}

    def close(self) -> None:
        """Stop all timers."""
        for deadlines in self._all:
            deadlines.close()

    def forget(self, member_ids: Collection[str]) -> None:
        """Stop all deadlines of members."""
        for deadlines in self._all:
            deadlines.stop(member_ids)
        for member_id in member_ids:
            self._revoking_since.pop(member_id, None)

    def start_session(self, member: ConsumerMember) -> None:
        """Give a member its session timeout to send the next request."""
        self._sessions.start({member.member_id: self._session_ms(member)})

    def keep_alive(self, member: ConsumerMember) -> None:
        """Restart the session of a member, if it has one."""
        if member.member_id in self._sessions:
            self.start_session(member)

    def _session_ms(self, member: ConsumerMember) -> int:
        classic = member.classic
        return self._session_timeout_ms if classic is None else classic.session_timeout_ms

    def watch_revocation(self, member: ConsumerMember) -> None:
        """Give a member its rebalance timeout to revoke partitions that others wait for.

        A static member that has left has its session timeout to return.
        """
        member_id = member.member_id
        if not _is_revoking(member):
            self._revocations.stop((member_id,))
            self._revoking_since.pop(member_id, None)
        elif self._revoking_since.get(member_id) != member.epoch:
            self._revocations.start({member_id: member.rebalance_timeout_ms})
            self._revoking_since[member_id] = member.epoch

    # Members that use the classic protocol --------------------------------------------------------

    def await_join(self, member: ConsumerMember) -> None:
        """Give a member its rebalance timeout to join again, unless it has one already."""
        if member.member_id not in self._joins:
            self._joins.start({member.member_id: member.rebalance_timeout_ms})

    def await_sync(self, member: ConsumerMember) -> None:
        """Give a member that has joined its rebalance timeout to send SyncGroup."""
        self._joins.stop((member.member_id,))
        self._syncs.start({member.member_id: member.rebalance_timeout_ms})

    def stop_sync(self, member_id: str) -> None:
        """Note that a member has sent SyncGroup."""
        self._syncs.stop((member_id,))

    def stop_classic(self, member_id: str) -> None:
        """Note that a member uses the consumer protocol from now on."""
        self._joins.stop((member_id,))
        self._syncs.stop((member_id,))


def _is_revoking(member: ConsumerMember) -> bool:
    """Return whether a member has to confirm that it revoked partitions, and has not left."""
    return member.state is MemberState.UNREVOKED_PARTITIONS and not member.has_left
