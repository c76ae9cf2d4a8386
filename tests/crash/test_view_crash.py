"""Power lost at each step of a run of a view that remembers deletes, and in the sweep after it.

The whole of a run as the broker makes it, without the broker: stage, clean, settle, publish, sweep.
"""

from dataclasses import dataclass

from cleaner.engine.clean import run_clean
from cleaner.job import SourceSegment, ViewOrder, ViewRules
from storage.format.batch import Record, build_batch, decode_records, walk_headers
from storage.format.filenames import LOG, file_name
from storage.log.log_state import index_limits
from storage.swap.swap_journal import CleanedFile
from storage.view.deleted_keys import DELETED_KEYS_NAME
from storage.view.ledger import (
    Ledger,
    LinkedKeys,
    LinkedSource,
    Source,
    check_deleted_keys,
    describe_segment,
    make_staging_folder,
    open_ledger,
    publish,
    settle_deleted_keys,
    settle_group,
    stage,
    sweep,
    view_path,
)
from storage.view.manifest import ViewManifest
from tests.support.cleaner.cleaning import Recorder, clean_job
from tests.support.draws import seed_of_test
from tests.support.storage.logs import NOW_MS, SMALL
from tests.support.storage.memory_env import MemoryEnv, SimulatedCrash

FOLDER = "/data/orders-0"
TOPIC_ID = bytes(range(16))
LIMITS = index_limits(SMALL)
# Segment by segment: a key is deleted in the first, comes late and older in the second.
LOG_PARTS = [
    [(b"a", None, 9), (b"b", b"1", 1), (b"c", b"1", 1)],
    [(b"a", b"late", 8), (b"b", b"2", 2), (b"c", None, 5)],
    [(b"c", b"late", 4), (b"d", b"1", 1), (b"a", b"late", 7)],
]
OFFSETS = 3  # of each segment
VIEWS = [
    {b"b": b"1", b"c": b"1"},
    {b"b": b"2"},
    {b"b": b"2", b"d": b"1"},
]
DELETED = [1, 2, 2]


def write_log(env: MemoryEnv) -> None:
    env.mkdir(FOLDER)
    for number, rows in enumerate(LOG_PARTS):
        base = number * OFFSETS
        records = [Record(base + i, NOW_MS + at, key, v) for i, (key, v, at) in enumerate(rows)]
        file = env.open(f"{FOLDER}/{file_name(base, LOG)}", create=True)
        file.pwrite(bytes(build_batch(records)), 0)
        file.sync()


def opened(env: MemoryEnv) -> Ledger | None:
    return open_ledger(env, FOLDER, TOPIC_ID, LIMITS)


@dataclass
class Made:
    sources: list[Source]
    segments: list[SourceSegment]
    deleted: CleanedFile | None


def sources_of(env: MemoryEnv, previous: Ledger | None, number: int) -> Made:
    made = Made([], [], None)
    if previous is not None:
        folder = f"{view_path(FOLDER)}/{previous.manifest.compaction_id}"
        for segment in previous.manifest.segments:
            made.sources.append(LinkedSource(folder, segment.base_offset))
            made.segments.append(
                SourceSegment(
                    segment.base_offset, segment.next_base_offset, segment.size_bytes, NOW_MS, 0
                )
            )
        if (deleted := previous.manifest.deleted) is not None:
            made.sources.append(LinkedKeys(folder, deleted))
            made.deleted = CleanedFile(DELETED_KEYS_NAME, deleted.size_bytes, deleted.crc)
    base = number * OFFSETS
    made.sources.append(LinkedSource(FOLDER, base))
    size = env.size(f"{FOLDER}/{file_name(base, LOG)}")
    made.segments.append(SourceSegment(base, base + OFFSETS, size, NOW_MS, 0))
    if len(made.segments) == 1 or made.segments[0].base_offset == base:
        return made
    for at, segment in enumerate(made.segments[:-1]):  # neighbours
        end = made.segments[at + 1].base_offset
        made.segments[at] = SourceSegment(segment.base_offset, end, segment.size_bytes, NOW_MS, 0)
    return made


def make_run(env: MemoryEnv, number: int) -> None:
    """Bring the view from what is published to the end of segment `number`."""
    previous = opened(env)
    compaction_id = f"run-{number}"
    sweep(env, FOLDER, [] if previous is None else [previous.manifest.compaction_id])
    directory = make_staging_folder(env, FOLDER, compaction_id)
    made = sources_of(env, previous, number)
    stage(env, directory, made.sources)
    job = clean_job(
        [[segment] for segment in made.segments],
        directory=directory,
        first_dirty_offset=number * OFFSETS,
        job_id=compaction_id,
        view=ViewRules(order=ViewOrder(None, made.deleted)),
    )
    control = Recorder()
    report = run_clean(env, job, control)
    sources = {source.base_offset: source for source in made.segments}
    for group in control.groups:
        settle_group(env, directory, group.source_base_offsets, group.output)
        if group.output is None:
            del sources[group.source_base_offsets[0]]
    deleted = settle_deleted_keys(env, directory, report.deleted_keys)
    segments = tuple(
        describe_segment(env, directory, source.base_offset, source.next_base_offset, None)
        for source in sources.values()
    )
    manifest = ViewManifest(
        TOPIC_ID, compaction_id, (number + 1) * OFFSETS, segments, 0, NOW_MS, "keep", "timestamp",
        deleted=deleted,
    )  # fmt: skip
    publish(env, FOLDER, manifest)
    sweep(env, FOLDER, [compaction_id])


def content(ledger: Ledger) -> dict[bytes | None, bytes | None]:
    results: dict[bytes | None, bytes | None] = {}
    offset = 0
    while data := ledger.read(offset, 1 << 20, at_least_one=True).read():
        for position, header in walk_headers(data):
            results.update((r.key, r.value) for r in decode_records(data, header, position))
            offset = header.next_offset
    return results


def check_version(env: MemoryEnv) -> int:
    """What is published is one version and all of it; how many segments it took in."""
    ledger = opened(env)
    if ledger is None:
        return 0
    number = ledger.horizon // OFFSETS
    assert content(ledger) == VIEWS[number - 1]
    deleted = ledger.manifest.deleted
    assert deleted is not None
    assert deleted.keys == DELETED[number - 1]
    check_deleted_keys(env, f"{view_path(FOLDER)}/{ledger.manifest.compaction_id}", deleted)
    return number


def test_power_lost_at_any_step_leaves_a_whole_version_and_the_next_run_is_right() -> None:
    seed = seed_of_test(1)
    seen = set()
    for number in range(len(LOG_PARTS)):
        at, is_over = 1, False
        while not is_over:  # crash_at: the operation that is not carried out
            env = MemoryEnv(seed + at)
            write_log(env)
            for earlier in range(number):
                make_run(env, earlier)
            env.settle()
            env.crash_at = env.operations + at
            try:
                make_run(env, number)
                is_over = True
            except SimulatedCrash:
                pass
            after = env.crash()
            result = check_version(after)
            assert result in (number, number + 1), (number, at)
            seen.add((number, result))
            for following in range(result, len(LOG_PARTS)):
                make_run(after, following)
            assert check_version(after) == len(LOG_PARTS)
            at += 1
    assert len(seen) == 2 * len(LOG_PARTS)
