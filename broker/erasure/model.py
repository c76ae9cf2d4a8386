"""Erasures as they are stored. Frozen; times in wall ms.

Rules
- An erasure is open until no file has a value of its key, or until it is cancelled or void. The
  bytes of the key are kept until then and no longer: afterwards only their digest is.
- The digest is keyed with the secret of the installation (docs/decisions/0005-key-hash.md), so that
  nobody else can find out by guessing whose key it was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any

DIGEST_BYTES = 16


class ErasureState(Enum):
    """The state of an erasure. All but OPEN are final."""

    OPEN = "open"
    COMPLETE = "complete"
    CANCELLED = "cancelled"
    VOID = "void"  # the topic was deleted


@dataclass(frozen=True, slots=True)
class PartitionReceipt:
    """The search that found no value of the key in any file of a partition."""

    at_ms: int
    files: int
    bytes_read: int
    tombstones: int  # records of the key without a value that are left below the end offset
    # They stay at least until then: delete.retention.ms counts from a clean of the whole log.
    tombstones_until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionErasure:
    """The part of an erasure in one partition.

    No value of the key may be left below `end_offset`. It is None until the first search has ended.
    `tombstone_offset` is that of the last tombstone which the broker has written, if there were
    values. A second one is at the end offset or after it.
    """

    partition: int
    end_offset: int | None = None
    tombstone_offset: int | None = None
    receipt: PartitionReceipt | None = None

    @property
    def is_done(self) -> bool:
        """Return whether no value is left."""
        return self.receipt is not None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, for the file and the API."""
        receipt = self.receipt
        return {
            "partition": self.partition,
            "end_offset": self.end_offset,
            "tombstone_offset": self.tombstone_offset,
            "receipt": None
            if receipt is None
            else {
                "at_ms": receipt.at_ms,
                "files": receipt.files,
                "bytes_read": receipt.bytes_read,
                "tombstones": receipt.tombstones,
                "tombstones_until_ms": receipt.tombstones_until_ms,
            },
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "PartitionErasure":
        """Read it. Raises ValueError, KeyError or TypeError if it is malformed."""
        receipt = fields["receipt"]
        return cls(
            partition=int(fields["partition"]),
            end_offset=_optional(fields["end_offset"]),
            tombstone_offset=_optional(fields["tombstone_offset"]),
            receipt=None
            if receipt is None
            else PartitionReceipt(
                at_ms=int(receipt["at_ms"]),
                files=int(receipt["files"]),
                bytes_read=int(receipt["bytes_read"]),
                tombstones=int(receipt["tombstones"]),
                tombstones_until_ms=_optional(receipt["tombstones_until_ms"]),
            ),
        )


@dataclass(frozen=True, slots=True)
class Erasure:
    """A request to erase one key of a topic, and what was done for it."""

    erasure_id: str
    topic: str
    topic_id: bytes
    digest: str
    key: bytes | None  # None once it has ended
    requested_by: str
    requested_ms: int
    deadline_ms: int
    parts: tuple[PartitionErasure, ...]
    state: ErasureState = ErasureState.OPEN
    ended_ms: int | None = None
    reason: str = ""  # why it was cancelled or is void

    @property
    def is_open(self) -> bool:
        """Return whether there is something left to do."""
        return self.state is ErasureState.OPEN

    def with_part(self, part: PartitionErasure, now_ms: int) -> "Erasure":
        """Return it with a changed part; complete if that was the last one."""
        parts = tuple(part if old.partition == part.partition else old for old in self.parts)
        changed = replace(self, parts=parts)
        if all(each.is_done for each in parts):
            return changed.ended(ErasureState.COMPLETE, now_ms)
        return changed

    def ended(self, state: ErasureState, now_ms: int, reason: str = "") -> "Erasure":
        """Return it ended, without the bytes of its key."""
        return replace(self, state=state, ended_ms=now_ms, reason=reason, key=None)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON for the file, without its parts."""
        return {
            "id": self.erasure_id,
            "topic": self.topic,
            "topic_id": self.topic_id.hex(),
            "digest": self.digest,
            "key": None if self.key is None else self.key.hex(),
            "requested_by": self.requested_by,
            "requested_ms": self.requested_ms,
            "deadline_ms": self.deadline_ms,
            "state": self.state.value,
            "ended_ms": self.ended_ms,
            "reason": self.reason,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Erasure":
        """Read it with its `parts`. Raises ValueError, KeyError, TypeError if it is malformed."""
        key = fields["key"]
        return cls(
            erasure_id=str(fields["id"]),
            topic=str(fields["topic"]),
            topic_id=bytes.fromhex(fields["topic_id"]),
            digest=str(fields["digest"]),
            key=None if key is None else bytes.fromhex(key),
            requested_by=str(fields["requested_by"]),
            requested_ms=int(fields["requested_ms"]),
            deadline_ms=int(fields["deadline_ms"]),
            parts=tuple(map(PartitionErasure.from_json, fields["parts"])),
            state=ErasureState(fields["state"]),
            ended_ms=_optional(fields["ended_ms"]),
            reason=str(fields["reason"]),
        )


def digest_of(key: bytes, secret: bytes) -> str:
    """Return the digest of a key: 32 hexadecimal digits."""
    return blake2b(key, digest_size=DIGEST_BYTES, key=secret).hexdigest()


def _optional(value: Any) -> int | None:
    return None if value is None else int(value)
