"""A small file with a checksum: one header line, then JSON.

    <magic> <version> <payload bytes> <crc32c of all before and after it, 8 hex digits>\\n<payload>

`unseal` returns exactly what was sealed. A file that was cut, extended or changed is an error, and
so is a file of a newer version, because rewriting it would lose data.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from crc32c import crc32c

from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.format.checkpoints import LARGEST_INT32, parse_number


def seal(magic: str, version: int, payload: Mapping[str, object]) -> bytes:
    """Return the bytes of a sealed file."""
    return seal_body(magic, version, to_json(payload))


def to_json(payload: Mapping[str, object] | Sequence[object]) -> bytes:
    """Return a JSON object or list without spaces, with its keys in order."""
    return json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()


def seal_body(magic: str, version: int, body: bytes) -> bytes:
    """Return the bytes of a sealed file with this encoded JSON object as payload."""
    return _header(magic, version, body) + body


def _header(magic: str, version: int, body: bytes) -> bytes:
    start = f"{magic} {version} {len(body)} ".encode()
    return start + f"{crc32c(body, crc32c(start)):08x}\n".encode()


def unseal(magic: str, version: int, data: bytes, path: str) -> dict[str, Any]:
    """Return the payload of a sealed file. Raises CorruptCheckpointError and NewerFormatError."""
    line, newline, body = data.partition(b"\n")
    words = line.split(b" ")
    if not newline or len(words) != 4 or words[0] != magic.encode():
        raise CorruptCheckpointError(path, f"no header line of {magic}")
    result = parse_number(words[1].decode("ascii", "replace"), LARGEST_INT32)
    if result is None or line + newline != _header(magic, result, body):
        raise CorruptCheckpointError(path, "its length or checksum does not match")
    if result > version:
        raise NewerFormatError(path, result, version)
    try:
        payload = json.loads(body)
    except (ValueError, RecursionError):
        payload = None
    if result < 1 or not isinstance(payload, dict):
        raise CorruptCheckpointError(path, f"malformed payload of version {result}")
    return payload
