"""Keys, values and headers of records as JSON fields, and as text that is safe on a terminal."""

import base64
from collections.abc import Iterable
from typing import Any, Final

from config.printable import printable

TEXT_CHARS_MAX: Final = 1000  # of a key or a value; JSON has all


def record_fields(
    key: bytes | None,
    value: bytes | None,
    headers: Iterable[tuple[str | bytes, bytes | None]] | None,
) -> dict[str, Any]:
    """Return `key`, `value` and, if there are any, `headers`, as text; see `json_field`."""
    row: dict[str, Any] = {**json_field("key", key), **json_field("value", value)}
    if headers:
        row["headers"] = [
            {"name": name if isinstance(name, str) else name.decode("utf-8", "backslashreplace"),
             **json_field("value", data)}
            for name, data in headers
        ]  # fmt: skip
    return row


def json_field(name: str, data: bytes | None) -> dict[str, str | None]:
    """Return the field `name`; `<name>_base64` for bytes that are not UTF-8."""
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(data).decode()}


def text_of(row: dict[str, Any], name: str) -> str:
    """Return the field that `json_field` made, as text for people."""
    if name in row:
        return shown(None if row[name] is None else row[name].encode(), name)
    return shown(base64.b64decode(row[f"{name}_base64"]), name)


def shown(data: bytes | None, name: str) -> str:
    """Return a key or value as text that is safe on a terminal, shortened."""
    if data is None:
        return "<no key>" if name == "key" else "<tombstone>"
    text = data[: 4 * TEXT_CHARS_MAX].decode("utf-8", "backslashreplace")
    more = f"... ({len(data):,} bytes)" if len(text) > TEXT_CHARS_MAX else ""
    return printable(text[:TEXT_CHARS_MAX]) + more
