"""What `varve verify` prints: the sums, what differs, and the segments on request."""

from typing import Any

from admin.client import Json
from admin.http.verify_text import verified_lines

SUMS = {
    "size_bytes": 4096,
    "records": 1200,
    "live": 900,
    "dead": 300,
    "tombstones": 7,
    "keyless": 0,
    "aborted": 0,
}


def row(*differences: Json, **sums: Any) -> Json:
    segment = {**SUMS, "base_offset": 0, "next_offset": 1200, "index": "current", "damage": None}
    return {
        "topic": "orders",
        "partition": 0,
        "state": "done",
        "reason": "",
        "result": {**SUMS, "end_offset": 1200, "keys": 900, "digests_compared": 0, **sums},
        "segments": [segment, {**segment, "base_offset": 1200, "index": "missing"}],
        "differences": list(differences),
    }


def test_a_log_without_a_difference_takes_one_line() -> None:
    assert verified_lines([row()], with_segments=False) == [
        "orders-0: nothing differs, below offset 1,200: 900 keys, 4.0 KiB; 1,200 records, 900 live "
        "(7 tombstones), 300 dead; 1 key index compared"
    ]


def test_a_single_key_and_record_are_counted_in_the_singular() -> None:
    (line,) = verified_lines([row(keys=1, records=1)], with_segments=False)
    assert "1,200: 1 key, 4.0 KiB; 1 record, " in line


def test_records_without_a_key_are_named_if_there_are_any() -> None:
    (line,) = verified_lines([row(keyless=3, aborted=2)], with_segments=False)
    assert "300 dead, 3 without a key, 2 aborted; 1 key index compared" in line


def test_the_digests_that_were_compared_are_counted() -> None:
    (line,) = verified_lines([row(digests_compared=2)], with_segments=False)
    assert line.endswith("1 key index compared; 2 digests compared")


def test_each_difference_has_a_line_with_its_offsets() -> None:
    difference = {"kind": "key index", "first_offset": 0, "end_offset": 1200, "text": "its rows"}
    lines = verified_lines([row(difference)], with_segments=False)
    assert lines[0].startswith("orders-0: 1 difference, below")
    assert lines[1] == "  - key index, offsets 0 to 1,199: its rows"


def test_segments_are_listed_on_request() -> None:
    lines = verified_lines([row()], with_segments=True)
    assert lines[2].split() == [
        "SEGMENT", "SIZE", "RECORDS", "LIVE", "DEAD", "TOMBSTONES", "NO", "KEY", "INDEX",
    ]  # fmt: skip
    assert lines[3].split()[-1] == "current"


def test_a_segment_without_a_key_index_does_not_read_as_damage() -> None:
    without = row()
    for segment in without["segments"]:
        segment["index"] = "missing"
    lines = verified_lines([without], with_segments=True)
    assert lines[0].endswith("300 dead")
    assert [line.split()[-1] for line in lines[3:5]] == ["none", "none"]


def test_a_check_that_failed_says_why() -> None:
    failed = {**row(), "result": None, "state": "failed", "reason": "no progress for 60 s"}
    assert verified_lines([failed], with_segments=False) == [
        "orders-0 was not verified: no progress for 60 s"
    ]
