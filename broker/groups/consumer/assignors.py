"""Server-side assignors: which member gets which partitions. Pure functions.

`uniform` gives each member as many partitions as the others, as far as subscriptions allow, and
moves as few partitions as possible. `range` gives each member a contiguous range of every topic, so
that topics with equal numbers of partitions are assigned alike (co-partitioning). Source: KIP-848.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

from broker.groups.consumer.model import Assignment, PartitionId, TopicMetadata


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One member for an assignor; `target` is its present target assignment.

    `topics` are names of topics that exist; members with the same names share one set.
    """

    member_id: str
    instance_id: str | None
    topics: frozenset[str]
    target: Assignment


Targets = dict[str, Assignment]
Assignor = Callable[[Collection[Subscriber], Mapping[str, TopicMetadata]], Targets]


def assign_range(members: Collection[Subscriber], topics: Mapping[str, TopicMetadata]) -> Targets:
    """Return contiguous ranges of each topic, members in order of instance id, then member id.

    The work grows with the partitions and with the names of distinct subscriptions: a topic is not
    compared with members that get none of its partitions.
    """
    ordered = sorted(members, key=_range_order)
    partitions: dict[str, set[PartitionId]] = {member.member_id: set() for member in ordered}
    sharing: dict[frozenset[str], list[int]] = defaultdict(list)  # positions of members
    for position, member in enumerate(ordered):
        sharing[member.topics].append(position)
    subscribers: dict[str, list[list[int]]] = defaultdict(list)
    for names, positions in sharing.items():
        for name in names:
            subscribers[name].append(positions)
    for name, subscribed in subscribers.items():
        topic = topics.get(name)
        if topic is None:
            continue
        each, rest = divmod(topic.partition_count, sum(map(len, subscribed)))
        first = 0
        # If there are more members than partitions, the first members get one each.
        receivers = islice(heapq.merge(*subscribed), topic.partition_count)
        for order, position in enumerate(receivers):
            end = first + each + (order < rest)
            assigned = partitions[ordered[position].member_id]
            assigned.update((topic.topic_id, index) for index in range(first, end))
            first = end
    return {member_id: frozenset(assigned) for member_id, assigned in partitions.items()}


def _range_order(member: Subscriber) -> tuple[bool, str]:
    return member.instance_id is None, member.instance_id or member.member_id


def assign_uniform(members: Collection[Subscriber], topics: Mapping[str, TopicMetadata]) -> Targets:
    """Return a balanced assignment that keeps as much as possible of the present targets."""
    if not members:
        return {}
    subscriptions = {member.topics for member in members}
    if len(subscriptions) == 1:
        return _uniform_same_topics(
            members, [t for n in subscriptions.pop() if (t := topics.get(n))]
        )
    return _uniform_different_topics(members, topics)


def _uniform_same_topics(
    members: Collection[Subscriber], topics: Sequence[TopicMetadata]
) -> Targets:
    """Assign when all members have the same topics: their counts differ by at most one."""
    counts = {topic.topic_id: topic.partition_count for topic in topics}
    each, with_one_more = divmod(sum(counts.values()), len(members))
    kept: dict[str, list[PartitionId]] = {}
    taken: set[PartitionId] = set()
    for member in sorted(members, key=lambda m: -len(m.target)):
        quota = each + (with_one_more > 0)
        still_valid = sorted(p for p in member.target if p[1] < counts.get(p[0], 0))
        kept[member.member_id] = [p for p in still_valid if p not in taken][:quota]
        taken.update(kept[member.member_id])
        with_one_more -= len(kept[member.member_id]) > each
    free = iter(
        (topic_id, index)
        for topic_id, count in sorted(counts.items())
        for index in range(count)
        if (topic_id, index) not in taken
    )
    for partitions in kept.values():
        while len(partitions) < each:
            partitions.append(next(free))
    for partitions in kept.values():
        if with_one_more > 0 and len(partitions) == each:
            partitions.append(next(free))
            with_one_more -= 1
    return {member_id: frozenset(partitions) for member_id, partitions in kept.items()}


