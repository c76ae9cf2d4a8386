"""kio as an oracle: random messages made from kio's own classes, and their plain values.

kio is generated from Apache Kafka's schemas and was found byte-identical to the Java client. It
may abort the process on hostile input, so it only ever encodes here, and never decodes.
"""

import dataclasses
import datetime
import importlib
import io
import random
import re
import types
import typing
import uuid
from typing import Any

from kio.schema.errors import ErrorCode
from kio.serial import entity_writer

from protocol.api import APIS
from protocol.messages import Message
from protocol.schema import Direction

_BITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
_STRINGS = ("", "a", "topic-1", "ключ", "x" * 126, "y" * 127, "z" * 128, "w" * 300)
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_ERRORS = list(ErrorCode)
_MS = datetime.timedelta(milliseconds=1)


def kio_class(api_key: int, version: int, direction: Direction) -> Any:
    """kio's class of a body."""
    name = APIS[api_key].name
    folder = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
    module = importlib.import_module(f"kio.schema.{folder}.v{version}.{direction}")
    return getattr(module, f"{name}{direction.capitalize()}")


def random_message(rng: random.Random, kind: Any, width: int = 3) -> Any:
    """A message of this kio class with random values."""
    values = {}
    for field in dataclasses.fields(kind):
        if field.metadata.get("tag") is not None and rng.random() < 0.5:
            continue  # its default, which is not sent
        values[field.name] = _random_value(rng, field, field.type, width)
    return kind(**values)


def encoded(message: Any) -> bytes:
    """The bytes of a body, by kio."""
    buffer = io.BytesIO()
    entity_writer(type(message))(buffer, message)
    return buffer.getvalue()


def _random_value(rng: random.Random, field: Any, kind: Any, width: int) -> Any:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        if rng.random() < 0.2 and field.metadata.get("tag") is None:
            return None
        [kind] = [part for part in typing.get_args(kind) if part is not types.NoneType]
    if typing.get_origin(kind) is tuple:
        count = rng.choice((0, 1, width, 130)) if width > 1 else rng.randrange(3)
        return tuple(_random_value(rng, field, typing.get_args(kind)[0], 1) for _ in range(count))
    if dataclasses.is_dataclass(kind):
        return random_message(rng, kind, width)
    return _random_primitive(rng, field.metadata["kafka_type"])


def _random_primitive(rng: random.Random, kafka_type: str) -> Any:
    bits = _BITS.get(kafka_type)
    if bits is not None:
        edges = (-(2**bits), -1, 0, 1, 2**bits - 1)
        return rng.choice(edges) if rng.random() < 0.5 else rng.randrange(-(2**bits), 2**bits)
    makers: dict[str, Any] = {
        "bool": lambda: rng.random() < 0.5,
        "float64": lambda: rng.choice((0.0, -1.5, 1e300, rng.random())),
        "string": lambda: rng.choice(_STRINGS),
        "bytes": lambda: rng.randbytes(rng.choice((0, 1, 126, 127, 128, 1000))),
        "records": lambda: rng.randbytes(rng.choice((0, 1, 126, 127, 128, 1000))),
        "uuid": lambda: uuid.UUID(int=rng.getrandbits(128)),
        "error_code": lambda: rng.choice(_ERRORS),
        "uint16": lambda: rng.randrange(2**16),
        "timedelta_i32": lambda: rng.randrange(-(2**31), 2**31) * _MS,
        "timedelta_i64": lambda: rng.randrange(2**40) * _MS,
        "datetime_i64": lambda: _EPOCH + rng.randrange(2**40) * _MS,
    }
    return makers[kafka_type]()


def difference(local: object, remote: Any, path: str = "") -> str | None:
    """Say where our decoded message differs from kio's, by name; None when nowhere."""
    if isinstance(local, Message):
        remaining = set(local.__slots__)
        for field in dataclasses.fields(remote):
            # kio turns durations and times into objects and drops the unit of the name.
            name = field.name if field.name in remaining else f"{field.name}_ms"
            if name not in remaining:
                return f"{path}.{field.name} is unknown here"
            result = difference(getattr(local, name), getattr(remote, field.name), f"{path}.{name}")
            if result is not None:
                return result
        return None
    if isinstance(local, list) and isinstance(remote, tuple):
        if len(local) != len(remote):
            return f"{path}: {len(local)} elements, expected {len(remote)}"
        pairs = enumerate(zip(local, remote, strict=True))
        found_all = (difference(a, b, f"{path}[{n}]") for n, (a, b) in pairs)
        return next((actual for actual in found_all if actual is not None), None)
    plain = _plain(remote)
    if local == plain or (remote is None and local in (bytes(16), -1)):
        return None
    return f"{path}: {local!r}, expected {plain!r}"


def _plain(value: Any) -> Any:
    if isinstance(value, uuid.UUID):
        return value.bytes
    if isinstance(value, datetime.timedelta):
        return value // _MS
    if isinstance(value, datetime.datetime):
        return (value - _EPOCH) // _MS
    return value
