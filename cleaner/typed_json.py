"""Convert frozen dataclasses to JSON and back, by the types of their fields. Pure.

Rules
- A round trip gives an equal value: integers are exact, floats are written as Python does, bytes
  as hex, tuples, named tuples and lists as arrays, mappings by string as objects.
- Input is not trusted. Every value must have the type of its field, every field without a default
  must be present, and no other field may be. MalformedJsonError names the place.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_INTEGER_MAX: Final = 1 << 64  # larger than any number that we send
_SHOWN_CHARS: Final = 60


class MalformedJsonError(ValueError):
    """JSON of another shape than expected; names the place."""


def to_json(value: Any) -> object:
    """Convert a dataclass or a field's value for `json.dumps`."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def dumps(value: Any) -> bytes:
    """Return a dataclass as JSON."""
    return json.dumps(to_json(value), separators=(",", ":")).encode()


def loads(kind: type[T], data: bytes) -> T:
    """Read a dataclass from JSON. Raises MalformedJsonError."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedJsonError("it is not JSON") from None
    return from_json(kind, document)


def from_json(kind: type[T], value: object) -> T:
    """Read a dataclass from the result of `json.loads`. Raises MalformedJsonError."""
    return cast(T, _read(kind, value, ""))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, value: object, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        (member,) = (item for item in inner if item is not NoneType)
        return _read(member, value, where)
    if origin is Sequence:
        return _read_tuple((inner[0], ...), value, where)
    if origin is tuple:
        return _read_tuple(inner, value, where)
    if origin is list:
        return list(_read_tuple((inner[0], ...), value, where))
    if origin is dict:
        if not isinstance(value, dict):
            raise _unexpected("an object", value, where)
        return {key: _read(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(kind):
        return _read_dataclass(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, tuple):
        items = _array(value, where, len(_hints(kind)))
        named = zip(_hints(kind).items(), items, strict=True)
        return kind(*(_read(element, item, f"{where}.{name}") for (name, element), item in named))
    if isinstance(kind, type) and issubclass(kind, Enum):
        if not isinstance(value, str) or value not in {member.value for member in kind}:
            raise _unexpected(f"one of {', '.join(member.value for member in kind)}", value, where)
        return kind(value)
    return _read_plain(kind, value, where)


def _read_tuple(inner: tuple[Any, ...], value: object, where: str) -> tuple[Any, ...]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        items = _array(value, where)
        return tuple(_read(inner[0], item, f"{where}[{at}]") for at, item in enumerate(items))
    items = _array(value, where, len(inner))
    pairs = enumerate(zip(inner, items, strict=True))
    return tuple(_read(element, item, f"{where}[{at}]") for at, (element, item) in pairs)


def _array(value: object, where: str, count: int | None = None) -> list[object]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        expected = "an array" if count is None else f"an array of {count}"
        raise _unexpected(expected, value, where)
    return value


def _read_dataclass(kind: Any, value: object, where: str) -> Any:
    if not isinstance(value, dict):
        raise _unexpected("an object", value, where)
    hints = _hints(kind)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise MalformedJsonError(f"{where or 'it'} has an unknown field {min(unknown)[:40]!r}")
    for field in fields(kind):
        is_needed = field.default is MISSING and field.default_factory is MISSING
        if is_needed and field.name not in value:
            raise MalformedJsonError(f"{where or 'it'} has no field {field.name}")
    values = {name: _read(hints[name], item, f"{where}.{name}") for name, item in value.items()}
    return kind(**values)


def _read_plain(kind: Any, value: object, where: str) -> Any:
    if kind is bytes:
        try:
            return bytes.fromhex(cast(str, value))
        except (TypeError, ValueError):
            raise _unexpected("hexadecimal digits", value, where) from None
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        if -_INTEGER_MAX <= value <= _INTEGER_MAX:
            return value
        raise MalformedJsonError(f"{where}: the number is too large")
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) <= _INTEGER_MAX else math.inf
        if math.isfinite(number):
            return number
    if kind is str and isinstance(value, str):
        return value
    raise _unexpected(kind.__name__, value, where)


def _unexpected(expected: str, value: object, where: str) -> MalformedJsonError:
    return MalformedJsonError(
        f"{where or 'it'}: expected {expected}, not {value!r:.{_SHOWN_CHARS}}"
    )
