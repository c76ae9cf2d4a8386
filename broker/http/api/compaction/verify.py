"""/api/v1/cleaner/partitions/.../verify: check a whole log. openapi/ lists the paths.

Status codes are those of the cleaner's API. A request begins a check and returns at once; the
status has the result.
"""

from collections.abc import Iterator
from typing import Final

from aiohttp import web

from broker.cleaning.log_checks import CheckRefusedError, CheckStatus, LogChecks
from broker.http.api.json_shapes import Json, partition_fields
from broker.http.api.lookup import served_partition
from broker.http.api.requests import (
    ApiError,
    action_response,
    parse_partition,
    query_flags,
    query_parameters,
    rows_response,
)
from broker.http.audited import note_no_change, sender_of
from broker.topics.topics import Topics
from cleaner.verification import LogCheck, SegmentCheck
from storage.model import TopicPartition

PATH: Final = "/api/v1/cleaner/partitions/{topic}/{partition}/verify"
SUMS: Final = (
    "size_bytes", "records", "live", "dead", "tombstones", "keyless", "aborted", "live_bytes"
)  # fmt: skip


class VerifyApi:
    """Handlers of the requests that check whole logs."""

    def __init__(self, topics: Topics, checks: LogChecks) -> None:
        self._topics = topics
        self._checks = checks

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(PATH, self._status)
        yield web.post(PATH, self._begin)
        yield web.post(f"{PATH}/abort", self._abort)

    async def _status(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        partition = parse_partition(request)
        served_partition(self._topics, partition)
        return await self._response(partition)

    async def _begin(self, request: web.Request) -> web.Response:
        note_no_change(request)  # it reads
        query_parameters(request, ())
        partition, sender = parse_partition(request), sender_of(request)
        await query_flags(request)
        served_partition(self._topics, partition)
        try:
            self._checks.begin(partition, None if sender.is_unlimited else sender.principal)
        except CheckRefusedError as error:
            raise ApiError(409, str(error)) from error
        return await self._response(partition)

    async def _abort(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        partition = parse_partition(request)
        await query_flags(request)
        served_partition(self._topics, partition)
        changed = self._checks.abort(partition)
        return action_response(request, {**partition_fields(partition), "changed": changed})

    async def _response(self, partition: TopicPartition) -> web.Response:
        status = self._checks.status(partition)
        if status is None:
            raise ApiError(404, f"{partition} was not verified since the broker started")
        check = status.check
        rows = () if check is None else (segment_json(segment) for segment in check.segments)
        return await rows_response("segments", rows, status_json(status))


def status_json(status: CheckStatus) -> Json:
    """Return a check without its segments as JSON."""
    return {
        **partition_fields(status.partition),
        "state": status.state,
        "started_ms": status.started_ms,
        "share": round(status.share, 3),
        "reason": status.reason,
        "result": None if status.check is None else check_json(status.check),
        "differences": [
            {
                "kind": difference.kind,
                "first_offset": difference.first_offset,
                "end_offset": difference.end_offset,
                "text": difference.text,
            }
            for difference in status.differences
        ],
    }


def check_json(check: LogCheck) -> Json:
    """Return the sums of a check as JSON."""
    return {
        "end_offset": check.end_offset,
        "keys": check.keys,
        "uncleaned": check.uncleaned,
        "digests_compared": check.compared,
        "bytes_read": check.bytes_read,
        "seconds": round(check.seconds, 3),
        **{name: sum(getattr(segment, name) for segment in check.segments) for name in SUMS},
    }


def segment_json(segment: SegmentCheck) -> Json:
    """Return what a check found in a segment as JSON."""
    return {
        "base_offset": segment.base_offset,
        "next_offset": segment.next_base_offset,
        **{name: getattr(segment, name) for name in SUMS},
        "index": segment.index.value,
        "damage": None if segment.damage is None else segment.damage.reason,
        "is_gone": segment.is_gone,
    }
