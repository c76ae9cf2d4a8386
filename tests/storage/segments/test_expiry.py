"""Which segments go: the arithmetic of retention, by tables."""

from dataclasses import replace

import pytest

from config.topics.keys import TopicConfig
from storage.model import SegmentFacts
from storage.segments.expiry import ExpiryReason, plan_expiry

NOW_MS = 1_000_000
DELETE = TopicConfig(cleanup_policy=("delete",), retention_ms=-1, retention_bytes=-1)
COMPACT = replace(DELETE, cleanup_policy=("compact",))
BOTH = replace(DELETE, cleanup_policy=("compact", "delete"))


def facts(base: int, end: int, size: int = 100, largest_ms: int = NOW_MS) -> SegmentFacts:
    return SegmentFacts(base, end, size, 0, 0, largest_ms, largest_ms, NOW_MS, False, ())


def three(*, size: int = 100, last_size: int = 100, largest_ms: int = NOW_MS) -> list[SegmentFacts]:
    return [
        facts(0, 5, size, largest_ms),
        facts(5, 10, size, largest_ms),
        facts(10, 15, last_size, largest_ms),
    ]


def expired(
    segments: list[SegmentFacts],
    config: TopicConfig,
    *,
    start: int = 0,
    high_watermark: int = 15,
    clock_trusted: bool = True,
) -> list[int]:
    going = plan_expiry(
        segments,
        config,
        log_start_offset=start,
        high_watermark=high_watermark,
        now_ms=NOW_MS,
        clock_trusted=clock_trusted,
    )
    return [segment.facts.base_offset for segment in going]


@pytest.mark.parametrize(
    ("limit", "gone"),
    [(300, []), (299, []), (201, []), (200, [0]), (101, [0]), (100, [0, 5]), (0, [0, 5, 10])],
)
def test_by_size_the_log_never_falls_below_the_limit(limit: int, gone: list[int]) -> None:
    assert expired(three(), replace(DELETE, retention_bytes=limit)) == gone


@pytest.mark.parametrize(("age_ms", "gone"), [(1000, []), (1001, [0, 5, 10])])
def test_by_time_a_segment_goes_when_it_is_strictly_older(age_ms: int, gone: list[int]) -> None:
    segments = three(largest_ms=NOW_MS - age_ms)
    assert expired(segments, replace(DELETE, retention_ms=1000)) == gone


def test_a_segment_without_timestamps_is_as_old_as_its_file() -> None:
    old = facts(0, 5, largest_ms=-1)._replace(last_modified_ms=NOW_MS - 1001)
    young = facts(5, 10, largest_ms=-1)
    config = replace(DELETE, retention_ms=1000)
    assert expired([old, young], config, high_watermark=10) == [0]


@pytest.mark.parametrize(("start", "gone"), [(0, []), (1, []), (5, [0]), (9, [0]), (15, [0, 5])])
@pytest.mark.parametrize("config", [DELETE, COMPACT, BOTH])
def test_below_the_log_start_whole_closed_segments_go(
    config: TopicConfig, start: int, gone: list[int]
) -> None:
    assert expired(three(), config, start=start) == gone


def test_compact_alone_keeps_what_is_old_and_large() -> None:
    config = replace(COMPACT, retention_ms=1, retention_bytes=1)
    assert expired(three(largest_ms=0), config) == []


def test_compact_and_delete_expires_as_delete_does() -> None:
    assert expired(three(largest_ms=0), replace(BOTH, retention_ms=1)) == [0, 5, 10]


def test_only_a_prefix_goes() -> None:
    segments = [facts(0, 5), facts(5, 10, largest_ms=0), facts(10, 15)]
    assert expired(segments, replace(DELETE, retention_ms=1000)) == []


@pytest.mark.parametrize(("high_watermark", "gone"), [(4, []), (5, [0]), (14, [0, 5])])
def test_nothing_above_the_high_watermark_goes(high_watermark: int, gone: list[int]) -> None:
    config = replace(DELETE, retention_ms=1)
    assert expired(three(largest_ms=0), config, high_watermark=high_watermark) == gone


def test_an_empty_active_segment_stays() -> None:
    segments = three(largest_ms=0, last_size=0)
    assert expired(segments, replace(DELETE, retention_ms=1)) == [0, 5]


def test_nobody_gave_a_policy_so_nothing_goes() -> None:
    config = replace(DELETE, retention_ms=1, retention_bytes=0, policy_known=False)
    assert expired(three(largest_ms=0), config, start=15) == []


def test_a_clock_that_is_not_trusted_expires_nothing_by_time() -> None:
    config = replace(DELETE, retention_ms=1, retention_bytes=200)
    assert expired(three(largest_ms=0), config, clock_trusted=False) == [0]


def test_each_segment_says_why_it_goes() -> None:
    segments = [facts(0, 5), facts(5, 10), facts(10, 15, largest_ms=0), facts(15, 20)]
    config = replace(DELETE, retention_ms=1000, retention_bytes=200)
    going = plan_expiry(segments, config, log_start_offset=5, high_watermark=20, now_ms=NOW_MS)
    assert [segment.reason for segment in going] == [
        ExpiryReason.LOG_START_OFFSET,
        ExpiryReason.SIZE,
        ExpiryReason.TIME,
    ]
