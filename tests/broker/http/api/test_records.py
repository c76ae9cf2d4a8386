"""Records over HTTP: pages, key search, hostile contents, damage, permissions, producing."""

import asyncio
import json
import tracemalloc
from base64 import b64encode
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from structlog.testing import capture_logs

from broker.app import Broker
from broker.event_loop.loop_turns import Turns, yield_to_loop
from broker.http.api.kafka import records
from broker.inspection import record_reader, record_scan
from broker.topics.partition import Partition
from storage.format.batch import Record, build_batch, read_header
from storage.model import TopicPartition
from tests.support.broker.http_client import basic, call_api
from tests.support.broker.http_users import OWNERS, broker_with_users, owner_rule, send

RECORDS = "/api/v1/topics/orders/partitions/0/records"
TOPICS = {"orders": {"keys": {"max.message.bytes": str(32 << 20)}}, "other": {}}
GZIP = 1


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with broker_with_users(tmp_path, OWNERS, owner_rule, seed=5, topics=TOPICS) as broker:
        yield broker


def orders(broker: Broker) -> Partition:
    partition = broker.topics.partition(TopicPartition("orders", 0))
    assert partition is not None
    return partition


def append(broker: Broker, *records: tuple[bytes | None, bytes | None], **batch: Any) -> None:
    """Append one batch."""
    rows = [
        Record(number, 1000 + number, key, value) for number, (key, value) in enumerate(records)
    ]
    data = memoryview(build_batch(rows, **batch))
    orders(broker).append(data, read_header(data), 0, in_transaction=True)


async def read(broker: Broker, query: str = "", user: str = "owner") -> Any:
    status, answer = await send(broker, "GET", f"{RECORDS}?{query}", user)
    assert status == 200, answer
    return answer


def offsets(answer: Any) -> list[int]:
    return [row["offset"] for row in answer["records"]]


async def test_pages_follow_each_other_to_the_end(broker: Broker) -> None:
    for first in range(0, 9, 3):
        append(broker, *((b"k%d" % (first + number), b"v") for number in range(3)))
    page = await read(broker, "limit=4")
    assert (offsets(page), page["next_offset"], page["done"]) == ([0, 1, 2, 3], 4, False)
    page = await read(broker, f"limit=9&from={page['next_offset']}")
    assert (offsets(page), page["next_offset"], page["done"]) == ([4, 5, 6, 7, 8], 9, True)
    assert (page["end_offset"], page["log_start_offset"], page["unreadable"]) == (9, 0, [])
    row = page["records"][0]
    assert (row["key"], row["value"], row["value_bytes"], row["truncated"]) == ("k4", "v", 1, [])
    assert offsets(await read(broker, "from=latest&limit=2")) == [7, 8]
    assert offsets(await read(broker, "from=99")) == []


async def test_a_page_does_not_skip_the_records_of_a_huge_batch(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_scan, "SKIPPED_MAX", 10)
    append(broker, *((b"k", b"v") for _ in range(30)))
    append(broker, (b"k", b"v"))
    page = await read(broker, "from=10&limit=2")
    assert (offsets(page), page["unreadable"]) == ([10, 11], [])
    page = await read(broker, "from=20")
    assert (offsets(page), page["done"]) == ([30], True)
    reason = "its batch has more than 10 records before it"
    assert page["unreadable"] == [{"first_offset": 20, "next_offset": 30, "reason": reason}]


async def test_a_time_is_the_first_record_that_is_not_older(broker: Broker) -> None:
    append(broker, (b"a", b"1"), (b"b", b"2"), (b"c", b"3"))  # at 1000, 1001, 1002 ms
    assert offsets(await read(broker, "from=1970-01-01T00:00:01.001Z")) == [1, 2]
    assert offsets(await read(broker, "from=2999-01-01T00:00:00Z")) == []


