"""Kafka's small text files: offset checkpoints, `partition.metadata`, `meta.properties`.

Decoding and encoding are pure and inverse to each other. A missing or empty file has no entries; a
file in another format is an error. Files are replaced atomically.
"""

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from storage.env import Env, write_file_atomically
from storage.errors import CorruptCheckpointError, NewerFormatError
from storage.model import TopicPartition

CHECKPOINT_VERSION: Final = 0
META_PROPERTIES_VERSION: Final = 1
TOPIC_ID_BYTES: Final = 16
LARGEST_INT64: Final = (1 << 63) - 1
LARGEST_INT32: Final = (1 << 31) - 1
_DIGITS_MAX: Final = 19  # of the largest 64-bit number


def parse_number(text: str, largest: int) -> int | None:
    """Return a decimal number in `[0, largest]`; None for other text, also with a sign."""
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX):
        return None
    value = int(text)
    return value if value <= largest else None


def decode_lines(data: bytes, path: str) -> list[str]:
    """Return the lines of a checkpoint after its version and line count.

    A file that is empty or has the version only has no lines. Raises CorruptCheckpointError.
    """
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(path, "not UTF-8") from error
    if lines[-1] == "":
        lines.pop()
    if not lines:
        return []
    if parse_number(lines[0].strip(), LARGEST_INT32) != CHECKPOINT_VERSION:
        raise CorruptCheckpointError(path, f"version {lines[0]!r:.40}")
    if len(lines) == 1:
        return []
    count = parse_number(lines[1].strip(), LARGEST_INT32)
    if count != len(lines) - 2:
        raise CorruptCheckpointError(path, f"{len(lines) - 2} lines, {lines[1]!r:.40} announced")
    return lines[2:]


def encode_lines(lines: list[str]) -> bytes:
    """Return a checkpoint with these lines: version, line count, lines."""
    return "\n".join([str(CHECKPOINT_VERSION), str(len(lines)), *lines, ""]).encode()


def encode_offsets(offsets: Mapping[TopicPartition, int]) -> bytes:
    """Return an offset checkpoint (cleaner, recovery point, log start), ordered by partition."""
    return encode_lines(
        [f"{key.topic} {key.partition} {offset}" for key, offset in sorted(offsets.items())]
    )


def decode_offsets(data: bytes, path: str = "") -> dict[TopicPartition, int]:
    """Read an offset checkpoint. The last line of a partition counts, as in Kafka.

    Raises CorruptCheckpointError for another version, a malformed line or a wrong line count.
    """
    offsets: dict[TopicPartition, int] = {}
    for line in decode_lines(data, path):
        fields = line.split()
        if len(fields) != 3:
            raise CorruptCheckpointError(path, f"malformed line {line!r:.300}")
        partition = parse_number(fields[1], LARGEST_INT32)
        offset = parse_number(fields[2], LARGEST_INT64)
        if partition is None or offset is None:
            raise CorruptCheckpointError(path, f"malformed line {line!r:.300}")
        offsets[TopicPartition(fields[0], partition)] = offset
    return offsets


