"""Fetches of damaged offsets: log them, count them, and record which clients they block.

Rules: each damaged range is logged at most once a minute, however often it is read. Memory is
bounded by a number of partitions, and of clients for each; the oldest entries are dropped.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import structlog

from broker.counters import BrokerStats
from broker.groups.offset_commits import OffsetCommits
from config.units import about_span
from storage.env import Env
from storage.errors import DamagedSegmentError
from storage.log.log import Log
from storage.model import TopicPartition
from storage.segments.damage import DamagedSegment

logger = structlog.get_logger("broker.damage")

LOG_INTERVAL_SECONDS: Final = 60.0  # between two lines about one range
PARTITIONS_MAX: Final = 1000
CLIENTS_MAX: Final = 20  # of one partition
NAMED_MAX: Final = 10  # in one sentence
# After this time without a fetch, a client no longer counts as blocked.
CLIENT_SECONDS: Final = 300.0


class RefusedFetch(NamedTuple):
    """A client's last fetch that was refused for damage; `at` is in monotonic seconds."""

    client_id: str
    offset: int
    at: float
    path: str
    position: int  # of the damage


class DamageWatch:
    """Refused fetches of damaged offsets by client, and when each damage was last logged."""

    def __init__(self, env: Env, stats: BrokerStats) -> None:
        self._env = env
        self._stats = stats
        self.offsets: OffsetCommits  # set before requests are served
        self._refused: dict[TopicPartition, dict[str, RefusedFetch]] = {}
        self._logged: dict[tuple[TopicPartition, int], float] = {}  # by position in the file

    def refuse(self, opened: Log, offset: int, client_id: str, error: DamagedSegmentError) -> None:
        """Record a fetch at a damaged offset; log it at most once per LOG_INTERVAL_SECONDS."""
        now, partition = self._env.monotonic(), opened.partition
        self._stats.damaged_fetches[partition.topic] += 1
        clients = self._refused.pop(partition, {})
        clients.pop(client_id, None)
        clients[client_id] = RefusedFetch(client_id, offset, now, error.path, error.position)
        if len(clients) > CLIENTS_MAX:
            del clients[next(iter(clients))]
        self._refused[partition] = clients
        if len(self._refused) > PARTITIONS_MAX:
            del self._refused[next(iter(self._refused))]
        self._log(opened, offset, client_id, error, now)

    def _log(
        self,
        opened: Log,
        offset: int,
        client_id: str,
        error: DamagedSegmentError,
        now: float,
    ) -> None:
        partition = opened.partition
        key = (partition, error.position)
        if now - self._logged.get(key, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return
        self._logged.pop(key, None)
        self._logged[key] = now
        if len(self._logged) > PARTITIONS_MAX:
            del self._logged[next(iter(self._logged))]
        damage = next((damage for damage in opened.damage.ranges if _refused(damage, error)), None)
        # A fetch in the gap that compaction left below the damage is refused, too.
        skipped = offset if damage is None else max(offset, damage.first_offset)
        skip = f"varve log skip {partition.topic} {partition.partition} --offset {skipped}"
        remake = f"varve view compact {partition.topic} {partition.partition} --from-scratch"
        logger.error(
            "damaged batch blocks a reader",
            partition=str(partition),
            fetch_offset=offset,
            client_id=client_id,
            path=error.path,
            position=error.position,
            reason=error.reason,
            first_offset=None if damage is None else damage.first_offset,
            next_offset=None if damage is None else damage.next_offset,
            remedy=remake if damage is None else skip,  # else it is a file of the topic's view
        )

    def clients_at(self, partition: TopicPartition, damage: DamagedSegment) -> list[RefusedFetch]:
        """Return the clients whose last fetch was recently refused for this damage.

        Their offset may be below the range, in a gap that compaction left.
        """
        now = self._env.monotonic()
        return [
            fetch
            for fetch in self._refused.get(partition, {}).values()
            if _refused(damage, fetch) and now - fetch.at <= CLIENT_SECONDS
        ]

    def groups_at(
        self, partition: TopicPartition, damage: DamagedSegment
    ) -> Iterator[tuple[str, int]]:
        """Yield the consumer groups whose committed offset is damaged, each with that offset."""
        for group_id, offset in self.offsets.committed_in(*partition):
            if damage.first_offset <= offset < damage.next_offset:
                yield group_id, offset

    def to_json(
        self, opened: Log, sees_group: Callable[[str], bool] = lambda _: True
    ) -> list[dict[str, Any]]:
        """Return every damaged range of a log with the readers that it blocks.

        Groups that the requester may not see are left out.
        """
        now = self._env.monotonic()
        return [
            {
                **damage_fields(damage),
                "blocked_groups": [
                    {"group": group, "offset": offset}
                    for group, offset in self.groups_at(opened.partition, damage)
                    if sees_group(group)
                ],
                "blocked_clients": [
                    {"client_id": fetch.client_id, "offset": fetch.offset,
                     "seconds_ago": round(now - fetch.at, 3)}
                    for fetch in self.clients_at(opened.partition, damage)
                ],
            }
            for damage in opened.damage.ranges
        ]  # fmt: skip


def damage_fields(damage: DamagedSegment) -> dict[str, Any]:
    """Return a damaged range as the API and the log show it; offsets and bytes are half-open."""
    return {
        "path": damage.path,
        "segment_base_offset": damage.base_offset,
        "position": damage.position,
        "end_position": damage.end_position,
        "first_offset": damage.first_offset,
        "next_offset": damage.next_offset,
        "reason": damage.reason,
    }


def blocked_text(damage: dict[str, Any]) -> str:
    """Describe the readers that an entry of `DamageWatch.to_json` lists as blocked."""
    first, last = damage["first_offset"], damage["next_offset"] - 1
    blocked = [
        f"group {blocked_group['group']} (committed offset {blocked_group['offset']})"
        for blocked_group in damage["blocked_groups"]
    ]
    blocked += [
        f"client {blocked_client['client_id'] or 'without an id'} (fetched offset "
        f"{blocked_client['offset']} "
        f"{about_span(round(1000 * blocked_client['seconds_ago']))} ago)"
        for blocked_client in damage["blocked_clients"]
    ]
    if not blocked:
        return f"No blocked reader is known at offsets {first} to {last}."
    more = f" and {len(blocked) - NAMED_MAX} more" if len(blocked) > NAMED_MAX else ""
    return f"Blocked at offsets {first} to {last}: {', '.join(blocked[:NAMED_MAX])}{more}."


def damage_at(opened: Log, offset: int) -> DamagedSegment | None:
    """Return the damaged or uncleanable range that contains `offset`, if any."""
    ranges = (
        (range(damage.first_offset, damage.next_offset), damage)
        for damage in opened.damage.left_by_cleaner
    )
    return next((damage for offsets, damage in ranges if offset in offsets), None)


def _refused(damage: DamagedSegment, fetch: RefusedFetch | DamagedSegmentError) -> bool:
    """Return whether a fetch was refused for this damage."""
    return damage.path == fetch.path and damage.holds(fetch.position)
