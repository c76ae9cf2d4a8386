"""The compiled walk over records: agrees with plain Python, and never reads outside its bytes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.errors import CorruptBatchError
from storage.format.batch import (
    Record,
    build_batch,
    decode_records,
    encode_record,
    read_header,
    read_varint,
    read_varlong,
    write_varint,
)
from storage.kernels import (
    CACHE_VARIABLE,
    NUMBA_VARIABLE,
    choose_cache_directory,
    is_first_compilation,
    primitives,
)
from storage.kernels.records import (
    LARGEST_INT64,
    SMALLEST_INT64,
    RecordCode,
    check_records_kernel,
)
from tests.support.formats import MALFORMED


class Rules(NamedTuple):
    """The arguments of the kernel between the count and the failures."""

    base_timestamp: int = 0
    first_ms: int = SMALLEST_INT64
    last_ms: int = LARGEST_INT64
    needs_keys: bool = False


INT64 = st.integers(SMALLEST_INT64, LARGEST_INT64)
ANY_TIME = Rules()
KEYED = ANY_TIME._replace(needs_keys=True)
PADDING = 64
check_kernel: Any = check_records_kernel  # of memoryviews


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.uint8)


def walk(data: bytes, count: int, rules: Rules = ANY_TIME) -> tuple[int, int, list[int]]:
    failed = np.full(4, -7, dtype=np.int64)
    code, failures, _ = check_kernel(memoryview(data), 0, count, *rules, failed)
    return code, failures, failed[: min(failures, 4)].tolist()


def body(records: list[Record]) -> bytes:
    return b"".join(encode_record(r, r.offset, r.timestamp) for r in records)


RECORDS = [
    Record(0, 10, b"key", b"value", (("h", b"x"), ("", None))),
    Record(1, -10, None, None),
    Record(2, 1 << 40, b"", b""),
]


def test_well_formed_records_are_valid() -> None:
    assert walk(body(RECORDS), 3) == (RecordCode.VALID, 0, [])
    assert walk(b"", 0) == (RecordCode.VALID, 0, [])


def test_every_truncation_is_malformed_at_its_record() -> None:
    data = body(RECORDS)
    ends = [len(body(RECORDS[:n])) for n in range(1, 4)]
    for size in range(len(data)):
        index = sum(end <= size for end in ends)
        assert walk(data[:size], 3) == (RecordCode.MALFORMED, 1, [index])


@given(st.integers(-(1 << 40), 1 << 40), st.lists(st.integers(-(1 << 40), 1 << 40), min_size=1))
def test_the_largest_timestamp_is_that_of_a_record(base: int, deltas: list[int]) -> None:
    data = memoryview(body([Record(n, delta, b"k", b"") for n, delta in enumerate(deltas)]))
    rules = ANY_TIME._replace(base_timestamp=base)
    failed = np.zeros(0, dtype=np.int64)
    code, _, largest = check_kernel(data, 0, len(deltas), *rules, failed)
    assert (code, largest) == (RecordCode.VALID, base + max(deltas))


@pytest.mark.parametrize("data", MALFORMED)
def test_malformed_records_are_no_valid_ones(data: bytes) -> None:
    assert walk(data, 1)[0] in {RecordCode.MALFORMED, RecordCode.OFFSETS, RecordCode.LEFT_OVER}


def test_a_count_that_is_not_the_records_is_noticed() -> None:
    data = body(RECORDS)
    assert walk(data, 2)[0] == RecordCode.LEFT_OVER
    assert walk(data, 4) == (RecordCode.MALFORMED, 1, [3])
    assert walk(data, (1 << 31) - 1) == (RecordCode.MALFORMED, 1, [3])


@pytest.mark.parametrize("deltas", [(0, 2), (0, 0), (1, 2), (0, -1)])
def test_offset_deltas_have_to_count_from_zero(deltas: tuple[int, int]) -> None:
    data = b"".join(encode_record(Record(0, 0, b"k", b""), delta, 0) for delta in deltas)
    index = next(n for n, delta in enumerate(deltas) if n != delta)
    assert walk(data, 2) == (RecordCode.OFFSETS, 1, [index])


def test_null_keys_are_counted_where_keys_are_needed_and_an_empty_key_is_one() -> None:
    assert walk(body(RECORDS), 3, KEYED) == (RecordCode.NULL_KEY, 1, [1])
    keyless = [Record(n, 0, None, b"") for n in range(9)]
    assert walk(body(keyless), 9, KEYED) == (RecordCode.NULL_KEY, 9, [0, 1, 2, 3])
    assert walk(body(keyless), 9)[0] == RecordCode.VALID


def test_times_outside_the_window_are_counted_and_no_time_is_exempt() -> None:
    deltas = [-1, 0, 99, 100, 101, -1001]
    records = [Record(n, delta, b"k", b"") for n, delta in enumerate(deltas)]
    rules = Rules(1000, 1000, 1100, needs_keys=True)
    assert walk(body(records), 6, rules) == (RecordCode.TIMESTAMP, 2, [0, 4])


def test_a_time_decides_the_code_before_or_after_a_null_key() -> None:
    early, keyless = (5, b"k"), (50, None)
    rules = Rules(0, 50, 50, needs_keys=True)
    for order in ((early, keyless), (keyless, early)):
        records = [Record(n, delta, key, b"") for n, (delta, key) in enumerate(order)]
        assert walk(body(records), 2, rules) == (RecordCode.TIMESTAMP, 2, [0, 1])


@given(INT64, INT64, INT64, INT64)
@example(SMALLEST_INT64, -1, SMALLEST_INT64, LARGEST_INT64)
@example(LARGEST_INT64, 1, SMALLEST_INT64, LARGEST_INT64)
def test_the_window_is_exact_over_all_of_64_bits(base: int, delta: int, a: int, b: int) -> None:
    first, last = min(a, b), max(a, b)
    rules = Rules(base, first, last, needs_keys=False)
    timestamp = base + delta
    inside = timestamp == -1 or first <= timestamp <= last
    code, _, _ = walk(body([Record(0, delta, b"k", b"")]), 1, rules)
    assert code == (RecordCode.VALID if inside else RecordCode.TIMESTAMP)


def in_python(data: bytes, count: int) -> bool:
    """Whether plain Python reads `count` records with offsets 0, 1, 2, ... here."""
    batch = build_batch([Record(0, 0, b"", b"")], last_offset_delta=max(count - 1, 0))
    header = read_header(batch)._replace(batch_length=49 + len(data), record_count=count)
    try:
        records = decode_records(bytes(batch[:61]) + data, header)
    except CorruptBatchError:
        return False
    return [record.offset for record in records] == list(range(count))


@given(st.binary(max_size=60), st.integers(1, 3))
def test_any_bytes_are_judged_as_by_plain_python(data: bytes, count: int) -> None:
    assert (walk(data, count)[0] == RecordCode.VALID) == in_python(data, count)


@given(st.data())
def test_damaged_records_are_judged_as_by_plain_python(data: st.DataObject) -> None:
    raw = bytearray(body(RECORDS))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.integers(0, 255))
    assert (walk(bytes(raw), 3)[0] == RecordCode.VALID) == in_python(bytes(raw), 3)


@given(st.data())
def test_bytes_behind_the_end_never_matter(data: st.DataObject) -> None:
    raw = bytearray(body(RECORDS))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    answers = set()
    for filler in (b"\x00", b"\x02", b"\xff"):
        padded = memoryview(bytes(raw[:cut]) + filler * PADDING)[:cut]
        failed = np.zeros(1, dtype=np.int64)
        answers.add((*check_kernel(padded, 0, 3, *ANY_TIME, failed), int(failed[0])))
    assert len(answers) == 1


# Interpreted, an index past the end is an IndexError instead of a wild read.
INTERPRETED_FUZZ = """
import random, sys
import numpy as np
from tests.storage.format.test_records_kernel import KEYED, RECORDS, body
from storage.kernels.records import check_records_kernel

