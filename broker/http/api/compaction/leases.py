"""/api/v1/remote-compactions: leases of partitions, and their files. openapi/ lists the paths.

Rules
- Open, renew, adopt and end are for operators, with the access rules of the cleaner's API.
- Transfers of files need the token of their remote compaction, which is valid as long as it runs.
- Status codes: 400 invalid request or topic not compacted, 401 missing or wrong token, 404 not
  found, 409 not possible now or stale, 410 lease ended, 413 too large, 422 content does not match,
  429 too many remote compactions, 503 try again, 507 no room.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from broker.http.access import BEARER
from broker.http.api.requests import (
    ApiError,
    json_object,
    json_response,
    parse_integer,
    query_parameters,
    rows_response,
)
from broker.http.authentication import lease_sender
from broker.http.connections import mark_authorized
from broker.http.server import BODY_SECONDS
from broker.leases.file_transfer import FileRange, Transfers, Upload
from broker.leases.lease_issuer import LeaseRequest
from broker.leases.leases import Leases
from broker.leases.model import LeasedPartition, LeaseError
from cleaner.remote_compaction import (
    COMPACTIONS_PATH,
    CRC_HEADER,
    Purpose,
    encode_plan,
    manifest_bytes_max,
    result_json,
)

FILES: Final = f"{COMPACTIONS_PATH}/{{compaction_id}}/partitions/{{partition}}"
INPUT: Final = f"{FILES}/inputs/{{name}}"
OUTPUT: Final = f"{FILES}/outputs/{{folder}}/{{name}}"
MANIFEST: Final = f"{FILES}/manifest"
TRANSFERS: Final = frozenset(
    {INPUT, OUTPUT, MANIFEST}
)  # protected by the token of the remote compaction
TTL_SECONDS: Final = 120
CHUNK_BYTES: Final = 256 << 10

_RANGE: Final = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})?", re.ASCII)
_CRC: Final = re.compile(r"[0-9a-f]{8}", re.ASCII)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LeasesApi:
    """Handlers of the requests under /api/v1/remote-compactions."""

    def __init__(self, leases: Leases, transfers: Transfers) -> None:
        self._leases = leases
        self._transfers = transfers

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.post(COMPACTIONS_PATH, _with_error_responses(self._open))
        yield web.get(COMPACTIONS_PATH, _with_error_responses(self._list))
        yield web.get(f"{COMPACTIONS_PATH}/{{compaction_id}}", _with_error_responses(self._get))
        yield web.delete(
            f"{COMPACTIONS_PATH}/{{compaction_id}}", _with_error_responses(self._abandon)
        )
        yield web.post(
            f"{COMPACTIONS_PATH}/{{compaction_id}}/renew", _with_error_responses(self._renew)
        )
        yield web.post(
            f"{COMPACTIONS_PATH}/{{compaction_id}}/adopt", _with_error_responses(self._adopt)
        )
        yield web.get(INPUT, _with_error_responses(self._get_input), allow_head=False)
        yield web.get(OUTPUT, _with_error_responses(self._get_output), allow_head=False)
        yield web.put(OUTPUT, _with_error_responses(self._put_output))
        yield web.put(MANIFEST, _with_error_responses(self._put_manifest))

    # Remote compactions -------------------------------------------------------------------------

    async def _open(self, request: web.Request) -> web.Response:
        body = await _read_body(request, ("topic", "partitions", "purpose", "roll", "ttl_seconds"))
        plan = await self._leases.open(_parse_lease_request(body))
        data = await asyncio.to_thread(encode_plan, plan)
        return web.Response(body=data, status=201, content_type="application/json")

    async def _list(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        return await rows_response(
            "remote_compactions", (compaction.to_json() for compaction in self._leases.table.all())
        )

    async def _get(self, request: web.Request) -> web.Response:
        query_parameters(request, ())
        return json_response(self._leases.table.find(request.match_info["compaction_id"]).to_json())

    async def _renew(self, request: web.Request) -> web.Response:
        body = await _read_body(request, ("ttl_seconds",))
        requested = _integer(body, "ttl_seconds", None)
        return json_response(
            self._leases.renew(request.match_info["compaction_id"], requested).to_json()
        )

    async def _abandon(self, request: web.Request) -> web.Response:
        await _read_body(request, ())
        return json_response(self._leases.abandon(request.match_info["compaction_id"]).to_json())

    async def _adopt(self, request: web.Request) -> web.Response:
        body = await _read_body(request, ("partition",))
        partition = _integer(body, "partition", None)
        done, results, compaction = await self._leases.adoptions.adopt(
            request.match_info["compaction_id"], partition
        )
        answer = {"done": done, "results": [result_json(result) for result in results]}
        return json_response({**answer, "remote_compaction": compaction.to_json()})

    # Files ------------------------------------------------------------------------------------

    def _partition(self, request: web.Request) -> LeasedPartition:
        match = request.match_info
        header = request.headers.get("Authorization", "")
        token = header[len(BEARER) :].strip() if header[: len(BEARER)].lower() == BEARER else ""
        query_parameters(request, ())
        part = self._leases.table.authorize(
            match["compaction_id"], parse_integer(match["partition"], "partition"), token
        )
        mark_authorized(request, lease_sender(match["compaction_id"]))
        return part

    async def _get_input(self, request: web.Request) -> web.Response:
        part = self._partition(request)
        first, end = _requested_range(request)
        file_range = await self._transfers.read_input(part, request.match_info["name"], first, end)
        return _file_response(request, file_range)

    async def _get_output(self, request: web.Request) -> web.Response:
        part, match = self._partition(request), request.match_info
        first, end = _requested_range(request)
        file_range = await self._transfers.read_output(
            part, match["folder"], match["name"], first, end
        )
        return _file_response(request, file_range)

    async def _put_output(self, request: web.Request) -> web.Response:
        part, match = self._partition(request), request.match_info
        size_bytes = _content_length(request)
        header = request.headers.get(CRC_HEADER, "")
        if not _CRC.fullmatch(header):
            raise ApiError(400, f"{CRC_HEADER}: expected 8 hexadecimal digits")
        upload = Upload(size_bytes, int(header, 16), _body_chunks(request))
        await self._transfers.receive(part, match["folder"], match["name"], upload)
        return json_response({"bytes": size_bytes})

    async def _put_manifest(self, request: web.Request) -> web.Response:
        part = self._partition(request)
        size_bytes = _content_length(request)
        if size_bytes > manifest_bytes_max(part.job):
            raise ApiError(413, f"its manifest has up to {manifest_bytes_max(part.job)} bytes")
        data = bytearray()
        async for chunk in _body_chunks(request):
            data += chunk
        if len(data) != size_bytes:
            raise ApiError(400, f"received {len(data)} bytes instead of {size_bytes}")
        await self._transfers.receive_manifest(part, bytes(data))
        return json_response({"bytes": size_bytes})


def _with_error_responses(handler: Handler) -> Handler:
    """Translate a LeaseError into the ApiError of its status."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except LeaseError as error:
            raise ApiError(error.status, error.reason) from error

    return handle


