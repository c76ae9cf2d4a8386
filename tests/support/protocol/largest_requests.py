"""The most expensive requests that the limits of an API allow, made from the tables.

A request is expensive in one array at a time: for each array of each structure there is a body with
so many elements in it, once with names that exist and once with names that do not, once as one long
inner array and once as many short ones. Where null means "all", that is a body, too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from protocol.api import APIS
from protocol.messages import CLASSES, Message
from protocol.schema import Field, Struct
from storage.format.batch import Record, build_batch

BATCH: Final = bytes(build_batch([Record(0, 1, b"k", b"v", ())]))
# What every request says that says anything of it.
FIXED: Final[dict[str, Any]] = {
    "acks": 1,
    "generation_id_or_member_epoch": -1,
    "max_bytes": 1 << 20,
    "min_bytes": 0,
    "max_wait_ms": 0,
    "session_epoch": 0,
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
    "retention_time_ms": -1,
    "endpoint_type": 1,
    "resource_type": 2,
    "partition_max_bytes": 1 << 20,
    "response_partition_limit": 2_000,
    "replica_id": -1,
    "producer_id": -1,
    "current_leader_epoch": -1,
    "timestamp": -1,
    "count": 2,
    "num_partitions": 1,
    "replication_factor": 1,
}


@dataclass(frozen=True, slots=True)
class Names:
    """What exists at the broker that is asked."""

    topics: tuple[str, ...]
    topic_ids: tuple[bytes, ...]
    partitions: int  # of each topic
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Plan:
    path: tuple[Field, ...]  # the arrays down to the one that is long
    counts: tuple[int, ...]  # elements of each
    names: Names | None  # None: names that do not exist


def largest_bodies(
    api_key: int, version: int, rows: int, names: Names, *, with_known: bool = True
) -> Iterator[tuple[str, Message]]:
    """Yield what makes a request expensive, and the request.

    `with_known`: also long arrays of names that exist.
    """
    root = APIS[api_key].request
    yield "small", _Maker(root.name, version, _Plan((), (), names)).make(root)
    owners = (("known", names), ("unknown", None))
    for path in _array_paths(root, version):
        label = ".".join(field.name for field in path)
        for owner, existing in owners if with_known else owners[1:]:
            long = (*(1 for _ in path[:-1]), rows - len(path) + 1)
            yield (
                f"{label} {owner}",
                _Maker(root.name, version, _Plan(path, long, existing)).make(root),
            )
            if len(path) > 1:
                many = (rows // len(path), *(1 for _ in path[1:]))
                body = _Maker(root.name, version, _Plan(path, many, existing)).make(root)
                yield f"{label} {owner}, spread", body
    for field in root.fields:
        if field.is_array and version in field.nullable and version in field.versions:
            body = _Maker(root.name, version, _Plan((), (), names)).make(root)
            setattr(body, field.name, None)
            yield f"all {field.name}", body


def long_array_bodies(
    api_key: int, version: int, rows: int, names: Names
) -> Iterator[tuple[str, Message]]:
    """Yield each array of the request itself, and a request with so many elements in it."""
    root = APIS[api_key].request
    for field in root.fields:
        if field.is_array and version in field.versions:
            plan = _Plan((field,), (rows,), names)
            yield field.name, _Maker(root.name, version, plan).make(root)


def _array_paths(
    struct: Struct, version: int, above: tuple[Field, ...] = ()
) -> Iterator[tuple[Field, ...]]:
    for field in struct.fields:
        if version not in field.versions:
            continue
        if field.is_array:
            yield (*above, field)
        if field.is_struct:
            child = Struct(field.type, field.fields)
            yield from _array_paths(child, version, (*above, field) if field.is_array else above)


class _Maker:
    """Makes one body. Elements are numbered, so that names differ and partitions take turns."""

    def __init__(self, root: str, version: int, plan: _Plan) -> None:
        self._root = root
        self._version = version
        self._plan = plan
        self._number = 0

    def make(self, struct: Struct, name: str = "", depth: int = 0) -> Message:
        values = {
            field.name: self._field(field, depth)
            for field in struct.fields
            if self._version in field.versions and field.tag is None
        }
        return CLASSES[name or struct.name](**values)

    def _field(self, field: Field, depth: int) -> Any:
        plan = self._plan
        if field.is_array:
            count = 0
            if depth < len(plan.path) and plan.path[depth] is field:
                count = plan.counts[depth]
            return [self._element(field, depth + 1) for _ in range(count)]
        if field.is_struct and self._version in field.nullable:
            return None
        return self._element(field, depth)

    def _element(self, field: Field, depth: int) -> Any:
        self._number += field.is_array
        if field.is_struct:
            return self.make(Struct(field.type, field.fields), self._root + field.type, depth)
        return self._value(field)

    def _value(self, field: Field) -> Any:
        number, names = self._number, self._plan.names
        if field.name in FIXED:
            return FIXED[field.name]
        if field.name == "transactional_id" and self._version in field.nullable:
            return None
        if field.type == "records":
            return BATCH
        if field.type == "bool":
            return True
        if field.type == "bytes":
            return b"x" * 16
        if field.type == "uuid":
            ids = names.topic_ids if names is not None else ()
            return ids[number // 64 % len(ids)] if ids else number.to_bytes(16, "big")
        if field.type == "string":
            if names is None:
                return f"x{number}"
            existing = names.groups if "group" in field.name else names.topics
            return existing[number % len(existing)] if "member" not in field.name else f"m{number}"
        if field.name in ("partition", "partition_index", "index", "partitions"):
            return number % names.partitions if names is not None else number
        return 0
