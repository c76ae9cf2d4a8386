"""Records with a schema of a registry, decoded in the browser."""

import json
import random
import struct
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from playwright.sync_api import Page, expect

from tests.support.console import open_page
from tests.support.draws import cases
from tests.support.schema_registry import (
    FakeRegistry,
    add_avro,
    add_protobuf,
    framed,
    schema_registry,
)
from tests.support.varve import VarveBroker, running_varve

CUSTOMER = {
    "type": "record",
    "name": "Customer",
    "namespace": "shop",
    "fields": [
        {"name": "name", "type": "string"},
        {"name": "balance", "type": "long"},
        {"name": "score", "type": ["null", "double"]},
        {"name": "tier", "type": {"type": "enum", "name": "Tier", "symbols": ["BASIC", "GOLD"]}},
        {"name": "tags", "type": {"type": "array", "items": "string"}},
        {"name": "limits", "type": {"type": "map", "values": "int"}},
        {"name": "code", "type": {"type": "fixed", "name": "Code", "size": 2}},
        {"name": "since", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "born", "type": {"type": "int", "logicalType": "date"}},
        {"name": "friend", "type": ["null", "Customer"]},
        {"name": "old", "type": "Tier"},
    ],
}
TREE = {"type": "record", "name": "T", "fields": [{"name": "t", "type": ["null", "T"]}]}
NULLS = {"type": "array", "items": "null"}
# Runs a decoder on the bytes; the text of an error begins with "error: ".
DECODE = """async ([module, schema, data]) => {
  const { avro } = await import("/console/schemas/avro.js");
  const { protobuf } = await import("/console/schemas/protobuf.js");
  const { Reader, fromBase64 } = await import("/console/schemas/wire.js");
  try {
    const read = module === "avro" ? avro(schema) : protobuf(JSON.parse(schema));
    return JSON.stringify(read(new Reader(fromBase64(data))));
  } catch (error) {
    return `error: ${error.message}`;
  }
}"""


@pytest.fixture(scope="module")
def registry() -> Iterator[FakeRegistry]:
    with schema_registry() as registry:
        yield registry


@pytest.fixture(scope="module")
def broker(
    tmp_path_factory: pytest.TempPathFactory, registry: FakeRegistry
) -> Iterator[VarveBroker]:
    settings = {"schema_registry": {"url": registry.url}}
    with running_varve(tmp_path_factory.mktemp("schemas"), settings) as running:
        yield running


def long(value: int) -> bytes:
    """A number of Avro."""
    zigzag, parts = value << 1 if value >= 0 else (-value << 1) - 1, bytearray()
    while zigzag > 127:
        parts.append(zigzag & 127 | 128)
        zigzag >>= 7
    return bytes([*parts, zigzag])


def text(value: str) -> bytes:
    return long(len(value.encode())) + value.encode()


def customer(name: str, friend: bytes | None) -> bytes:
    return b"".join(
        (
            text(name),
            long(2**60),
            long(1) + struct.pack("<d", 1.5),
            long(1),  # GOLD
            long(2) + text("a") + text("\u202eb") + long(0),
            long(-1) + long(3) + text("x") + long(-7) + long(0),  # a block with its size
            b"\x01\xff",
            long(1_700_000_000_000),
            long(19_000),
            long(0) if friend is None else long(1) + friend,
            long(0),
        )
    )


def decode(page: Page, broker: VarveBroker, module: str, schema: str, data: bytes) -> str:
    if not page.url.startswith(broker.url):
        page.goto(f"{broker.url}/")
    return str(page.evaluate(DECODE, [module, schema, b64encode(data).decode()]))


