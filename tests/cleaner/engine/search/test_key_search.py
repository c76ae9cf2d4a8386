"""The search of all files of a partition for one key: what counts, and files that come and go."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import pytest

from cleaner.engine.search.search_files import (
    CHUNK_BYTES,
    FilesChangeError,
    search_files,
)
from cleaner.job import CleanAbortedError
from cleaner.key_search import (
    KeySearch,
    KeySearchResult,
    PausedSearch,
    SearchedFolder,
    file_state,
)
from storage.errors import CorruptBatchError
from storage.format.batch import (
    BATCH_LENGTH_MIN,
    HEADER_BYTES,
    LOG_APPEND_TIME,
    Record,
    build_batch,
    decode_records,
    read_header,
    with_crc,
    write_varint,
)
from storage.format.compression import GZIP, LZ4, SNAPPY, ZSTD, compress
from tests.support.cleaner.cleaning import Recorder
from tests.support.storage.memory_env import MemoryEnv

FOLDER = "/disk/orders-0"
KEY = b"ada@example.org"


def batch(*records: tuple[int, bytes | None, bytes | None], codec: int = 0) -> bytes:
    made = [Record(offset, 1000 + offset, key, value) for offset, key, value in records]
    return bytes(build_batch(made, codec=codec))


def write(env: MemoryEnv, name: str, *batches: bytes) -> str:
    path = f"{FOLDER}/{name}"
    env.mkdir(path.rpartition("/")[0])
    file = env.open(path, create=True, write=True, truncate=True)
    file.pwrite(b"".join(batches), 0)
    file.close()
    return path


def search(
    env: MemoryEnv,
    *,
    below: int = 1000,
    active: str = "",
    key: bytes = KEY,
    control: Recorder | None = None,
    header: str = "",
    between: Callable[[], None] | None = None,
) -> KeySearchResult:
    """Search at once; with `between`, pause after each batch and call it."""
    folder, control = SearchedFolder(FOLDER, below, active), control or Recorder()
    request = KeySearch(key, (folder,), 64 << 20, header)
    if between is not None:
        request = replace(request, slice_seconds=0.0)
    while isinstance(result := search_files(env, request, control), PausedSearch):
        assert between is not None
        between()
        request = replace(request, position=result.position)
    return result


@pytest.mark.parametrize("codec", [0, GZIP, SNAPPY, LZ4, ZSTD])
def test_every_record_of_the_key_with_a_value_is_found_in_every_codec(codec: int) -> None:
    env = MemoryEnv(seed=1)
    others = batch((0, b"bob", b"1"), (1, KEY + b"x", b"2"), (2, b"", KEY), codec=codec)
    owned = batch((3, KEY, b"1"), (4, b"bob", b"2"), (7, KEY, b""), codec=codec)
    path = write(env, f"{0:020}.log", others, owned, batch((8, KEY, None), codec=codec))
    result = search(env)
    (file,) = result.found
    assert (file.state.path, file.records, file.first_offset, file.last_offset) == (path, 2, 3, 7)
    assert (result.records, result.tombstones, result.latest_ms) == (2, 1, 1008)


def test_records_from_the_end_on_do_not_count() -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch((3, KEY, b"1"), (4, KEY, b"2")), batch((5, KEY, b"3")))
    assert search(env, below=4).records == 1
    assert search(env, below=3).found == ()


@pytest.mark.parametrize(
    "name",
    [
        f"{0:020}.log.deleted",
        f"{0:020}.log.1a2b.cleaned",
        f"{0:020}.log.swap",
        f"varve.view/{0:020}.log",
        f"varve.leases/5f/inputs/{0:020}.log",
    ],
)
def test_every_file_with_batches_counts(name: str) -> None:
    env = MemoryEnv(seed=1)
    path = write(env, name, batch((3, KEY, b"1")))
    assert [file.state.path for file in search(env).found] == [path]


@pytest.mark.parametrize("key", [b"", b"1", b"\x00" * 300, b"\xff\xfe"])
def test_any_key_is_found_and_no_other_one(key: bytes) -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch((0, b"11", b"1"), (1, None, b"1"), (2, key, b"1")))
    assert search(env, key=key).records == 1


@pytest.mark.parametrize("codec", [0, ZSTD])
@pytest.mark.parametrize("key", [b"", b"1", KEY, b"k" * 5000])
def test_a_key_is_found_however_many_bytes_its_length_has(key: bytes, codec: int) -> None:
    env = MemoryEnv(seed=1)
    shortest = bytearray()
    write_varint(shortest, len(key))
    lengths = [bytes(shortest)]
    while len(lengths[-1]) < 5:
        *head, last = lengths[-1]
        lengths.append(bytes([*head, last | 0x80, 0]))
    batches = []
    for offset, length in enumerate(lengths):
        body = b"\0\0\0" + length + key + b"\x02v\0"  # deltas of 0, a value, no headers
        record = bytearray()
        write_varint(record, len(body))
        records = bytes(record) + body
        header = read_header(build_batch([Record(offset, 1000, b"", b"")], codec=codec))
        packed = compress(codec, records) if codec else records
        batches.append(
            bytes(with_crc(header._replace(batch_length=BATCH_LENGTH_MIN + len(packed)), packed))
        )
    write(env, f"{0:020}.log", *batches)
    assert search(env, key=key).records == len(lengths)


def test_a_batch_larger_than_a_chunk_is_searched() -> None:
    env = MemoryEnv(seed=1)
    giant = batch((0, b"bob", bytes(2 * CHUNK_BYTES)), (1, KEY, b"1"))
    write(env, f"{0:020}.log", giant, batch((2, KEY, b"1")))
    result = search(env)
    assert (result.records, result.bytes_read > 2 * CHUNK_BYTES) == (2, True)


def test_a_damaged_file_is_reported_with_what_was_found_before_the_damage() -> None:
    env = MemoryEnv(seed=1)
    good = batch((0, KEY, b"1"))
    write(env, f"{0:020}.log", good, b"\x01" * 200)
    write(env, f"{5:020}.log", good[:-3])
    result = search(env)
    first, second = result.unreadable
    assert (first.position, second.position) == (len(good), 0)
    assert "cut short" in second.reason
    assert result.records == 1


def test_no_damaged_bit_hides_a_value() -> None:
    good, other = batch((0, KEY, b"1")), batch((5, b"bob", b"1"))
    for bit in range(8 * len(good)):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        env = MemoryEnv(seed=1)
        path = write(env, f"{0:020}.log", bytes(damaged))
        write(env, f"{5:020}.log", other)
        result = search(env, below=6)
        states = [file.state for file in result.found]
        states += [file.state for file in result.unreadable]
        assert [state.path for state in states] == [path], f"byte {bit // 8}, bit {bit % 8}"


def test_a_batch_with_the_offset_of_a_later_one_is_reported() -> None:
    env = MemoryEnv(seed=1)
    damaged = bytearray(batch((1, KEY, b"1")))
    damaged[7] ^= 0x10
    good = batch((0, b"bob", b"1"))
    write(env, f"{0:020}.log", good, bytes(damaged), batch((2, b"bob", b"1")))
    (file,) = search(env, below=3).unreadable
    assert (file.position, file.reason) == (len(good) + len(damaged), "offset 2 after 17")


def test_damaged_bytes_that_an_operator_removed_from_the_log_are_reported() -> None:
    env = MemoryEnv(seed=1)
    path = write(env, f"{0:020}.log.0-80.damaged", batch((0, b"bob", b"1")))
    assert [file.state.path for file in search(env).unreadable] == [path]


class Replacing(Recorder):
    """A control that replaces the first of two files while the second one is searched."""

    def __init__(self, env: MemoryEnv) -> None:
        super().__init__()
        self._env = env
        self._reads = 0

    def read_bytes(self, count: int) -> None:
        super().read_bytes(count)
        self._reads += 1
        if self._reads == 2:
            write(self._env, f"{0:020}.log", batch((0, b"bob", b"1"), (1, b"bob", b"2")))


def test_damage_in_a_file_that_was_replaced_during_the_search_is_not_reported() -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", b"\x00" * 100)
    write(env, f"{5:020}.log", batch((5, b"bob", b"1")))
    assert search(env).unreadable != ()
    assert search(env, control=Replacing(env)).unreadable == ()


def test_the_active_segment_may_end_within_a_batch() -> None:
    env = MemoryEnv(seed=1)
    path = write(env, f"{0:020}.log", batch((0, KEY, b"1")), batch((1, KEY, b"1"))[:-3])
    result = search(env, active=path)
    assert (result.unreadable, result.records) == ((), 1)


class Moving(Recorder):
    """A control during whose first read a clean moves the key to another file."""

    def __init__(self, env: MemoryEnv) -> None:
        super().__init__()
        self._env = env

    def read_bytes(self, count: int) -> None:
        super().read_bytes(count)
        source = f"{FOLDER}/{5:020}.log"
        if self._env.exists(source):
            write(self._env, f"{0:020}.log", batch((0, b"bob", b"1"), (5, KEY, b"1")))
            self._env.unlink(source)


def test_a_key_that_moves_to_a_file_that_was_read_before_is_found() -> None:
    env = MemoryEnv(seed=1)
    first = write(env, f"{0:020}.log", batch((0, b"bob", b"1")))
    write(env, f"{5:020}.log", batch((5, KEY, b"1")))
    result = search(env, control=Moving(env))
    assert [file.state for file in result.found] == [file_state(env, first)]


class Restless(Recorder):
    """A control during whose reads another file appears each time, and the one before it grows."""

    def __init__(self, env: MemoryEnv, suffix: str = "") -> None:
        super().__init__()
        self._env, self._suffix, self._next = env, suffix, 1

    def read_bytes(self, count: int) -> None:
        first = self._next
        self._next += 2
        write(self._env, f"{first:020}.log{self._suffix}", batch((first, KEY, b"1")))
        if first > 1:
            whole = [batch((first - 2, KEY, b"1")), batch((first - 1, KEY, b"2"))]
            write(self._env, f"{first - 2:020}.log{self._suffix}", *whole)


def test_a_search_ends_although_files_never_stop_changing() -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch((0, b"bob", b"1")))
    with pytest.raises(FilesChangeError):
        search(env, control=Restless(env))


@pytest.mark.parametrize("suffix", ["", ".deleted", ".5f.cleaned"])
def test_a_search_succeeds_while_a_partition_closes_and_expires_segments(suffix: str) -> None:
    """None of them has a record below the end of the search, however large they become."""
    env = MemoryEnv(seed=1)
    path = write(env, f"{0:020}.log", batch((0, KEY, b"1")))
    result = search(env, below=1, active=path, control=Restless(env, suffix))
    assert [file.first_offset for file in result.found] == [0]
    assert result.unreadable == ()


def test_the_bytes_are_charged_and_an_abort_ends_the_search() -> None:
    env = MemoryEnv(seed=1)
    data = batch((0, KEY, b"1"))
    write(env, f"{0:020}.log", data)
    control = Recorder()
    assert search(env, control=control).bytes_read == control.charged_read == len(data)
    with pytest.raises(CleanAbortedError):
        search(env, control=Recorder(abort_after=0))


def test_progress_and_aborts_are_looked_at_for_each_batch() -> None:
    """A chunk may have hundreds of batches that unpack to the limit each."""
    env = MemoryEnv(seed=1)
    batches = [batch((offset, KEY, b"1"), codec=ZSTD) for offset in range(3)]
    write(env, f"{0:020}.log", *batches)
    control = Recorder()
    search(env, control=control)
    total = sum(map(len, batches))
    done = [len(batches[0]), len(batches[0]) + len(batches[1]), total]
    assert control.stages == [("search", bytes_done, total) for bytes_done in done]
    control = Recorder(abort_after=1)
    with pytest.raises(CleanAbortedError):
        search(env, control=control)
    assert len(control.stages) == 1


def test_progress_and_aborts_are_looked_at_where_a_chunk_has_no_whole_batch() -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch((0, b"bob", bytes(3 * CHUNK_BYTES))))
    control = Recorder()
    search(env, control=control)
    assert [done for _, done, _ in control.stages[:2]] == [0, 0]
    control = Recorder(abort_after=0)
    with pytest.raises(CleanAbortedError):
        search(env, control=control)
    assert control.charged_read == CHUNK_BYTES


def test_the_bytes_of_a_damaged_chunk_are_counted() -> None:
    env = MemoryEnv(seed=1)
    good, damaged = batch((0, KEY, b"1")), bytearray(batch((1, KEY, b"1")))
    damaged[-1] ^= 1
    write(env, f"{0:020}.log", good, bytes(damaged))
    assert search(env).bytes_read == len(good) + len(damaged)


# Slices ---------------------------------------------------------------------------------------


def outcome(result: KeySearchResult) -> KeySearchResult:
    """All of it but what a pause may change."""
    return replace(result, bytes_read=0, seconds=0.0)


def test_a_search_in_slices_of_one_batch_finds_what_a_search_at_once_finds() -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch((0, KEY, b"1")), batch((1, b"bob", b"1"), (2, KEY, None)))
    write(env, f"{5:020}.log", batch((5, KEY, b"1")), batch((6, KEY, b"2")), b"\x01" * 200)
    path = write(env, f"{9:020}.log", batch((9, KEY, b"1")), batch((10, KEY, b"1"))[:-3])
    slices = 0

    def count() -> None:
        nonlocal slices
        slices += 1

    at_once = search(env, active=path)
    assert at_once.records == 4
    assert outcome(search(env, active=path, between=count)) == outcome(at_once)
    assert slices == 5 + 3, "one after each batch and one after each file"


def test_a_slice_has_one_batch_however_long_it_takes() -> None:
    env = MemoryEnv(seed=1)
    batches = [batch((offset, b"bob", b"1")) for offset in range(3)]
    write(env, f"{0:020}.log", *batches)

    class Slow(Recorder):
        def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
            super().progress(stage, done_bytes, total_bytes)
            env.advance_ms(1_000_000)

    control = Slow()
    request = KeySearch(KEY, (SearchedFolder(FOLDER, 1000),), 64 << 20, slice_seconds=10.0)
    for number in range(1, 4):
        paused = search_files(env, request, control)
        assert isinstance(paused, PausedSearch)
        assert len(control.stages) == number
        request = replace(request, position=paused.position)
    result = search_files(env, request, control)
    assert isinstance(result, KeySearchResult)
    assert (result.files, result.seconds) == (1, 3000.0)
    assert control.stages[-1][1:] == (sum(map(len, batches)),) * 2


def test_a_file_that_was_replaced_during_a_pause_is_searched_from_its_beginning() -> None:
    """The new one has the key where the old one was read already."""
    env = MemoryEnv(seed=1)
    names = [f"{0:020}.log", f"{5:020}.log"]
    write(env, names[0], batch((0, b"bob", b"1")), batch((1, b"bob", b"1")))
    write(env, names[1], batch((5, b"bob", b"1")), batch((6, KEY, b"1")))

    def merge() -> None:
        if env.exists(f"{FOLDER}/{names[1]}"):
            write(env, names[0], batch((0, b"bob", b"1"), (6, KEY, b"1")))
            env.unlink(f"{FOLDER}/{names[1]}")

    result = search(env, between=merge)
    assert [file.state.path for file in result.found] == [f"{FOLDER}/{names[0]}"]


def test_a_late_segment_that_is_merged_with_later_ones_during_the_search_is_not_damaged() -> None:
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch((0, b"bob", b"1")))
    for offset in (1, 2):
        write(env, f"{offset:020}.log", batch((offset, b"bob", b"1")))

    class Merging(Recorder):
        def read_bytes(self, count: int) -> None:
            write(env, f"{1:020}.log", batch((1, b"bob", b"1")), batch((2, b"bob", b"1")))

    assert search(env, below=1, control=Merging()).unreadable == ()


@pytest.mark.parametrize("is_rewritten", [False, True])
def test_an_active_segment_that_grew_during_a_pause_is_searched_further(
    *, is_rewritten: bool
) -> None:
    """After it was closed and cleaned, other batches are at the position."""
    env = MemoryEnv(seed=1)
    name = f"{0:020}.log"
    first, last = batch((0, b"bob", b"1"), (1, b"bob", b"2")), batch((9, KEY, b"1"))
    path = write(env, name, first, batch((2, b"eve", b"2")), last)
    reads = list[int]()

    class Reads(Recorder):
        def read_bytes(self, count: int) -> None:
            reads.append(count)

    def grow() -> None:
        if is_rewritten:
            write(env, name, batch((1, b"bob", b"2")), last)
        else:
            with_more = [batch((offset, b"bob", b"1")) for offset in range(10, 13)]
            write(env, name, first, batch((2, b"eve", b"2")), last, *with_more)

    result = search(env, active=path, between=grow, control=Reads())
    assert result.records == 1
    whole = env.size(path)
    assert (reads[1] == whole) == is_rewritten, "searched from its beginning again"


def test_a_segment_that_a_clean_made_larger_during_a_pause_is_searched_to_its_end() -> None:
    env = MemoryEnv(seed=1)
    name, first, last = f"{0:020}.log", batch((0, b"bob", b"1")), batch((9, KEY, b"1"))
    path = write(env, name, first, batch((1, b"eve", bytes(5000)), codec=ZSTD), last)

    def unpack() -> None:
        write(env, name, first, batch((1, b"eve", bytes(5000))), last)

    assert search(env, active=path, between=unpack).records == 1


class ChangingFiles:
    """Segments with one record in each batch. Cleans never remove the record of the key."""

    def __init__(self, env: MemoryEnv, rng: random.Random, keyed: int) -> None:
        self._env, self._rng, self._keyed = env, rng, keyed
        self._segments: list[list[int]] = [[]]  # offsets; the last one is active
        self._next_offset = 0
        self._changes = rng.randint(1, 20)  # left
        for _ in range(rng.randint(3, 12)):
            self._append()
        for index in range(len(self._segments)):
            self._write(index)
        self.end = self._next_offset
        self.active = self._path(-1)

    def _path(self, index: int) -> str:
        return f"{FOLDER}/{self._segments[index][0]:020}.log"

    def _append(self) -> None:
        if self._segments[-1] and self._rng.random() < 0.4:
            self._segments.append([])
        self._segments[-1].append(self._next_offset)
        self._next_offset += 1

    def _write(self, index: int) -> None:
        offsets = self._segments[index]
        batches = [
            batch((offset, KEY if offset == self._keyed else b"bob", b"1" * (1 + offset % 3)))
            for offset in offsets
        ]
        write(self._env, f"{offsets[0]:020}.log.swap", *batches)
        self._env.rename(f"{FOLDER}/{offsets[0]:020}.log.swap", self._path(index))

    def change(self) -> None:
        """Append, close the active segment, or clean and merge closed ones; or do nothing."""
        if not self._changes:
            return
        self._changes -= 1
        self._env.advance_ms(5)
        if self._rng.random() < 0.5:
            self._append()
            self._write(-1)
        elif len(self._segments) > 2:
            self._clean()

    def _clean(self) -> None:
        first = self._rng.randrange(len(self._segments) - 2)
        end = self._rng.randint(first + 1, len(self._segments) - 1)
        group = self._segments[first:end]
        kept = [
            offset
            for offset in chain.from_iterable(group)
            if offset in (self._keyed, group[0][0]) or self._rng.random() < 0.7
        ]
        self._segments[first:end] = [kept]
        self._write(first)
        for removed in group[1:]:
            self._env.unlink(f"{FOLDER}/{removed[0]:020}.log")


def test_no_value_is_missed_whatever_happens_to_the_files_during_pauses() -> None:
    """A model of cleans, merges, rolls and appends, which never lose a value of the key."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(100):
        env, keyed = MemoryEnv(seed=1), rng.randrange(-1, 3)
        files = ChangingFiles(env, rng, keyed)
        result = search(env, below=files.end, active=files.active, between=files.change)
        assert bool(result.found) == (keyed >= 0)
        assert result.unreadable == ()


