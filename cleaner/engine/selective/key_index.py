"""The key index of a closed segment: the fingerprint and offset of each record with a key.

A key index is written once, the first time that the segment is resolved, and then replaces reading
the segment: 24 bytes for each record. The index of a rewritten segment is made from the indexes of
its sources.

It also says where the batches of the segment are, so that a rewriting pass can skip those without a
live record (live_parts.py); that of a rewritten segment does not.

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
- for each piece: its position, its number of buckets, the first row of each bucket, and the number
  of its rows;
- the CRC-32C of each block of the rows (spilled/checksums.py), one for each word;
- the blocks of batches (kernels/passes/blocks.py); none if it is not known where they are;
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
from cleaner.engine.kernels.codecs.memory import load_be32
from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.kernels.layout import LENGTH_BYTES, LENGTH_POSITION, SLOT_WORDS, Code
from cleaner.engine.kernels.passes.blocks import BLOCK_WORDS, add_blocks
from cleaner.engine.key_rows import Listing
from cleaner.engine.map_size import SLOT_BYTES
from cleaner.engine.segment_scan import scan_segment
from cleaner.engine.spilled.checksums import Checksums
from cleaner.engine.spilled.scratch import DamagedScratchError, Rows, Scratch
from cleaner.job import CleanJob, JobControl, SourceSegment
from storage.env import Env, remove_if_there
from storage.format import filenames

BUCKETS_MAX: Final = 1024  # a power of two; as many shards can be read one by one
BLOCK_BYTES_MIN = 8192  # of neighbouring batches that are read or skipped together
_BUCKET_ROWS: Final = 256  # fewer buckets for fewer rows: their directory stays small
_MAGIC: Final = int.from_bytes(b"varvkeys", "little")
_VERSION: Final = 2
# Magic, version, what it indexes (4 words), records, flags, pieces, words behind the rows, bytes of
# the rows, blocks of batches.
FOOTER_FIELDS: Final = 12
_WORD: Final = 8
_HAS_TRANSACTIONS: Final = 1
_HAS_KEYLESS: Final = 2
_NO_BLOCKS: Final[Ints] = np.empty((0, BLOCK_WORDS), dtype=np.int64)


class UnusableIndexError(Exception):
    """A key index is missing, is not one, or belongs to other bytes."""


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """A complete key index. Positions are bytes in its file."""

    source: SourceSegment
    records: int  # with a key
    has_transactions: bool
    has_keyless: bool
    pieces: tuple[tuple[int, Ints], ...]  # position, first row of each bucket and the end
    checksums: Checksums  # of the rows


def identity_of(job: CleanJob, source: SourceSegment) -> Words:
    """Return four words that differ for different contents, generations and hash keys."""
    text = f"{job.generation}/{job.partition}/{source.base_offset}/{source.size_bytes}/"
    text += str(source.content_id)
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
        listing = _BlockListing(context, Listing(context, rows.add))
        context.state[fields.TRANSACTIONS_SEEN] = context.state[fields.KEYLESS_SEEN] = 0
        scan_segment(context, source, listing)
        listing.flush()
        context.release()
        index = KeyIndex(
            source,
            rows.count,
            bool(context.state[fields.TRANSACTIONS_SEEN]),
            bool(context.state[fields.KEYLESS_SEEN]),
            tuple((position, np.array(places)) for position, places in rows.pieces),
            scratch.checksums,
        )
        scratch.append(_directory(job, index, listing.blocks))
        scratch.keep(filenames.file_name(source.base_offset, filenames.KEYS))
    except BaseException:
        scratch.close()
        raise
    return index


class _BlockListing:
    """A BatchConsumer (segment_scan.py) that lists the records and the blocks of batches."""

    def __init__(self, context: CleanContext, listing: Listing) -> None:
        self._reader = context.reader
        self._listing = listing
        self._blocks: Ints = np.empty(BLOCK_WORDS, dtype=np.int64)
        self._count = 0
        self.make_room, self.flush = listing.make_room, listing.flush

    @property
    def blocks(self) -> Ints:
        """Return the blocks as (blocks, BLOCK_WORDS)."""
        blocks: Ints = self._blocks.reshape(-1, BLOCK_WORDS)[: self._count]
        return blocks

    def batches(self) -> tuple[int, int]:
        """See BatchConsumer."""
        code, at = self._listing.batches()
        self._add(at)
        return code, at

    def unpacked(self, count: int) -> int:
        """See BatchConsumer."""
        reader = self._reader
        code = self._listing.unpacked(count)
        if code == Code.DONE:
            self._add(
                reader.at
                + int(load_be32(reader.buffer, reader.at + LENGTH_POSITION))
                + LENGTH_BYTES
            )
        return code

    def _add(self, end: int) -> None:
        """Add the checked batches from the reader's position up to `end` of the buffer."""
        reader = self._reader
        blocks_max = self._count + 1 + (end - reader.at) // BLOCK_BYTES_MIN
        if blocks_max * BLOCK_WORDS > len(self._blocks):
            larger = np.empty(2 * blocks_max * BLOCK_WORDS, dtype=np.int64)
            larger[: self._count * BLOCK_WORDS] = self._blocks[: self._count * BLOCK_WORDS]
            self._blocks = larger
        self._count = add_blocks(
            reader.buffer, reader.at, end, reader.position, self._blocks, self._count,
            BLOCK_BYTES_MIN,
        )  # fmt: skip


