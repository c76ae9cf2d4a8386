"""The key index of a closed segment: the fingerprint and offset of the last record of each key.

A key index replaces reading the segment: 16 bytes for each record that the segment itself does not
supersede. The broker writes it when it closes a segment whose appends it has recorded
(appended_keys.py); otherwise a worker reads the segment the first time that it resolves it. The
index of a rewritten segment is made from the indexes of its sources.

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
- the rows (packed_rows.py) in pieces of up to ROWS_PIECE records, each sorted by the fingerprint's
  first word, and without records that have a later one with their key in the piece. The upper bits
  of this word are the bucket;
- the blocks of batches, in two words each (packed_blocks.py), which only a rewriting pass reads;
- the directory: for each piece its position, its number of buckets, the first row of each bucket,
  and the number of its rows; then the CRC-32C of each block of the rows (spilled/checksums.py), one
  for each word;
- the footer: FOOTER_FIELDS, then their CRC-32C.
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
from cleaner.engine.key_rows import Listing
from cleaner.engine.segment_scan import PositionedConsumer, scan_segment
from cleaner.engine.selective.packed_blocks import (
    PACKED_BLOCK_WORDS,
    pack_blocks,
    unpack_blocks,
)
from cleaner.engine.selective.packed_rows import (
    PACKED_BYTES,
    PACKED_WORDS,
    SUM_VALUES,
    last_of_each_key,
    pack_rows,
    sum_of_rows,
    unpack_rows,
)
from cleaner.engine.spilled.checksums import Checksums
from cleaner.engine.spilled.scratch import ROWS_PIECE, DamagedScratchError, Scratch
from cleaner.job import CleanJob, JobControl, SourceSegment
from storage.env import Env, File, remove_if_there
from storage.format import filenames

BUCKETS_MAX: Final = 1024  # a power of two; as many shards can be read one by one
_BUCKET_ROWS: Final = 256  # fewer buckets for fewer rows: their directory stays small
_MAGIC: Final = int.from_bytes(b"varvkeys", "little")
_VERSION: Final = 5
# Magic, version, what it indexes (4 words), records, the checksum of those without a row, flags,
# pieces, bytes of the rows, blocks of batches, words of the directory, and the CRC-32C of the
# blocks and of the directory.
FOOTER_FIELDS: Final = 15
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
    records: int  # with a key, also without a row
    superseded_sum: int  # of the records without a row (packed_rows.py:sum_of_rows)
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
            superseded_sum=rows.superseded_sum,
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
            superseded_sum=rows.superseded_sum,
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
        self.superseded_sum = 0
        self.pieces: list[tuple[int, Ints]] = []
        self._scratch = scratch
        self._base_offset = base_offset
        self._edges: Words = np.empty(0, dtype=np.uint64)  # the first word where a bucket begins

    def add(self, rows: Words, count: int) -> None:
        """Add the first `count` rows; those of a key are in ascending order of offsets."""
        if len(self._edges) == 0:
            self._edges = _edges_of(_buckets_for(count))
        for begin in range(0, count, ROWS_PIECE):
            end = min(begin + ROWS_PIECE, count)
            packed = pack_rows(rows[begin * SLOT_WORDS : end * SLOT_WORDS], self._base_offset)
            last = last_of_each_key(packed)
            self.superseded_sum += sum_of_rows(packed) - sum_of_rows(last)
            self.superseded_sum %= SUM_VALUES
            places = np.searchsorted(last[::PACKED_WORDS], self._edges)
            places = np.append(places, len(last) // PACKED_WORDS)
            self.pieces.append((self._scratch.size_bytes, places))
            self._scratch.append(last)
        self.count += count


def _edges_of(buckets: int) -> Words:
    """Return the least first word of a fingerprint in each bucket."""
    return np.array([(bucket << 64) // buckets for bucket in range(buckets)], dtype=np.uint64)


def _buckets_for(rows: int) -> int:
    wanted = max(1, rows // _BUCKET_ROWS)
    return min(BUCKETS_MAX, 1 << (wanted.bit_length() - 1))


def write_derived_index(
    context: CleanContext,
    indexes: "Sequence[IndexRows]",
    output: SourceSegment,
    blocks: Ints,
) -> None:
    """Write the key index of an output that has exactly the surviving records of `indexes`.

    They have one shard each. `blocks` are those of the output.

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
            superseded_sum=rows.superseded_sum,
            has_transactions=False,
            has_keyless=False,
            has_tombstones=any(rows.index.has_tombstones for rows in indexes),
            has_empty_batches=_has_empty_batches(blocks),
            pieces=tuple(rows.pieces),
            checksums=scratch.checksums,
        )
        _complete(job, scratch, derived, blocks)


