"""Server-side assignors: what a balanced assignment is, and that it stays."""

import tracemalloc
from collections.abc import Iterator
from itertools import combinations

import pytest

from broker.groups.consumer.assignors import Subscriber, assign_range, assign_uniform
from broker.groups.consumer.model import TopicMetadata
from tests.support.clocks.loop_meter import LoopMeter

ORDERS, BILLS = b"o" * 16, b"b" * 16


def topics(**partitions: int) -> dict[str, TopicMetadata]:
    ids = {"orders": ORDERS, "bills": BILLS}
    return {
        name: TopicMetadata(name, ids.get(name) or name.encode().rjust(16), count)
        for name, count in partitions.items()
    }


def subscriber(member_id: str, *names: str, has: tuple[int, ...] = ()) -> Subscriber:
    """A member that has these partitions of `orders`."""
    target = frozenset((ORDERS, index) for index in has)
    return Subscriber(member_id, None, frozenset(names), target)


def test_a_uniform_assignment_that_is_even_stays_beside_members_of_other_topics() -> None:
    members = [
        subscriber("a", "orders", has=(1, 2)),
        subscriber("b", "orders", has=(0,)),
        subscriber("c", "bills"),  # which does not exist
    ]
    assigned = assign_uniform(members, topics(orders=3))
    assert assigned == {member.member_id: member.target for member in members}


def test_a_uniform_assignment_moves_one_partition_where_one_has_two_more() -> None:
    members = [
        subscriber("a", "orders", has=(0, 1, 2)),
        subscriber("b", "orders", "bills"),
    ]
    assigned = assign_uniform(members, topics(orders=3))
    assert sorted(map(len, assigned.values())) == [1, 2]
    assert len(assigned["a"] & members[0].target) == 2


def test_the_memory_of_a_uniform_assignment_does_not_grow_with_members_times_topics() -> None:
    """Each topic has other subscribers: those of all topics, and a pair of its own."""
    pairs = dict(zip(range(400), combinations(range(30), 2), strict=False))
    names = {f"t{number}": 1 for number in pairs}
    members = [subscriber(f"m{number}", *names) for number in range(500)]
    for other in range(30):
        own = [f"t{number}" for number, pair in pairs.items() if other in pair]
        members.append(subscriber(f"o{other}", *own))
    metadata = topics(**names)
    tracemalloc.start()
    try:
        assigned = assign_uniform(members, metadata)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, assigned.values())) == 400
    assert peak_bytes < 10 * 500 * 400, "an entry for each member and topic has 64 bytes"


def test_the_work_of_a_uniform_assignment_does_not_grow_with_members_times_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    members = [
        subscriber(f"m{number}", *(["orders"] if number % 2 else ["orders", "bills"]))
        for number in range(1_000)
    ]
    members[0] = subscriber("m0", "orders", "bills", has=tuple(range(4_000)))
    meter = LoopMeter()
    with meter.measuring(monkeypatch):
        assigned = assign_uniform(members, topics(orders=4_000, bills=10))
    assert {len(partitions) for partitions in assigned.values()} == {4, 5}
    assert meter.lines < 100 * (1_000 + 4_000)  # each partition with each member: 4,000,000


def test_ranges_of_topics_with_equal_counts_are_alike() -> None:
    members = [subscriber(name, "orders", "bills") for name in "cab"]
    assigned = assign_range(members, topics(orders=4, bills=4))
    for member_id, indexes in (("a", {0, 1}), ("b", {2}), ("c", {3})):
        for topic_id in (ORDERS, BILLS):
            assert {index for t, index in assigned[member_id] if t == topic_id} == indexes


def test_ranges_of_members_with_other_subscriptions_follow_the_order_of_all_members() -> None:
    members = [
        subscriber("d", "orders"),
        subscriber("c", "orders", "bills"),
        subscriber("b", "orders"),
        subscriber("a", "bills"),
    ]
    assigned = assign_range(members, topics(orders=5, bills=1))
    assert assigned == {
        "a": {(BILLS, 0)},
        "b": {(ORDERS, 0), (ORDERS, 1)},
        "c": {(ORDERS, 2), (ORDERS, 3)},
        "d": {(ORDERS, 4)},
    }


def test_ranges_read_a_subscription_once_for_all_members_that_share_it() -> None:
    class CountedNames(frozenset[str]):
        reads = 0

        def __iter__(self) -> Iterator[str]:
            self.reads += 1
            return super().__iter__()

    names = CountedNames({"orders", "bills"})
    members = [Subscriber(f"m{index:03}", None, names, frozenset()) for index in range(100)]
    assigned = assign_range(members, topics(orders=3, bills=250))
    assert names.reads == 1
    assert [len(assigned[f"m{index:03}"]) for index in (0, 2, 3, 49, 50)] == [4, 4, 3, 3, 2]
