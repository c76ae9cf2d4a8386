"""The manifest of a compacted view: a small sealed file that names the current version.

    varve.view/                  inside the partition's folder
        manifest                 names one folder, its segments and the horizon
        <compaction id>/         segments in Kafka's format with Kafka's names, the deleted keys
                                 (deleted_keys.py), and a copy of the manifest

One rename replaces the manifest, after everything that it names is synced. Folders that it does not
name belong to an interrupted compaction or to a former version.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from storage.errors import CorruptCheckpointError
from storage.format import sealed_json
from storage.view.deleted_keys import rows_in

VIEW_FOLDER: Final = "varve.view"
MANIFEST_NAME: Final = "manifest"
MANIFEST_MAGIC: Final = "varve-view"
MANIFEST_VERSION: Final = 2  # version 1 had the strategy `offset` only


@dataclass(frozen=True, slots=True)
class LedgerSegment:
    """One ledger segment: offsets [base, next base), size and CRC-32C of its log file."""

    base_offset: int
    next_base_offset: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class DeletedKeys:
    """The file of deleted keys: its size and CRC-32C."""

    size_bytes: int
    crc: int

    @property
    def keys(self) -> int:
        """Return the number of keys."""
        return rows_in(self.size_bytes)


@dataclass(frozen=True, slots=True)
class ViewManifest:
    """One version of a view. The ledger has the offsets below `horizon`, the log the others."""

    topic_id: bytes  # 16 bytes, of the topic
    compaction_id: str  # the name of the folder
    horizon: int
    segments: tuple[LedgerSegment, ...]
    records: int  # in the ledger
    made_ms: int
    null_key: str
    strategy: str
    # [first, end) of offsets that expired before a compaction read them.
    missed: tuple[tuple[int, int], ...] = ()
    version_header: str = ""  # with the strategy `header`
    first_offset: int = 0  # the log start when the view was made from the log alone
    deleted: DeletedKeys | None = None  # with a strategy other than `offset`
    # The cleaner may have removed records of the log since the view was made from it alone.
    log_compacted: bool = False
    leader_epoch: int = -1  # of the log's last offset below the horizon; -1: unknown

    @property
    def size_bytes(self) -> int:
        """Return the bytes of the ledger's log files."""
        return sum(segment.size_bytes for segment in self.segments)


def encode_manifest(manifest: ViewManifest) -> bytes:
    """Return the bytes of the file."""
    payload = {
        "topic_id": manifest.topic_id.hex(),
        "compaction_id": manifest.compaction_id,
        "horizon": manifest.horizon,
        "segments": [
            [segment.base_offset, segment.next_base_offset, segment.size_bytes, segment.crc]
            for segment in manifest.segments
        ],
        "records": manifest.records,
        "made_ms": manifest.made_ms,
        "null_key": manifest.null_key,
        "strategy": manifest.strategy,
        "missed": [list(item) for item in manifest.missed],
        "version_header": manifest.version_header,
        "first_offset": manifest.first_offset,
        "deleted": manifest.deleted and [manifest.deleted.size_bytes, manifest.deleted.crc],
        "log_compacted": manifest.log_compacted,
        "leader_epoch": manifest.leader_epoch,
    }
    return sealed_json.seal(MANIFEST_MAGIC, MANIFEST_VERSION, payload)


def decode_manifest(data: bytes, path: str) -> ViewManifest:
    """Return the manifest in `data`. Raises CorruptCheckpointError, NewerFormatError."""
    payload = sealed_json.unseal(MANIFEST_MAGIC, MANIFEST_VERSION, data, path)
    try:
        manifest = _manifest(payload)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(path, f"malformed: {error!r}") from error
    reach = 0
    for segment in manifest.segments:
        if not reach <= segment.base_offset < segment.next_base_offset <= manifest.horizon:
            raise CorruptCheckpointError(path, f"segment {segment.base_offset} is out of order")
        reach = segment.next_base_offset
    return manifest


def _manifest(payload: Mapping[str, Any]) -> ViewManifest:
    compaction_id = str(payload["compaction_id"])
    if not compaction_id or "/" in compaction_id or compaction_id.startswith("."):
        raise ValueError(f"compaction id {compaction_id!r}")
    deleted = payload.get("deleted")
    if deleted is not None:
        deleted = DeletedKeys(*map(int, deleted))
        if deleted.keys < 0:
            raise ValueError(f"deleted keys in {deleted.size_bytes} bytes")
    return ViewManifest(
        topic_id=bytes.fromhex(payload["topic_id"]),
        compaction_id=compaction_id,
        horizon=int(payload["horizon"]),
        segments=tuple(LedgerSegment(*map(int, row)) for row in payload["segments"]),
        records=int(payload["records"]),
        made_ms=int(payload["made_ms"]),
        null_key=str(payload["null_key"]),
        strategy=str(payload["strategy"]),
        missed=tuple((int(first), int(end)) for first, end in payload["missed"]),
        version_header=str(payload.get("version_header", "")),
        first_offset=int(payload.get("first_offset", 0)),
        deleted=deleted,
        log_compacted=bool(payload.get("log_compacted", False)),
        leader_epoch=int(payload.get("leader_epoch", -1)),
    )
