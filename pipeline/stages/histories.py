"""Stage `histories`: count the records of each key and measure how long records stay live.

Rules
- The lifetime of a record ends with the next committed record of its key, a tombstone included. The
  end of the log cuts off the lifetime of a last record. Tombstones have no lifetime.
- If not all keys fit, lifetimes are measured for the keys whose fingerprints end in zero bits: each
  bit halves the number of keys.
- If not all keys fit, those with the fewest records are dropped, and the result has the largest
  record count of a dropped key.
- A damaged segment is read up to its damage; stage `index` or `combine` reports it.
"""

import base64
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cleaner.engine.kernels.compile import Ints
from cleaner.job import CleanJob, SourceSegment
from pipeline.records.decode import Selection, decode_segment
from pipeline.records.fingerprints import Words, fingerprints
from pipeline.stages.planning import source_segments
from pipeline.stages.task_files import open_task_files
from pipeline.stages.tasks import decode, encode
from storage.env import Env, RealEnv
from storage.errors import DamagedSegmentError
from storage.format.filenames import LOG, file_name

BINS_PER_OCTAVE: Final = 4
ROW_BYTES: Final = 96  # memory for each tracked record, sorting included
KEY_BYTES: Final = 128  # memory for each counted key
RANKS: Final = (1, 10, 100, 1000, 10_000)
_CHUNK_ROWS: Final = 1 << 20
_COLUMNS: Final = ("key", "value", "offset", "timestamp")


@dataclass(frozen=True, slots=True)
class HistoriesTask:
    """Track the keys of a partition from `first_offset` on."""

    source: dict[str, str]
    job: CleanJob
    first_offset: int
    memory_bytes: int
    top: int  # keys to report by name


@dataclass(frozen=True, slots=True)
class TopKey:
    """A key with many records, in Base64."""

    key: str
    records: int


