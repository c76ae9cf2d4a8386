"""Incremental fetch sessions: KIP-227's rules, and their bounds."""

import random

import pytest

from broker.network import fetch_sessions
from broker.network.fetch_sessions import (
    EVICT_AFTER_SECONDS,
    FINAL_EPOCH,
    MAX_EPOCH,
    FetchSession,
    FetchSessionError,
    FetchSessions,
    Targets,
)
from protocol.errors import ErrorCode
from protocol.fetch_codec import FetchPartition


def targets(*indexes: int, topic: str = "t") -> Targets:
    return {(topic, index): FetchPartition(index, -1, 0, -1, -1, 1000) for index in indexes}


def sessions(limit: int = 10) -> FetchSessions:
    return FetchSessions(limit, random.Random(7))


def granted(
    cache: FetchSessions, expected: Targets, now: float = 0.0, owner: str = "a"
) -> FetchSession:
    session = cache.full(0, 0, expected, by_id=False, owner=owner, now=now)
    assert session is not None
    return session


def test_a_full_fetch_is_granted_a_session_and_an_incremental_one_names_changes_only() -> None:
    cache = sessions()
    session = granted(cache, targets(0, 1))
    again = cache.incremental(
        session.session_id, 1, targets(2), [("t", 0)], by_id=False, owner="a", now=1.0
    )
    assert again is session
    assert list(again.targets) == [("t", 1), ("t", 2)]
    assert again.epoch == 2


def test_a_sessionless_fetch_gets_none_and_ends_the_session_it_names() -> None:
    cache = sessions()
    session = granted(cache, targets(0))
    assert cache.full(session.session_id, -1, targets(0), by_id=False, owner="a", now=0.0) is None
    assert len(cache) == 0


@pytest.mark.parametrize(
    ("session_offset", "epoch", "by_id", "code"),
    [
        (1, 1, False, ErrorCode.FETCH_SESSION_ID_NOT_FOUND),
        (0, 5, False, ErrorCode.INVALID_FETCH_SESSION_EPOCH),
        (0, 1, True, ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR),
    ],
)
def test_a_session_that_does_not_fit_is_refused_by_code(
    session_offset: int, epoch: int, by_id: bool, code: ErrorCode
) -> None:
    cache = sessions()
    session = granted(cache, targets(0))
    with pytest.raises(FetchSessionError) as caught:
        cache.incremental(
            session.session_id + session_offset, epoch, {}, [], by_id=by_id, owner="a", now=0.0
        )
    assert caught.value.code is code


def test_the_epoch_wraps_to_1_and_never_to_0() -> None:
    cache = sessions()
    session = granted(cache, targets(0))
    session.epoch = MAX_EPOCH
    cache.incremental(session.session_id, MAX_EPOCH, {}, [], by_id=False, owner="a", now=0.0)
    assert session.epoch == 1


def test_a_full_cache_gives_no_session_until_one_has_been_idle() -> None:
    cache = sessions(limit=1)
    first = granted(cache, targets(0), now=0.0)
    assert cache.full(0, 0, targets(1), by_id=False, owner="a", now=EVICT_AFTER_SECONDS - 1) is None
    second = cache.full(0, 0, targets(1), by_id=False, owner="a", now=EVICT_AFTER_SECONDS)
    assert second is not None
    assert second.session_id != first.session_id
    assert cache.evictions == 1


def test_a_session_does_not_exist_for_another_principal() -> None:
    cache = sessions()
    session_id = granted(cache, targets(0)).session_id
    with pytest.raises(FetchSessionError) as caught:
        cache.incremental(session_id, 1, targets(1), [], by_id=False, owner="b", now=0.0)
    assert caught.value.code is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert cache.full(session_id, FINAL_EPOCH, {}, by_id=False, owner="b", now=0.0) is None
    assert cache.incremental(session_id, 1, {}, [], by_id=False, owner="a", now=0.0).epoch == 2


def test_a_principal_with_many_sessions_leaves_room_for_the_others() -> None:
    cache = sessions(limit=10)
    mine = [granted(cache, targets(0)).session_id for _ in range(10)]
    assert cache.full(0, 0, targets(0), by_id=False, owner="a", now=1.0) is None
    others = [granted(cache, targets(0), now=1.0, owner="b").session_id for _ in range(3)]
    assert cache.full(0, 0, targets(0), by_id=False, owner="b", now=1.0) is None
    for session_id in others:
        cache.incremental(session_id, 1, {}, [], by_id=False, owner="b", now=1.0)
    for session_id in mine[3:]:
        cache.incremental(session_id, 1, {}, [], by_id=False, owner="a", now=1.0)
    assert cache.evictions == 3