def _survivors(context: CleanContext, indexes: "Sequence[IndexRows]") -> Iterator[Words]:
    """Yield the surviving rows of each piece of the indexes, as (rows, SLOT_WORDS)."""
    for rows_of_index in indexes:
        for rows, _ in rows_of_index.of(0):
            by_row = rows.reshape(-1, SLOT_WORDS)
            offsets = by_row[:, 2].astype(np.int64) - 1
            yield by_row[context.survive(offsets) & (offsets >= context.job.log_start_offset)]


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
    """Return all words after the rows."""
    packed_blocks = pack_blocks(blocks, index.source.base_offset)
    places = [
        np.concatenate(([position, len(places) - 1], places)).astype(np.uint64)
        for position, places in index.pieces
    ]
    crcs = np.frombuffer(index.checksums.crcs, dtype=np.uint32).astype(np.uint64)
    directory = np.concatenate((*places, crcs))
    flags = index.has_transactions * _HAS_TRANSACTIONS | index.has_keyless * _HAS_KEYLESS
    flags |= index.has_tombstones * _HAS_TOMBSTONES
    flags |= index.has_empty_batches * _HAS_EMPTY_BATCHES
    numbers = (
        index.records,
        index.superseded_sum,
        flags,
        len(places),
        index.checksums.size_bytes,
        len(blocks),
        len(directory),
        crc32c(packed_blocks.tobytes()),
        crc32c(directory.tobytes()),
    )
    footer = np.concatenate(
        (
            np.array((_MAGIC, _VERSION), dtype=np.uint64),
            identity_of(job, index.source),
            np.array(numbers, dtype=np.uint64),
        )
    )
    assert len(footer) == FOOTER_FIELDS
    crc = np.array([crc32c(footer.tobytes())], dtype=np.uint64)
    return np.concatenate((packed_blocks, directory, footer, crc))


# Reading -------------------------------------------------------------------------------------


def read_index(env: Env, job: CleanJob, control: JobControl, source: SourceSegment) -> KeyIndex:
    """Read the directory of a segment's key index. Raises UnusableIndexError, OSError.

    The rows are validated when a clean reads them, by their checksums.
    """
    with _opened(env, job, source) as file:
        footer = _read_footer(job, control, source, file)
        words = _read_words(control, file, footer.directory_at, footer.directory_words)
    if crc32c(words.tobytes()) != footer.directory_crc:
        raise UnusableIndexError("the checksum of the directory does not match")
    return _parse(source, footer, words)


def read_blocks(env: Env, job: CleanJob, control: JobControl, source: SourceSegment) -> Ints:
    """Return where the batches of a segment are, as (blocks, BLOCK_WORDS); no rows if unknown.

    Raises OSError.
    """
    try:
        with _opened(env, job, source) as file:
            footer = _read_footer(job, control, source, file)
            count = footer.blocks * PACKED_BLOCK_WORDS
            words = _read_words(control, file, footer.rows_bytes, count)
    except UnusableIndexError:
        return _NO_BLOCKS
    if crc32c(words.tobytes()) != footer.blocks_crc:
        return _NO_BLOCKS
    return unpack_blocks(words, source.base_offset)


@contextmanager
def _opened(env: Env, job: CleanJob, source: SourceSegment) -> Iterator[File]:
    """Open the key index of a segment. Raises MissingIndexError, OSError."""
    if source.content_id == 0:
        raise MissingIndexError("the segment has no content id")
    try:
        file = env.open(f"{job.outputs}/{_final_name(source)}")
    except FileNotFoundError as error:
        raise MissingIndexError("missing") from error
    try:
        yield file
    finally:
        file.close()


