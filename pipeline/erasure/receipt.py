"""The receipt of an erasure, a JSON document. It contains no key, only digests.

`complete`: no record of the keys that has a value and was written before is left in the log, in the
view, or in the files if these were scanned. `pending`: records are left, for the stated `reasons`.
`copies` lists what may still hold such records, with the time until which it does, if known.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from config.units import counted

FORMAT: Final = 1
COMPLETE: Final = "complete"
PENDING: Final = "pending"
DRY_RUN: Final = "dry-run"


def key_digest(key: bytes) -> str:
    """Return the SHA-256 that stands for a key in a receipt."""
    return hashlib.sha256(key).hexdigest()


@dataclass(slots=True)
class PartitionErased:
    """The erasure in one partition. Records are those with a value; offsets are the log's."""

    keys: int = 0  # requested keys with records here
    records_found: int = 0
    view_records_found: int = 0
    tombstones_found: int = 0
    tombstones_written: int = 0
    tombstone_offsets: tuple[int, int] | None = None  # [first, end) of the written ones
    cleaned_offset: int = 0
    view_horizon: int | None = None
    records_left: int = 0
    view_records_left: int = 0
    tombstones_left: int = 0
    written_since: int = 0  # records of the keys after the first search
    reason: str = ""

    @property
    def removed(self) -> int:
        """Return the number of records removed from the log."""
        return max(self.records_found - self.records_left, 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """Something that may still hold records, or the keys themselves."""

    kind: str
    text: str
    until_ms: int | None = None


@dataclass(slots=True)
class Receipt:
    """The receipt of one erasure."""

    topic: str
    keys: Sequence[bytes]
    state: str
    started_ms: int
    finished_ms: int = 0
    absent: int = 0  # keys without any record
    partitions: dict[int, PartitionErased] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    files_scanned: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the document."""
        return {
            "receipt": FORMAT,
            "topic": self.topic,
            "state": self.state,
            "reasons": self.reasons,
            "started_ms": self.started_ms,
            "finished_ms": self.finished_ms,
            "keys": {
                "count": len(self.keys),
                "absent": self.absent,
                "sha256": [key_digest(key) for key in self.keys],
            },
            "partitions": [
                _partition_json(n, erased) for n, erased in sorted(self.partitions.items())
            ],
            "copies": [
                {
                    "kind": copy.kind,
                    "until_ms": copy.until_ms,
                    "text": copy.text,
                }
                for copy in self.copies
            ],
            "files_scanned": self.files_scanned,
        }


def _partition_json(number: int, erased: PartitionErased) -> dict[str, Any]:
    return {
        "partition": number,
        "keys": erased.keys,
        "records_found": erased.records_found,
        "records_removed": erased.removed,
        "records_left": erased.records_left,
        "view_records_found": erased.view_records_found,
        "view_records_left": erased.view_records_left,
        "tombstones_written": erased.tombstones_written,
        "tombstone_offsets": erased.tombstone_offsets,
        "tombstones_left": erased.tombstones_left,
        "cleaned_offset": erased.cleaned_offset,
        "view_horizon": erased.view_horizon,
        "written_since": erased.written_since,
        "reason": erased.reason,
    }


def records_text(in_log: int, in_view: int) -> str:
    """Format record counts of the log and of its view, which repeats records of the log."""
    text = f"{counted(in_log, 'record')} in the log"
    return f"{text} and {in_view:,} in its view" if in_view else text


def lines(receipt: Receipt) -> list[str]:
    """Return the receipt as lines of text."""
    result = []
    for n, erased in sorted(receipt.partitions.items()):
        name, keys = f"{receipt.topic}-{n}", counted(erased.keys, "key")
        if receipt.state == DRY_RUN:
            records = records_text(erased.records_found, erased.view_records_found)
            result.append(f"{name}: would erase {records} of {keys}")
            continue
        removed = erased.removed, max(erased.view_records_found - erased.view_records_left, 0)
        records = records_text(*removed)
        total = records_text(erased.records_found, erased.view_records_found)
        if removed != (erased.records_found, erased.view_records_found):
            records += f" (of {total})"
        tombstones = f"{erased.tombstones_left:,} tombstones remain until they expire"
        result.append(f"{name}: erased {records} of {keys}; {tombstones}")
    result += [f"pending: {reason}" for reason in receipt.reasons]
    result += [f"may hold copies: {copy.text}" for copy in receipt.copies]
    keys = f"{counted(len(receipt.keys), 'key')}, {receipt.absent:,} of them without records"
    return [*result, f"{receipt.topic}: {receipt.state} ({keys})"]
