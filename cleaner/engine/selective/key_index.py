"""The key index of a closed segment: the fingerprint and offset of each record with a key.

A key index is written once, the first time that the segment is resolved, and then replaces reading
the segment: 24 bytes for each record.

Rules
- The file is `<base offset>.keys` in the folder of the partition. It is written under a name of the
  job and then renamed, so no incomplete one has this name, except after a crash.
- It is bound to the generation of the log and to the content id of the segment: a truncation, a
  clean of the segment and a restart make it void. Nothing in it is believed if it was written for
  other bytes, under another hash key, or if a checksum differs. Then it is written again.
- It is a cache: never synced, no part of a copy, a lease or a move, and removed at the next start.

Format, in little-endian words of 8 bytes
- the rows (kernels/passes/shards.py) in pieces of up to ROWS_PIECE, each sorted by bucket: by the
  upper bits of the fingerprint's first word;
- for each piece: its position and the first row of each bucket, then the number of its rows;
- the CRC-32C of each block of the rows (spilled/checksums.py), one for each word;
- the footer: FOOTER_FIELDS, then the CRC-32C of all words since the rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
from crc32c import crc32c

from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.key_rows import Listing
from cleaner.engine.map_size import SLOT_BYTES
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.spilled.checksums import BLOCK_BYTES, Checksums
from cleaner.engine.spilled.scratch import DamagedScratchError, Rows, Scratch
from cleaner.job import CleanJob, JobControl, SourceSegment
from storage.env import Env, remove_if_there
from storage.format import filenames

BUCKETS_MAX: Final = 1024  # a power of two; as many shards can be read one by one
_BUCKET_ROWS: Final = 256  # fewer buckets for fewer rows: their directory stays small
_MAGIC: Final = int.from_bytes(b"varvkeys", "little")
_VERSION: Final = 1
# Magic, version, what it indexes (4 words), records, flags, buckets, pieces, bytes of the rows.
FOOTER_FIELDS: Final = 11
_WORD: Final = 8
_HAS_TRANSACTIONS: Final = 1
_HAS_KEYLESS: Final = 2


class UnusableIndexError(Exception):
    """A key index is missing, is not one, or belongs to other bytes."""


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """A complete key index. Positions are bytes in its file."""

    source: SourceSegment
    records: int  # with a key
    has_transactions: bool
    has_keyless: bool
    buckets: int
    pieces: tuple[tuple[int, Ints], ...]  # position, first row of each bucket and the end
    checksums: Checksums  # of the rows


def identity_of(job: CleanJob, source: SourceSegment) -> Words:
    """Return four words that differ for different contents, generations and hash keys."""
    text = f"{job.generation}/{job.partition}/{source.base_offset}/{source.next_base_offset}/"
    text += f"{source.size_bytes}/{source.content_id}"
    digest = blake2b(text.encode(), digest_size=4 * _WORD, key=job.hash_key).digest()
    return np.frombuffer(digest, dtype=np.uint64)


# Writing -------------------------------------------------------------------------------------


def write_index(context: CleanContext, source: SourceSegment) -> KeyIndex:
    """Read a segment and write its key index.

    Raises DamagedSegmentError, TransactionIndexError, NoScratchSpaceError, CleanAbortedError,
    OSError.
    """
    job = context.job
    name = filenames.cleaned_name(source.base_offset, filenames.KEYS, job.job_id)
    scratch = Scratch(context.env, job, context.control, name=name, bytes_max=job.spill_bytes_max)
    try:
        rows = _BucketedRows(scratch)
        listing = Listing(context, rows.add)
        context.state[fields.TRANSACTIONS_SEEN] = context.state[fields.KEYLESS_SEEN] = 0
        scan_segment(context, source, listing)
        listing.flush()
        context.release()
        index = KeyIndex(
            source,
            rows.count,
            bool(context.state[fields.TRANSACTIONS_SEEN]),
            bool(context.state[fields.KEYLESS_SEEN]),
            rows.buckets,
            tuple((position, np.array(places)) for position, places in rows.pieces),
            scratch.checksums,
        )
        scratch.append(_directory(job, index))
        scratch.keep(filenames.file_name(source.base_offset, filenames.KEYS))
    except BaseException:
        scratch.close()
        raise
    return index


class _BucketedRows:
    """Rows of one segment; the first ones decide how many buckets there are."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._rows: Rows | None = None
        self.buckets = 1
        self.count = 0

    @property
    def pieces(self) -> Sequence[tuple[int, tuple[int, ...]]]:
        return () if self._rows is None else self._rows.pieces

    def add(self, rows: Words, count: int) -> None:
        if self._rows is None:
            wanted = max(1, count // _BUCKET_ROWS)
            self.buckets = min(BUCKETS_MAX, 1 << (wanted.bit_length() - 1))
            self._rows = Rows(self._scratch, self.buckets)
        self._rows.add(rows, count)
        self.count += count


def _directory(job: CleanJob, index: KeyIndex) -> Words:
    """Return all words behind the rows."""
    places = [
        np.concatenate(([position], places)).astype(np.uint64) for position, places in index.pieces
    ]
    crcs = np.frombuffer(index.checksums.crcs, dtype=np.uint32).astype(np.uint64)
    flags = index.has_transactions * _HAS_TRANSACTIONS | index.has_keyless * _HAS_KEYLESS
    counts = (index.records, flags, index.buckets, len(index.pieces), index.checksums.size_bytes)
    footer = np.concatenate(
        (
            np.array((_MAGIC, _VERSION), dtype=np.uint64),
            identity_of(job, index.source),
            np.array(counts, dtype=np.uint64),
        )
    )
    words = np.concatenate((*places, crcs, footer))
    return np.append(words, np.uint64(crc32c(words.tobytes())))


# Reading -------------------------------------------------------------------------------------


def read_index(env: Env, job: CleanJob, control: JobControl, source: SourceSegment) -> KeyIndex:
    """Read the directory of a segment's key index. Raises UnusableIndexError, OSError."""
    if source.content_id == 0:
        raise UnusableIndexError("nobody knows what it belongs to")
    path = f"{job.outputs}/{filenames.file_name(source.base_offset, filenames.KEYS)}"
    try:
        file = env.open(path)
    except FileNotFoundError as error:
        raise UnusableIndexError("missing") from error
    try:
        size_bytes = file.size()
        footer_bytes = (FOOTER_FIELDS + 1) * _WORD
        if size_bytes < footer_bytes:
            raise UnusableIndexError("too short")
        control.read_bytes(footer_bytes)
        data = file.pread(footer_bytes, size_bytes - footer_bytes)
        if len(data) < footer_bytes:
            raise UnusableIndexError("too short")
        footer = np.frombuffer(data, dtype=np.uint64)
        rows_bytes = _check_footer(footer, identity_of(job, source), size_bytes)
        control.read_bytes(size_bytes - rows_bytes - footer_bytes)
        data = file.pread(size_bytes - rows_bytes, rows_bytes)
    finally:
        file.close()
    words = np.frombuffer(data, dtype=np.uint64) if len(data) % _WORD == 0 else footer[:0]
    if len(words) <= FOOTER_FIELDS or crc32c(words[:-1].tobytes()) != int(words[-1]):
        raise UnusableIndexError("the checksum does not match")
    return _parse(source, words)


def _check_footer(footer: Words, identity: Words, size_bytes: int) -> int:
    """Return the bytes of the rows. Raises UnusableIndexError."""
    if int(footer[0]) != _MAGIC or int(footer[1]) != _VERSION:
        raise UnusableIndexError("no key index of this version")
    if not np.array_equal(footer[2:6], identity):
        raise UnusableIndexError("it belongs to other bytes")
    buckets, pieces, rows_bytes = (int(word) for word in footer[8:11])
    blocks = -(-rows_bytes // BLOCK_BYTES)
    words = pieces * (buckets + 2) + blocks + FOOTER_FIELDS + 1
    if size_bytes != rows_bytes + words * _WORD:
        raise UnusableIndexError("the file is not as long as it says")
    return rows_bytes


def _parse(source: SourceSegment, words: Words) -> KeyIndex:
    """Return the index with the directory `words`, which were checked."""
    records, flags, buckets, pieces, rows_bytes = (int(word) for word in words[-6:-1])
    width = buckets + 2
    table = words[: pieces * width].astype(np.int64).reshape(pieces, width)
    crcs = words[pieces * width : -(FOOTER_FIELDS + 1)].astype(np.uint32)
    return KeyIndex(
        source,
        records,
        bool(flags & _HAS_TRANSACTIONS),
        bool(flags & _HAS_KEYLESS),
        buckets,
        tuple((int(row[0]), row[1:]) for row in table),
        Checksums(rows_bytes, crcs.tobytes()),
    )


class IndexRows:
    """The rows of a key index by shard, as of Rows; opens the file for each shard."""

    def __init__(
        self, env: Env, job: CleanJob, control: JobControl, index: KeyIndex, shards: int
    ) -> None:
        """`shards` is a power of two."""
        assert shards & (shards - 1) == 0
        self._index = index
        self._shards = shards
        self._name = filenames.file_name(index.source.base_offset, filenames.KEYS)
        self._scratch = Scratch(env, job, control, name=self._name, existing=index.checksums)

    def count(self, shard: int) -> int:
        """Return how many rows a shard has at most."""
        return sum(end - first for _, first, end in self._slices(shard))

    def of(self, shard: int) -> Iterator[tuple[Words, int]]:
        """Yield a shard's rows by piece as (rows, count), each valid until the next one.

        Raises CleanAbortedError, OSError, DamagedScratchError.
        """
        slices = list(self._slices(shard))
        if not slices:
            return
        self._scratch.open()
        try:
            for position, first, end in slices:
                rows: Words = np.empty((end - first) * SLOT_WORDS, dtype=np.uint64)
                self._scratch.read(rows, position + first * SLOT_BYTES)
                rows = self._only(shard, rows)
                yield rows, len(rows) // SLOT_WORDS
        finally:
            self._scratch.keep()

    def _slices(self, shard: int) -> Iterator[tuple[int, int, int]]:
        """Yield position, first row and end of a shard's buckets in each piece."""
        buckets = self._index.buckets
        first_bucket = shard * buckets // self._shards
        end_bucket = max(first_bucket + 1, (shard + 1) * buckets // self._shards)
        for position, places in self._index.pieces:
            first, end = int(places[first_bucket]), int(places[end_bucket])
            if first < end:
                yield position, first, end

    def _only(self, shard: int, rows: Words) -> Words:
        """Return the rows of a shard where a bucket has rows of several shards."""
        if self._shards <= self._index.buckets:
            return rows
        by_row = rows.reshape(-1, SLOT_WORDS)
        shift = np.uint64(64 - (self._shards.bit_length() - 1))
        own: Words = by_row[by_row[:, 0] >> shift == shard].reshape(-1)
        return own

    def free_buffer(self) -> None:
        """Do nothing: no memory is kept."""


# Removal -------------------------------------------------------------------------------------


def remove_indexes(env: Env, job: CleanJob, *, but: Sequence[SourceSegment] = ()) -> None:
    """Remove the key indexes of the partition below the job's end, except those of `but`.

    Raises OSError.
    """
    kept = {source.base_offset for source in but}
    for base in filenames.classify(env.listdir(job.outputs)).keys:
        if base < job.end_offset and base not in kept:
            name = filenames.file_name(base, filenames.KEYS)
            remove_if_there(env, f"{job.outputs}/{name}")


def remove_index(env: Env, error: DamagedScratchError) -> None:
    """Remove the key index with wrong bytes. Raises OSError."""
    remove_if_there(env, error.path)
