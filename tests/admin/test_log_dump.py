"""`varve log dump`: what files of a partition contain, whole and damaged."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from broker.cli import main
from config import exit_codes
from storage.format.batch import (
    CONTROL,
    TRANSACTIONAL,
    ControlType,
    Record,
    build_batch,
    marker_record,
)
from storage.format.index import OffsetIndex, TimeIndex
from storage.format.producer_state import ProducerStates
from storage.format.txn_index import TxnIndexEntry, encode_entries

NOW = 1_800_000_000_000
FIRST = build_batch(
    [Record(100, NOW, b"k", b"v"), Record(103, NOW, None, None, (("h", b"\xff"),))], codec=4
)
SECOND = build_batch(
    [Record(104, NOW + 1, b"\x1b[2J", b"x" * 2000)],
    producer_id=7,
    producer_epoch=1,
    base_sequence=5,
    attributes=TRANSACTIONAL,
)
MARKER = build_batch(
    [marker_record(ControlType.COMMIT, 2, NOW)._replace(offset=105)],
    producer_id=7,
    producer_epoch=1,
    attributes=TRANSACTIONAL | CONTROL,
)
HORIZON = build_batch([Record(106, NOW, b"k", None)], delete_horizon_ms=NOW + 5)


def dumped(path: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["log", "dump", str(path), *options])


def rows(path: Path, *options: str) -> list[dict[str, Any]]:
    result = dumped(path, "--json", *options)
    assert result.exit_code in (exit_codes.DONE, exit_codes.UNVERIFIED), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def written(folder: Path, name: str, *parts: bytes) -> Path:
    path = folder / name
    path.write_bytes(b"".join(parts))
    return path


def test_batches_and_records_are_shown(tmp_path: Path) -> None:
    path = written(tmp_path, f"{100:020}.log", FIRST, SECOND, MARKER, HORIZON)
    batches = rows(path)
    assert [(row["base_offset"], row["last_offset"], row["records"]) for row in batches] == [
        (100, 103, 2),
        (104, 104, 1),
        (105, 105, 1),
        (106, 106, 1),
    ]
    assert [row["compression"] for row in batches] == ["zstd", "none", "none", "none"]
    assert [row["is_control"] for row in batches] == [False, False, True, False]
    assert [row["delete_horizon_ms"] for row in batches] == [None, None, None, NOW + 5]
    assert sum(row["size_bytes"] for row in batches) == path.stat().st_size
    records = [row for row in rows(path, "--records") if "offset" in row]
    assert [row["offset"] for row in records] == [100, 103, 104, 105, 106]
    assert records[1]["headers"] == [{"name": "h", "value_base64": "/w=="}]
    assert records[3]["control"] == "commit marker"
    text = dumped(path, "--records").stdout
    assert "\x1b" not in text
    assert "\t\\x1b[2J\txxx" in text
    assert "x... (2,000 bytes)" in text
    assert "\t<no key>\t<tombstone>\n" in text
    assert "\tcommit marker\n" in text
    assert "producer 7 epoch 1 sequence 5, transactional\n" in text
    assert "tombstones kept until 20" in text


def test_damage_is_shown_and_the_batches_behind_it_as_well(tmp_path: Path) -> None:
    wrong = bytearray(SECOND)
    wrong[-1] ^= 1
    path = written(tmp_path, f"{100:020}.log", FIRST, wrong, MARKER, HORIZON[:-3])
    assert dumped(path).exit_code == exit_codes.UNVERIFIED
    found = rows(path)
    assert [row.get("base_offset") for row in found] == [100, None, 105, None]
    first, second = (row for row in found if "damage" in row)
    assert (first["position"], first["end_position"]) == (len(FIRST), len(FIRST) + len(wrong))
    assert first["damage"] == "CRC does not match"
    assert second["end_position"] == path.stat().st_size
    assert "cut short" in second["damage"]
    assert f"DAMAGED at byte {len(FIRST)}, 2.0 KiB: CRC does not match" in dumped(path).stdout


def test_indexes_are_shown_without_the_zeros_that_kafka_allocates(tmp_path: Path) -> None:
    offsets, times = OffsetIndex(), TimeIndex()
    data = offsets.append(3, 4096) + offsets.append(256, 8192)
    path = written(tmp_path, f"{100:020}.index", data, bytes(80))
    assert [(row["offset"], row["position"]) for row in rows(path)] == [(103, 4096), (356, 8192)]
    data = times.maybe_append(NOW, 3) + times.maybe_append(NOW + 1, 256)
    path = written(tmp_path, f"{100:020}.timeindex", data, bytes(120))
    assert [(row["timestamp_ms"], row["offset"]) for row in rows(path)] == [
        (NOW, 103),
        (NOW + 1, 356),
    ]


def test_aborted_transactions_and_producers_are_shown(tmp_path: Path) -> None:
    path = written(tmp_path, f"{0:020}.txnindex", encode_entries([TxnIndexEntry(7, 1, 5, 3)]))
    (row,) = rows(path)
    assert row.pop("file") == str(path)
    assert row == {
        "producer_id": 7,
        "first_offset": 1,
        "last_offset": 5,
        "last_stable_offset": 3,
    }
    assert dumped(path).stdout == (
        "producer_id=7  first_offset=1  last_offset=5  last_stable_offset=3\n"
    )
    empty = written(tmp_path, f"{5:020}.snapshot", ProducerStates().to_snapshot())
    assert (dumped(empty).stdout, rows(empty)) == ("empty\n", [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (f"{0:020}.index", struct.pack(">iiii", 5, 10, 4, 20)),
        (f"{0:020}.timeindex", b"\1" * 13),
        (f"{0:020}.txnindex", b"\1" * 34),
        (f"{0:020}.snapshot", b"\1" * 40),
    ],
)
def test_a_damaged_file_says_what_is_wrong(tmp_path: Path, name: str, content: bytes) -> None:
    result = dumped(written(tmp_path, name, content))
    assert result.exit_code == exit_codes.UNVERIFIED
    assert result.stdout.startswith("DAMAGED: ")


@pytest.mark.parametrize("kind", ["log", "index", "timeindex", "txnindex", "snapshot"])
def test_any_bytes_end_with_a_code_and_no_traceback(tmp_path: Path, kind: str) -> None:
    seed = 8191
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = bytes(FIRST + SECOND + MARKER + HORIZON)
    for _ in range(60):
        content = bytearray(whole if rng.random() < 0.7 else rng.randbytes(rng.randint(0, 300)))
        for _ in range(rng.randint(0, 6)):
            if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
        path = written(tmp_path, f"{100:020}.{kind}", content[: rng.randint(0, len(content))])
        for options in ((), ("--records",), ("--json", "--records")):
            result = dumped(path, *options)
            assert result.exit_code in (exit_codes.DONE, exit_codes.UNVERIFIED), result.output
            assert result.exception is None or isinstance(result.exception, SystemExit)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / f"{0:020}.log"
    result = dumped(missing)
    assert result.exit_code == exit_codes.FAILED
    assert result.stderr == f"varve: cannot read {missing}: No such file or directory\n"
    absent = tmp_path / "notes.txt"
    assert dumped(absent).stderr == f"varve: cannot read {absent}: No such file or directory\n"
    result = dumped(written(tmp_path, "notes.txt", b"x"))
    assert result.exit_code == exit_codes.USAGE
    assert "is not named as a file of a partition" in result.stderr


def test_for_a_directory_the_command_asks_for_files_in_it(tmp_path: Path) -> None:
    result = dumped(tmp_path)
    assert result.exit_code == exit_codes.USAGE
    reason = f"{tmp_path} is a directory: name files in it, such as {tmp_path}/*.log"
    assert result.stderr == f"varve: {reason}\n"
