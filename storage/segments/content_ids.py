"""The content ids of the closed segments of a partition, kept for the next start.

A key index (cleaner/engine/selective/key_index.py) is bound to the content id of its segment. So it
can be used after a start if the start gives the segment the same id, and only if the file has the
same content.

Rules
- A row says that the file with this base offset, size, inode and time of the last change has the
  content with this id. The system sets that time at every change of the file (FileStamp), so the
  row stays true for ever: after a kill, after other starts, and whatever another program does.
- A row is only written for a file that nobody has changed since the broker closed or opened it, and
  that is durable: after a power failure a file with this size and time cannot have other bytes.
- A file system that keeps whole seconds gets no rows: a change within the second would not show.
- They are written after each clean by key indexes and when the log is closed.
- Nothing here is synced. A file that is lost, torn or old costs a reading of segments.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from storage.env import Env, write_file
from storage.errors import CorruptCheckpointError, NoRoomError
from storage.format import filenames, sealed_json
from storage.segments.segment import Segment

CONTENT_IDS_MAGIC: Final = "varve-content-ids"
CONTENT_IDS_VERSION: Final = 1
# Base offset, size, inode, time of the last change in ns, content id; in hexadecimal digits.
_ROW: Final = struct.Struct(">3QqQ")
_NS_PER_SECOND: Final = 1_000_000_000


def write_content_ids(env: Env, directory: str, closed: Sequence[Segment]) -> None:
    """Write the ids of closed segments, if the folder has key indexes.

    Without room there is no file. Raises OSError.
    """
    if not filenames.classify(env.listdir(directory)).keys:
        return
    rows = []
    for segment in closed:
        stamp = segment.stamp
        if stamp is None or stamp.changed_ns % _NS_PER_SECOND == 0 or segment.needs_sync:
            continue
        row = (segment.base_offset, segment.size_bytes, *stamp, segment.content_id)
        rows.append(_ROW.pack(*row).hex())
    data = sealed_json.seal(CONTENT_IDS_MAGIC, CONTENT_IDS_VERSION, {"segments": rows})
    with suppress(NoRoomError):
        write_file(env, f"{directory}/{filenames.CONTENT_IDS}", data)


def restore_content_ids(env: Env, directory: str, closed: Sequence[Segment]) -> frozenset[int]:
    """Give segments that are unchanged the ids that they had; return their base offsets.

    Raises CorruptCheckpointError and NewerFormatError before any change, OSError.
    """
    path = f"{directory}/{filenames.CONTENT_IDS}"
    data = env.read_file(path)
    payload = sealed_json.unseal(CONTENT_IDS_MAGIC, CONTENT_IDS_VERSION, data, path)
    try:
        rows = [_ROW.unpack(bytes.fromhex(row)) for row in payload["segments"]]
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise CorruptCheckpointError(path, f"its payload is malformed: {error!r}") from error
    content_ids = {row[:4]: row[4] for row in rows}
    restored = set()
    for segment in closed:
        stamp = segment.stamp
        if stamp is None:
            continue
        content_id = content_ids.get((segment.base_offset, segment.size_bytes, *stamp))
        if content_id is not None:
            segment.restore_content_id(content_id)
            restored.add(segment.base_offset)
    return frozenset(restored)
