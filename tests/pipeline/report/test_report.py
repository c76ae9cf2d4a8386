"""What a survey advises, and how its plots are labelled: plain Python, no broker and no Spark."""

import random
import re

import pytest

from pipeline.report.figures import PartitionFigures, TopicFigures, segment_figures
from pipeline.report.policy import advise
from pipeline.report.ticks import TICKS_MAX, even_ticks, log_ticks
from pipeline.stages.tasks import SegmentCounts

DAY_MS = 86_400_000
MS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": DAY_MS}


def span_ms(label: str) -> int:
    """What a label says, which is a whole number of one unit."""
    number, unit = re.fullmatch(r"(\d+) (ms|s|min|h|d)", label).groups()  # type: ignore[union-attr]
    return int(number) * MS[unit]


@pytest.mark.parametrize("seed", range(3))
def test_ticks_of_time_are_whole_units_at_their_places(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(300):
        high = 10 ** chance.uniform(-3, 9.5)
        ticks = even_ticks(high)
        assert 2 <= len(ticks) <= TICKS_MAX + 1
        assert ticks[0] == (0, "0")
        assert {label.split()[1] for _, label in ticks[1:]} <= {ticks[-1][1].split()[1]}
        ticks = [*ticks[1:], *log_ticks(high / 10 ** chance.uniform(0, 6), high)]
        assert all(round(place * 1000) == span_ms(label) for place, label in ticks)
        assert all(place <= high for place, _ in ticks)


def test_ticks_are_those_that_people_would_choose() -> None:
    assert [label for _, label in even_ticks(400)] == [
        "0", "1 min", "2 min", "3 min", "4 min", "5 min", "6 min"]  # fmt: skip
    assert [label for _, label in even_ticks(100)] == [
        "0", "15 s", "30 s", "45 s", "60 s", "75 s", "90 s"]  # fmt: skip
    assert [label for _, label in log_ticks(0.5, 90_000)] == ["1 s", "1 min", "1 h", "1 d"]
    assert [label for _, label in log_ticks(3, 40)] == ["5 s", "10 s", "15 s", "30 s"]
    assert log_ticks(3.1, 3.2) == []


def figures_of(size_bytes: int, **settings: str) -> TopicFigures:
    """A compacted topic of that size, with much garbage."""
    counts = {"records": 10_000, "live": 1000, "tombstones": 10, "garbage": 9000, "keyless": 0}
    partition = PartitionFigures(
        partition=0, first_offset=0, end_offset=10_000, aborted=0, keys=1000, whole_from=0,
        size_bytes=size_bytes, live_bytes=size_bytes // 10, **counts,
    )  # fmt: skip
    named = {name.replace("_", "."): value for name, value in settings.items()}
    return TopicFigures("t", partitions=[partition], settings=named)


@pytest.mark.parametrize(
    ("size_bytes", "now", "advised"),
    [
        (1 << 30, str(DAY_MS), DAY_MS),  # read in minutes: that does not make an hour enough
        (1 << 30, None, DAY_MS),  # Kafka's default
        (1 << 30, str(3 * DAY_MS), 3 * DAY_MS),
        (100 << 30, str(DAY_MS), 10 * (100 << 30) // (5 << 20) * 1000),
        (10 << 40, str(DAY_MS), 7 * DAY_MS),
        (10 << 40, str(30 * DAY_MS), 30 * DAY_MS),
    ],
)
def test_an_assumed_reader_never_makes_the_advice_shorter_than_the_setting(
    size_bytes: int, now: str | None, advised: int
) -> None:
    settings = {} if now is None else {"delete_retention_ms": now}
    topic = figures_of(size_bytes, **settings)
    advise(topic)
    (advice,) = [advice for advice in topic.advice if advice.setting == "delete.retention.ms"]
    assert abs(int(advice.advised) - advised) < 60_000
    assert "set it to the longest time for which yours may be stopped" in advice.why


def test_the_age_of_a_segment_is_the_time_from_its_middle_to_the_end_of_the_log() -> None:
    counts = [
        SegmentCounts(0, 10, 100, records=10, live=5, first_ms=0, last_ms=0),
        SegmentCounts(10, 20, 100, control=1),  # no data record, so no time
        SegmentCounts(20, 30, 100, records=10, live=10, first_ms=400, last_ms=1000),
    ]
    segments = segment_figures("t", 0, counts)
    assert [segment.age_ms for segment in segments] == [1000, 0, 300]
    assert [segment.live_share for segment in segments] == [0.5, 0.0, 1.0]
