"""Write `messages.pyi`, the types of the classes in `protocol/messages.py`.

The file is not in the repository: `make lint` and the pre-commit hook write it before mypy runs.
Run `python -m protocol.stubs` for an editor that reads it.
"""

from pathlib import Path
from typing import Final

from protocol.messages import bodies
from protocol.schema import Field, Struct, walk

STUB_PATH: Final = Path(__file__).with_name("messages.pyi")

_HEAD: Final = """\
# Written by protocol/stubs.py from the message tables; do not edit.
# ruff: noqa
from collections.abc import Iterator
from typing import Final

from protocol.schema import Field, Struct

class Message:
    __slots__: tuple[str, ...]

CLASSES: Final[dict[str, type[Message]]]

def default_expression(field: Field) -> str | None: ...
def bodies() -> Iterator[Struct]: ...
"""

_PYTHON_TYPES: Final = {
    "bool": "bool", "string": "str", "bytes": "bytes", "records": "bytes", "uuid": "bytes",
    "float64": "float",
}  # fmt: skip


def _annotation(field: Field, root: str) -> str:
    element = root + field.type if field.is_struct else _PYTHON_TYPES.get(field.type, "int")
    kind = f"list[{element}]" if field.is_array else element
    return f"{kind} | None" if field.is_nullable else kind


def _class(struct: Struct, root: str) -> list[str]:
    lines = ["", f"class {struct.name}(Message):"]
    kinds = [(field.name, _annotation(field, root)) for field in struct.fields]
    lines += [f"    {name}: {kind}" for name, kind in kinds]
    lines += ["    def __init__(", "        self,", "        *,"]
    lines += [f"        {name}: {kind} = ...," for name, kind in kinds]
    return [*lines, "    ) -> None: ..."]


def stub_text() -> str:
    """Return the text of `messages.pyi`."""
    lines: list[str] = []
    for root in bodies():
        for struct in walk(root):
            lines += _class(struct, root.name)
    return _HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    STUB_PATH.write_text(stub_text(), encoding="utf-8")
