"""Members of classic groups: what is known of all of them is what each of them says."""

import random
from collections import Counter

import pytest

from broker.groups.classic.members import Member, Members, Protocols
from tests.support.draws import cases

NAMES = ("range", "roundrobin", "sticky", "own")


def member(number: int, chance: random.Random) -> Member:
    names = chance.sample(NAMES, chance.randint(1, len(NAMES)))
    protocols: Protocols = tuple((name, bytes(chance.randint(0, 9))) for name in names)
    instance_id = f"i{number}" if number % 2 else None
    return Member(f"m{number}", instance_id, "c", "/h", 10, 60, protocols)


@pytest.mark.parametrize("seed", range(cases(few=20, many=200)))
def test_totals_after_random_changes_are_those_of_the_members(seed: int) -> None:
    print(f"seed {seed}")
    chance = random.Random(seed)
    members = Members.of()
    expected: dict[str, Member] = {}
    for _ in range(60):
        if chance.random() < 0.7:
            joined = member(chance.randrange(12), chance)
            members = members.with_member(joined)
            expected[joined.member_id] = joined
        else:
            gone = chance.sample(sorted(expected), chance.randint(0, len(expected)))
            members = members.without([*gone, "unknown"])
            for member_id in gone:
                del expected[member_id]
        _check(members, expected)


def _check(members: Members, expected: dict[str, Member]) -> None:
    assert members == expected
    assert list(members) == list(expected), "in the order in which they joined"
    assert members.memory_bytes == sum(each.memory_bytes for each in expected.values())
    for number in range(12):
        static = members.with_instance(f"i{number}")
        assert static == (expected.get(f"m{number}") if number % 2 else None)
    sizes = Counter[str]()
    for each in expected.values():
        sizes.update({name: len(data) for name, data in each.protocols})
    assert members.protocols.largest_bytes == max(sizes.values(), default=0)
    named = [{name for name, _ in each.protocols} for each in expected.values()]
    shared = set.intersection(*named) if named else None
    assert members.protocols.supported_by_all() == shared
    if shared:
        votes = Counter(
            next(name for name, _ in each.protocols if name in shared) for each in expected.values()
        )
        assert votes[members.protocols.elected()] == max(votes.values())
