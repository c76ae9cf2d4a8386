"""The members of a classic group, with what a join asks of all of them together.

Rules. Values never change. Apart from copying mappings, a change costs time only for the members
that it changes: a group has thousands of members, and each of them joins in every generation.
"""

from collections.abc import Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass, field
from typing import Final

from broker.quotas.memory_budget import memory_of_text

NO_ASSIGNMENT = b""
MEMBER_BYTES: Final = 1_000  # of memory, for each member beside its metadata and names

# (name, metadata) in the order of a member's preference.
Protocols = tuple[tuple[str, bytes], ...]


def memory_of(protocols: Protocols, *names: str | None) -> int:
    """Return about how many bytes of memory a member with these protocols and names takes."""
    return (
        MEMBER_BYTES
        + sum(memory_of_text(name) for name in names if name is not None)
        + sum(memory_of_text(name) + len(metadata) for name, metadata in protocols)
    )


@dataclass(frozen=True, slots=True)
class Member:
    """One member."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols

    def metadata(self, protocol_name: str | None) -> bytes:
        """Return the member's metadata for a protocol; empty if it does not support it."""
        wanted = protocol_name or ""
        for name, metadata in self.protocols:
            if name == wanted:
                return metadata
        return b""

    @property
    def memory_bytes(self) -> int:
        """Return about how many bytes of memory it takes."""
        return memory_of(self.protocols, self.instance_id, self.client_id)


@dataclass(frozen=True, slots=True)
class ProtocolTotals:
    """The protocols of all members.

    `preferences` has the number of members with each list of protocol names, in the order of
    preference. `metadata_bytes` has the size of all members' metadata for each protocol.
    """

    preferences: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    metadata_bytes: Mapping[str, int] = field(default_factory=dict)

    def changed(self, removed: Iterable[Protocols], added: Iterable[Protocols]) -> "ProtocolTotals":
        """Return the totals without the protocols of some members, and with those of others."""
        preferences, metadata_bytes = dict(self.preferences), dict(self.metadata_bytes)
        for sign, members in ((1, added), (-1, removed)):
            for protocols in members:
                names = tuple(name for name, _ in protocols)
                preferences[names] = preferences.get(names, 0) + sign
                if not preferences[names]:
                    del preferences[names]
                for name, metadata in protocols:
                    size_bytes = metadata_bytes.pop(name, 0) + sign * len(metadata)
                    if size_bytes:
                        metadata_bytes[name] = size_bytes
        return ProtocolTotals(preferences, metadata_bytes)

    def supported_by_all(self) -> frozenset[str] | None:
        """Return the protocols that every member supports; None without members: any protocol."""
        if not self.preferences:
            return None
        first, *others = self.preferences
        return frozenset(first).intersection(*others)

    def elected(self) -> str:
        """Return the protocol with the most votes; in a tie, the one that got a vote first.

        Each member votes for the protocol that it prefers among those that all members support.
        There is at least one: the group refuses a member that would leave none.
        """
        shared = self.supported_by_all()
        assert shared, "members without a common protocol"
        votes: dict[str, int] = {}
        for names, members in self.preferences.items():
            vote = next(name for name in names if name in shared)
            votes[vote] = votes.get(vote, 0) + members
        return max(votes, key=votes.__getitem__)

    @property
    def largest_bytes(self) -> int:
        """Return the most bytes of metadata that the record of the group can have.

        The record has the metadata for the elected protocol, and each member can change which one
        is elected.
        """
        return max(self.metadata_bytes.values(), default=0)


class Members(Mapping[str, Member]):
    """Members by id."""

    __slots__ = ("_by_id", "_ids_by_instance", "memory_bytes", "protocols")

    def __init__(
        self,
        by_id: Mapping[str, Member],
        ids_by_instance: Mapping[str, str],
        protocols: ProtocolTotals,
        memory_bytes: int,
    ) -> None:
        """Use `of`, or `changed`."""
        self._by_id = by_id
        self._ids_by_instance = ids_by_instance
        self.protocols = protocols
        self.memory_bytes = memory_bytes

    @classmethod
    def of(cls, members: Iterable[Member] = ()) -> "Members":
        """Return a collection of members."""
        return cls({}, {}, ProtocolTotals(), 0).changed((), tuple(members))

    def __getitem__(self, member_id: str) -> Member:
        return self._by_id[member_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_id)

    def __len__(self) -> int:
        return len(self._by_id)

    def __repr__(self) -> str:
        return f"Members({list(self._by_id.values())})"

    def keys(self) -> KeysView[str]:
        """Return the ids of the members."""
        return self._by_id.keys()

    def values(self) -> ValuesView[Member]:
        """Return the members."""
        return self._by_id.values()

    def items(self) -> ItemsView[str, Member]:
        """Return the members with their ids."""
        return self._by_id.items()

    def with_instance(self, instance_id: str) -> Member | None:
        """Return the member with this group.instance.id."""
        member_id = self._ids_by_instance.get(instance_id)
        return None if member_id is None else self._by_id[member_id]

    def with_member(self, member: Member) -> "Members":
        """Return the members with this one added or replaced."""
        return self.changed((), (member,))

    def without(self, member_ids: Iterable[str]) -> "Members":
        """Return the members without some."""
        gone = frozenset(member_ids) & self.keys()
        if 2 * len(gone) > len(self):  # fewer members stay than go
            return Members.of(self[key] for key in [key for key in self if key not in gone])
        return self.changed(gone, ())

    def changed(self, gone: Iterable[str], present: Collection[Member]) -> "Members":
        """Return the members without some, and with others added or replaced."""
        by_id, ids_by_instance = dict(self._by_id), dict(self._ids_by_instance)
        removed = [by_id.pop(member_id) for member_id in gone]
        for member in present:
            replaced = by_id.get(member.member_id)
            if replaced is not None:
                removed.append(replaced)
            by_id[member.member_id] = member
        for member in removed:
            if member.instance_id is not None:
                ids_by_instance.pop(member.instance_id, None)
        for member in present:
            if member.instance_id is not None:
                ids_by_instance[member.instance_id] = member.member_id
        more_bytes = sum(member.memory_bytes for member in present)
        less_bytes = sum(member.memory_bytes for member in removed)
        protocols = self.protocols.changed(
            [member.protocols for member in removed], [member.protocols for member in present]
        )
        memory_bytes = self.memory_bytes + more_bytes - less_bytes
        return Members(by_id, ids_by_instance, protocols, memory_bytes)
