"""Full collections of cyclic garbage: when they are due, and what they traverse again."""

import gc
from collections.abc import Iterator
from itertools import count

import pytest

from broker.event_loop.gc_pauses import (
    COLLECT_SECONDS,
    FREEZES_MAX,
    FROZEN_SECONDS,
    LONG_SECONDS,
    MANY_FROZEN_SECONDS,
    MIDDLE_COLLECTIONS,
    PUT_OFF_SECONDS,
    FullCollections,
)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, instead of doing it; few objects are new."""
    steps: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: steps.append(name))
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 0))
    return steps


class Collections:
    """Collections that take a given time each."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        readings = count()
        clock = lambda: next(readings) * seconds  # noqa: E731
        self._collections = FullCollections(clock, lambda: self.now)

    def look(self, seconds: float = COLLECT_SECONDS, *, is_large_request: bool = False) -> None:
        self.now += seconds
        self._collections.collect_if_due(is_large_request=is_large_request)


def test_what_survives_a_long_collection_is_not_traversed_again() -> None:
    Collections(2 * LONG_SECONDS).look()
    assert gc.get_freeze_count() > 0


def test_what_survives_a_short_collection_is_traversed_again() -> None:
    Collections(LONG_SECONDS / 2).look()
    assert gc.get_freeze_count() == 0


def test_a_collection_is_due_after_a_time_or_when_many_objects_have_grown_old(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    collections = Collections(0)
    collections.look(COLLECT_SECONDS - 1)
    assert steps == []
    collections.look(1)
    assert steps == ["collect"]
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, MIDDLE_COLLECTIONS - 1))
    collections.look(1)
    assert steps == ["collect"]
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, MIDDLE_COLLECTIONS))
    collections.look(1)
    assert steps == ["collect"] * 2


def test_objects_that_last_are_traversed_in_small_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client creates 15,000 groups in a minute: to traverse them at once takes 120 ms."""
    collections, kept, unfrozen = Collections(2 * LONG_SECONDS), list[list[int]](), list[int]()
    collect = gc.collect

    def count() -> int:
        unfrozen.append(len(gc.get_objects()))
        return collect()

    monkeypatch.setattr(gc, "collect", count)
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 1 << 30)
    try:
        collections.look()
        for _ in range(200):
            kept += [[] for _ in range(1000)]
            collections.look(0.01)
    finally:
        gc.set_threshold(*before)
    assert len(unfrozen) > 5
    assert max(unfrozen[1:]) < 40_000


def test_a_large_request_puts_a_collection_off_but_not_for_ever(
    steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1000))
    collections = Collections(2 * LONG_SECONDS)
    collections.look(PUT_OFF_SECONDS - 1, is_large_request=True)
    assert steps == []
    collections.look(1, is_large_request=True)
    assert steps == ["collect"]  # its rows are not frozen


def test_everything_is_traversed_once_a_day(steps: list[str]) -> None:
    """Cyclic garbage among frozen objects would stay for ever."""
    collections = Collections(2 * LONG_SECONDS)
    collections.look()
    collections.look(FROZEN_SECONDS - 1)
    assert steps == ["collect", "freeze"] * 2
    collections.look()
    collections.look()
    assert steps == [*["collect", "freeze"] * 2, "collect", "unfreeze", "collect", "freeze"]


def test_everything_is_traversed_once_an_hour_after_many_freezes(steps: list[str]) -> None:
    collections = Collections(2 * LONG_SECONDS)
    for _ in range(FREEZES_MAX):
        collections.look()
    assert steps == ["collect", "freeze"] * FREEZES_MAX
    collections.look(MANY_FROZEN_SECONDS)
    assert steps[2 * FREEZES_MAX :] == ["collect", "unfreeze"]
