"""What a compacted view consists of at one moment: the manifest, a small sealed file.

    varve.view/                  inside the partition's folder
        manifest                 names one run's folder, its segments and the horizon
        <run id>/                segments in Kafka's format, under Kafka's names, and the deleted
                                 keys that are remembered (deleted_keys.py)

Rules: the manifest is replaced as a whole, by one rename, after everything it names is on the
device. What it does not name is of no one: a run that was cut off, or a version that was replaced.
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
MANIFEST_VERSION: Final = 2  # 1 knew no strategy but that of offsets


@dataclass(frozen=True, slots=True)
class LedgerSegment:
    """One segment of the ledger: offsets [base, next base), its log file's size and CRC-32C."""

    base_offset: int
    next_base_offset: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class DeletedKeys:
    """The file of deleted keys that are remembered: its size and CRC-32C."""

    size_bytes: int
    crc: int

    @property
    def keys(self) -> int:
        """Return how many there are."""
        return rows_in(self.size_bytes)


@dataclass(frozen=True, slots=True)
class ViewManifest:
    """One version of a view. Offsets below `horizon` are the ledger's, the others the log's."""

    topic_id: bytes  # 16 bytes, of the topic that is viewed
    compaction_id: str  # names the folder
    horizon: int
    segments: tuple[LedgerSegment, ...]
    records: int  # in the ledger
    made_ms: int
    null_key: str
    strategy: str
    missed: tuple[tuple[int, int], ...] = ()  # [first, end) that expired before it was seen
    version_header: str = ""  # with the strategy `header`
    first_offset: int = 0  # the log's start when it was made of the log alone
    deleted: DeletedKeys | None = None  # with a strategy other than `offset`

    @property
    def size_bytes(self) -> int:
        """Return bytes of the ledger's log files."""
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
        raise ValueError(f"run id {compaction_id!r}")
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
    )
