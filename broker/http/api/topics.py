"""/api/v1/topics: all topics, and the segments of a partition. openapi/ lists the paths.

A row of segments is an array, whose columns the response names: a log may have thousands of
segments, and the console asks for them every few seconds.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain
from typing import Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.http.api.json_shapes import Json, partition_fields
from broker.http.api.lookup import served_partition
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    cut_page,
    first_page,
    page_limit,
    parse_boolean,
    parse_integer,
    parse_partition,
    query_parameters,
    rows_response,
)
from broker.http.audited import sender_of
from broker.http.authentication import Allows
from broker.inspection.segment_history import SegmentHistory, SegmentRow
from broker.security.acls import CLUSTER_NAME, Operation, ResourceType
from broker.topics.partition import Partition
from broker.topics.topics import Topic, Topics
from broker.views.views import Views
from cleaner.planning.cleaner_state import PartitionCleanerState
from cleaner.scheduler.clean_attempt import PoolStatus
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.states import is_busy
from storage.log.log import Log
from storage.model import SegmentFacts

ROOT: Final = "/api/v1/topics"
ADMINISTRATIVE: Final = (("GET", ROOT),)
TOPICS: Final = 1000
TOPICS_MAX: Final = 5000
SEGMENTS: Final = 5000
SEGMENTS_MAX: Final = 20_000  # about 1 MB
PRESENT_ROWS: Final = 200  # of a step of a history
SUMS: Final = (  # over the partitions of a topic
    "damaged",
    "paused",
    "in_progress",
    "size_bytes",
    "segments",
    "clean_bytes",
    "dirty_bytes",
    "waiting_bytes",
)
COLUMNS: Final = (
    "base_offset",
    "next_offset",
    "size_bytes",
    "first_timestamp_ms",
    "largest_timestamp_ms",
    "horizon_ms",
    "live_bytes",  # at most; -1: unknown
)


class TopicsApi:
    """Handlers of the requests under /api/v1/topics."""

    def __init__(
        self,
        topics: Topics,
        views: Views,
        pool: CleanerPool,
        segment_history: SegmentHistory,
        *,
        allows: Allows,
    ) -> None:
        self._topics = topics
        self._views = views
        self._pool = pool
        self._segment_history = segment_history
        self._permissions = Permissions(allows)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(ROOT, self._all)
        yield web.get(f"{ROOT}/{{topic}}/partitions/{{partition}}/segments", self._segments)
        yield web.get(f"{ROOT}/{{topic}}/partitions/{{partition}}/history", self._history)

    async def _all(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("after", "limit", "contains", "internal"))
        limit = page_limit(query, TOPICS, TOPICS_MAX)
        after, part = query.get("after", ""), query.get("contains", "")
        hides = parse_boolean(query.get("internal", "true"), "internal") is False
        turns = Turns()
        names = (
            topic.name
            async for topic in turns.over(await self._described(request, turns))
            if topic.name > after and part in topic.name and not (hides and topic.is_internal)
        )
        page, last = await first_page(names, limit, key=str)
        status, rows = self._pool.status(), list[Json]()
        for name in page:
            topic = self._topics.get(name)
            if topic is not None:  # it was deleted in an earlier turn
                rows.append(await self._topic_json(topic, status, turns))
        return await rows_response("topics", rows, {"next": last})

    async def _described(self, request: web.Request, turns: Turns) -> list[Topic]:
        """Return the topics that the sender may describe. Raises ApiError 403 if it may none."""
        may = self._permissions.has
        if may(request, Operation.DESCRIBE, ResourceType.CLUSTER, CLUSTER_NAME):
            return list(self._topics)
        described = [
            topic
            async for topic in turns.over(list(self._topics))
            if may(request, Operation.DESCRIBE, ResourceType.TOPIC, topic.name)
        ]
        if not described:
            principal = sender_of(request).principal
            raise ApiError(403, f"{principal} needs DESCRIBE on the cluster or on a topic")
        return described

    async def _topic_json(self, topic: Topic, status: PoolStatus, turns: Turns) -> Json:
        sums = dict.fromkeys(SUMS, 0)
        live_bytes: int | None = None
        for partition in list(topic.partitions.values()):
            await turns.take()
            name, log = partition.partition, partition.log
            verdict = status.verdicts.get(name)
            section = None if verdict is None else verdict.section
            sums["damaged"] += bool(log.damage.ranges)
            sums["paused"] += name in status.paused
            sums["in_progress"] += is_busy(self._pool.in_progress.state(name))
            sums["size_bytes"] += log.segments.size_bytes
            sums["segments"] += len(log.segments)
            sums["clean_bytes"] += 0 if section is None else section.clean_bytes
            sums["dirty_bytes"] += 0 if section is None else section.dirty_bytes
            sums["waiting_bytes"] += 0 if section is None else section.waiting_bytes
            if verdict is not None and verdict.live_bytes is not None:
                live_bytes = (live_bytes or 0) + verdict.live_bytes
        return {
            "name": topic.name,
            "internal": topic.is_internal,
            "cleanup_policy": list(topic.config.cleanup_policy),
            "policy_unknown": not topic.config.policy_known,
            "view": topic.config.has_view,
            "partitions": topic.partition_count,
            "offline": len(topic.offline),
            **sums,
            "live_bytes": live_bytes,
        }

    async def _segments(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("after", "limit"))
        limit = page_limit(query, SEGMENTS, SEGMENTS_MAX)
        after = parse_integer(query.get("after", "0"), "after", 0, (1 << 63) - 1)
        partition = served_partition(self._topics, parse_partition(request))
        log = partition.log
        state = self._pool.state_of(partition.partition)
        segments = log.segment_facts()
        first = 0
        if "after" in query:
            first = bisect_right(segments, after, key=lambda facts: facts.base_offset)
        page, last = cut_page(segments[first:], limit)
        return await rows_response(
            "segments",
            (_segment_row(facts, state) for facts in page),
            {
                "columns": COLUMNS,
                "next": None if last is None else last.base_offset,
                **partition_fields(partition.partition),
                **_offsets(log),
                "view_horizon": self._view_horizon(partition),
            },
        )

    async def _history(self, request: web.Request) -> web.Response:
        """Return the present list in steps of PRESENT_ROWS, then the changes, the newest first."""
        query_parameters(request, ())
        partition = served_partition(self._topics, parse_partition(request))
        past = self._segment_history.of(partition)
        facts = partition.log.segment_facts()
        state = self._pool.state_of(partition.partition)
        present: Iterator[Json] = (
            {"present": [_segment_row(row, state) for row in facts[first : first + PRESENT_ROWS]]}
            for first in range(0, len(facts), PRESENT_ROWS)
        )
        changes: Iterator[Json] = (
            {
                "at_ms": change.before.at_ms,
                "first_dirty_offset": change.before.first_dirty_offset,
                "end_offset": change.before.end_offset,
                "active": change.before.active,
                "removed": change.removed,
                "added": change.added,
                "job_id": change.before.job_id,
            }
            for change in reversed(past.changes)
        )
        return await rows_response(
            "steps",
            chain(present, changes),
            {
                "columns": COLUMNS,
                "removed_columns": SegmentRow._fields,
                "since_ms": past.since_ms,
                **partition_fields(partition.partition),
            },
        )

    def _view_horizon(self, partition: Partition) -> int | None:
        """Return the end of the offsets in a partition's view; None without."""
        view = self._views.partition(partition.partition)
        return None if view is None or view.log.ledger is None else view.log.horizon


def _segment_row(facts: SegmentFacts, state: PartitionCleanerState) -> list[int]:
    live_bytes = state.live_bytes_of(facts)
    return [
        facts.base_offset,
        facts.next_base_offset,
        facts.size_bytes,
        facts.first_batch_timestamp_ms,
        facts.largest_timestamp_ms,
        state.horizon(facts),
        -1 if live_bytes is None else live_bytes,
    ]


def _offsets(log: Log) -> Json:
    return {
        "log_start_offset": log.log_start_offset,
        "last_stable_offset": log.last_stable_offset,
        "high_watermark": log.high_watermark,
        "log_end_offset": log.log_end_offset,
    }
