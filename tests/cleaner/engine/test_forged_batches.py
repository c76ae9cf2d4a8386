"""Batches with a valid checksum and fields that lie, met by recovery, readers, verify and a clean.

Rules, for one forged batch in each segment below the recovery point
- Nothing raises an assertion or any other internal error.
- Every intact batch stays readable, before and after a clean, unless the log is refused with a
  reason because a batch claims offsets of the following segment.
- Memory and file operations are bounded, whatever a field claims.

Two cases are left out, because the files do not show which batch lies: an intact batch between two
forged ones whose lengths are wrong (decision 0020; tests/storage/segments/test_damage.py), and an
offset that moves ahead by less than the next batch.
"""

import random
import struct
import tracemalloc
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import pytest

from storage.errors import (
    CorruptBatchError,
    DamagedSegmentError,
    OverlappingSegmentsError,
    UnsupportedCompressionError,
)
from storage.format.batch import (
    LARGEST_INT32,
    LARGEST_INT64,
    BatchHeader,
    decode_records,
    walk_headers,
)
from storage.log.log import Log
from tests.support.cleaner.compacted_log import CONFIG, CompactedLog, Producer
from tests.support.draws import cases
from tests.support.storage.hostile_batches import sealed
from tests.support.storage.logs import FOLDER, open_log

SEEDS: Final = cases(few=50, many=300)
OPERATIONS_MAX: Final = 20_000  # on files, for some thirty batches
BYTES_MAX: Final = 64 << 20
# Position and layout of each field (the batch format), and what it may claim.
INT16: Final = (-(1 << 15), -1, 0, 1, (1 << 15) - 1)
INT32: Final = (-(1 << 31), -1, 0, 1, 2, 7, 1000, LARGEST_INT32 - 1, LARGEST_INT32)
INT64: Final = (
    -(1 << 63), -1, 0, 1, 5, 1 << 31, LARGEST_INT64 - LARGEST_INT32 - 1,
    LARGEST_INT64 - LARGEST_INT32, LARGEST_INT64 - 1, LARGEST_INT64,
)  # fmt: skip
FIELDS: Final = {
    "base offset": (0, ">q", INT64),
    "batch length": (8, ">i", INT32),
    "leader epoch": (12, ">i", INT32),
    "attributes": (21, ">h", (*INT16, 0x10, 0x20, 0x30, 0x40, 2, 4)),
    "last offset delta": (23, ">i", INT32),
    "base timestamp": (27, ">q", INT64),
    "max timestamp": (35, ">q", INT64),
    "producer id": (43, ">q", INT64),
    "producer epoch": (51, ">h", INT16),
    "base sequence": (53, ">i", INT32),
    "record count": (57, ">i", INT32),
}


