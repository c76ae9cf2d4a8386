"""Recommends a cleanup policy and settings from a topic's figures, with reasons.

Rules
- Advice is computed from the figures alone and names them. With too few records it says so.
- Whether old state may be deleted depends on the use of the topic; only its owner can decide.
"""

import math
from typing import Final

from config.units import about_size, about_span
from pipeline.report.figures import Advice, SpaceOverhead, TopicFigures, level_at, percent

RECORDS_MIN: Final = 1000  # fewer records are not significant
KEYLESS_MOST: Final = 0.5
GARBAGE_LEAST: Final = 0.05
SLACK_WANTED: Final = 0.3  # most garbage, as a share of the log
SEGMENT_MIN: Final = 4 << 20
SEGMENT_MAX: Final = 1 << 30
READ_BYTES_PER_SECOND: Final = 5 << 20  # of a slow consumer
DAY_MS: Final = 86_400_000
_UNKNOWN: Final = "unknown"


def advise(topic: TopicFigures) -> None:
    """Set the policy, the advice and the slack of a topic."""
    written = sum(figures.end_offset - figures.first_offset for figures in topic.partitions)
    live_bytes, size_bytes = topic.total("live_bytes"), topic.total("size_bytes")
    topic.overhead.now_bytes = max(size_bytes - live_bytes, 0)
    if written < RECORDS_MIN or not topic.total("records"):
        topic.policy = "too few records"
        topic.policy_why = (
            f"The closed segments have {written:,} offsets and {topic.total('records'):,} records;"
            f" advice needs {RECORDS_MIN:,}."
        )
        topic.overhead.least_bytes = topic.overhead.most_bytes = topic.overhead.now_bytes
        topic.overhead.why = "The size of the log minus its live records."
        return
    topic.policy, topic.policy_why = _policy(topic)
    now = topic.settings.get("cleanup.policy", _UNKNOWN)
    topic.advice.append(Advice("cleanup.policy", now, topic.policy, topic.policy_why))
    if "compact" not in topic.policy:
        topic.overhead.least_bytes = topic.overhead.most_bytes = topic.overhead.now_bytes
        topic.overhead.why = "Without compaction, retention alone limits the log."
        return
    ratio = _dirty_ratio(topic)
    segment_bytes = _segment_bytes(topic)
    lag_ms = _lag(topic)
    _delete_retention(topic)
    topic.overhead = _overhead(topic, ratio, segment_bytes, lag_ms)


def _policy(topic: TopicFigures) -> tuple[str, str]:
    keyless, garbage = topic.share("keyless"), topic.share("garbage")
    if keyless > KEYLESS_MOST:
        return "delete", (
            f"{percent(keyless)} of the records have no key: compaction refuses new ones and"
            " removes old ones. Time or size should bound this log."
        )
    if topic.total("live") == 0:
        return "compact", (
            "Every key was deleted: compaction would leave only tombstones, for"
            " delete.retention.ms."
        )
    if garbage < GARBAGE_LEAST and not topic.is_cleaned:
        return "delete", (
            f"{percent(garbage)} of the records are superseded: nearly every record is the only one"
            " of its key. Compaction would read the log repeatedly and free almost nothing."
        )
    level = topic.survival.by_age[-1][1] if topic.survival.by_age else 1.0
    if level > 0.5 and topic.total("keys") > 0.3 * topic.total("records") and garbage < 0.5:
        return "compact,delete", (
            f"{percent(garbage)} of the records are superseded, but {percent(level)} will probably"
            " stay live for ever: the number of keys grows with the log. Compaction removes the"
            " updates; without retention.ms the log still grows."
        )
    return "compact", (
        f"{percent(garbage)} of the records are superseded, {percent(topic.share('live'))} are the"
        f" last of their key: the state fits into {about_size(topic.total('live_bytes'))} of"
        f" {about_size(topic.total('size_bytes'))}."
    )


