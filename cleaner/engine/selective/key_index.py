"""The key index of a closed segment: the fingerprint and offset of each record with a key.

A key index replaces reading the segment: 16 bytes for each record. The broker writes it when it
closes a segment whose appends it has recorded (appended_keys.py); otherwise a worker reads the
segment the first time that it resolves it. The index of a rewritten segment is made from the
indexes of its sources.

It also says where the batches of the segment are, so that a rewriting pass can skip those without a
live record (live_parts.py).

Rules
- The file is `<base offset>.keys` in the folder of the partition. It is written under a name of the
  job and then renamed, so no incomplete one has this name, except after a crash.
- It is bound to the content id of the segment: a truncation and a clean of the segment make it
  void, and so does a start that does not find the file as the last stop left it
  (storage/segments/content_ids.py). Nothing in it is believed if it was written for other bytes,
  under another hash key, or if a checksum differs. Then it is written again.
- It is a cache: never synced, and no part of a copy, a lease or a move.

Format, in little-endian words of 8 bytes
- the rows (packed_rows.py) in pieces of up to ROWS_PIECE, each sorted by bucket: by the
  upper bits of the fingerprint's first word;
- for each piece: its position, its number of buckets, the first row of each bucket, and the number
  of its rows;
- the CRC-32C of each block of the rows (spilled/checksums.py), one for each word;
- the blocks of batches (kernels/passes/blocks.py);
- the footer: FOOTER_FIELDS, then the CRC-32C of all words since the rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from crc32c import crc32c

from cleaner.engine.batch_blocks import BatchBlocks
from cleaner.engine.context import CleanContext
from cleaner.engine.kernels import fields
from cleaner.engine.kernels.compile import Ints, Words
from cleaner.engine.kernels.layout import SLOT_WORDS
from cleaner.engine.kernels.passes.blocks import BLOCK_WORDS, UNSKIPPABLE
from cleaner.engine.kernels.passes.shards import count_by_shard, sort_by_shard
from cleaner.engine.key_rows import Listing
from cleaner.engine.segment_scan import PositionedConsumer, scan_segment
from cleaner.engine.selective.packed_rows import (
    PACKED_BYTES,
    PACKED_WORDS,
    pack_rows,
    unpack_rows,
)
from cleaner.engine.spilled.checksums import Checksums
from cleaner.engine.spilled.scratch import ROWS_PIECE, DamagedScratchError, Scratch
from cleaner.job import CleanJob, JobControl, SourceSegment
from storage.env import Env, remove_if_there
from storage.format import filenames

BUCKETS_MAX: Final = 1024  # a power of two; as many shards can be read one by one
_BUCKET_ROWS: Final = 256  # fewer buckets for fewer rows: their directory stays small
_MAGIC: Final = int.from_bytes(b"varvkeys", "little")
_VERSION: Final = 4
# Magic, version, what it indexes (4 words), records, flags, pieces, words behind the rows, bytes of
# the rows, blocks of batches.
FOOTER_FIELDS: Final = 12
_WORD: Final = 8
_HAS_TRANSACTIONS: Final = 1
_HAS_KEYLESS: Final = 2
_HAS_TOMBSTONES: Final = 4
_HAS_EMPTY_BATCHES: Final = 8
_NO_BLOCKS: Final[Ints] = np.empty((0, BLOCK_WORDS), dtype=np.int64)


class SegmentKeys(NamedTuple):
    """The keys of a whole segment without transactions, each record of which has a key."""

    packed_rows: Words  # (packed_rows.py), ascending by offset
    blocks: Ints  # (blocks, BLOCK_WORDS)
    has_tombstones: bool


class UnusableIndexError(Exception):
    """A key index is malformed, or of one of the kinds below."""


class MissingIndexError(UnusableIndexError):
    """There is no key index."""


class StaleIndexError(UnusableIndexError):
    """A key index was written for another content of the segment, or by another release."""


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """A complete key index. Positions are bytes in its file."""

    source: SourceSegment
    records: int  # with a key
    has_transactions: bool
    has_keyless: bool
    has_tombstones: bool  # at least one, or not known
    has_empty_batches: bool  # which may stay for their headers, and later go
    pieces: tuple[tuple[int, Ints], ...]  # position, first row of each bucket and the end
    checksums: Checksums  # of the rows


def identity_of(job: CleanJob, source: SourceSegment) -> Words:
    """Return four words that differ for different contents and hash keys."""
    text = f"{job.partition}/{source.base_offset}/{source.size_bytes}/{source.content_id}"
    digest = blake2b(text.encode(), digest_size=4 * _WORD, key=job.hash_key).digest()
    return np.frombuffer(digest, dtype=np.uint64)


# Writing -------------------------------------------------------------------------------------


def write_index(context: CleanContext, source: SourceSegment) -> KeyIndex:
    """Read a segment and write its key index.

    Raises DamagedSegmentError, TransactionIndexError, NoScratchSpaceError, CleanAbortedError,
    OSError.
    """
    with _index_file(context.env, context.job, context.control, source) as scratch:
        rows = _BucketedRows(scratch, source.base_offset)
        listing, blocks = Listing(context, rows.add), BatchBlocks()
        for seen in (fields.TRANSACTIONS_SEEN, fields.KEYLESS_SEEN, fields.TOMBSTONES_SEEN):
            context.state[seen] = 0
        scan_segment(context, source, PositionedConsumer(context, listing, blocks.add))
        listing.flush()
        context.release()
        index = KeyIndex(
            source,
            records=rows.count,
            has_transactions=bool(context.state[fields.TRANSACTIONS_SEEN]),
            has_keyless=bool(context.state[fields.KEYLESS_SEEN]),
            has_tombstones=bool(context.state[fields.TOMBSTONES_SEEN]),
            has_empty_batches=_has_empty_batches(blocks.blocks),
            pieces=tuple(rows.pieces),
            checksums=scratch.checksums,
        )
        _complete(context.job, scratch, index, blocks.blocks)
    return index


def write_appended_index(
    env: Env, job: CleanJob, control: JobControl, keys: SegmentKeys, source: SourceSegment
) -> None:
    """Write the key index of a segment whose keys were recorded while it was appended.

    An index that a worker has written meanwhile stays: the worker may be reading it.
    Raises NoScratchSpaceError, OSError.
    """
    with _index_file(env, job, control, source) as scratch:
        rows = _BucketedRows(scratch, source.base_offset)
        for begin in range(0, len(keys.packed_rows), ROWS_PIECE * PACKED_WORDS):
            piece = keys.packed_rows[begin : begin + ROWS_PIECE * PACKED_WORDS]
            rows.add(unpack_rows(piece, source.base_offset), len(piece) // PACKED_WORDS)
        if _final_name(source) in env.listdir(job.outputs):
            scratch.close()
            return
        index = KeyIndex(
            source,
            records=rows.count,
            has_transactions=False,
            has_keyless=False,
            has_tombstones=keys.has_tombstones,
            has_empty_batches=False,
            pieces=tuple(rows.pieces),
            checksums=scratch.checksums,
        )
        _complete(job, scratch, index, keys.blocks)


@contextmanager
def _index_file(
    env: Env, job: CleanJob, control: JobControl, source: SourceSegment
) -> Iterator[Scratch]:
    """Create the file of a key index under a name of the job; remove it after an error."""
    name = filenames.cleaned_name(source.base_offset, filenames.KEYS, job.job_id)
    scratch = Scratch(env, job, control, name=name, bytes_max=job.spill_bytes_max)
    try:
        yield scratch
    except BaseException:
        scratch.close()
        raise


def _complete(job: CleanJob, scratch: Scratch, index: KeyIndex, blocks: Ints) -> None:
    scratch.append(_directory(job, index, blocks))
    scratch.keep(_final_name(index.source))


def _has_empty_batches(blocks: Ints) -> bool:
    return bool((blocks[:, 3] == UNSKIPPABLE).any())


def _final_name(source: SourceSegment) -> str:
    return filenames.file_name(source.base_offset, filenames.KEYS)


class _BucketedRows:
    """Rows of one segment; the first ones decide how many buckets there are."""

    def __init__(self, scratch: Scratch, base_offset: int) -> None:
        self.count = 0
        self.pieces: list[tuple[int, Ints]] = []
        self._scratch = scratch
        self._base_offset = base_offset
        self._counts: Ints = np.empty(0, dtype=np.int64)
        self._sorted: Words = np.empty(0, dtype=np.uint64)

    def add(self, rows: Words, count: int) -> None:
        """Add the first `count` rows."""
        if len(self._counts) == 0:
            self._counts = np.zeros(_buckets_for(count), dtype=np.int64)
        for begin in range(0, count, ROWS_PIECE):
            end = min(begin + ROWS_PIECE, count)
            if len(self._sorted) < (end - begin) * SLOT_WORDS:
                self._sorted = np.empty((end - begin) * SLOT_WORDS, dtype=np.uint64)
            self._counts.fill(0)
            count_by_shard(rows, begin, end, self._counts)
            places = np.concatenate(([0], np.cumsum(self._counts)))
            sort_by_shard(rows, begin, end, places[:-1].copy(), self._sorted)
            self.pieces.append((self._scratch.size_bytes, places))
            packed = pack_rows(self._sorted[: (end - begin) * SLOT_WORDS], self._base_offset)
            self._scratch.append(packed)
        self.count += count


def _buckets_for(rows: int) -> int:
    wanted = max(1, rows // _BUCKET_ROWS)
    return min(BUCKETS_MAX, 1 << (wanted.bit_length() - 1))


def write_derived_index(
    context: CleanContext, indexes: Sequence[KeyIndex], output: SourceSegment, blocks: Ints
) -> None:
    """Write the key index of an output that has exactly the surviving records of `indexes`.

    `blocks` are those of the output.

    Raises NoScratchSpaceError, DamagedScratchError, CleanAbortedError, OSError.
    """
    env, job, control = context.env, context.job, context.control
    with _index_file(env, job, control, output) as scratch:
        rows = _BucketedRows(scratch, output.base_offset)
        for piece in _pieces(_survivors(context, indexes)):
            rows.add(piece.reshape(-1), len(piece))
        derived = KeyIndex(
            output,
            records=rows.count,
            has_transactions=False,
            has_keyless=False,
            has_tombstones=any(index.has_tombstones for index in indexes),
            has_empty_batches=_has_empty_batches(blocks),
            pieces=tuple(rows.pieces),
            checksums=scratch.checksums,
        )
        _complete(job, scratch, derived, blocks)


def _survivors(context: CleanContext, indexes: Sequence[KeyIndex]) -> Iterator[Words]:
    """Yield the surviving rows of each piece of the indexes, as (rows, SLOT_WORDS)."""
    job = context.job
    for index in indexes:
        for rows, _ in IndexRows(context.env, job, context.control, index, shards=1).of(0):
            by_row = rows.reshape(-1, SLOT_WORDS)
            offsets = by_row[:, 2].astype(np.int64) - 1
            yield by_row[context.survive(offsets) & (offsets >= job.log_start_offset)]


def _pieces(parts: Iterable[Words]) -> Iterator[Words]:
    """Join arrays of rows to fewer ones, each but the last with ROWS_PIECE rows or more.

    Each piece of an index takes a read of its own.
    """
    pending: list[Words] = []
    for part in parts:
        pending.append(part)
        if sum(map(len, pending)) >= ROWS_PIECE:
            yield np.concatenate(pending)
            pending.clear()
    if pending:
        yield np.concatenate(pending)


def _directory(job: CleanJob, index: KeyIndex, blocks: Ints) -> Words:
    """Return all words behind the rows."""
    places = [
        np.concatenate(([position, len(places) - 1], places)).astype(np.uint64)
        for position, places in index.pieces
    ]
    crcs = np.frombuffer(index.checksums.crcs, dtype=np.uint32).astype(np.uint64)
    flags = index.has_transactions * _HAS_TRANSACTIONS | index.has_keyless * _HAS_KEYLESS
    flags |= index.has_tombstones * _HAS_TOMBSTONES
    flags |= index.has_empty_batches * _HAS_EMPTY_BATCHES
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
    """Validate the file of a key index and return the words behind its rows.

    The rows are validated when a clean reads them, by their checksums. Raises UnusableIndexError,
    OSError.
    """
    if source.content_id == 0:
        raise MissingIndexError("the segment has no content id")
    path = f"{job.outputs}/{filenames.file_name(source.base_offset, filenames.KEYS)}"
    try:
        file = env.open(path)
    except FileNotFoundError as error:
        raise MissingIndexError("missing") from error
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
        raise StaleIndexError("no key index of this version")
    if not np.array_equal(footer[2:6], identity):
        raise StaleIndexError("it was written for another content of the segment")
    words, rows_bytes = int(footer[9]), int(footer[10])
    if size_bytes != rows_bytes + words * _WORD:
        raise UnusableIndexError("the length of the file differs from its footer")
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
        records=records,
        has_transactions=bool(flags & _HAS_TRANSACTIONS),
        has_keyless=bool(flags & _HAS_KEYLESS),
        has_tombstones=bool(flags & _HAS_TOMBSTONES),
        has_empty_batches=bool(flags & _HAS_EMPTY_BATCHES),
        pieces=tuple(pieces),
        checksums=Checksums(rows_bytes, crcs.tobytes()),
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
                packed: Words = np.empty((end - first) * PACKED_WORDS, dtype=np.uint64)
                self._scratch.read(packed, position + first * PACKED_BYTES)
                rows = unpack_rows(packed, self._index.source.base_offset)
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


def remove_index_of(env: Env, job: CleanJob, source: SourceSegment) -> None:
    """Remove the key index of a segment. Raises OSError."""
    remove_if_there(env, f"{job.outputs}/{_final_name(source)}")


def remove_index(env: Env, error: DamagedScratchError) -> None:
    """Remove the key index with wrong bytes. Raises OSError."""
    remove_if_there(env, error.path)
