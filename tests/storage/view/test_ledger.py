"""A view on the disk: the manifest, publication with a crash at each step, what is swept."""

import errno
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from storage.errors import CorruptCheckpointError, InvalidViewError, NewerFormatError
from storage.format.batch import Record, build_batch, decode_records, walk_headers
from storage.format.filenames import LOG, file_name
from storage.format.sealed_json import seal
from storage.log.log_state import index_limits
from storage.view.ledger import (
    CopiedTail,
    Ledger,
    LinkedSource,
    describe_segment,
    make_staging_folder,
    open_ledger,
    publish,
    remove_run,
    remove_view,
    stage,
    sweep,
    view_path,
)
from storage.view.manifest import (
    MANIFEST_MAGIC,
    MANIFEST_NAME,
    LedgerSegment,
    ViewManifest,
    decode_manifest,
    encode_manifest,
)
from tests.support.draws import seed_of_test
from tests.support.storage.logs import NOW_MS, SMALL, fill, open_log
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

FOLDER = "/data/orders-0"
RUN = f"{view_path(FOLDER)}/run-1"
TOPIC_ID = bytes(range(16))
LIMITS = index_limits(SMALL)
MANIFEST = ViewManifest(
    TOPIC_ID, "run-1", 20, (LedgerSegment(0, 10, 100, 7), LedgerSegment(10, 20, 50, 8)), 12, NOW_MS,
    "keep", "offset", ((3, 5),),
)  # fmt: skip


# --- the manifest ---------------------------------------------------------------------------------


def test_a_manifest_comes_back_as_it_was() -> None:
    assert decode_manifest(encode_manifest(MANIFEST), "m") == MANIFEST
    empty = replace(MANIFEST, segments=(), horizon=0, missed=())
    assert decode_manifest(encode_manifest(empty), "m") == empty


def test_a_manifest_with_any_bit_flipped_or_cut_short_is_refused() -> None:
    data = encode_manifest(MANIFEST)
    for at in range(len(data)):
        for broken in (data[:at], data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]):
            with pytest.raises((CorruptCheckpointError, NewerFormatError)):
                decode_manifest(broken, "m")


