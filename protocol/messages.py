"""The bodies of requests, responses and internal records, as classes made from the tables.

Each structure has one class with slots, the same for all versions: `MetadataResponse`,
`MetadataResponseTopic` (name of the message, then name of the structure). Constructors take
keywords only; an omitted field gets the default of its table, an omitted array a new list. A field
that a version does not have gets its default when decoded and is not encoded. Type checkers read
`messages.pyi`, which `python -m protocol.stubs` writes (`make lint` runs it).
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

from protocol.api import APIS
from protocol.schema import Field, Struct, walk
from protocol.tables.internal_records import INTERNAL_RECORDS

# Fields that `repr` hides, because they contain credentials.
SECRETS: Final = frozenset(("auth_bytes", "salted_password", "hmac"))


class Message:
    """Base of all bodies and parts of bodies."""

    __slots__: tuple[str, ...] = ()
    __hash__ = None  # type: ignore[assignment]  # mutable, as the fields are

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={'...' if name in SECRETS else repr(getattr(self, name))}"
            for name in self.__slots__
        )
        return f"{type(self).__name__}({fields})"


_NEW: Final = object()  # stands for "a new list" or "a new structure" in a signature


def default_expression(field: Field) -> str | None:
    """Return the source of a field's default; None when each message needs a new object."""
    if field.is_array or (field.is_struct and not field.is_nullable):
        return None
    return repr(field.default)


def _new_expression(field: Field, root: str) -> str:
    return "[]" if field.is_array else f"{root}{field.type}()"


def _constructor(struct: Struct, root: str, namespace: dict[str, Any]) -> Callable[..., None]:
    arguments: list[str] = []
    lines: list[str] = []
    for field in struct.fields:
        default = default_expression(field)
        arguments.append(f"{field.name}={'_NEW' if default is None else default}")
        value = field.name
        if default is None:
            value = f"{_new_expression(field, root)} if {value} is _NEW else {value}"
        lines.append(f"    self.{field.name} = {value}")
    source = "\n".join([f"def __init__(self, *, {', '.join(arguments)}):", *lines])
    made: dict[str, Any] = {}
    exec(source, namespace, made)
    constructor: Callable[..., None] = made["__init__"]
    return constructor


def bodies() -> Iterator[Struct]:
    """Yield every request, response and internal record that has a table."""
    for api in APIS.values():
        yield api.request
        yield api.response
    for record in INTERNAL_RECORDS:
        yield record.body


def _make_classes() -> dict[str, type[Message]]:
    made: dict[str, Any] = {"_NEW": _NEW}
    for root in bodies():
        for struct in walk(root):
            assert struct.name not in made, struct.name
            body = {
                "__slots__": tuple(field.name for field in struct.fields),
                "__init__": _constructor(struct, root.name, made),
                "__module__": __name__,
                "__doc__": f"{struct.name} of Kafka's message schemas.",
            }
            made[struct.name] = type(struct.name, (Message,), body)
    # exec adds __builtins__.
    return {name: kind for name, kind in made.items() if isinstance(kind, type)}


CLASSES: Final[dict[str, type[Message]]] = _make_classes()
globals().update(CLASSES)
