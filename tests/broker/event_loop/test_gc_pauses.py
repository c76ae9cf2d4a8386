"""Full collections of cyclic garbage: how often they traverse objects that last."""

import gc
from collections.abc import Iterator
from itertools import count

import pytest

from broker.event_loop.gc_pauses import (
    COLLECTIONS_MAX,
    FREEZES_MAX,
    LONG_SECONDS,
    FullCollections,
)


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


def collections(seconds: float) -> FullCollections:
    """Each of them takes so long."""
    readings = count()
    return FullCollections(lambda: next(readings) * seconds)


def test_what_survives_a_long_collection_is_not_traversed_again() -> None:
    collections(2 * LONG_SECONDS).collect(may_freeze=True)
    assert gc.get_freeze_count() > 0


def test_what_survives_a_short_collection_is_traversed_again() -> None:
    collections(LONG_SECONDS / 2).collect(may_freeze=True)
    assert gc.get_freeze_count() == 0


def test_rows_of_a_large_request_are_not_frozen() -> None:
    collections(2 * LONG_SECONDS).collect(may_freeze=False)
    assert gc.get_freeze_count() == 0


def test_after_many_freezes_everything_is_traversed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cyclic garbage among frozen objects would stay for ever."""
    steps: list[str] = []
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: steps.append(name))
    long_ones = collections(2 * LONG_SECONDS)
    for _ in range(FREEZES_MAX + 2):
        long_ones.collect(may_freeze=True)
    all_again = ["collect", "unfreeze", "collect", "freeze"]
    assert steps == ["collect", "freeze"] * FREEZES_MAX + all_again


def test_after_many_short_collections_everything_is_traversed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is frozen may become garbage while the broker has little to do."""
    steps: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: None)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: steps.append(name))
    readings = iter([0.0, 2 * LONG_SECONDS])  # the first one is long
    mixed = FullCollections(lambda: next(readings, 0.0))
    for _ in range(COLLECTIONS_MAX + 1):
        mixed.collect(may_freeze=True)
    assert steps == ["freeze"]
    for _ in range(COLLECTIONS_MAX + 1):
        mixed.collect(may_freeze=True)
    assert steps == ["freeze", "unfreeze"]
