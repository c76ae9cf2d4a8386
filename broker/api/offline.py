"""/api/v1/offline-runs: work on logs outside of the broker. The paths: openapi.py.

Rules
- Opening, renewing, adopting and giving up are an operator's, guarded as the cleaner's API is.
- Files move with the token of their run, which ends with it, whatever the broker's own token is.
- 400 the request, or a topic that is not compacted, 401 no or a wrong token, 404 no such thing, 409
  it makes no sense now or is stale, 410 the lease is over, 413 too much, 422 not what it claims to
  be, 429 too many runs, 503 try again, 507 no room.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from broker.api.requests import ApiError, json_response, number, query_of, rows_response
from broker.http import BODY_SECONDS
from broker.http_guard import BEARER
from broker.offline.issue import Wanted
from broker.offline.leases import OfflineRuns
from broker.offline.model import LeasedPartition, OfflineError
from broker.offline.transfers import FileRange, Transfers, Upload
from cleaner.handoff import (
    CRC_HEADER,
    RUNS_PATH,
    Purpose,
    encode_plan,
    manifest_bytes_max,
    result_json,
)

FILES: Final = f"{RUNS_PATH}/{{run}}/partitions/{{partition}}"
INPUT: Final = f"{FILES}/inputs/{{name}}"
OUTPUT: Final = f"{FILES}/outputs/{{folder}}/{{name}}"
MANIFEST: Final = f"{FILES}/manifest"
TRANSFERS: Final = frozenset({INPUT, OUTPUT, MANIFEST})  # guarded by the token of the run
TTL_SECONDS: Final = 120
CHUNK_BYTES: Final = 256 << 10

_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?", re.ASCII)
_CRC: Final = re.compile(r"[0-9a-f]{8}", re.ASCII)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OfflineApi:
    """Answers for the runs."""

    def __init__(self, runs: OfflineRuns, transfers: Transfers) -> None:
        self._runs = runs
        self._transfers = transfers

    def routes(self) -> Iterator[web.RouteDef]:
        """Every route, for the server."""
        yield web.post(RUNS_PATH, _telling(self._open))
        yield web.get(RUNS_PATH, _telling(self._list))
        yield web.get(f"{RUNS_PATH}/{{run}}", _telling(self._one))
        yield web.delete(f"{RUNS_PATH}/{{run}}", _telling(self._abandon))
        yield web.post(f"{RUNS_PATH}/{{run}}/renew", _telling(self._renew))
        yield web.post(f"{RUNS_PATH}/{{run}}/adopt", _telling(self._adopt))
        yield web.get(INPUT, _telling(self._get_input), allow_head=False)
        yield web.get(OUTPUT, _telling(self._get_output), allow_head=False)
        yield web.put(OUTPUT, _telling(self._put_output))
        yield web.put(MANIFEST, _telling(self._put_manifest))

    # Runs -------------------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.Response:
        body = await _body_of(request, ("topic", "partitions", "purpose", "roll", "ttl_seconds"))
        plan = await self._runs.open(_wanted(body))
        data = await asyncio.to_thread(encode_plan, plan)
        return web.Response(body=data, status=201, content_type="application/json")

    async def _list(self, request: web.Request) -> web.Response:
        query_of(request, ())
        return await rows_response("runs", (run.to_json() for run in self._runs.runs()))

    async def _one(self, request: web.Request) -> web.Response:
        query_of(request, ())
        return json_response(self._runs.find(request.match_info["run"]).to_json())

    async def _renew(self, request: web.Request) -> web.Response:
        body = await _body_of(request, ("ttl_seconds",))
        wanted = _integer(body, "ttl_seconds", None)
        return json_response(self._runs.renew(request.match_info["run"], wanted).to_json())

    async def _abandon(self, request: web.Request) -> web.Response:
        await _body_of(request, ())
        return json_response(self._runs.abandon(request.match_info["run"]).to_json())

    async def _adopt(self, request: web.Request) -> web.Response:
        body = await _body_of(request, ("partition",))
        partition = _integer(body, "partition", None)
        done, results, run = await self._runs.adopt(request.match_info["run"], partition)
        told = {"done": done, "results": [result_json(one) for one in results]}
        return json_response({**told, "run": run.to_json()})

    # Files ------------------------------------------------------------------------------------

    def _part(self, request: web.Request) -> LeasedPartition:
        match = request.match_info
        given = request.headers.get("Authorization", "")
        token = given[len(BEARER) :].strip() if given[: len(BEARER)].lower() == BEARER else ""
        query_of(request, ())
        return self._runs.files_of(match["run"], number(match["partition"], "partition"), token)

    async def _get_input(self, request: web.Request) -> web.Response:
        part = self._part(request)
        first, end = _range_of(request)
        found = await self._transfers.read_input(part, request.match_info["name"], first, end)
        return _file_response(request, found)

    async def _get_output(self, request: web.Request) -> web.Response:
        part, match = self._part(request), request.match_info
        first, end = _range_of(request)
        found = await self._transfers.read_output(part, match["folder"], match["name"], first, end)
        return _file_response(request, found)

    async def _put_output(self, request: web.Request) -> web.Response:
        part, match = self._part(request), request.match_info
        size_bytes = _length_of(request)
        told = request.headers.get(CRC_HEADER, "")
        if not _CRC.fullmatch(told):
            raise ApiError(400, f"{CRC_HEADER}: expected 8 hexadecimal digits")
        upload = Upload(size_bytes, int(told, 16), _chunks_of(request))
        await self._transfers.receive(part, match["folder"], match["name"], upload)
        return json_response({"bytes": size_bytes})

    async def _put_manifest(self, request: web.Request) -> web.Response:
        part = self._part(request)
        size_bytes = _length_of(request)
        if size_bytes > manifest_bytes_max(part.job):
            raise ApiError(413, f"its manifest has up to {manifest_bytes_max(part.job)} bytes")
        data = bytearray()
        async for chunk in _chunks_of(request):
            data += chunk
        if len(data) != size_bytes:
            raise ApiError(400, f"{len(data)} bytes came instead of {size_bytes}")
        await self._transfers.receive_manifest(part, bytes(data))
        return json_response({"bytes": size_bytes})


def _telling(handler: Handler) -> Handler:
    """Turns an OfflineError into the ApiError of its status."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except OfflineError as error:
            raise ApiError(error.status, error.reason) from error

    return handle