class _Footer(NamedTuple):
    """The numbers of a footer that was checked, in their order."""

    records: int
    superseded_sum: int
    flags: int
    pieces: int
    rows_bytes: int
    blocks: int
    directory_words: int
    blocks_crc: int
    directory_crc: int

    @property
    def directory_at(self) -> int:
        """Return the position of the directory."""
        return self.rows_bytes + self.blocks * PACKED_BLOCK_WORDS * _WORD

    @property
    def size_bytes(self) -> int:
        """Return the size of the file."""
        return self.directory_at + (self.directory_words + FOOTER_FIELDS + 1) * _WORD


def _read_footer(job: CleanJob, control: JobControl, source: SourceSegment, file: File) -> _Footer:
    """Read and check the footer. Raises UnusableIndexError, OSError."""
    size_bytes, words_count = file.size(), FOOTER_FIELDS + 1
    if size_bytes < words_count * _WORD:
        raise UnusableIndexError("too short")
    words = _read_words(control, file, size_bytes - words_count * _WORD, words_count)
    if int(words[0]) != _MAGIC or int(words[1]) != _VERSION:
        raise StaleIndexError("no key index of this version")
    if not np.array_equal(words[2:6], identity_of(job, source)):
        raise StaleIndexError("it was written for another content of the segment")
    if crc32c(words[:-1].tobytes()) != int(words[-1]):
        raise UnusableIndexError("the checksum of the footer does not match")
    footer = _Footer(*words[6:-1].tolist())
    if size_bytes != footer.size_bytes:
        raise UnusableIndexError("the length of the file differs from its footer")
    return footer


def _read_words(control: JobControl, file: File, position: int, count: int) -> Words:
    """Read words. Raises UnusableIndexError, OSError."""
    control.read_bytes(count * _WORD)
    data = file.pread(count * _WORD, position)
    if len(data) < count * _WORD:
        raise UnusableIndexError("too short")
    return np.frombuffer(data, dtype=np.uint64)


def _parse(source: SourceSegment, footer: _Footer, words: Words) -> KeyIndex:
    """Return the index with the directory `words`, which were checked."""
    pieces: list[tuple[int, Ints]] = []
    at = 0
    for _ in range(footer.pieces):
        end = at + int(words[at + 1]) + 3
        pieces.append((int(words[at]), words[at + 2 : end].astype(np.int64)))
        at = end
    crcs = words[at:].astype(np.uint32)
    return KeyIndex(
        source,
        records=footer.records,
        superseded_sum=footer.superseded_sum,
        has_transactions=bool(footer.flags & _HAS_TRANSACTIONS),
        has_keyless=bool(footer.flags & _HAS_KEYLESS),
        has_tombstones=bool(footer.flags & _HAS_TOMBSTONES),
        has_empty_batches=bool(footer.flags & _HAS_EMPTY_BATCHES),
        pieces=tuple(pieces),
        checksums=Checksums(footer.rows_bytes, crcs.tobytes()),
    )


class IndexRows:
    """The rows of a key index by shard, as of Rows; opens the file for each shard."""

    def __init__(
        self,
        env: Env,
        job: CleanJob,
        control: JobControl,
        index: KeyIndex,
        shards: int,
        *,
        keeps: bool = False,
    ) -> None:
        """`shards` is a power of two. With `keeps`, the rows stay in memory, 16 bytes for each."""
        assert shards & (shards - 1) == 0
        self.index = index
        self._shards = shards
        self._keeps = keeps
        self._kept: dict[int, Words] = {}  # by position, packed
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
                packed = self._read(position + first * PACKED_BYTES, end - first)
                rows = unpack_rows(packed, self.index.source.base_offset)
                if is_shared:
                    rows = self._only(shard, rows)
                yield rows, len(rows) // SLOT_WORDS
        finally:
            self._scratch.keep()

    def _read(self, position: int, count: int) -> Words:
        packed = self._kept.get(position)
        if packed is None:
            packed = np.empty(count * PACKED_WORDS, dtype=np.uint64)
            self._scratch.read(packed, position)
            if self._keeps:
                self._kept[position] = packed
        return packed

    def _slices(self, shard: int) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the rows [first, end) of a shard's buckets in each piece.

        As (position of the piece, first, end, whether the bucket has rows of other shards, too).
        """
        for position, places in self.index.pieces:
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