def _dirty_ratio(topic: TopicFigures) -> float:
    """Advise the dirty ratio at which a clean is worth its reads."""
    die = 1 - level_at(topic.survival.by_age, math.inf)
    if topic.survival.ended == 0:
        die = topic.share("garbage")
    ratio = min(max(SLACK_WANTED / max(die, 0.01), 0.1), 0.9)
    ratio = round(ratio * 20) / 20
    topic.advice.append(
        Advice(
            "min.cleanable.dirty.ratio",
            topic.settings.get("min.cleanable.dirty.ratio", _UNKNOWN),
            f"{ratio:g}",
            f"{percent(die)} of the records written are superseded within the observed time. A"
            f" clean at {ratio:g} finds about {percent(ratio * die)} of the log to be garbage, and"
            f" cleans read each byte {1 / ratio:.1f} times.",
        )
    )
    return ratio


def _segment_bytes(topic: TopicFigures) -> int:
    live = topic.total("live_bytes") // max(len(topic.partitions), 1)
    segment_bytes = min(max(live // 10, SEGMENT_MIN), SEGMENT_MAX)
    segment_bytes = 1 << (segment_bytes - 1).bit_length()
    spent_ms = topic.last_ms - topic.first_ms
    size = topic.total("size_bytes") // max(len(topic.partitions), 1)
    fills = ""
    if size and spent_ms > 0:
        span = about_span(int(spent_ms * segment_bytes / size))
        fills = f" At the current rate, a segment fills in {span}."
    topic.advice.append(
        Advice(
            "segment.bytes",
            topic.settings.get("segment.bytes", _UNKNOWN),
            str(segment_bytes),
            "The active segment is never cleaned, so it should be small compared to the live state"
            f" of a partition, {about_size(live)}.{fills}",
        )
    )
    return segment_bytes


def _lag(topic: TopicFigures) -> int:
    half_ms = topic.survival.half_life_ms
    if half_ms is None or half_ms > DAY_MS:
        advised = 0
        why = (
            "Less than half of the records are superseded within a day, so waiting saves little."
            " Set it if consumers must see every update for some time."
        )
    else:
        advised = int(max(half_ms, 1000)) // 1000 * 1000
        why = (
            f"Half of the records are superseded within {about_span(int(half_ms))}: cleaning sooner"
            " would copy records that are soon dropped."
        )
    now = topic.settings.get("min.compaction.lag.ms", _UNKNOWN)
    topic.advice.append(Advice("min.compaction.lag.ms", now, str(advised), why))
    return advised


def _delete_retention(topic: TopicFigures) -> None:
    """Advise a longer time if reading the whole topic takes long, never less than the setting.

    No figure shows how long consumers are stopped; one that misses a delete keeps the key for ever.
    """
    now = topic.settings.get("delete.retention.ms")
    now_ms = DAY_MS if now is None else int(now)
    read_ms = topic.total("size_bytes") / READ_BYTES_PER_SECOND * 1000
    wanted_ms = int(min(10 * read_ms, 7 * DAY_MS)) // 60_000 * 60_000
    deletes = topic.total("tombstones")
    topic.advice.append(
        Advice(
            "delete.retention.ms",
            _UNKNOWN if now is None else now,
            str(max(now_ms, wanted_ms)),
            "A consumer that is stopped for longer than this misses deletes for good, so set it to"
            " the longest time for which yours may be stopped. The advice covers only reading: at"
            f" {about_size(READ_BYTES_PER_SECOND)}/s a consumer reads the whole topic in"
            f" {about_span(int(read_ms))}; the advised minimum is ten times that, up to a week."
            f" {deletes:,} keys are tombstones now.",
        )
    )


def _overhead(topic: TopicFigures, ratio: float, segment_bytes: int, lag_ms: int) -> SpaceOverhead:
    live, size = topic.total("live_bytes"), topic.total("size_bytes")
    die = 1 - level_at(topic.survival.by_age, math.inf)
    garbage = min(ratio * die, 0.95)
    active = segment_bytes * len(topic.partitions)
    spent_ms = topic.last_ms - topic.first_ms
    too_young = min(size * lag_ms // spent_ms, size) if spent_ms > 0 else 0
    most = int(live * garbage / (1 - garbage)) + active + too_young
    return SpaceOverhead(
        now_bytes=topic.overhead.now_bytes,
        least_bytes=too_young,
        most_bytes=most,
        why=(
            f"Up to {about_size(most)} just before a clean: {percent(garbage)} of the log as"
            f" garbage, {about_size(active)} of active segments, and {about_size(too_young)} too"
            f" young to be cleaned. At present: {about_size(topic.overhead.now_bytes)}."
        ),
    )