def test_a_principal_with_many_partitions_leaves_room_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch_sessions, "MAX_ALL_PARTITIONS", 100)
    cache = sessions(limit=1000)
    for _ in range(5):
        granted(cache, targets(*range(20)))
    assert cache.full(0, 0, targets(0), by_id=False, owner="a", now=1.0) is None
    granted(cache, targets(0, 1, 2), owner="b")
    assert cache.partitions == 83


def test_an_answer_holds_what_moved_and_what_has_records_and_nothing_else() -> None:
    session = granted(sessions(), targets(0))
    key = ("t", 0)

    def tell(*, records: bool = False, error: bool = False, end: int = 5) -> bool:
        return session.needs_response(
            key, records=records, error=error, high_watermark=end, log_start=0
        )

    assert tell()
    assert not tell()
    assert tell(end=6)
    assert not tell(end=6)
    assert tell(records=True, end=6)
    assert tell(error=True, end=-1)
    assert tell(end=6), "well again after an error"


def test_a_partition_that_was_served_moves_behind_the_others() -> None:
    session = granted(sessions(), targets(0, 1, 2))
    session.needs_response(("t", 0), records=True, error=False, high_watermark=1, log_start=0)
    assert [index for _, index in session.targets] == [1, 2, 0]


def test_sessions_that_grow_stay_below_the_limit_of_all_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch_sessions, "MAX_ALL_PARTITIONS", 100)
    cache = sessions()
    grown, other = granted(cache, targets(0)), granted(cache, targets(0))
    cache.incremental(
        grown.session_id, 1, targets(*range(1, 90)), [], by_id=False, owner="a", now=1.0
    )
    with pytest.raises(FetchSessionError) as refused:
        cache.incremental(
            other.session_id, 1, targets(*range(1, 12)), [], by_id=False, owner="a", now=1.0
        )
    assert refused.value.code is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert cache.partitions == 91
    cache.incremental(other.session_id, 1, targets(0), [], by_id=False, owner="a", now=1.0)
    cache.end(grown)
    cache.incremental(
        other.session_id, 2, targets(*range(1, 12)), [], by_id=False, owner="a", now=1.0
    )
    assert cache.partitions == 12


def test_a_session_that_names_its_partitions_again_and_again_takes_no_more_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch_sessions, "MAX_ALL_PARTITIONS", 100)
    cache = sessions()
    session = granted(cache, targets(*range(50)))
    for epoch in range(1, 10):
        cache.incremental(
            session.session_id,
            epoch,
            targets(*range(50)),
            [],
            by_id=False,
            owner="a",
            now=1.0,
        )
    assert len(session.targets) == 50


def test_requests_that_add_partitions_at_a_time_count_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetch_sessions, "MAX_SESSION_PARTITIONS", 100)
    cache = sessions()
    session = granted(cache, targets(0))
    for epoch in (1, 2):
        cache.resume(session.session_id, epoch, 49, by_id=False, owner="a", now=1.0)
    with pytest.raises(FetchSessionError):
        cache.resume(session.session_id, 3, 49, by_id=False, owner="a", now=1.0)
    session.added(49)
    cache.resume(session.session_id, 3, 49, by_id=False, owner="a", now=1.0)


def test_evictions_do_not_count_all_sessions_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user with a thousand sessions made the next fetch of another hold the event loop."""

    class Owner:
        looked_up = 0

        def __hash__(self) -> int:
            Owner.looked_up += 1
            return 7

    monkeypatch.setattr(fetch_sessions, "MAX_ALL_PARTITIONS", 800)
    cache, owner = sessions(limit=1000), Owner()
    for index in range(300):
        assert cache.full(0, 0, targets(index), by_id=False, owner=owner, now=0.0) is not None
    assert cache.full(0, 0, targets(*range(400)), by_id=False, owner=owner, now=0.0) is not None
    Owner.looked_up = 0
    granted(cache, targets(*range(200)), owner="b")
    assert cache.evictions == 100
    assert Owner.looked_up < 5 * cache.evictions