# What a request says --------------------------------------------------------------------------


async def _body_of(request: web.Request, known: tuple[str, ...]) -> Mapping[str, Any]:
    query_of(request, ())
    body = await request.read()
    try:
        found = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    if not isinstance(found, dict):
        raise ApiError(400, "expected a JSON object as the body")
    for key in found:
        if key not in known:
            raise ApiError(400, f"unknown key {key[:40]!r} in the body")
    return found


def _wanted(body: Mapping[str, Any]) -> Wanted:
    topic, purpose = body.get("topic"), body.get("purpose", Purpose.COMPACT.value)
    partitions, roll = body.get("partitions"), body.get("roll", False)
    if not isinstance(topic, str):
        raise ApiError(400, "topic: expected a name")
    if purpose not in list(Purpose):
        raise ApiError(400, f"purpose: expected {' or '.join(Purpose)}")
    if not isinstance(roll, bool):
        raise ApiError(400, "roll: expected true or false")
    if partitions is not None and (
        not isinstance(partitions, list)
        or not all(isinstance(one, int) and not isinstance(one, bool) for one in partitions)
    ):
        raise ApiError(400, "partitions: expected a list of numbers")
    ttl_seconds = _integer(body, "ttl_seconds", TTL_SECONDS)
    assert ttl_seconds is not None
    return Wanted(
        topic=topic,
        partitions=None if partitions is None else tuple(partitions),
        purpose=Purpose(purpose),
        roll=roll,
        ttl_seconds=ttl_seconds,
    )


def _integer(body: Mapping[str, Any], key: str, default: int | None) -> int | None:
    found = body.get(key)
    if found is None:
        return default
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    raise ApiError(400, f"{key}: expected a number")


def _length_of(request: web.Request) -> int:
    if request.content_length is None:
        raise ApiError(411, "Content-Length is needed")
    return request.content_length


def _range_of(request: web.Request) -> tuple[int, int | None]:
    """The one range `[first, end)` that is asked for, or all. Raises ApiError."""
    told = request.headers.get("Range")
    if told is None:
        return 0, None
    match = _RANGE.fullmatch(told)
    if match is None:
        raise ApiError(400, "Range: expected bytes=FIRST-LAST")
    first, last = int(match[1]), match[2]
    if last is not None and int(last) < first:
        raise ApiError(416, "Range: it ends before it begins")
    return first, None if last is None else int(last) + 1


async def _chunks_of(request: web.Request) -> AsyncIterator[bytes]:
    """The body, as it comes; whoever stops in its midst is not waited for."""
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                chunk = await request.content.read(CHUNK_BYTES)
        except TimeoutError:
            raise ApiError(408, f"nothing has come in {BODY_SECONDS:g} s") from None
        if not chunk:
            return
        yield chunk


def _file_response(request: web.Request, found: FileRange) -> web.Response:
    end = found.first + len(found.data)
    headers = {CRC_HEADER: f"{found.crc:08x}", "Cache-Control": "no-store"}
    is_whole = found.first == 0 and end == found.total_bytes
    if "Range" not in request.headers and not is_whole:
        raise ApiError(400, f"the file has {found.total_bytes} bytes: ask for ranges of it")
    if found.data and "Range" in request.headers:
        headers["Content-Range"] = f"bytes {found.first}-{end - 1}/{found.total_bytes}"
        status = 206
    else:
        status = 200
    return web.Response(
        body=found.data,
        status=status,
        headers=headers,
        content_type="application/octet-stream",
    )
