"""One log in a folder, on disk or in memory, and records to put into it."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

from crc32c import crc32c

from config.topics.keys import TopicConfig
from storage.directory.log_directory import LogDirectory
from storage.env import Env, mkdir_durably
from storage.format.batch import (
    BatchHeader,
    Record,
    build_batch,
    decode_records,
    read_header,
    walk_headers,
)
from storage.format.checkpoints import decode_offsets
from storage.format.filenames import INDEX, LOG, TIME_INDEX, cleaned_name, file_name
from storage.log.log import Log
from storage.log.log_state import LogContext, index_limits
from storage.model import AppendInfo, TopicPartition
from storage.recovery.load_log import LoadedLog, load_log
from storage.segments.segment import Segment
from storage.swap.swap_journal import (
    CleanedFile,
    CleanedSegment,
    SwapPlan,
    execute_swap,
    plan_swap,
)
from tests.support.storage.memory_env import MemoryEnv
from tests.support.storage.swaps import RUN, put

HOME = "/data"
PARTITION = TopicPartition("orders", 0)
FOLDER = f"{HOME}/{PARTITION}"
TOPIC_ID = bytes(range(16))
NOW_MS = 1_700_000_000_000

# Small enough that a few batches fill a segment, and every batch after the first is indexed.
SMALL = TopicConfig(segment_bytes=1000, index_interval_bytes=0)


def open_log(
    env: Env,
    config: TopicConfig = SMALL,
    *,
    was_clean: bool = False,
    recovery_point: int | None = 0,
    log_start_offset: int | None = None,
    folder: str = FOLDER,
) -> Log:
    log, _ = open_with_notes(
        env,
        config,
        was_clean=was_clean,
        recovery_point=recovery_point,
        log_start_offset=log_start_offset,
        folder=folder,
    )
    return log


def open_with_notes(
    env: Env,
    config: TopicConfig = SMALL,
    *,
    was_clean: bool = False,
    recovery_point: int | None = 0,
    log_start_offset: int | None = None,
    folder: str = FOLDER,
) -> tuple[Log, LoadedLog]:
    mkdir_durably(env, folder)
    loaded = load_log(
        env,
        folder,
        index_limits(config),
        was_clean=was_clean,
        recovery_point=recovery_point,
        log_start_offset=log_start_offset,
    )
    numbers = count()
    context = LogContext(env, LogDirectory(env, HOME), lambda: f"test-{next(numbers)}")
    return Log(context, PARTITION, TOPIC_ID, folder, config, loaded=loaded), loaded


def batch_of(
    *values: bytes | None,
    key: bytes | None = b"key",
    timestamp: int = NOW_MS,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    attributes: int = 0,
    codec: int = 0,
    timestamps: Sequence[int] | None = None,
) -> bytearray:
    times = timestamps or [timestamp] * len(values)
    records = [
        Record(at, when, key, value)
        for at, (value, when) in enumerate(zip(values, times, strict=True))
    ]
    return build_batch(
        records,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        attributes=attributes,
        codec=codec,
    )


def append(log: Log, *values: bytes | None, now_ms: int = NOW_MS, **fields: object) -> AppendInfo:
    """Append one batch with these values."""
    return append_batch(log, batch_of(*values, **fields), now_ms=now_ms)  # type: ignore[arg-type]


def append_batch(
    log: Log, batch: bytearray, *, now_ms: int = NOW_MS, in_transaction: bool = False
) -> AppendInfo:
    return log.append(batch, read_header(batch), now_ms=now_ms, in_transaction=in_transaction)


def fill(log: Log, batches: int, *, size: int = 100, timestamp: int = NOW_MS) -> None:
    """Append batches of one record each; the value tells the offset."""
    for _ in range(batches):
        append(log, value_at(log.log_end_offset, size), timestamp=timestamp)


def value_at(offset: int, size: int = 100) -> bytes:
    return str(offset).encode().ljust(size, b".")


def headers_of(data: bytes) -> list[BatchHeader]:
    return [header for _, header in walk_headers(data)]


def read_records(log: Log, *, start: int | None = None, max_bytes: int = 1 << 20) -> list[Record]:
    """Everything a consumer gets that begins at `start`, up to the high watermark."""
    offset = log.log_start_offset if start is None else start
    records: list[Record] = []
    while True:
        data = log.reader.read(offset, max_bytes, end_offset=log.high_watermark).read()
        if not data:
            return records
        for position, header in walk_headers(data):
            results = decode_records(data, header, position)
            records += [record for record in results if record.offset >= offset]
            next_offset = header.next_offset
        assert next_offset > offset
        offset = next_offset


def offsets_in(log: Log, *, start: int | None = None) -> list[int]:
    return [record.offset for record in read_records(log, start=start)]


def overwrite(env: Env, name: str, data: bytes, position: int | None = None) -> None:
    """Change a file of the log behind its back; at the end if no position is given."""
    file = env.open(f"{FOLDER}/{name}", write=True)
    file.pwrite(data, file.size() if position is None else position)
    file.close()


def resize(env: Env, name: str, length: int) -> None:
    file = env.open(f"{FOLDER}/{name}", write=True)
    file.truncate(length)
    file.close()


def content(env: Env, base_offset: int, kind: str) -> bytes:
    return env.read_file(f"{FOLDER}/{file_name(base_offset, kind)}")


def segments_of(log: Log) -> list[tuple[int, int]]:
    """(base offset, bytes) of each segment."""
    return [(facts.base_offset, facts.size_bytes) for facts in log.segment_facts()]


def loaded_segment(env: Env, base_offset: int, config: TopicConfig = SMALL) -> Segment:
    segment = Segment(env, FOLDER, base_offset, index_limits(config), create=False)
    segment.load_or_rebuild()
    return segment


def cleaned(env: Env, log: Log, sources: Sequence[int], keep: Collection[int]) -> SwapPlan:
    """What a cleaner would leave of these segments, and the plan to publish it."""
    base = sources[0]
    made_in = MemoryEnv()
    config = replace(SMALL, segment_bytes=1 << 20)
    made = open_log(made_in, config, log_start_offset=base, was_clean=True)
    for offset in sorted(keep):
        made._state.log_end_offset = offset
        append(made, value_at(offset))
    made.close()
    files = []
    for kind in (LOG, INDEX, TIME_INDEX):
        data = made_in.read_file(f"{FOLDER}/{file_name(base, kind)}")
        name = cleaned_name(base, kind, RUN)
        put(env, f"{FOLDER}/{name}", data)
        files.append(CleanedFile(name, len(data), crc32c(data)))
    facts = [facts for facts in log.segment_facts() if facts.base_offset in sources]
    return plan_swap(FOLDER, facts, [CleanedSegment(base, RUN, tuple(files))] if keep else [])


def publish(env: Env, log: Log, sources: Sequence[int], keep: Collection[int]) -> None:
    plan = cleaned(env, log, sources, keep)
    log.flush()
    log.swap.pin(sources)
    execute_swap(env, plan)
    log.swap.attach(plan, log.swap.open_outputs(plan))


def read_offsets(env: Env, path: str) -> dict[TopicPartition, int]:
    """The entries of an offset checkpoint; none without a file."""
    return decode_offsets(env.read_file(path), path) if env.exists(path) else {}
