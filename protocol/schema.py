"""The types of the message tables: fields, messages and APIs.

A table (`protocol/tables`) is plain data. Names are those of the Kafka protocol guide in
snake_case, so that a reader can compare them. Types are the primitive types of the guide; `[]x` is
an array of x, and a capitalised word is a structure whose fields follow. `table_compiler.py` knows
the bytes of each type.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

PRIMITIVES: Final = frozenset(
    ("bool", "int8", "int16", "uint16", "int32", "int64", "float64", "uuid",
     "string", "bytes", "records")
)  # fmt: skip
NO_UUID: Final = bytes(16)

Direction = Literal["request", "response"]
Scalar = int | float | bool | str | bytes | None


class Versions(NamedTuple):
    """An inclusive range of versions; empty when first > last."""

    first: int
    last: int

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.first <= version <= self.last


NEVER: Final = Versions(1, 0)
FOREVER: Final = 32767


def parse_versions(text: str) -> Versions:
    """Read "3+", "2-5", "4" or "" (no version at all), as Kafka's own schemas write them."""
    if not text:
        return NEVER
    if text.endswith("+"):
        return Versions(int(text[:-1]), FOREVER)
    first, _, last = text.partition("-")
    return Versions(int(first), int(last or first))


class Unset:
    """The default that a table leaves to the type of the field."""


_UNSET: Final = Unset()


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a structure.

    `type` is without the array mark; `fields` belong to a structure type. A field with a `tag` is a
    tagged field (KIP-482) in all of its versions.
    """

    name: str
    type: str
    is_array: bool
    versions: Versions
    nullable: Versions
    tag: int | None
    fields: tuple["Field", ...]
    default: Scalar

    @property
    def is_struct(self) -> bool:
        """Return whether the element type is a structure."""
        return self.type not in PRIMITIVES

    @property
    def is_nullable(self) -> bool:
        """Return whether null is a value of this field in any version."""
        return self.nullable != NEVER


_TYPE_DEFAULTS: Final[dict[str, Scalar]] = {
    "bool": False, "float64": 0.0, "string": "", "bytes": b"", "records": None, "uuid": NO_UUID,
}  # fmt: skip


def F(  # noqa: N802 - a table of two thousand rows reads better with a short name
    name: str,
    type_: str,
    versions: str = "0+",
    *fields: Field,
    null: str = "",
    tag: int | None = None,
    default: Scalar | Unset = _UNSET,
) -> Field:
    """Make a field: `F("topics", "[]Topic", "0+", F(...), F(...), null="1+")`."""
    element = type_.removeprefix("[]")
    is_array = element != type_
    assert element in PRIMITIVES or (element[0].isupper() and fields), name
    if isinstance(default, Unset):
        default = None if is_array or fields else _TYPE_DEFAULTS.get(element, 0)
    return Field(
        name,
        element,
        is_array,
        parse_versions(versions),
        parse_versions(null),
        tag,
        fields,
        default,
    )


@dataclass(frozen=True, slots=True)
class Struct:
    """A named structure: a whole message body or the element of an array."""

    name: str
    fields: tuple[Field, ...]

    def child(self, root: str, field: Field) -> "Struct":
        """Return the structure of a field; its name is that of the message plus its own."""
        return Struct(root + field.type, field.fields)


@dataclass(frozen=True, slots=True)
class Api:
    """One API: its key, the versions whose layout the table gives, and both bodies."""

    key: int
    name: str
    versions: Versions
    flexible: Versions
    request: Struct
    response: Struct

    def body(self, direction: Direction) -> Struct:
        """Return the structure of one direction."""
        return self.request if direction == "request" else self.response

    def is_flexible(self, version: int) -> bool:
        """Return whether this version has compact lengths and tagged fields (KIP-482)."""
        return version in self.flexible


def api(
    key: int,
    name: str,
    versions: str,
    flexible: str,
    *,
    request: tuple[Field, ...],
    response: tuple[Field, ...],
) -> Api:
    """Make an API; body names are `<name>Request` and `<name>Response`."""
    return Api(
        key,
        name,
        parse_versions(versions),
        parse_versions(flexible),
        Struct(f"{name}Request", request),
        Struct(f"{name}Response", response),
    )


def walk(root: Struct) -> Iterator[Struct]:
    """Yield the structures of a message, innermost first, the message itself last."""

    def below(struct: Struct) -> Iterator[Struct]:
        for field in struct.fields:
            if field.is_struct:
                child = struct.child(root.name, field)
                yield from below(child)
                yield child

    yield from below(root)
    yield root


@dataclass(frozen=True, slots=True)
class RecordSchema:
    """A key or a value of a record in an internal topic: a version (int16), then the body."""

    name: str
    versions: Versions
    flexible: Versions
    body: Struct


def record(name: str, versions: str, flexible: str, *fields: Field) -> RecordSchema:
    """Make a record's key or value."""
    return RecordSchema(
        name, parse_versions(versions), parse_versions(flexible), Struct(name, fields)
    )
