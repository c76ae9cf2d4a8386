"""Shares of a limited number of entries."""

from broker.quotas.shares import Shares


def create(shares: Shares, creator: str | None, entries: int) -> int:
    """Create as many entries as possible; return how many there are."""
    while shares.admits(creator, entries):
        shares.add(f"{entries}", creator)
        entries += 1
    return entries


def test_each_principal_leaves_room_for_another() -> None:
    shares = Shares(1000)
    counts, entries = [], 0
    for creator in ("a", "b", "c"):
        before, entries = entries, create(shares, creator, entries)
        counts.append(entries - before)
    assert counts == [500, 250, 125]
    assert not shares.admits("a", entries)
    assert shares.admits("d", entries)


def test_without_principals_all_entries_can_be_used() -> None:
    assert create(Shares(100), None, 0) == 100


def test_a_removed_entry_may_be_replaced() -> None:
    shares = Shares(10)
    entries = create(shares, "a", 0)
    assert not shares.admits("a", entries)
    shares.remove("0")
    assert shares.admits("a", entries - 1)
    for number in range(1, entries):
        shares.remove(str(number))
    shares.remove("not there")
    assert not shares._counts
    assert not shares._creators
