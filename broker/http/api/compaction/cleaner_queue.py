"""/api/v1/cleaner/queue: what waits for a worker, in order, and what somebody has to act on.

The order and the reasons are those of the last scan.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns
from broker.http.api.json_shapes import Json, dirty_ratio_of, partition_fields
from broker.http.api.requests import page_limit, parse_integer, query_parameters, rows_response
from cleaner.planning.plan import Verdict
from cleaner.scheduler.clean_attempt import PoolStatus
from cleaner.scheduler.cleaner_pool import CleanerPool
from cleaner.scheduler.explain import describe_finding
from config.topics.names import INTERNAL_TOPICS
from storage.model import TopicPartition

PATH: Final = "/api/v1/cleaner/queue"
ROWS: Final = 100
ROWS_MAX: Final = 1000


class CleanerQueueApi:
    """The handler of /api/v1/cleaner/queue."""

    def __init__(self, pool: CleanerPool, now_ms: Callable[[], int]) -> None:
        self._pool = pool
        self._now_ms = now_ms

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield the route, for the server."""
        yield web.get(PATH, self._queue)

    async def _queue(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("after", "limit"))
        limit = page_limit(query, ROWS, ROWS_MAX)
        first = parse_integer(query.get("after", "0"), "after")
        status = self._pool.status()
        waiting = self._pool.waiting()
        blocked = await _in_order(status.quarantines.keys() | status.paused)
        entries: list[tuple[int | None, TopicPartition]] = [*enumerate(waiting, 1)]
        entries += [(None, partition) for partition in blocked]
        page = entries[first : first + limit]
        end = first + len(page)
        return await rows_response(
            "queue",
            (self._row(position, partition, status) for position, partition in page),
            {
                "next": end if end < len(entries) else None,
                "waiting": len(waiting),
                "blocked": len(blocked),
            },
        )

    def _row(self, position: int | None, partition: TopicPartition, status: PoolStatus) -> Json:
        verdict = status.verdicts.get(partition)
        section = None if verdict is None else verdict.section
        quarantine, is_paused = status.quarantines.get(partition), partition in status.paused
        reasons = [] if verdict is None else self._reasons(verdict)
        if quarantine is not None:
            reasons = [f"Cleaning failed: {quarantine.reason}."]
        if is_paused:
            reasons = ["An operator paused it."]
        return {
            "position": position,
            **partition_fields(partition),
            "state": "paused" if is_paused else "quarantined" if quarantine else "waiting",
            "dirty_bytes": None if section is None else section.dirty_bytes,
            "dirty_ratio": dirty_ratio_of(verdict),
            "live_bytes": None if verdict is None else verdict.live_bytes,
            "over_lag_ms": 0 if verdict is None else verdict.over_lag_ms,
            "reasons": reasons,
        }

    def _reasons(self, verdict: Verdict) -> list[str]:
        """Return why a candidate is cleaned."""
        now_ms = self._now_ms()
        return [describe_finding(f, now_ms, verdict) for f in verdict.findings if not f.blocks]


async def _in_order(partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
    """Sort partitions in turns of the loop, those of internal topics last.

    Sorting 10,000 in one turn takes 17 ms.
    """
    turns, by_topic = Turns(), defaultdict[str, list[TopicPartition]](list)
    async for partition in turns.over(partitions):
        by_topic[partition.topic].append(partition)
    topics = sorted(by_topic, key=lambda name: (name in INTERNAL_TOPICS, name))
    return [
        partition async for topic in turns.over(topics) for partition in sorted(by_topic[topic])
    ]
