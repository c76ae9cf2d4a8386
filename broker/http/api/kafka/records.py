"""/api/v1/topics/{topic}/partitions/{partition}/records: look at records, also of a view; produce.

A page has previews: keys and values are cut to 4 KiB. Records are not trusted: the answer is JSON
with every byte either valid UTF-8 or in base64, and nothing here interprets them.
"""

import base64
import codecs
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from aiohttp import web

from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.http.api.json_shapes import Json, partition_fields
from broker.http.api.kafka.client import KafkaClient, KafkaHandlers
from broker.http.api.kafka.positions import Position, parse_position
from broker.http.api.lookup import LogFailures, readable_partition
from broker.http.api.permissions import Permissions
from broker.http.api.requests import (
    ApiError,
    body_value,
    bytes_value,
    json_object,
    json_response,
    page_limit,
    parse_partition,
    query_parameters,
    rows_response,
)
from broker.http.audited import client_of, note_no_change, sender_of
from broker.http.authentication import Allows
from broker.inspection.record_reader import RecordReader
from broker.inspection.record_scan import Gap, RecordPreview, ScanRequest
from broker.security.acls import Operation, ResourceType
from broker.topics.partition import Partition
from broker.topics.topics import Topics
from broker.views.view_partition import ViewPartition
from broker.views.views import Views
from protocol import messages as m
from protocol.api import ApiKey
from storage.errors import LogDirectoryError, StorageError
from storage.format.batch import Record, build_batch
from storage.model import TopicPartition
from storage.view.view_log import ViewCursor

RECORDS: Final = "/api/v1/topics/{topic}/partitions/{partition}/records"
ADMINISTRATIVE: Final = (("GET", RECORDS), ("POST", RECORDS))
LIMIT: Final = 50
LIMIT_MAX: Final = 500
PRODUCE_MS: Final = 30_000
ALL: Final = -1  # acks
TIMESTAMP_MAX: Final = (1 << 63) - 1


class RecordsApi:
    """Handlers of the requests for records."""

    def __init__(
        self,
        topics: Topics,
        views: Views,
        handlers: KafkaHandlers,
        reader: RecordReader,
        *,
        allows: Allows,
        now_ms: Callable[[], int],
        fail_directory: Callable[[LogDirectoryError], None],
    ) -> None:
        self._topics = topics
        self._views = views
        self._handlers = handlers
        self._reader = reader
        self._permissions = Permissions(allows)
        self._now_ms = now_ms
        self._failures = LogFailures(fail_directory)

    def routes(self) -> Iterator[web.RouteDef]:
        """Yield every route, for the server."""
        yield web.get(RECORDS, self._read)
        yield web.post(RECORDS, self._produce)

    async def _read(self, request: web.Request) -> web.Response:
        query = query_parameters(request, ("from", "limit", "key", "key_base64"))
        limit = page_limit(query, LIMIT, LIMIT_MAX)
        position = parse_position(query.get("from", "earliest"), "from")
        key, name = _wanted_key(query), parse_partition(request)
        self._permissions.check(request, Operation.READ, ResourceType.TOPIC, name.topic)
        partition = readable_partition(self._topics, self._views, name)
        log, client = partition.log, KafkaClient(self._handlers, request)
        end = log.last_stable_offset
        first = await self._first_offset(client, partition, position, limit)
        scan = ScanRequest(end, limit, key, log.config.varve_decompressed_batch_bytes)
        requester = client_of(request)
        try:
            if isinstance(partition, ViewPartition):
                base, cursor = partition.base, ViewCursor(partition.log)
                page = await self._reader.read_page(base, first, scan, requester, cursor)
            else:
                page = await self._reader.read_page(partition, first, scan, requester)
        except (StorageError, OSError) as error:
            raise self._failures.refuse(partition, error) from error
        self._handlers.charge_read(sender_of(request).principal, page.scanned_bytes)
        broken = page.gaps and page.gaps[-1].next_offset is None
        return await rows_response(
            "records",
            (record_json(preview) for preview in page.records),
            {
                **partition_fields(name),
                "first_offset": first,
                "next_offset": page.next_offset,
                "log_start_offset": log.log_start_offset,
                "end_offset": end,
                "scanned_bytes": page.scanned_bytes,
                "done": page.next_offset >= end or bool(broken),
                "unreadable": [_gap_json(gap) for gap in page.gaps],
            },
        )

    async def _first_offset(
        self,
        client: KafkaClient,
        partition: Partition | ViewPartition,
        position: Position,
        limit: int,
    ) -> int:
        """Return where a page begins; `latest` is `limit` offsets before the end."""
        log, at_time = partition.log, None
        start, end = log.log_start_offset, log.last_stable_offset
        if position.at_ms is not None:
            at_time = await self._offset_at(client, partition.partition, position.at_ms)
        elif position == Position():
            return max(start, end - limit)
        return position.within(start, end, at_time)

    async def _offset_at(self, client: KafkaClient, name: TopicPartition, at_ms: int) -> int | None:
        row = m.ListOffsetsRequestPartition(
            partition_index=name.partition, current_leader_epoch=-1, timestamp=at_ms
        )
        answer = await client.call(
            ApiKey.LIST_OFFSETS,
            m.ListOffsetsRequest(
                replica_id=-1,
                topics=[m.ListOffsetsRequestTopic(name=name.topic, partitions=[row])],
            ),
        )
        result = answer.topics[0].partitions[0]
        client.check(ApiKey.LIST_OFFSETS, result.error_code)
        return result.offset if result.offset >= 0 else None

    async def _produce(self, request: web.Request) -> web.Response:
        note_no_change(request)  # records are no administrative changes, and may be secret
        query_parameters(request, ())
        body = await json_object(
            request, ("key", "key_base64", "value", "value_base64", "headers", "timestamp_ms")
        )
        timestamp = body_value(body, "timestamp_ms", int, self._now_ms())
        if abs(timestamp) > TIMESTAMP_MAX:
            raise ApiError(400, f"timestamp_ms: expected at most {TIMESTAMP_MAX}")
        record = Record(
            0,
            timestamp,
            bytes_value(body, "key"),
            bytes_value(body, "value"),
            tuple([header async for header in Turns().over(_headers(body))]),
        )
        name, key = parse_partition(request), ApiKey.PRODUCE
        await yield_to_loop()  # a record may have thousands of headers
        data = m.ProduceRequestPartition(index=name.partition, records=bytes(build_batch([record])))
        await yield_to_loop()
        client = KafkaClient(self._handlers, request)
        answer = await client.call(
            key,
            m.ProduceRequest(
                transactional_id=None,
                acks=ALL,
                timeout_ms=PRODUCE_MS,
                topic_data=[m.ProduceRequestTopic(name=name.topic, partition_data=[data])],
            ),
        )
        row = answer.responses[0].partition_responses[0]
        texts = [error.batch_index_error_message for error in row.record_errors]
        client.check(key, row.error_code, row.error_message or next(iter(texts), None))
        return json_response({**partition_fields(name), "offset": row.base_offset}, 201)