class Forgery:
    """A log of a few segments, of which some batches are forged on disk."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.written = CompactedLog(seed)
        self.lies: list[tuple[int, str, int]] = []  # (base offset, field, claim)
        self.intact: dict[int, bytes] = {}  # value by offset
        forged: set[int] = set()
        draw = self.random
        producer = Producer(7, is_transactional=False)
        for _ in range(draw.randint(2, 5)):
            # Of two forged batches in a row, nothing shows where the batch between them begins.
            batches = draw.randint(1, 6)
            forged_one = draw.randrange(2 * batches)
            for number in range(batches):
                is_forged = number == forged_one
                name = "forged" if is_forged else "key"
                keys = [f"{name}{draw.randrange(12)}" for _ in range(draw.randint(1, 3))]
                by = producer if draw.random() < 0.3 else None
                base = self.written.write(*keys, by=by)
                if is_forged:
                    forged.add(base)
                    continue
                for at, key in enumerate(keys):
                    self.intact[base + at] = f"{key}@{base}".encode()
            self.written.roll()
        self.written.write("key0")
        self.intact[self.written.log.log_end_offset - 1] = b""
        self.end_offset = self.written.log.log_end_offset
        self.written.log.close()
        self._forge(forged)

    def _forge(self, bases: set[int]) -> None:
        env = self.written.env
        for name in env.listdir(FOLDER):
            path = f"{FOLDER}/{name}"
            if name.endswith((".index", ".timeindex")) and self.random.random() < 0.5:
                env.unlink(path)
            if not name.endswith(".log"):
                continue
            data = env.read_file(path)
            for position, header in list(walk_headers(data)):
                if header.base_offset in bases:
                    batch = bytearray(data[position : position + header.size_bytes])
                    for field in self.random.sample(sorted(FIELDS), self.random.choice((1, 1, 2))):
                        at, layout, claims = FIELDS[field]
                        claim = self.random.choice(claims)
                        if field == "base offset" and self.random.random() < 0.5:
                            claim = header.base_offset - self.random.randint(1, 9)
                        struct.pack_into(layout, batch, at, claim)
                        self.lies.append((header.base_offset, field, claim))
                    file = env.open(path, write=True)
                    file.pwrite(sealed(batch), position)
                    file.close()

    def open(self, *, was_clean: bool, recovery_point: int) -> Log:
        return open_log(
            self.written.env, CONFIG, was_clean=was_clean, recovery_point=recovery_point
        )


def readable(log: Log, offsets: Iterable[int]) -> dict[int, bytes]:
    """The values at these offsets, each fetched by itself."""
    values: dict[int, bytes] = {}
    for offset in offsets:
        try:
            data = log.reader.read(offset, 1 << 20, end_offset=log.log_end_offset).read()
        except DamagedSegmentError:
            continue
        with suppress(CorruptBatchError):  # after the wanted batch
            for position, header in walk_headers(data):
                if header.base_offset <= offset <= header.last_offset:
                    # The first batch counts: consumers ignore lower offsets after it.
                    values = value_in(data, position, header, offset) | values
    return values


def value_in(data: bytes, position: int, header: BatchHeader, offset: int) -> dict[int, bytes]:
    """The value of an offset, if the batch holds it; a forged one may claim to."""
    try:
        records = decode_records(data, header, position)
    except (CorruptBatchError, UnsupportedCompressionError):
        return {}
    return {r.offset: r.value or b"" for r in records if r.offset == offset}


def check_verify(log: Log) -> None:
    offset, steps = log.log_start_offset, 0
    while offset < log.log_end_offset:
        steps += 1
        assert steps < 500, "verification ends"
        step = log.damage.verify_step(offset, is_border=steps > 1)
        if step.damage is not None:
            assert step.damage.next_offset > offset
            offset = step.damage.next_offset
            continue
        part = step.run(1 << 20)
        reached = part.next_offset
        if part.damage:
            log.damage.note_finding(step.segment, part.end_position, part.damage)
        elif part.end_position >= step.segment.size_bytes:
            reached = step.offsets.stop
        offset = max(offset, reached)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Load the kernels before memory is traced, which slows their compilation."""
    log = CompactedLog()
    log.write("key")
    log.roll()
    log.clean()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_forged_batches_cost_no_intact_record(seed: int) -> None:
    forgery = Forgery(seed)
    draw = forgery.random
    was_clean = draw.random() < 0.5
    written, env = forgery.written, forgery.written.env
    operations = env.operations
    why = (seed, was_clean, forgery.lies)
    tracemalloc.start()
    try:
        log = forgery.open(was_clean=was_clean, recovery_point=forgery.end_offset)
        written.log = log
        if draw.random() < 0.5:
            check_verify(log)
        values = expected(forgery.intact)
        assert readable(log, values) == values, why
        log.roll(written.now_ms)
        written.clean(last_records=())
        lasts = last_of_each_key(forgery.intact)
        assert readable(log, lasts) == lasts, why
        check_verify(log)
        assert readable(log, lasts) == lasts, why
        _, peak = tracemalloc.get_traced_memory()
    except OverlappingSegmentsError:  # refused with a reason, and nothing was changed
        return
    finally:
        tracemalloc.stop()
    assert peak < BYTES_MAX
    assert env.operations - operations < OPERATIONS_MAX


def expected(values: dict[int, bytes]) -> dict[int, bytes]:
    return {offset: value for offset, value in values.items() if value}


def last_of_each_key(values: dict[int, bytes]) -> dict[int, bytes]:
    lasts: dict[bytes, int] = {}
    for offset, value in values.items():
        key = value.partition(b"@")[0] if value else b"key0"
        lasts[key] = offset
    return expected({offset: values[offset] for offset in lasts.values()})