def write_offsets(env: Env, path: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Replace an offset checkpoint atomically and durably. Raises OSError."""
    write_file_atomically(env, path, encode_offsets(offsets))


def encode_topic_id(topic_id: bytes) -> str:
    """Return a 16-byte id as Kafka prints it: 22 characters of base64url without padding."""
    assert len(topic_id) == TOPIC_ID_BYTES
    return base64.urlsafe_b64encode(topic_id).decode().rstrip("=")


def decode_topic_id(text: str) -> bytes | None:
    """Return the 16 bytes of a printed id; None if the text is not an id."""
    if len(text) != 22 or not text.isascii():
        return None
    try:
        topic_id = base64.b64decode(text + "==", altchars=b"-_", validate=True)
    except binascii.Error:
        return None
    # Text with spare bits or from the other base64 alphabet does not encode to itself.
    return topic_id if encode_topic_id(topic_id) == text else None


def encode_partition_metadata(topic_id: bytes) -> bytes:
    """Return the content of `partition.metadata`, which ties a folder to a topic id."""
    return f"version: 0\ntopic_id: {encode_topic_id(topic_id)}".encode()


def decode_partition_metadata(data: bytes, path: str = "") -> bytes:
    """Return the topic id in a `partition.metadata`. Raises CorruptCheckpointError."""
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(path, "not UTF-8") from error
    values = [line.partition(":") for line in lines if line.strip()]
    fields = {name.strip(): value.strip() for name, colon, value in values if colon}
    if len(fields) != len(values) or len(fields) != 2:
        raise CorruptCheckpointError(path, "not two lines of `name: value`")
    if fields.get("version") != "0":
        raise CorruptCheckpointError(path, f"version {fields.get('version')}")
    topic_id = decode_topic_id(fields.get("topic_id", ""))
    if topic_id is None:
        raise CorruptCheckpointError(path, "no valid topic_id")
    return topic_id


@dataclass(frozen=True, slots=True)
class MetaProperties:
    """The `meta.properties` of a log directory; None for a key that version 0 does not have."""

    cluster_id: str | None
    node_id: int | None
    directory_id: str | None
    version: int = 1
    others: Mapping[str, str] = field(default_factory=dict)


def encode_meta_properties(properties: MetaProperties) -> bytes:
    """Return `meta.properties`, in Kafka's order; version 0 has `broker.id`, not `node.id`."""
    node_key = "broker.id" if properties.version == 0 else "node.id"
    fields = dict(properties.others)
    fields["version"] = str(properties.version)
    if properties.cluster_id is not None:
        fields["cluster.id"] = properties.cluster_id
    if properties.node_id is not None:
        fields[node_key] = str(properties.node_id)
    if properties.directory_id is not None:
        fields["directory.id"] = properties.directory_id
    lines = [f"{_escape(key)}={_escape(fields[key])}" for key in sorted(fields)]
    return "\n".join(["#", *lines, ""]).encode()


def decode_meta_properties(data: bytes, path: str = "") -> MetaProperties:
    """Read `meta.properties` (Java properties). Raises CorruptCheckpointError, NewerFormatError."""
    fields = _properties(data, path)
    version = parse_number(fields.pop("version", ""), LARGEST_INT32)
    if version is not None and version > META_PROPERTIES_VERSION:
        raise NewerFormatError(path, version, META_PROPERTIES_VERSION)
    if version not in (0, 1):
        raise CorruptCheckpointError(path, "no version 0 or 1")
    node_text = fields.pop("broker.id" if version == 0 else "node.id", None)
    node_id = None if node_text is None else parse_number(node_text, LARGEST_INT32)
    # Version 0 has -1 before the broker has an id.
    if node_text is not None and node_id is None and node_text != "-1":
        raise CorruptCheckpointError(path, f"node id {node_text!r:.40}")
    return MetaProperties(
        cluster_id=fields.pop("cluster.id", None),
        node_id=node_id,
        directory_id=fields.pop("directory.id", None),
        version=version,
        others=fields,
    )


def _properties(data: bytes, path: str) -> dict[str, str]:
    """Return the entries of a Java properties file without continued lines, as Kafka writes it."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CorruptCheckpointError(path, "not UTF-8") from error
    fields: dict[str, str] = {}
    for line in text.replace("\r", "\n").split("\n"):
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        at = _separator(stripped)
        if at < 0:
            raise CorruptCheckpointError(path, f"malformed line {stripped!r:.100}")
        fields[_unescape(stripped[:at].strip())] = _unescape(stripped[at + 1 :].strip())
    return fields


def _separator(line: str) -> int:
    """Return the position of the first unescaped `=` or `:`, or -1."""
    escaped = False
    for index, char in enumerate(line):
        if char in "=:" and not escaped:
            return index
        escaped = char == "\\" and not escaped
    return -1


def _escape(text: str) -> str:
    return "".join(f"\\{char}" if char in "\\=:#! " else char for char in text)


def _unescape(text: str) -> str:
    out: list[str] = []
    escaped = False
    for char in text:
        escaped = char == "\\" and not escaped
        if not escaped:
            out.append(char)
    return "".join(out)