class _BucketedRows:
    """Rows of one segment; the first ones decide how many buckets there are."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._rows: Rows | None = None
        self.count = 0

    @property
    def pieces(self) -> Sequence[tuple[int, tuple[int, ...]]]:
        return () if self._rows is None else self._rows.pieces

    def add(self, rows: Words, count: int) -> None:
        if self._rows is None:
            self._rows = Rows(self._scratch, _buckets_for(count))
        self._rows.add(rows, count)
        self.count += count


def _buckets_for(rows: int) -> int:
    wanted = max(1, rows // _BUCKET_ROWS)
    return min(BUCKETS_MAX, 1 << (wanted.bit_length() - 1))


def write_derived_index(
    context: CleanContext, indexes: Sequence[KeyIndex], output: SourceSegment
) -> None:
    """Write the key index of an output that has exactly the surviving records of `indexes`.

    Raises NoScratchSpaceError, DamagedScratchError, CleanAbortedError, OSError.
    """
    env, job, control = context.env, context.job, context.control
    name = filenames.cleaned_name(output.base_offset, filenames.KEYS, job.job_id)
    scratch = Scratch(env, job, control, name=name, bytes_max=job.spill_bytes_max)
    pieces: list[tuple[int, Ints]] = []
    records = 0
    try:
        for index in indexes:
            rows_of_all = IndexRows(env, job, control, index, shards=1).of(0)
            for (rows, count), (_, places) in zip(rows_of_all, index.pieces, strict=True):
                by_row = rows.reshape(-1, SLOT_WORDS)
                offsets = by_row[:, 2].astype(np.int64) - 1
                is_live = context.survive(offsets) & (offsets >= job.log_start_offset)
                before = np.concatenate(([0], np.cumsum(is_live)))
                survivors = int(before[count])
                if survivors == 0:
                    continue
                new_places = before[places]
                while len(new_places) - 1 > _buckets_for(survivors):
                    new_places = new_places[::2]
                pieces.append((scratch.size_bytes, new_places))
                scratch.append(by_row[is_live].reshape(-1))
                records += survivors
        derived = KeyIndex(output, records, False, False, tuple(pieces), scratch.checksums)
        scratch.append(_directory(job, derived, _NO_BLOCKS))
        scratch.keep(filenames.file_name(output.base_offset, filenames.KEYS))
    except BaseException:
        scratch.close()
        raise


def _directory(job: CleanJob, index: KeyIndex, blocks: Ints) -> Words:
    """Return all words behind the rows."""
    places = [
        np.concatenate(([position, len(places) - 1], places)).astype(np.uint64)
        for position, places in index.pieces
    ]
    crcs = np.frombuffer(index.checksums.crcs, dtype=np.uint32).astype(np.uint64)
    flags = index.has_transactions * _HAS_TRANSACTIONS | index.has_keyless * _HAS_KEYLESS
    blocks_words = blocks.reshape(-1).astype(np.uint64)
    words_count = sum(map(len, (*places, crcs, blocks_words))) + FOOTER_FIELDS + 1
    counts = (
        index.records,
        flags,
        len(places),
        words_count,
        index.checksums.size_bytes,
        len(blocks),
    )
    footer = np.concatenate(
        (
            np.array((_MAGIC, _VERSION), dtype=np.uint64),
            identity_of(job, index.source),
            np.array(counts, dtype=np.uint64),
        )
    )
    words = np.concatenate((*places, crcs, blocks_words, footer))
    assert len(words) + 1 == words_count
    return np.append(words, np.uint64(crc32c(words.tobytes())))


# Reading -------------------------------------------------------------------------------------


def read_index(env: Env, job: CleanJob, control: JobControl, source: SourceSegment) -> KeyIndex:
    """Read the directory of a segment's key index. Raises UnusableIndexError, OSError."""
    return _parse(source, _read_directory(env, job, control, source))