# Parsing --------------------------------------------------------------------------------------


async def _read_body(request: web.Request, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    query_parameters(request, ())
    return await json_object(request, allowed)


def _parse_lease_request(body: Mapping[str, Any]) -> LeaseRequest:
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
        or not all(
            isinstance(partition, int) and not isinstance(partition, bool)
            for partition in partitions
        )
    ):
        raise ApiError(400, "partitions: expected a list of numbers")
    ttl_seconds = _integer(body, "ttl_seconds", TTL_SECONDS)
    assert ttl_seconds is not None
    return LeaseRequest(
        topic=topic,
        partitions=None if partitions is None else tuple(partitions),
        purpose=Purpose(purpose),
        roll=roll,
        ttl_seconds=ttl_seconds,
    )


def _integer(body: Mapping[str, Any], key: str, default: int | None) -> int | None:
    result = body.get(key)
    if result is None:
        return default
    if isinstance(result, int) and not isinstance(result, bool):
        return result
    raise ApiError(400, f"{key}: expected a number")


def _content_length(request: web.Request) -> int:
    if request.content_length is None:
        raise ApiError(411, "Content-Length is needed")
    return request.content_length


def _requested_range(request: web.Request) -> tuple[int, int | None]:
    """Return the requested range `[first, end)`, or the whole file. Raises ApiError."""
    header = request.headers.get("Range")
    if header is None:
        return 0, None
    match = _RANGE.fullmatch(header)
    if match is None:
        raise ApiError(400, "Range: expected bytes=FIRST-LAST")
    first, last = int(match[1]), match[2]
    if last is not None and int(last) < first:
        raise ApiError(416, "Range: it ends before it begins")
    return first, None if last is None else int(last) + 1


async def _body_chunks(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the body as it arrives; a client that stops sending times out."""
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                chunk = await request.content.read(CHUNK_BYTES)
        except TimeoutError:
            raise ApiError(408, f"received no data for {BODY_SECONDS:g} s") from None
        if not chunk:
            return
        yield chunk


def _file_response(request: web.Request, file_range: FileRange) -> web.Response:
    end = file_range.first + len(file_range.data)
    headers = {CRC_HEADER: f"{file_range.crc:08x}", "Cache-Control": "no-store"}
    is_whole = file_range.first == 0 and end == file_range.total_bytes
    if "Range" not in request.headers and not is_whole:
        raise ApiError(400, f"the file has {file_range.total_bytes} bytes: ask for ranges of it")
    if file_range.data and "Range" in request.headers:
        headers["Content-Range"] = f"bytes {file_range.first}-{end - 1}/{file_range.total_bytes}"
        status = 206
    else:
        status = 200
    return web.Response(
        body=file_range.data,
        status=status,
        headers=headers,
        content_type="application/octet-stream",
    )