def test_the_largest_version_of_the_key_is_returned() -> None:
    env = MemoryEnv(seed=1)
    versions = [5, -3, 9]
    records = [
        Record(i, 1000, KEY, b"1", (("v", version.to_bytes(8, "big", signed=True)),))
        for i, version in enumerate(versions)
    ]
    records.append(Record(3, 1000, KEY, b"1", (("v", b"short"),)))
    write(env, f"{0:020}.log", bytes(build_batch(records)))
    assert search(env, header="v").version == 9
    assert search(env).version is None


def test_deletions_before_a_search_without_result_survive_a_power_loss() -> None:
    env = MemoryEnv(seed=1)
    path = write(env, f"varve.view/{0:020}.log", batch((0, KEY, b"1")))
    env.settle()
    env.unlink(path)
    assert search(env).found == ()
    for _ in range(20):
        assert not env.crash().exists(path)


def test_a_batch_is_not_decoded_record_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few kilobytes may have a million records of the key, which take seconds in Python."""

    def refuse(*_: object) -> None:
        raise AssertionError("a record is decoded in Python")

    count = 100_000
    made = [(offset, b"k", b"") for offset in range(count)]
    env = MemoryEnv(seed=1)
    write(env, f"{0:020}.log", batch(*made, codec=ZSTD))
    monkeypatch.setattr("storage.format.batch._decode_record", refuse)
    result = search(env, below=count, key=b"k")
    assert (result.records, result.found[0].last_offset) == (count, count - 1)


RANDOM_KEYS = (b"", b"k", b"kk", b"other", None)
RANDOM_HEADERS = (
    (),
    (("v", None),),
    (("v", b"short"),),
    (("v", bytes(8)), ("w", b"")),
    (("v", b"\xff" * 8),),
    (("v", b"\x7f" + bytes(7)), ("v", b"\x01" * 8)),
    (("v", bytes(8)), ("v", b"")),
)


def random_records(rng: random.Random) -> list[Record]:
    offsets = sorted(rng.sample(range(100, 130), rng.randint(1, 12)))
    return [
        Record(
            offset,
            rng.choice([-1, 0, 5, 7, 1 << 40]),
            rng.choice(RANDOM_KEYS),
            rng.choice([None, b"", b"\x02k", b"\x02k" * 40]),
            rng.choice(RANDOM_HEADERS),
        )
        for offset in offsets
    ]


def version_of(record: Record) -> int | None:
    versions = [value for name, value in record.headers if name == "v"]
    if not versions or versions[-1] is None or len(versions[-1]) != 8:
        return None
    return int.from_bytes(versions[-1], "big", signed=True)


def test_what_is_found_is_what_the_decoded_records_say() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        codec = rng.choice([0, ZSTD])
        attributes = rng.choice([0, LOG_APPEND_TIME])
        data = bytes(build_batch(random_records(rng), codec=codec, attributes=attributes))
        below, key = rng.randint(95, 135), rng.choice([b"", b"k", b"kk"])
        records = [
            record
            for record in decode_records(data, read_header(data))
            if record.key == key and record.offset < below
        ]
        env = MemoryEnv(seed=1)
        write(env, f"{100:020}.log", data)
        result = search(env, below=below, key=key, header="v")
        values = [record.offset for record in records if record.value is not None]
        found = [(f.records, f.first_offset, f.last_offset) for f in result.found]
        assert found == ([(len(values), values[0], values[-1])] if values else [])
        assert result.tombstones == len(records) - len(values)
        latest = max([(record.timestamp, record.offset) for record in records], default=(-1, -1))
        assert (result.latest_ms, result.latest_offset) == max(latest, (-1, -1))
        ranked = [(version_of(record), record.offset) for record in records]
        versions = [(version, offset) for version, offset in ranked if version is not None]
        assert (result.version, result.version_offset) == max(versions, default=(None, -1))


def test_changed_bytes_of_records_are_reported_as_in_plain_python() -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(500):
        good = build_batch(random_records(rng))
        header, body = read_header(good), bytearray(good[HEADER_BYTES:])
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(len(body))] = rng.choice([0, 1, 2, 127, 128, 255])
        cut = rng.randrange(len(body)) if rng.random() < 0.2 else len(body)
        body = body[:cut] + b"\x02k"  # the bytes of the key are there
        batch_length = BATCH_LENGTH_MIN + len(body)
        data = bytes(with_crc(header._replace(batch_length=batch_length), body))
        env = MemoryEnv(seed=1)
        write(env, f"{100:020}.log", data)
        try:
            decode_records(data, read_header(data))
        except CorruptBatchError:
            assert search(env, key=b"k").unreadable
        else:
            assert not search(env, key=b"k").unreadable
