"""The budget for metadata of group members."""

from broker.quotas.memory_budget import MemoryBudget

KB = 1_000


def fill(budget: MemoryBudget, principal: str | None) -> int:
    """Create groups of 1 KB until one is refused; return how many there are."""
    groups = 0
    while budget.admits(f"{principal}{groups}", KB, principal):
        budget.own(f"{principal}{groups}", principal)
        budget.note(f"{principal}{groups}", KB)
        groups += 1
    return groups


def test_each_principal_leaves_room_for_another() -> None:
    budget = MemoryBudget(1_024 * KB)
    assert [fill(budget, name) for name in "abc"] == [512, 256, 128]
    assert not budget.admits("new", KB, "a")
    assert budget.admits("new", KB, "d")


def test_without_principals_a_member_may_have_a_part_of_the_free_bytes() -> None:
    budget = MemoryBudget(1_024 * KB)
    assert fill(budget, None) == 1_024 - 63


def test_the_first_principal_of_a_group_owns_its_bytes() -> None:
    budget = MemoryBudget(1_024 * KB)
    budget.note("loaded", 600 * KB)
    budget.own("loaded", "a")
    budget.own("loaded", "b")
    assert not budget.admits("loaded", KB, "b")
    assert not budget.admits("other", KB, "a")
    assert budget.admits("other", KB, "b")
    assert budget.admits("loaded", 0)
    budget.remove("loaded")
    assert budget.admits("other", KB, "a")
    assert budget.used_bytes == 0
    assert not budget._owned_bytes
    assert not budget._owners