def read_blocks(env: Env, job: CleanJob, control: JobControl, source: SourceSegment) -> Ints:
    """Return where the batches of a segment are, as (blocks, BLOCK_WORDS); no rows if unknown.

    Raises OSError.
    """
    try:
        words = _read_directory(env, job, control, source)
    except UnusableIndexError:
        return _NO_BLOCKS
    return words[_blocks_at(words) : -(FOOTER_FIELDS + 1)].astype(np.int64).reshape(-1, BLOCK_WORDS)


def _read_directory(env: Env, job: CleanJob, control: JobControl, source: SourceSegment) -> Words:
    """Return the words behind the rows, checked. Raises UnusableIndexError, OSError."""
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
    return words


def _check_footer(footer: Words, identity: Words, size_bytes: int) -> int:
    """Return the bytes of the rows. Raises UnusableIndexError."""
    if int(footer[0]) != _MAGIC or int(footer[1]) != _VERSION:
        raise UnusableIndexError("no key index of this version")
    if not np.array_equal(footer[2:6], identity):
        raise UnusableIndexError("it belongs to other bytes")
    words, rows_bytes = int(footer[9]), int(footer[10])
    if size_bytes != rows_bytes + words * _WORD:
        raise UnusableIndexError("the file is not as long as it says")
    return rows_bytes


def _parse(source: SourceSegment, words: Words) -> KeyIndex:
    """Return the index with the directory `words`, which were checked."""
    records, flags, pieces_count, _, rows_bytes, _ = (int(word) for word in words[-7:-1])
    pieces: list[tuple[int, Ints]] = []
    at = 0
    for _ in range(pieces_count):
        end = at + int(words[at + 1]) + 3
        pieces.append((int(words[at]), words[at + 2 : end].astype(np.int64)))
        at = end
    crcs = words[at : _blocks_at(words)].astype(np.uint32)
    return KeyIndex(
        source,
        records,
        bool(flags & _HAS_TRANSACTIONS),
        bool(flags & _HAS_KEYLESS),
        tuple(pieces),
        Checksums(rows_bytes, crcs.tobytes()),
    )


def _blocks_at(words: Words) -> int:
    """Return the place of the blocks among the words of a directory."""
    return len(words) - FOOTER_FIELDS - 1 - int(words[-2]) * BLOCK_WORDS


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
        return sum(end - first for _, first, end, _ in self._slices(shard))

    def of(self, shard: int) -> Iterator[tuple[Words, int]]:
        """Yield a shard's rows by piece as (rows, count), each valid until the next one.

        Raises CleanAbortedError, OSError, DamagedScratchError.
        """
        slices = list(self._slices(shard))
        if not slices:
            return
        self._scratch.open()
        try:
            for position, first, end, is_shared in slices:
                rows: Words = np.empty((end - first) * SLOT_WORDS, dtype=np.uint64)
                self._scratch.read(rows, position + first * SLOT_BYTES)
                if is_shared:
                    rows = self._only(shard, rows)
                yield rows, len(rows) // SLOT_WORDS
        finally:
            self._scratch.keep()

    def _slices(self, shard: int) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the rows [first, end) of a shard's buckets in each piece.

        As (position of the piece, first, end, whether the bucket has rows of other shards, too).
        """
        for position, places in self._index.pieces:
            buckets = len(places) - 1
            first_bucket = shard * buckets // self._shards
            end_bucket = max(first_bucket + 1, (shard + 1) * buckets // self._shards)
            first, end = int(places[first_bucket]), int(places[end_bucket])
            if first < end:
                yield position, first, end, buckets < self._shards

    def _only(self, shard: int, rows: Words) -> Words:
        """Return the rows of a shard, of rows of several shards."""
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