def record_json(preview: RecordPreview) -> Json:
    """Return a record; `truncated` names the fields that are longer than what is shown."""
    record = preview.record
    key_bytes, value_bytes = preview.key_bytes, preview.value_bytes
    sizes = {"key": (record.key, key_bytes), "value": (record.value, value_bytes)}
    return {
        "offset": record.offset,
        "timestamp_ms": record.timestamp,
        **_field("key", record.key, key_bytes),
        "key_bytes": key_bytes,
        **_field("value", record.value, value_bytes),
        "value_bytes": value_bytes,
        "truncated": [name for name, (data, size) in sizes.items() if len(data or b"") < size],
        "headers": [
            {
                "name": name if isinstance(name, str) else name.decode(errors="backslashreplace"),
                **_field("value", value, len(value or b"")),
            }
            for name, value in record.headers
        ],
        "headers_left_out": preview.header_count - len(record.headers),
        "delete_horizon_ms": preview.delete_horizon_ms,
    }


def _field(name: str, data: bytes | None, size: int) -> dict[str, str | None]:
    """Return the field `name`, or `<name>_base64` for bytes that are not UTF-8."""
    if data is None:
        return {name: None}
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        # A character may have been cut in two.
        return {name: decoder.decode(data, final=len(data) == size)}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def _gap_json(gap: Gap) -> Json:
    return {
        "first_offset": gap.first_offset,
        "next_offset": gap.next_offset,
        "reason": gap.reason,
    }


def _wanted_key(query: Mapping[str, str]) -> bytes | None:
    return bytes_value(
        {name: query[name] for name in ("key", "key_base64") if name in query}, "key"
    )


def _headers(body: Mapping[str, Any]) -> Iterator[tuple[str, bytes | None]]:
    for row in body_value(dict(body), "headers", list, []):
        if not isinstance(row, dict) or not isinstance(row.get("name"), str):
            raise ApiError(400, "headers: expected objects with name and value")
        bytes_value(row, "name")  # refuses a lone surrogate
        yield row["name"], bytes_value(row, "value")