@dataclass(frozen=True, slots=True)
class HistoriesResult:
    """Lifetimes by bin (see `age_bin`), in ms and in offsets: how many ended in it, and how many
    were cut off by the end of the log. They belong to one key in 2 ** `sampled_bits`.

    `by_records`: bin of a key's number of records -> (keys, records). `missed_max`: a key that is
    not counted has no more records. `ranks`: rank -> records of so many keys with the most.
    """

    keys: int = 0
    records: int = 0  # with a key
    sampled_bits: int = 0
    missed_max: int = 0
    ages_ended: dict[str, int] = field(default_factory=dict)
    ages_cut: dict[str, int] = field(default_factory=dict)
    distances_ended: dict[str, int] = field(default_factory=dict)
    distances_cut: dict[str, int] = field(default_factory=dict)
    by_records: dict[str, tuple[int, int]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    top: tuple[TopKey, ...] = ()
    seconds: float = 0.0


def age_bin(values: npt.NDArray[Any]) -> Ints:
    """Return the bins of non-negative numbers, BINS_PER_OCTAVE for each doubling."""
    scaled = np.log2(np.maximum(values, 0).astype(np.float64) + 1) * BINS_PER_OCTAVE
    bins: Ints = np.floor(scaled).astype(np.int64)
    return bins


def bin_edge(place: int) -> float:
    """Return the lower edge of a bin."""
    return float(2.0 ** (place / BINS_PER_OCTAVE) - 1)


def run_task(task: bytes) -> bytes:
    """See pipeline.stages. Raises what `follow_partition` raises."""
    return encode(follow_partition(RealEnv(), decode(HistoriesTask, task)))


def follow_partition(env: Env, task: HistoriesTask) -> HistoriesResult:
    """Track a partition. Raises InputsGoneError, TransportError, OSError."""
    started = env.monotonic()
    sources = [
        source
        for source in source_segments(task.job)
        if source.next_base_offset > task.first_offset
    ]
    lives = _Lives(task.memory_bytes // 2 // ROW_BYTES)
    keys = _Counts(task.memory_bytes // 2 // KEY_BYTES)
    with open_task_files(env, task.source, task.job) as place:
        local = place.job_over(source.base_offset for source in sources)
        for source in sources:
            for batch in _batches(env, task, source, local.directory):
                _take(batch, task.job.hash_key, lives, keys)
        place.check_inputs(local, [source.base_offset for source in sources])
        keys.settle()
        lives.settle()
        named = [
            TopKey(base64.b64encode(key).decode(), count)
            for count, key in _named(env, task, sources, local.directory, keys.top(task.top))
        ]
    return HistoriesResult(
        keys=len(keys.words),
        records=keys.records,
        sampled_bits=lives.bits,
        missed_max=keys.missed_max,
        **lives.finish(),
        by_records=keys.by_records(),
        ranks=keys.ranks(),
        top=tuple(named),
        seconds=env.monotonic() - started,
    )


def _batches(
    env: Env,
    task: HistoriesTask,
    source: SourceSegment,
    directory: str,
    *,
    first: int | None = None,
    end: int | None = None,
) -> Any:
    try:
        yield from decode_segment(
            env,
            f"{directory}/{file_name(source.base_offset, LOG)}",
            Selection(
                topic=task.job.partition.topic,
                partition=task.job.partition.partition,
                columns=_COLUMNS,
                first_offset=task.first_offset if first is None else first,
                end_offset=task.job.end_offset if end is None else end,
                aborted=task.job.aborted,
                unpacked_bytes_max=task.job.decompressed_batch_bytes,
            ),
            size_bytes=source.size_bytes,
            next_base_offset=source.next_base_offset,
        )
    except DamagedSegmentError:
        return  # stage `index` or `combine` reports it


def _take(batch: pa.RecordBatch, hash_key: bytes, lives: "_Lives", keys: "_Counts") -> None:
    has_key = batch.column("key").is_valid()
    if batch.column("key").null_count:
        batch = batch.filter(has_key)
    if batch.num_rows == 0:
        return
    words = fingerprints(batch.column("key"), hash_key)
    offsets = batch.column("offset").to_numpy()
    times_ms = batch.column("timestamp").cast(pa.int64()).to_numpy() // 1000
    is_delete = batch.column("value").is_null().to_numpy(zero_copy_only=False)
    keys.add(words, offsets)
    lives.add(words, offsets, times_ms, is_delete)


def _named(
    env: Env,
    task: HistoriesTask,
    sources: list[SourceSegment],
    directory: str,
    requested: list[tuple[int, int]],
) -> Any:
    """Yield (records, key) for pairs of (records, an offset of the key)."""
    for count, offset in requested:
        (source,) = (
            source for source in sources if source.base_offset <= offset < source.next_base_offset
        )
        for batch in _batches(env, task, source, directory, first=offset, end=offset + 1):
            for key in batch.column("key").to_pylist():
                yield count, key


class _Counts:
    """Record counts and last offsets by key fingerprint, in sorted arrays."""

    def __init__(self, keys_max: int) -> None:
        self.records = 0
        self.missed_max = 0
        self.words: Words = np.zeros(0, dtype=np.uint64)
        self._keys_max = max(keys_max, 1)
        self._counts: Ints = np.zeros(0, dtype=np.int64)
        self._last: Ints = np.zeros(0, dtype=np.int64)
        self._waiting: list[tuple[Words, Ints]] = []
        self._waiting_rows = 0

    def add(self, words: Words, offsets: Ints) -> None:
        self.records += len(words)
        self._waiting.append((words, offsets))
        self._waiting_rows += len(words)
        if self._waiting_rows >= _CHUNK_ROWS:
            self.settle()

    def settle(self) -> None:
        """Merge the waiting rows into the counts."""
        if not self._waiting:
            return
        new = np.concatenate([words for words, _ in self._waiting])
        words = np.concatenate([self.words, new])
        counts = np.concatenate([self._counts, np.ones(len(new), dtype=np.int64)])
        last = np.concatenate([self._last, *(offsets for _, offsets in self._waiting)])
        self._waiting, self._waiting_rows = [], 0
        order = np.argsort(words, kind="stable")
        words, counts, last = words[order], counts[order], last[order]
        starts = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1]]))
        self.words = words[starts]
        self._counts = np.add.reduceat(counts, starts)
        self._last = last[np.concatenate([starts[1:], [len(words)]]) - 1]
        if len(self.words) > self._keys_max:
            self._forget()

    def _forget(self) -> None:
        remaining = np.argpartition(self._counts, -(self._keys_max // 2 or 1))
        gone, retained = np.split(remaining, [len(remaining) - (self._keys_max // 2 or 1)])
        self.missed_max += int(self._counts[gone].max())
        retained.sort()
        self.words, self._counts = self.words[retained], self._counts[retained]
        self._last = self._last[retained]

    def top(self, count: int) -> list[tuple[int, int]]:
        order = np.argsort(-self._counts, kind="stable")[:count]
        return [(int(self._counts[item]), int(self._last[item])) for item in order]

    def ranks(self) -> dict[str, int]:
        sums = np.cumsum(np.sort(self._counts)[::-1])
        return {str(rank): int(sums[min(rank, len(sums)) - 1]) for rank in RANKS if len(sums)}

    def by_records(self) -> dict[str, tuple[int, int]]:
        bins = age_bin(self._counts)
        return {
            str(item): (int((bins == item).sum()), int(self._counts[bins == item].sum()))
            for item in np.unique(bins).tolist()
        }


class _Records(NamedTuple):
    """Records of tracked keys, as columns."""

    words: Words
    offsets: Ints
    times_ms: Ints
    is_delete: npt.NDArray[np.bool_]


class _Lives:
    """Records of the tracked keys, in offset order."""

    def __init__(self, rows_max: int) -> None:
        self.bits = 0
        self._rows_max = max(rows_max, 1)
        self._rows = 0
        self._parts: list[_Records] = []
        self._end_ms = 0
        self._end_offset = 0

    def add(
        self, words: Words, offsets: Ints, times_ms: Ints, is_delete: npt.NDArray[np.bool_]
    ) -> None:
        self._end_ms = max(self._end_ms, int(times_ms.max()))
        self._end_offset = int(offsets[-1])
        self._keep(words, offsets, times_ms, is_delete)
        while self._rows > self._rows_max:
            self.bits += 1
            parts, self._parts, self._rows = self._parts, [], 0
            for part in parts:
                self._keep(*part)

    def _keep(
        self, words: Words, offsets: Ints, times_ms: Ints, is_delete: npt.NDArray[np.bool_]
    ) -> None:
        if self.bits:
            chosen = words & np.uint64((1 << self.bits) - 1) == 0
            words, offsets = words[chosen], offsets[chosen]
            times_ms, is_delete = times_ms[chosen], is_delete[chosen]
        self._parts.append(_Records(words, offsets, times_ms, is_delete))
        self._rows += len(words)

    def settle(self) -> None:
        """Sort by key, so that the next record of a key follows it."""
        if not self._parts:
            self._parts = [_Records(np.zeros(0, np.uint64), np.zeros(0, np.int64),
                                    np.zeros(0, np.int64), np.zeros(0, np.bool_))]  # fmt: skip
        words, offsets, times, deletes = (
            np.concatenate([part[place] for part in self._parts]) for place in range(4)
        )
        order = np.argsort(words, kind="stable")
        self._parts = [_Records(words[order], offsets[order], times[order], deletes[order])]

    def finish(self) -> dict[str, dict[str, int]]:
        """Return the bins of the result."""
        ((words, offsets, times_ms, is_delete),) = self._parts
        has_next = np.concatenate([words[1:] == words[:-1], [False]]) if len(words) else is_delete
        ended = has_next & ~is_delete
        cut = ~has_next & ~is_delete
        after = np.flatnonzero(ended) + 1
        return {
            "ages_ended": _binned(times_ms[after] - times_ms[ended]),
            "ages_cut": _binned(self._end_ms - times_ms[cut]),
            "distances_ended": _binned(offsets[after] - offsets[ended]),
            "distances_cut": _binned(self._end_offset - offsets[cut]),
        }


def _binned(values: Ints) -> dict[str, int]:
    bins, counts = np.unique(age_bin(values), return_counts=True)
    return dict(zip(map(str, bins.tolist()), counts.tolist(), strict=True))