async def test_every_version_of_a_key_is_found_a_page_at_a_time(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        append(broker, (b"key-%d" % (number % 3), b"v%d" % number))
    monkeypatch.setattr(record_scan, "PAGE_BYTES", 300)  # about four batches
    monkeypatch.setattr(record_reader, "STEP_BYTES", 150)
    found, pages, next_offset = [], 0, 0
    done = False
    while not done:
        page = await read(broker, f"key=key-1&from={next_offset}")
        found += offsets(page)
        next_offset, done, pages = page["next_offset"], page["done"], pages + 1
        assert page["scanned_bytes"] < 600
    assert found == list(range(1, 20, 3))
    assert pages > 3
    encoded = quote(b64encode(b"key-2").decode())
    assert offsets(await read(broker, f"key_base64={encoded}&limit=1")) == [2]


async def test_hostile_records_are_harmless_text(broker: Broker) -> None:
    html, escape = b"<script>alert(1)</script>", b"\x1b]0;owned\x07\x1b[31m"
    append(broker, (html, escape), (b"\xff\xfe", b"\xc3("), (None, None))
    page = await read(broker)
    first, second, third = page["records"]
    assert (first["key"], first["value"]) == (html.decode(), escape.decode())
    assert "key" not in second
    assert second["key_base64"] == b64encode(b"\xff\xfe").decode()
    assert second["value_base64"] == b64encode(b"\xc3(").decode()
    assert (third["key"], third["value"], third["value_bytes"]) == (None, None, 0)


async def test_a_huge_value_is_cut_between_two_characters(broker: Broker) -> None:
    append(broker, (b"k", "x€".encode() * (3 << 20)))  # 12 MB
    (row,) = (await read(broker))["records"]
    assert row["value_bytes"] == 12 << 20
    assert row["truncated"] == ["value"]
    assert row["value"] == "x€" * 1024
    append(broker, *((b"k%d" % number, b"x" * 5000) for number in range(400)))
    page = await read(broker, "from=1&limit=500")
    assert 200 < len(page["records"]) < 300  # previews of 1 MiB
    assert page["next_offset"] == 1 + len(page["records"])
    assert not page["done"]


@pytest.mark.parametrize("query", ["", "key=kx", "key=key"])
async def test_nothing_large_of_a_batch_is_copied_for_a_page(broker: Broker, query: str) -> None:
    """A copy holds the interpreter lock: 80 ms for a value of 60 MB."""
    large = bytes(24 << 20)
    append(broker, (b"key", large), (large, b"v"), codec=GZIP)
    await read(broker, query)  # load what is loaded once
    tracemalloc.start()
    try:
        page = await read(broker, query)
        peak = tracemalloc.get_traced_memory()[1]  # without the pages of the records
    finally:
        tracemalloc.stop()
    assert offsets(page) == {"": [0, 1], "key=kx": [], "key=key": [0]}[query]
    assert peak < 8 << 20


async def test_headers_beyond_those_of_a_preview_are_counted_only(broker: Broker) -> None:
    count = 1_000_000
    headers = (("n" * 5000, bytes(9000)), *((("n", None),) * (count - 1)))
    data = memoryview(build_batch([Record(0, 1000, b"k", b"v", headers)]))
    orders(broker).append(data, read_header(data), 0, in_transaction=True)
    tracemalloc.start()
    try:
        (row,) = (await read(broker))["records"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert row["headers_left_out"] == count - record_scan.HEADERS_MAX
    assert len(row["headers"]) == record_scan.HEADERS_MAX
    assert row["headers"][0]["name"] == "n" * record_scan.PREVIEW_BYTES
    assert peak < len(data) * 2 + (8 << 20)


@pytest.mark.parametrize("position", range(65_530, 65_540))
async def test_a_key_is_found_across_the_windows_of_the_search(
    broker: Broker, position: int
) -> None:
    assert record_scan._SEARCHED_BYTES == 65_536
    append(broker, (b"k", bytes(position - 80)), (b"across", b"v"))
    assert offsets(await read(broker, "key=across")) == [1]


async def test_a_batch_that_unpacks_to_more_than_the_topic_allows_is_a_gap(
    broker: Broker,
) -> None:
    append(broker, (b"a", b"1"))
    append(broker, (b"b", bytes(80 << 20)), codec=GZIP)  # 80 KB on the disk
    append(broker, (b"c", b"3"))
    page = await read(broker)
    assert offsets(page) == [0, 2]
    (gap,) = page["unreadable"]
    assert (gap["first_offset"], gap["next_offset"]) == (1, 2)
    assert "unpacks to more than" in gap["reason"]


async def test_damage_is_answered_with_its_range(broker: Broker) -> None:
    for number in range(4):
        append(broker, (b"k%d" % number, b"v"))
    log = orders(broker).log
    size = log.segments.size_bytes // 4
    log.roll(0)
    path = next(iter(log.segments)).path
    file = broker._env.open(path, write=True)
    file.pwrite(b"\xff", size + 65)
    log.damage.mark(path, size, "bad CRC")  # known damage: the second batch
    page = await read(broker)
    assert offsets(page) == [0, 2, 3]
    (gap,) = page["unreadable"]
    assert (gap["first_offset"], gap["next_offset"], page["done"]) == (1, 2, True)
    file.pwrite(b"\xff", 2 * size + 65)  # damage that nobody has met yet
    page = await read(broker)
    assert offsets(page) == [0, 3]
    gaps = [(gap["first_offset"], gap["next_offset"]) for gap in page["unreadable"]]
    assert gaps == [(1, 2), (2, 3)]
    file.pwrite(b"\0\0\0\0", 3 * size + 8)  # a length that is none
    page = await read(broker)
    assert (offsets(page), page["done"]) == ([0], True)
    assert page["unreadable"][-1]["next_offset"] is None


async def test_only_committed_records_are_shown(broker: Broker) -> None:
    partition = orders(broker)
    append(broker, (b"a", b"1"))
    append(broker, (b"b", b"2"), producer_id=7, producer_epoch=0, base_sequence=0, attributes=0x10)
    append(broker, (b"c", b"3"))
    page = await read(broker)
    assert (offsets(page), page["end_offset"]) == ([0], 1)
    await broker.coordinators.hanging.abort(partition, 7)
    page = await read(broker)
    assert offsets(page) == [0, 2]  # neither the aborted record nor the marker
    assert page["done"]


@pytest.mark.parametrize(
    ("user", "query", "status"),
    [
        ("viewer", "", 403),
        ("nobody", "", 403),
        ("owner", "from=soon", 400),
        ("owner", "limit=501", 400),
        ("owner", "key=a&key_base64=YQ==", 400),
        ("owner", "key_base64=!", 400),
        ("owner", "size=1", 400),
    ],
)
async def test_a_reader_needs_permission_and_sense(
    broker: Broker, user: str, query: str, status: int
) -> None:
    with capture_logs() as lines:
        answer = await send(broker, "GET", f"{RECORDS}?{query}", user)
    assert answer[0] == status
    denied = [line for line in lines if "denied" in line["event"]]
    assert len(denied) == (status == 403)
    for path in ("/api/v1/topics/orders/partitions/9/records",):
        assert (await send(broker, "GET", path))[0] == 404


@pytest.mark.parametrize("user", ["owner", "nobody"])
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"timestamp_ms": 9223372036854775808}', "timestamp_ms: expected"),
        ('{"headers": [{"name": "\\ud800"}]}', "half of a surrogate pair"),
    ],
)
async def test_a_record_that_has_no_bytes_is_refused_in_words(
    broker: Broker, user: str, body: str, words: str
) -> None:
    status, answer = await send(broker, "POST", RECORDS, user, json=body)
    assert (status, words in answer["detail"]) == (400, True), answer


