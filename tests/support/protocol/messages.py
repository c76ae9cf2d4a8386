"""Random bodies of any API and version, made from the tables."""

import random
import uuid
from typing import Any

from protocol.api import APIS
from protocol.messages import CLASSES, Message
from protocol.schema import Direction, Field, Struct

_LIMITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
_STRINGS = ("", "a", "topic-1", "ключ", "x" * 127, "y" * 128, "z" * 300)


def every_version() -> list[tuple[int, int]]:
    """All (api key, version) that have a table."""
    return [
        (key, version)
        for key, api in sorted(APIS.items())
        for version in range(api.versions.first, api.versions.last + 1)
    ]


def versions_of(api_key: int) -> list[tuple[int, int]]:
    """All (api key, version) of one API.

    A test of each API goes through its versions itself: hundreds of tests of one version each take
    more time to be collected and reported than to run.
    """
    return [case for case in every_version() if case[0] == api_key]


def api_name(api_key: int) -> str:
    return APIS[api_key].name


def name_of(case: tuple[int, int]) -> str:
    return f"{APIS[case[0]].name}-{case[1]}"


def random_body(
    rng: random.Random, api_key: int, version: int, direction: Direction, width: int = 3
) -> Message:
    """A body whose fields of this version are random, all others at their default."""
    root = APIS[api_key].body(direction)
    return _random_struct(rng, root, root.name, version, width)


def _random_struct(
    rng: random.Random, struct: Struct, root: str, version: int, width: int
) -> Message:
    values = {
        field.name: _random_field(rng, field, root, version, width)
        for field in struct.fields
        if version in field.versions
        # A tagged field is left alone half of the time: the default is not sent.
        and (field.tag is None or rng.random() < 0.5)
    }
    return CLASSES[struct.name](**values)


def _random_field(rng: random.Random, field: Field, root: str, version: int, width: int) -> Any:
    if version in field.nullable and rng.random() < 0.2:
        return None
    if field.is_array:
        count = rng.choice((0, 1, 1, width, 130)) if width > 1 else rng.randrange(3)
        return [_random_element(rng, field, root, version, 1) for _ in range(count)]
    return _random_element(rng, field, root, version, width)


def _random_element(rng: random.Random, field: Field, root: str, version: int, width: int) -> Any:
    if field.is_struct:
        child = Struct(root + field.type, field.fields)
        return _random_struct(rng, child, root, version, width)
    if field.type in _LIMITS:
        bits = _LIMITS[field.type]
        edges = (-(2**bits), -1, 0, 1, 2**bits - 1)
        return rng.choice(edges) if rng.random() < 0.5 else rng.randrange(-(2**bits), 2**bits)
    if field.type == "float64":
        return rng.choice((0.0, -1.5, 1e300, rng.random()))
    if field.type == "uint16":
        return rng.randrange(2**16)
    if field.type == "bool":
        return rng.random() < 0.5
    if field.type == "uuid":
        return uuid.UUID(int=rng.getrandbits(128)).bytes
    if field.type == "string":
        return rng.choice(_STRINGS)
    return rng.randbytes(rng.choice((0, 1, 60, 127, 128, 1000)))