def shop_file() -> Any:
    """A file of every kind of field."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="shop.proto", package="shop", syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    file.enum_type.add(name="Tier").value.add(name="BASIC", number=0)
    file.enum_type[0].value.add(name="GOLD", number=1)
    other = file.message_type.add(name="Other")
    other.field.add(name="no", number=1, type=kinds.TYPE_INT32, label=1)
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="CountsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=1)
    entry.field.add(name="value", number=2, type=kinds.TYPE_INT32, label=1)
    line = order.nested_type.add(name="Line")
    line.field.add(name="sku", number=1, type=kinds.TYPE_STRING, label=1)
    for number, (name, kind, label, type_name) in enumerate(
        (
            ("id", kinds.TYPE_INT64, 1, None),
            ("debt", kinds.TYPE_SINT32, 1, None),
            ("price", kinds.TYPE_DOUBLE, 1, None),
            ("paid", kinds.TYPE_BOOL, 1, None),
            ("raw", kinds.TYPE_BYTES, 1, None),
            ("tier", kinds.TYPE_ENUM, 1, ".shop.Tier"),
            ("lines", kinds.TYPE_MESSAGE, 3, ".shop.Order.Line"),
            ("sizes", kinds.TYPE_INT32, 3, None),
            ("names", kinds.TYPE_STRING, 3, None),
            ("counts", kinds.TYPE_MESSAGE, 3, ".shop.Order.CountsEntry"),
            ("at", kinds.TYPE_MESSAGE, 1, ".google.protobuf.Timestamp"),
            ("fixed", kinds.TYPE_SFIXED64, 1, None),
        ),
        start=1,
    ):
        order.field.add(name=name, number=number, type=kind, label=label, type_name=type_name)
    return file


def order_bytes() -> bytes:
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(shop_file())
    order = message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))(
        id=-(2**62), debt=-3, price=2.5, paid=True, raw=b"\x00\xff", tier=1, sizes=[1, -2],
        names=["a", "b"], counts={"x": 5}, fixed=-9,
    )  # fmt: skip
    order.lines.add(sku="lamp")
    order.at.FromMilliseconds(1_700_000_000_500)
    return bytes(order.SerializeToString())


ORDER = (
    '{"id":"-4611686018427387904","debt":-3,"price":2.5,"paid":true,"raw":"00 ff","tier":"GOLD",'
    '"lines":[{"sku":"lamp"}],"sizes":[1,-2],"names":["a","b"],"counts":{"x":5},'
    '"at":"2023-11-14T22:13:20.500Z","fixed":-9}'
)


def test_records_are_shown_decoded_with_the_name_of_their_schema(
    page: Page, broker: VarveBroker, registry: FakeRegistry
) -> None:
    add_avro(registry, 258, CUSTOMER)
    add_protobuf(registry, 3, shop_file().SerializeToString())
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic("shop", 1, 1)])["shop"].result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    records = {
        b"avro": framed(258, customer("ada", customer("eve", None))),
        b"protobuf": framed(3, long(1) + long(1) + order_bytes()),  # the second message
        b"wrong": framed(258, b"\x7f"),
        b"unknown": framed(99, b"abc"),
        b"plain": b"text",
    }
    for key, value in records.items():
        producer.produce("shop", value, key)
    assert producer.flush(30) == 0
    open_page(page, broker, "topics/shop/messages/0")
    rows = [page.get_by_role("row").filter(has_text=key.decode()) for key in records]
    expect(rows[0]).to_contain_text('"name":"ada","balance":"1152921504606846976","score":1.5')
    expect(rows[1]).to_contain_text('"tier":"GOLD","lines":[{"sku":"lamp"}]')
    expect(rows[3]).to_contain_text("abc")
    expect(rows[4]).to_contain_text("text")
    rows[0].get_by_role("button").click()
    expect(page.locator("pre").nth(1)).to_contain_text('"since": "2023-11-14T22:13:20.000Z"')
    expect(page.locator("pre").nth(1)).to_contain_text("\\u202eb")
    expect(page.get_by_text("Avro schema 258")).to_be_visible()
    rows[2].get_by_role("button").click()
    expect(page.get_by_text("not decoded with schema 258: it ends too early")).to_be_visible()


def test_every_kind_of_field_is_decoded(page: Page, broker: VarveBroker) -> None:
    file = b64encode(shop_file().SerializeToString()).decode()
    data = long(1) + long(1) + order_bytes()
    assert decode(page, broker, "protobuf", f'["{file}"]', data) == ORDER
    first = long(0) + b"\x08\x07"  # short for the first message
    assert decode(page, broker, "protobuf", f'["{file}"]', first) == '{"no":7}'
    unknown = long(0) + b"\x10\x05"
    assert decode(page, broker, "protobuf", f'["{file}"]', unknown) == '{"#2":5}'


@pytest.mark.parametrize(
    ("schema", "data", "reason"),
    [
        (TREE, long(1) * 1000 + long(0), "it is nested too deeply"),
        (NULLS, long(2**62) + long(0), "it has too many values"),
        ("string", long(-5), "it ends too early"),
        ("bytes", long(2**40), "it ends too early"),
        ("long", b"\xff" * 11, "a number is too long"),
        (["null"], long(7), "it has a branch of a union that the schema lacks"),
        ({"type": "none"}, b"", "the schema has no type none"),
    ],
)
def test_hostile_data_ends_with_an_error(
    page: Page, broker: VarveBroker, schema: object, data: bytes, reason: str
) -> None:
    assert decode(page, broker, "avro", json.dumps(schema), data) == f"error: {reason}"


def test_damaged_records_never_keep_the_page_busy(page: Page, broker: VarveBroker) -> None:
    seed = 14
    print(f"seed {seed}")
    rng = random.Random(seed)
    file = b64encode(shop_file().SerializeToString()).decode()
    originals = {
        "avro": (json.dumps(CUSTOMER), customer("ada", customer("eve", None))),
        "protobuf": (f'["{file}"]', long(1) + long(1) + order_bytes()),
    }
    for _ in range(cases(few=50, many=500)):
        module = rng.choice(list(originals))
        schema, original = originals[module]
        data = bytearray(original[: rng.randrange(len(original) + 1)])
        for _ in range(rng.randrange(4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        assert decode(page, broker, module, schema, bytes(data))
