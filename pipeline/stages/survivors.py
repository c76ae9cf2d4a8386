"""Sets of surviving offsets, one per segment, and the files that store them.

Rules
- A set is a bitmap over the offsets of its segment, or the sorted offsets if these are smaller: a
  segment may span 2^31 offsets and have three records.
- Several files may have sets of one segment, each for some of the keys; their union counts.
- Every set in a file has its own checksum and is read alone.

Format, little-endian: magic, number of sets, then for each its head (kind, base offset, next base
offset, position, bytes, crc32c), then a crc32c of all this, then the sets.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from cleaner.engine.context import WINDOW_OFFSETS
from storage.env import Env, write_file

Bits = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_MAGIC: Final = b"varve-survivors-1"
_COUNT: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BBqqQQI")
_CRC: Final = struct.Struct("<I")
_BITS: Final = 0
_OFFSETS: Final = 1
_FLAGS_MAX: Final = 1 << 24  # offsets converted to bits at a time, one byte each


class CorruptSurvivorsError(Exception):
    """A file of survivors is damaged."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


class Kind(IntEnum):
    """The kind of the records in a set."""

    LIVE = 0  # last records of their keys; for tables without tombstones
    DELETES = 1  # last records that are tombstones; only for tables


@dataclass(frozen=True, slots=True)
class Survivors:
    """A set of offsets of one segment, [base_offset, next_base_offset)."""

    base_offset: int
    next_base_offset: int
    bits: Bits | None  # bit i, from the lowest of byte 0 on: base_offset + i
    offsets: Offsets | None  # ascending

    @classmethod
    def of(cls, base_offset: int, next_base_offset: int, offsets: Offsets) -> "Survivors":
        """Create a set from ascending offsets of the segment, in the smaller form."""
        width = next_base_offset - base_offset
        if width >> 3 > 8 * len(offsets):
            return cls(base_offset, next_base_offset, None, offsets)
        bits = np.empty((width + 7) >> 3, dtype=np.uint8)
        for first in range(0, width, _FLAGS_MAX):
            end = min(first + _FLAGS_MAX, width)
            low, high = np.searchsorted(offsets, [base_offset + first, base_offset + end])
            flags = np.zeros(end - first, dtype=np.bool_)
            flags[offsets[low:high] - (base_offset + first)] = True
            bits[first >> 3 : (end + 7) >> 3] = np.packbits(flags, bitorder="little")
        return cls(base_offset, next_base_offset, bits, None)

    @classmethod
    def union(cls, parts: Sequence["Survivors"]) -> "Survivors":
        """Return the union of one or more sets of the same segment."""
        if len(parts) == 1:
            return parts[0]
        base, end = parts[0].base_offset, parts[0].next_base_offset
        listed = [part.offsets for part in parts if part.offsets is not None]
        dense = [part.bits for part in parts if part.bits is not None]
        if not dense:
            return cls.of(base, end, np.unique(np.concatenate(listed)))
        bits = dense[0].copy()
        for other in dense[1:]:
            bits |= other
        for offsets in listed:
            places = offsets - base
            np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))
        return cls(base, end, bits, None)

    @property
    def count(self) -> int:
        """Return the number of offsets."""
        if self.offsets is not None:
            return len(self.offsets)
        assert self.bits is not None
        return int(np.bitwise_count(self.bits).sum())

    def contains(self, offsets: Offsets) -> npt.NDArray[np.bool_]:
        """Return for each offset whether it is in the set."""
        if self.bits is not None:
            places = offsets - self.base_offset
            inside = (offsets >= self.base_offset) & (offsets < self.next_base_offset)
            places = np.where(inside, places, 0)
            result = (self.bits[places >> 3] >> (places & 7).astype(np.uint8)) & 1
            among: npt.NDArray[np.bool_] = np.logical_and(inside, result != 0)
            return among
        assert self.offsets is not None
        return np.isin(offsets, self.offsets)

    def listed(self) -> Offsets:
        """Return the offsets, ascending."""
        if self.offsets is not None:
            return self.offsets
        assert self.bits is not None
        return np.flatnonzero(np.unpackbits(self.bits, bitorder="little")) + self.base_offset

    def fill(self, bits: Bits, first: int, end: int) -> None:
        """Set the bits of [first, end); `first` is a multiple of 8 after the base offset."""
        assert (first - self.base_offset) & 7 == 0
        if self.bits is not None:
            begin = (first - self.base_offset) >> 3
            part = self.bits[begin : begin + ((end - first + 7) >> 3)]
            bits[: len(part)] = part
            return
        assert self.offsets is not None
        low, high = np.searchsorted(self.offsets, [first, end])
        places = self.offsets[low:high] - first
        np.bitwise_or.at(bits, places >> 3, (1 << (places & 7)).astype(np.uint8))

    def to_bytes(self) -> bytes:
        """Return the set without its range and form. See `from_bytes`."""
        data = self.bits if self.offsets is None else self.offsets.astype("<i8")
        assert data is not None
        return data.tobytes()

    @classmethod
    def from_bytes(cls, base: int, end: int, data: bytes, *, listed: bool) -> "Survivors":
        """Parse the result of `to_bytes`; `listed`: offsets, not bits. Raises ValueError."""
        if listed:
            offsets = np.frombuffer(data, dtype="<i8").astype(np.int64)
            if len(offsets) and (
                offsets[0] < base or offsets[-1] >= end or not bool((np.diff(offsets) > 0).all())
            ):
                raise ValueError("the offsets are unsorted or outside the segment")
            return cls(base, end, None, offsets)
        if len(data) != (end - base + 7) >> 3:
            raise ValueError("the bitmap has a wrong length")
        return cls(base, end, np.frombuffer(data, dtype=np.uint8), None)


