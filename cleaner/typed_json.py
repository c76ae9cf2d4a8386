"""Frozen dataclasses as JSON, and back by the types of their fields. Pure.

Rules
- What is read equals what was written: integers exactly, floats as Python writes them, bytes as
  hex, tuples, named tuples and lists as arrays, mappings by string as objects.
- What is read may come from anybody. Every value is of the type of its field, every field without a
  default is there, and no other: anything else is a MalformedJsonError that says where.
"""

import json
import math
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_INTEGER_MAX: Final = 1 << 64  # nothing that we send is larger
_SHOWN_CHARS: Final = 60


class MalformedJsonError(ValueError):
    """JSON that is not what was expected; says at which place."""


def to_json(value: Any) -> object:
    """A dataclass, or what its fields may hold, as what `json.dumps` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_json(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):
        return [to_json(one) for one in value]
    if isinstance(value, dict):
        return {key: to_json(one) for key, one in value.items()}
    assert value is None or isinstance(value, bool | int | float | str), type(value)
    return value


def dumps(value: Any) -> bytes:
    """The JSON of a dataclass."""
    return json.dumps(to_json(value), separators=(",", ":")).encode()


def loads(kind: type[T], data: bytes) -> T:
    """A dataclass from its JSON. Raises MalformedJsonError."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise MalformedJsonError("it is not JSON") from None
    return from_json(kind, found)


def from_json(kind: type[T], found: object) -> T:
    """A dataclass from what `json.loads` gave. Raises MalformedJsonError."""
    return cast(T, _read(kind, found, ""))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, found: object, where: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if found is None and NoneType in inner:
            return None
        (wanted,) = (one for one in inner if one is not NoneType)
        return _read(wanted, found, where)
    if origin is tuple:
        return _read_tuple(inner, found, where)
    if origin is list:
        return list(_read_tuple((inner[0], ...), found, where))
    if origin is dict:
        if not isinstance(found, dict):
            raise _unexpected("an object", found, where)
        return {key: _read(inner[1], one, f"{where}.{key}") for key, one in found.items()}
    if is_dataclass(kind):
        return _read_dataclass(kind, found, where)
    if isinstance(kind, type) and issubclass(kind, tuple):
        items = _array(found, where, len(_hints(kind)))
        named = zip(_hints(kind).items(), items, strict=True)
        return kind(*(_read(one, item, f"{where}.{name}") for (name, one), item in named))
    if isinstance(kind, type) and issubclass(kind, Enum):
        if not isinstance(found, str) or found not in {one.value for one in kind}:
            raise _unexpected(f"one of {', '.join(one.value for one in kind)}", found, where)
        return kind(found)
    return _read_plain(kind, found, where)


def _read_tuple(inner: tuple[Any, ...], found: object, where: str) -> tuple[Any, ...]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        items = _array(found, where)
        return tuple(_read(inner[0], one, f"{where}[{at}]") for at, one in enumerate(items))
    items = _array(found, where, len(inner))
    pairs = enumerate(zip(inner, items, strict=True))
    return tuple(_read(one, item, f"{where}[{at}]") for at, (one, item) in pairs)


def _array(found: object, where: str, count: int | None = None) -> list[object]:
    if not isinstance(found, list) or (count is not None and len(found) != count):
        wanted = "an array" if count is None else f"an array of {count}"
        raise _unexpected(wanted, found, where)
    return found


def _read_dataclass(kind: Any, found: object, where: str) -> Any:
    if not isinstance(found, dict):
        raise _unexpected("an object", found, where)
    hints = _hints(kind)
    strangers = found.keys() - hints.keys()
    if strangers:
        raise MalformedJsonError(f"{where or 'it'} has an unknown field {min(strangers)[:40]!r}")
    for one in fields(kind):
        is_needed = one.default is MISSING and one.default_factory is MISSING
        if is_needed and one.name not in found:
            raise MalformedJsonError(f"{where or 'it'} has no field {one.name}")
    values = {name: _read(hints[name], one, f"{where}.{name}") for name, one in found.items()}
    return kind(**values)


def _read_plain(kind: Any, found: object, where: str) -> Any:
    if kind is bytes:
        try:
            return bytes.fromhex(cast(str, found))
        except (TypeError, ValueError):
            raise _unexpected("hexadecimal digits", found, where) from None
    if kind is bool and isinstance(found, bool):
        return found
    if kind is int and isinstance(found, int) and not isinstance(found, bool):
        if -_INTEGER_MAX <= found <= _INTEGER_MAX:
            return found
        raise MalformedJsonError(f"{where}: the number is too large")
    if kind is float and isinstance(found, int | float) and not isinstance(found, bool):
        number = float(found) if abs(found) <= _INTEGER_MAX else math.inf
        if math.isfinite(number):
            return number
    if kind is str and isinstance(found, str):
        return found
    raise _unexpected(kind.__name__, found, where)


def _unexpected(wanted: str, found: object, where: str) -> MalformedJsonError:
    return MalformedJsonError(f"{where or 'it'}: expected {wanted}, not {found!r:.{_SHOWN_CHARS}}")