rng = random.Random(int(sys.argv[1]))
raw = body(RECORDS)
for _ in range(5000):
    data = bytearray(raw[:rng.randint(0, len(raw))])
    for _ in range(rng.randint(0, 4) if data else 0):
        data[rng.randrange(len(data))] = rng.choice([0, 1, 2, 127, 128, 255, rng.randrange(256)])
    failed = np.zeros(1, dtype=np.int64)
    check_records_kernel(memoryview(data), 0, rng.choice([1, 3, 9]), *KEYED, failed)
"""


def test_no_index_is_ever_past_the_end() -> None:
    seed = 7
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED_FUZZ, str(seed)],
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, f"seed {seed}: {done.stderr[-2000:]}"


@given(st.binary(max_size=14), st.integers(0, 14))
def test_numbers_are_read_as_by_plain_python(data: bytes, start: int) -> None:
    end = len(data)
    for local, remote in (
        (primitives.read_varint, read_varint),
        (primitives.read_varlong, read_varlong),
    ):
        value, position = local(as_array(data), start, end)
        try:
            expected = remote(data, start, end)
        except CorruptBatchError:
            assert position == -1
        else:
            assert (value, position) == expected


@given(INT64)
def test_every_number_of_64_bits_comes_back(value: int) -> None:
    out = bytearray()
    write_varint(out, value)
    data = as_array(bytes(out))
    assert primitives.read_varlong(data, 0, len(out)) == (value, len(out))
    fits = -(1 << 31) <= value < 1 << 31
    assert primitives.read_varint(data, 0, len(out)) == ((value, len(out)) if fits else (0, -1))


def test_lengths_of_two_gigabytes_are_compared_and_not_followed() -> None:
    huge = bytearray()
    write_varint(huge, (1 << 31) - 1)
    record = b"\x14\x00\x00\x00" + bytes(huge) + b"\x01\x00"
    for data in (bytes(huge) + bytes(20), record, b"\x18\x00\x00\x00\x01\x01" + bytes(huge)):
        assert walk(data, 1) == (RecordCode.MALFORMED, 1, [0])


# The cache of compiled kernels


def test_a_named_cache_directory_is_used_and_created(tmp_path: Path) -> None:
    named = str(tmp_path / "a" / "b")
    assert choose_cache_directory({CACHE_VARIABLE: named, NUMBA_VARIABLE: "/other"}) == named
    assert Path(named).is_dir()
    assert choose_cache_directory({NUMBA_VARIABLE: named}) == named


def test_a_named_cache_directory_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        choose_cache_directory({CACHE_VARIABLE: str(tmp_path / "file")})


def test_a_named_cache_directory_that_can_only_be_read_is_copied_to_a_private_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "kernels"
    (named / "records").mkdir(parents=True)
    (named / "records/walk.nbi").write_text("compiled")
    writable = os.access
    # The superuser may write everywhere but on a read-only file system.
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != str(named) and writable(path, mode)
    )
    private = Path(choose_cache_directory({CACHE_VARIABLE: str(named)}))
    assert private != named
    assert (private / "records/walk.nbi").read_text() == "compiled"
    assert private.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(private)


def test_without_a_name_the_installation_then_the_user_then_a_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, home = tmp_path / "prefix", tmp_path / "home"
    monkeypatch.setattr(sys, "prefix", str(prefix))
    assert choose_cache_directory({"HOME": str(home)}) == str(prefix / "var" / "varve" / "kernels")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert choose_cache_directory({"HOME": str(home)}) == str(home / ".cache" / "varve" / "kernels")
    cache = tmp_path / "cache"
    assert choose_cache_directory({"XDG_CACHE_HOME": str(cache)}) == str(
        cache / "varve" / "kernels"
    )
    private = choose_cache_directory({"HOME": str(tmp_path / "file")})
    assert os.stat(private).st_mode & 0o777 == 0o700
    os.rmdir(private)


def test_the_first_compilation_is_that_into_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NUMBA_VARIABLE, str(tmp_path))
    assert is_first_compilation()
    (tmp_path / "kernels_1").mkdir()
    assert not is_first_compilation()


@pytest.mark.parametrize(
    "module", ["storage.format.batch", "storage.format.validation", "storage.kernels"]
)
def test_numba_is_not_imported_before_records_are_walked(module: str) -> None:
    code = f"import sys, {module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_compiled_kernels_land_in_the_named_directory(tmp_path: Path) -> None:
    code = (
        "import numba, numpy; from storage.kernels.primitives import read_varint;"
        "read_varint(numpy.zeros(1, numpy.uint8), 0, 1)"
    )
    environment = {**os.environ, CACHE_VARIABLE: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=110)
    assert any(tmp_path.rglob("*.nbi"))