def _uniform_different_topics(
    members: Collection[Subscriber], topics: Mapping[str, TopicMetadata]
) -> Targets:
    """Assign when members have different topics: the least loaded first, then move to balance."""
    by_id = {topic.topic_id: topic for topic in topics.values()}
    owned: dict[str, set[PartitionId]] = {member.member_id: set() for member in members}
    taken: set[PartitionId] = set()
    for member in members:
        for partition in member.target:
            topic = by_id.get(partition[0])
            if topic is None or topic.name not in member.topics:
                continue
            if partition[1] < topic.partition_count and partition not in taken:
                owned[member.member_id].add(partition)
                taken.add(partition)
    loads = _Loads(members, topics, owned)
    # Topics with few subscribers first: their partitions have the least choice.
    for _, topic_id in sorted((count, topic_id) for topic_id, count in loads.subscribers.items()):
        for index in range(by_id[topic_id].partition_count):
            if (topic_id, index) not in taken:
                owned[loads.least(topic_id)].add((topic_id, index))
    _balance(owned, loads)
    return {member_id: frozenset(partitions) for member_id, partitions in owned.items()}


class _Loads:
    """Finds the member with the fewest partitions among the subscribers of a topic.

    There is a heap of loads and members for each subscription, and one of the first members of its
    subscriptions for each topic: memory grows with members and names, not with their product. An
    entry that is too low is corrected when it comes first; a member that has lost partitions gets a
    new one.
    """

    def __init__(
        self,
        members: Collection[Subscriber],
        topics: Mapping[str, TopicMetadata],
        owned: Mapping[str, set[PartitionId]],
    ) -> None:
        """`owned` are the partitions of each member; the caller changes them."""
        self._owned = owned
        numbers: dict[frozenset[str], int] = {}
        self._number_of = {  # of the subscription of a member
            member.member_id: numbers.setdefault(member.topics, len(numbers)) for member in members
        }
        self._members: list[list[tuple[int, str]]] = [[] for _ in numbers]
        for member_id, number in self._number_of.items():
            self._members[number].append((len(owned[member_id]), member_id))
        by_name: dict[str, list[tuple[int, str, int]]] = {name: [] for name in topics}
        for heap in self._members:
            heapq.heapify(heap)
        for names, number in numbers.items():
            for name in names & by_name.keys():
                by_name[name].append((*self._members[number][0], number))
        self._heaps_of = [  # of the topics of a subscription
            [by_name[name] for name in names & by_name.keys()] for names in numbers
        ]
        self._heaps = {topics[name].topic_id: heap for name, heap in by_name.items() if heap}
        self.subscribers: dict[bytes, int] = {}  # their number, by topic
        for topic_id, firsts in self._heaps.items():
            heapq.heapify(firsts)
            self.subscribers[topic_id] = sum(len(self._members[number]) for *_, number in firsts)

    def least(self, topic_id: bytes) -> str:
        """Return the subscriber of a topic that has the fewest partitions."""
        heap = self._heaps[topic_id]
        while True:
            load, member_id, number = heap[0]
            present = self._first(number)
            if (load, member_id) == present:
                return member_id
            heapq.heapreplace(heap, (*present, number))

    def lost(self, member_id: str) -> None:
        """Note that a member has lost partitions."""
        number, entry = self._number_of[member_id], (len(self._owned[member_id]), member_id)
        heapq.heappush(self._members[number], entry)
        if self._first(number) == entry:
            for heap in self._heaps_of[number]:
                heapq.heappush(heap, (*entry, number))

    def _first(self, number: int) -> tuple[int, str]:
        """Return the lowest load of a subscription, and its member."""
        heap = self._members[number]
        while True:
            load, member_id = heap[0]
            present = len(self._owned[member_id])
            if load == present:
                return heap[0]
            heapq.heapreplace(heap, (present, member_id))


# Each round moves at least one partition to a member with at least two less, so it ends; the bound
# keeps a group of thousands from taking seconds. What remains is valid, only less even.
_BALANCE_ROUNDS: Final = 4


def _balance(owned: dict[str, set[PartitionId]], loads: _Loads) -> None:
    for _ in range(_BALANCE_ROUNDS):
        has_moved = False
        fewest = min(map(len, owned.values()))
        for member_id in sorted(owned, key=lambda m: (-len(owned[m]), m)):
            before = len(owned[member_id])
            for partition in sorted(owned[member_id]):
                if len(owned[member_id]) <= fewest + 1:
                    break
                least = loads.least(partition[0])
                if len(owned[least]) + 1 < len(owned[member_id]):
                    owned[member_id].remove(partition)
                    owned[least].add(partition)
            if len(owned[member_id]) < before:
                loads.lost(member_id)
                has_moved = True
        if not has_moved:
            return


# In the order of preference: a group whose members name none uses the first.
ASSIGNORS: Final[dict[str, Assignor]] = {"uniform": assign_uniform, "range": assign_range}
DEFAULT_ASSIGNOR: Final = "uniform"