@pytest.mark.parametrize(
    "change",
    [
        {"compaction_id": "../x"},
        {"compaction_id": ""},
        {"segments": [[0, 30, 1, 1]]},
        {"segments": [[5, 5, 1, 1]]},
        {"segments": [[0, 10, 1, 1], [9, 20, 1, 1]]},
        {"segments": [[0]]},
        {"topic_id": "no hex"},
        {"horizon": None},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    payload = {
        "topic_id": TOPIC_ID.hex(), "compaction_id": "r", "horizon": 20, "segments": [],
        "records": 0, "made_ms": 0, "null_key": "keep", "strategy": "offset", "missed": [],
        **change,
    }  # fmt: skip
    with pytest.raises(CorruptCheckpointError):
        decode_manifest(seal(MANIFEST_MAGIC, 1, payload), "m")


# --- publication ----------------------------------------------------------------------------------


def write_source(env: MemoryEnv, base: int, values: list[bytes]) -> None:
    """A closed segment of the log with one batch for each value, on the device."""
    env.mkdir(FOLDER)
    data = b"".join(
        bytes(build_batch([Record(base + at, NOW_MS, b"k%d" % at, value)]))
        for at, value in enumerate(values)
    )
    file = env.open(f"{FOLDER}/{file_name(base, LOG)}", create=True)
    file.pwrite(data, 0)
    file.sync()


def make(env: MemoryEnv, compaction_id: str, bases: list[int], horizon: int) -> None:
    """A view of some segments as they are, published."""
    directory = make_staging_folder(env, FOLDER, compaction_id)
    stage(env, directory, [LinkedSource(FOLDER, base) for base in bases])
    ends = [*bases[1:], horizon]
    segments = tuple(
        describe_segment(env, directory, base, end, None)
        for base, end in zip(bases, ends, strict=True)
    )
    publish(
        env,
        FOLDER,
        replace(MANIFEST, compaction_id=compaction_id, horizon=horizon, segments=segments),
    )


def values_of(ledger: Ledger | None) -> list[bytes | None]:
    if ledger is None:
        return []
    results: list[bytes | None] = []
    offset = 0
    while data := ledger.read(offset, 1 << 20, at_least_one=True).read():
        for position, header in walk_headers(data):
            results += [record.value for record in decode_records(data, header, position)]
            offset = header.next_offset
    return results


def opened(env: MemoryEnv) -> Ledger | None:
    return open_ledger(env, FOLDER, TOPIC_ID, LIMITS)


def test_a_crash_at_any_step_leaves_the_old_view_or_the_new_one() -> None:
    old, new = [b"a", b"b"], [b"a", b"b", b"c"]
    seed = seed_of_test(1)
    steps = None
    at = 0
    seen = set()
    while steps is None or at <= steps:
        env = MemoryEnv(seed + at)
        write_source(env, 0, old)
        make(env, "run-1", [0], 2)
        write_source(env, 2, [b"c"])
        env.settle()
        before = env.operations
        if steps is not None:
            env.crash_at = before + at
        try:
            make(env, "run-2", [0, 2], 3)
            sweep(env, FOLDER, ["run-2"])
        except SimulatedCrash:
            pass
        if steps is None:
            steps = env.operations - before
        after = env.crash()
        results = values_of(opened(after))
        assert results in (old, new), (at, results)
        seen.add(len(results))
        path = f"{view_path(FOLDER)}/{MANIFEST_NAME}"
        data = after.read_file(path)
        after.unlink(path)
        with suppress(InvalidViewError):
            assert values_of(opened(after)) == results, "never another version"
        file = after.open(path, create=True)
        file.pwrite(data, 0)
        file.sync()
        ledger = opened(after)
        assert ledger is not None
        sweep(after, FOLDER, [ledger.manifest.compaction_id])
        again = after.crash()
        assert values_of(opened(again)) == results, "the sweep takes nothing that is named"
        at += 1
    assert seen == {2, 3}


def test_a_published_view_outlives_the_names_of_its_sources() -> None:
    for seed in range(50):
        env = MemoryEnv(seed)
        write_source(env, 0, [b"a"])
        env.sync_dir("/data")
        env.sync_dir("/")
        make(env, "run-1", [0], 1)
        env.unlink(f"{FOLDER}/{file_name(0, LOG)}")
        assert values_of(opened(env.crash())) == [b"a"], seed


def test_a_tail_is_copied_from_its_batch_on() -> None:
    env = MemoryEnv()
    write_source(env, 0, [b"a", b"b", b"c"])
    source = env.open(f"{FOLDER}/{file_name(0, LOG)}")
    first = len(build_batch([Record(0, NOW_MS, b"k0", b"a")]))
    directory = make_staging_folder(env, FOLDER, "run-1")
    stage(env, directory, [CopiedTail(source, first, source.size(), 1)])
    segment = describe_segment(env, directory, 1, 3, None)
    publish(env, FOLDER, replace(MANIFEST, segments=(segment,), horizon=3))
    assert values_of(opened(env.crash())) == [b"b", b"c"]


# --- what is not believed -------------------------------------------------------------------------


def test_a_view_of_another_topic_or_with_other_files_is_refused() -> None:
    env = MemoryEnv()
    write_source(env, 0, [b"a"])
    make(env, "run-1", [0], 1)
    with pytest.raises(InvalidViewError, match="another topic"):
        open_ledger(env, FOLDER, bytes(16), LIMITS)
    path = f"{view_path(FOLDER)}/run-1/{file_name(0, LOG)}"
    data = env.read_file(path)
    env.unlink(path)
    with pytest.raises(InvalidViewError, match="missing"):
        opened(env)
    env.open(path, create=True).pwrite(data[:-1], 0)
    with pytest.raises(InvalidViewError, match="bytes"):
        opened(env)


def test_without_a_manifest_there_is_no_view_whatever_else_is_there() -> None:
    env = MemoryEnv()
    write_source(env, 0, [b"a"])
    assert opened(env) is None
    stage(env, make_staging_folder(env, FOLDER, "run-1"), [LinkedSource(FOLDER, 0)])
    assert opened(env) is None
    assert sweep(env, FOLDER, []) == ("run-1",)
    assert env.listdir(view_path(FOLDER)) == []


def remove_manifest(env: MemoryEnv) -> None:
    env.unlink(f"{view_path(FOLDER)}/{MANIFEST_NAME}")


def test_a_view_whose_manifest_is_missing_is_that_of_its_copy_and_is_not_swept() -> None:
    env = MemoryEnv()
    write_source(env, 0, [b"a"])
    make(env, "run-1", [0], 1)
    write_source(env, 1, [b"b"])
    make(env, "run-2", [0, 1], 2)
    remove_manifest(env)
    assert values_of(opened(env)) == [b"a", b"b"], "not the former version, which is still there"
    assert sweep(env, FOLDER, []) == ("run-1",)
    assert values_of(opened(env.crash())) == [b"a", b"b"]


def test_a_missing_manifest_with_two_copies_is_refused_and_nothing_is_swept() -> None:
    env = MemoryEnv()
    write_source(env, 0, [b"a"])
    for name in ("run-1", "run-2"):
        make(env, name, [0], 1)
    data = env.read_file(f"{view_path(FOLDER)}/run-2/{MANIFEST_NAME}")
    env.open(f"{view_path(FOLDER)}/run-1/{MANIFEST_NAME}", create=True).pwrite(data, 0)
    remove_manifest(env)
    with pytest.raises(InvalidViewError, match="it is missing, and 2 folders have a copy"):
        opened(env)
    with pytest.raises(InvalidViewError):
        sweep(env, FOLDER, [])
    assert sorted(env.listdir(view_path(FOLDER))) == ["run-1", "run-2"]


def test_a_crash_in_the_first_publication_leaves_no_view_or_all_of_it() -> None:
    seed, seen, at, is_over = seed_of_test(1), set(), 1, False
    while not is_over:
        env = MemoryEnv(seed + at)
        write_source(env, 0, [b"a", b"b"])
        env.settle()
        env.crash_at = env.operations + at
        try:
            make(env, "run-1", [0], 2)
            is_over = True
        except SimulatedCrash:
            pass
        after = env.crash()
        results = values_of(opened(after))
        assert results in ([], [b"a", b"b"]), (at, results)
        seen.add(len(results))
        sweep(after, FOLDER, [])
        assert values_of(opened(after.crash())) == results, at
        at += 1
    assert seen == {0, 2}


@pytest.mark.parametrize("remove", [remove_view, lambda env, _: remove_run(env, RUN)])
def test_a_crash_in_a_removal_leaves_no_view_or_all_of_it(
    remove: Callable[[MemoryEnv, str], object],
) -> None:
    seed, at, is_over = seed_of_test(1), 1, False
    while not is_over:
        env = MemoryEnv(seed + at)
        write_source(env, 0, [b"a", b"b"])
        make(env, "run-1", [0], 2)
        env.settle()
        if remove is not remove_view:  # of a compaction that found no room for the manifest
            remove_manifest(env)
            env.sync_dir(view_path(FOLDER))
        env.crash_at = env.operations + at
        try:
            remove(env, FOLDER)
            is_over = True
        except SimulatedCrash:
            pass
        after = env.crash()
        assert values_of(opened(after)) in ([], [b"a", b"b"]), at
        remove(after, FOLDER)
        assert opened(after.crash()) is None, at
        at += 1


def test_a_view_that_is_removed_does_not_come_back() -> None:
    for seed in range(20):
        env = MemoryEnv(seed)
        write_source(env, 0, [b"a"])
        make(env, "run-1", [0], 1)
        assert remove_view(env, FOLDER)
        assert not remove_view(env, FOLDER)
        assert opened(env.crash()) is None


def test_indexes_that_were_not_used_since_the_last_call_are_dropped_and_loaded_again() -> None:
    env = MemoryEnv()
    log = open_log(env, folder=FOLDER)
    fill(log, 5)
    log.roll(NOW_MS)
    log.flush()
    make(env, "run-1", [0], 5)
    ledger = opened(env)
    assert ledger is not None
    loads = []

    def is_load(operation: str, path: str) -> bool:
        if operation == "read_file" and path.endswith("index"):
            loads.append(path)
        return False

    def read(offset: int) -> int:
        loads.clear()
        ledger.read(offset, 150, at_least_one=True).read()
        return len(loads)

    env.fail_on(is_load, errno.EIO)  # it only counts
    assert read(2) == 2
    ledger.drop_idle_indexes()
    assert read(4) == 0
    ledger.drop_idle_indexes()
    ledger.drop_idle_indexes()
    assert read(1) == 2
