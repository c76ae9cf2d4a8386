"""A small file of ours that knows when it is torn: one header line, then JSON.

    <magic> <version> <crc32c of the payload, 8 hex digits> <payload bytes>\\n<payload>

Rules: what is unsealed is exactly what was sealed; a file that was cut short, extended or changed
is an error, and so is one of a version that we do not know yet: it holds something we would lose.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from crc32c import crc32c

from storage.errors import CorruptCheckpointError, NewerFormatError

# The largest holder is the metadata of a broker: about 200 bytes for each of its partitions.
SEALED_BYTES_MAX: Final = 256 << 20
_HEADER_BYTES_MAX: Final = 128


def seal(magic: str, version: int, payload: Mapping[str, object]) -> bytes:
    """The bytes of a sealed file."""
    body = json.dumps(payload, sort_keys=True, separators=(",", ":")).encode()
    return f"{magic} {version} {crc32c(body):08x} {len(body)}\n".encode() + body


def unseal(magic: str, version: int, data: bytes, path: str) -> dict[str, Any]:
    """The payload of a sealed file. Raises CorruptCheckpointError and NewerFormatError."""
    header, newline, body = data.partition(b"\n")
    if not newline or len(header) > _HEADER_BYTES_MAX or len(body) > SEALED_BYTES_MAX:
        raise CorruptCheckpointError(path, "no header line")
    try:
        found_magic, found_version, crc, length = header.decode("ascii").split(" ")
        numbers = (int(found_version), int(crc, 16), int(length))
    except ValueError as error:
        raise CorruptCheckpointError(path, "malformed header line") from error
    if found_magic != magic:
        raise CorruptCheckpointError(path, f"it does not begin with {magic}")
    if numbers[2] != len(body):
        raise CorruptCheckpointError(path, f"{len(body)} bytes, {numbers[2]} announced")
    if numbers[1] != crc32c(body):
        raise CorruptCheckpointError(path, "its checksum does not match")
    if numbers[0] > version:
        raise NewerFormatError(path, numbers[0], version)
    if numbers[0] < 1:
        raise CorruptCheckpointError(path, f"format version {numbers[0]}")
    payload = json.loads(body)
    if not isinstance(payload, dict):
        raise CorruptCheckpointError(path, "its payload is no object")
    return payload