async def test_a_record_is_produced_by_who_may_write(broker: Broker) -> None:
    body = {
        "key": "k",
        "value_base64": b64encode(b"\xff").decode(),
        "headers": [{"name": "h", "value": "x"}],
        "timestamp_ms": 5,
    }
    with capture_logs() as lines:
        status, answer = await send(broker, "POST", RECORDS, json=json.dumps(body))
    assert (status, answer["offset"]) == (201, 0)
    assert "/w==" not in str(lines)  # records are nobody's business
    (row,) = (await read(broker))["records"]
    assert (row["key"], row["value_base64"], row["timestamp_ms"]) == ("k", "/w==", 5)
    assert row["headers"] == [{"name": "h", "value": "x"}]
    for user, path, sent, expected in (
        ("viewer", RECORDS, body, 403),
        ("owner", RECORDS.replace("orders", "other"), body, 403),
        ("owner", RECORDS.replace("/0/", "/9/"), body, 404),
        ("owner", RECORDS, {"key": 5}, 400),
        ("owner", RECORDS, {"value": "a", "value_base64": "YQ=="}, 400),
        ("owner", RECORDS, {"headers": ["x"]}, 400),
        ("owner", RECORDS, {"timestamp_ms": 1 << 62}, 422),
    ):
        status, answer = await send(broker, "POST", path, user, json.dumps(sent))
        assert status == expected, (sent, answer)
    assert orders(broker).log.log_end_offset == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be"])
async def test_half_a_character_is_refused_in_every_encoding_of_json(
    broker: Broker, encoding: str
) -> None:
    for body in ('{"value": "\\udc00"}', '{"value": "\udc00"}'):
        data = body.encode(encoding, "surrogatepass")
        status, answer = await ask_api(broker, data)
        assert (status, "half of a surrogate pair" in answer["detail"]) == (400, True), answer
    status, _ = await ask_api(broker, '{"value": "\\ud83d\\ude00"}'.encode(encoding))
    assert status == 201


async def ask_api(broker: Broker, body: bytes) -> tuple[int, Any]:
    return await call_api(broker, "POST", RECORDS, body, Authorization=basic("owner"))


async def test_after_each_header_of_a_record_others_may_have_the_loop(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "Turns", partial(Turns, 0.0))
    headers = [{"name": "h", "value": "x"}] * 500
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await yield_to_loop()

    bytes_value = records.bytes_value
    at_header: list[int] = []

    def noted(values: Any, name: str) -> bytes | None:
        at_header.append(turns)
        return bytes_value(values, name)

    monkeypatch.setattr(records, "bytes_value", noted)
    counting = asyncio.ensure_future(count_turns())
    status, _ = await send(broker, "POST", RECORDS, json=json.dumps({"headers": headers}))
    counting.cancel()
    assert status == 201
    assert len(set(at_header)) >= len(headers)


async def test_a_compacted_topic_takes_no_record_without_a_key(broker: Broker) -> None:
    change = '{"set": {"cleanup.policy": "compact"}}'
    assert (await send(broker, "PATCH", "/api/v1/topics/orders", json=change))[0] == 200
    status, answer = await send(broker, "POST", RECORDS, json='{"value": "x"}')
    assert status == 422
    assert "key" in answer["detail"]