def write_survivors(env: Env, path: str, sets: Sequence[tuple[Kind, Survivors]]) -> int:
    """Write a file of sets without syncing it; return its size. Raises OSError."""
    bodies = [segment_survivors.to_bytes() for _, segment_survivors in sets]
    position = len(_MAGIC) + _COUNT.size + len(sets) * _HEAD.size + _CRC.size
    head = bytearray(_MAGIC + _COUNT.pack(len(sets)))
    for (kind, survivors), body in zip(sets, bodies, strict=True):
        form = _BITS if survivors.offsets is None else _OFFSETS
        crc = crc32c(body)
        head += _HEAD.pack(
            kind, form, survivors.base_offset, survivors.next_base_offset, position, len(body), crc
        )
        position += len(body)
    head += _CRC.pack(crc32c(bytes(head)))
    write_file(env, path, b"".join([bytes(head), *bodies]))
    return position


class SurvivorsFile:
    """A file of sets, read on demand."""

    def __init__(self, env: Env, path: str) -> None:
        """Read the index of the file. Raises CorruptSurvivorsError, OSError."""
        self.path = path
        self._env = env
        start = len(_MAGIC) + _COUNT.size
        file = env.open(path)
        try:
            head = file.pread(start, 0)
            if len(head) < start or not head.startswith(_MAGIC):
                raise CorruptSurvivorsError(path, "not a file of survivors")
            (count,) = _COUNT.unpack_from(head, len(_MAGIC))
            size = count * _HEAD.size
            if start + size > file.size():
                raise CorruptSurvivorsError(path, "truncated")
            heads = file.pread(size, start)
            if _CRC.pack(crc32c(heads, crc32c(head))) != file.pread(_CRC.size, start + size):
                raise CorruptSurvivorsError(path, "the checksum does not match")
        finally:
            file.close()
        self._heads = [_HEAD.unpack_from(heads, i * _HEAD.size) for i in range(count)]

    def read(self, base_offset: int, kind: Kind = Kind.LIVE) -> Iterator[Survivors]:
        """Yield the sets of a segment. Raises CorruptSurvivorsError, OSError."""
        for set_kind, form, base, end, position, size, crc in self._heads:
            if base != base_offset or set_kind != kind:
                continue
            file = self._env.open(self.path)
            try:
                data = file.pread(size, position)
            finally:
                file.close()
            if len(data) != size or crc32c(data) != crc:
                raise CorruptSurvivorsError(self.path, "the checksum does not match")
            try:
                yield Survivors.from_bytes(base, end, data, listed=form == _OFFSETS)
            except ValueError as error:
                raise CorruptSurvivorsError(self.path, str(error)) from error


def read_survivors(
    files: Iterable[SurvivorsFile],
    base_offset: int,
    next_base_offset: int,
    kind: Kind = Kind.LIVE,
) -> Survivors:
    """Return the union of all sets of one segment. Raises CorruptSurvivorsError, OSError."""
    parts = [part for file in files for part in file.read(base_offset, kind)]
    if not parts:
        return Survivors.of(base_offset, next_base_offset, np.zeros(0, dtype=np.int64))
    return Survivors.union(parts)


def cut(offsets: Offsets, ranges: Sequence[tuple[int, int]]) -> Iterator[Survivors]:
    """Yield a set for each of `ranges` that has some of the ascending `offsets`."""
    edges = np.searchsorted(offsets, [edge for item in ranges for edge in item])
    for number, (base, end) in enumerate(ranges):
        inside = offsets[edges[2 * number] : edges[2 * number + 1]]
        if len(inside):
            yield Survivors.of(base, end, inside)


class SegmentSurvivors:
    """The sets of some segments, as a SurvivorSource of the cleaner's second pass."""

    def __init__(self, sets: Mapping[int, Survivors], *, keyless_seen: bool) -> None:
        """`sets` has every segment to rewrite, by base offset."""
        self.keyless_seen = keyless_seen
        self._sets = sets
        self._bases = np.array(sorted(sets), dtype=np.int64)

    def _containing(self, offset: int) -> Survivors:
        place = int(np.searchsorted(self._bases, offset, side="right")) - 1
        return self._sets[int(self._bases[place])]

    def window(self, first: int, last: int) -> tuple[int, int]:
        """See SurvivorSource. The window lies within the segment of `first`."""
        survivors = self._containing(first)
        begin = first - ((first - survivors.base_offset) & 7)
        end = min(max(begin + WINDOW_OFFSETS, last + 1), survivors.next_base_offset)
        assert survivors.base_offset <= first
        assert last < end
        return begin, end

    def mark(self, bits: Bits, first: int, end: int) -> None:
        """See SurvivorSource."""
        self._containing(first).fill(bits, first, end)
