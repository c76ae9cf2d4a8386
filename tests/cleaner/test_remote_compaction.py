"""Plans, manifests and results as bytes, and what a faulty or hostile process may send instead."""

import json
import math
import random
from dataclasses import replace

import pytest

from cleaner import typed_json
from cleaner.job import CleanedGroup, Damage, SegmentHorizon
from cleaner.remote_compaction import (
    AdoptOutcome,
    AdoptResult,
    LeasePlan,
    MalformedPlanError,
    OutputManifest,
    PartitionPlan,
    Purpose,
    decode_manifest,
    encode_manifest,
    encode_plan,
    is_file_of,
    is_folder,
    parse_plan,
    parse_result,
    result_json,
)
from storage.format.txn_index import TxnIndexEntry
from storage.swap.swap_journal import CleanedFile, CleanedSegment
from tests.support.cleaner.cleaner_jobs import T0, group_of, job, report_of
from tests.support.draws import seed_of_test

LARGE = (1 << 63) - 1
JOB = replace(
    job(),
    first_dirty_offset=LARGE,
    hash_key=bytes(range(16)),
    last_records=((LARGE, 3, -1),),
    aborted=(TxnIndexEntry(LARGE, 1, 2, 3),),
    output_directory="/elsewhere",
)
PLAN = LeasePlan("run-1", "t", Purpose.COMPACT, 1, LARGE, "secret", (PartitionPlan(JOB, b"id", 9),))
OUTPUT = CleanedSegment(0, "run-1", (CleanedFile(f"{0:020d}.log.run-1.cleaned", LARGE, 2**32 - 1),))
GROUPS = (replace(group_of(job()), output=OUTPUT), group_of(job()))
REPORT = report_of(
    job(),
    horizons=(SegmentHorizon(0, 5, -2),),
    damaged=(Damage("/a/b.log", 3, "bad CRC"),),
    map_utilization=0.1,
    cleaned=((1, LARGE),),
)
MANIFEST = OutputManifest(
    "run-1", T0, bytes(16), "boot-1", LARGE, ("a", "b"), GROUPS, REPORT, "spark"
)


def test_what_is_read_is_what_was_written() -> None:
    assert parse_plan(json.loads(encode_plan(PLAN))) == PLAN
    assert decode_manifest(encode_manifest(MANIFEST)) == MANIFEST
    result = AdoptResult(T0, AdoptOutcome.INVALID, "why", 1, 2, LARGE, 0.25)
    assert parse_result(json.loads(json.dumps(result_json(result)))) == result
    assert isinstance(decode_manifest(encode_manifest(MANIFEST)).groups[0], CleanedGroup)


@pytest.mark.parametrize(
    ("where", "value", "output"),
    [
        (("compaction_id",), 5, ".compaction_id: expected str"),
        (("created_ms",), 1.5, ".created_ms: expected int"),
        (("created_ms",), True, ".created_ms: expected int"),
        (("created_ms",), 10**400, "too large"),
        (("purpose",), "destroy", "expected one of compact, read"),
        (("partitions",), {}, "expected an array"),
        (("partitions", 0, "topic_id"), "xyz", "hexadecimal"),
        (("partitions", 0, "topic_id"), 7, "hexadecimal"),
        (("partitions", 0, "job", "groups"), [[5]], ".partitions[0].job.groups[0][0]"),
        (("partitions", 0, "job", "partition"), ["t"], "an array of 2"),
        (("partitions", 0, "job", "wish"), 1, "unknown field 'wish'"),
        (("partitions", 0, "job"), None, "expected an object"),
    ],
)
def test_what_is_not_of_its_type_is_told_with_its_place(
    where: tuple[str | int, ...], value: object, output: str
) -> None:
    document = json.loads(encode_plan(PLAN))
    inner = document
    for step in where[:-1]:
        inner = inner[step]
    inner[where[-1]] = value
    with pytest.raises(MalformedPlanError) as error:
        parse_plan(document)
    assert output in str(error.value)


def test_a_field_that_is_missing_is_told() -> None:
    document = json.loads(encode_plan(PLAN))
    del document["partitions"][0]["job"]["job_id"]
    with pytest.raises(MalformedPlanError, match="has no field job_id"):
        parse_plan(document)


@pytest.mark.parametrize("value", ["", [], None, {}, {"a": math.nan}])
def test_what_is_no_plan_is_no_plan(value: object) -> None:
    with pytest.raises(MalformedPlanError):
        parse_plan(value)


@pytest.mark.parametrize("text", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000, b'{"a":NaN}'])
def test_text_that_is_not_a_plan_is_malformed(text: bytes) -> None:
    with pytest.raises(typed_json.MalformedJsonError):
        typed_json.loads(LeasePlan, text)


def test_no_number_that_is_none_becomes_a_float() -> None:
    for text in ("NaN", "Infinity", "1e999"):
        data = encode_manifest(MANIFEST).partition(b"\n")[2].replace(b"0.25", text.encode())
        document = json.loads(data)
        document["report"]["map_seconds"] = float(text)
        with pytest.raises(typed_json.MalformedJsonError):
            typed_json.from_json(OutputManifest, document)


def test_a_manifest_that_was_changed_by_one_byte_is_none() -> None:
    rng = random.Random(seed_of_test(5))
    data = encode_manifest(MANIFEST)
    for _ in range(300):
        at = rng.randrange(len(data))
        forged = bytearray(data)
        forged[at] ^= 1 << rng.randrange(8)
        with pytest.raises(MalformedPlanError):
            decode_manifest(bytes(forged))
        with pytest.raises(MalformedPlanError):
            decode_manifest(data[:at])


@pytest.mark.parametrize(
    ("folder", "name", "is_good"),
    [
        ("whole-1a", f"{0:020d}.log.run-1.cleaned", True),
        ("whole-1a", f"{0:020d}.txnindex.run-1.cleaned", True),
        ("whole-1a", f"{0:020d}.snapshot.run-1.cleaned", False),
        ("whole-1a", f"{0:020d}.log.run-2.cleaned", False),
        ("whole-1a", f"{0:020d}.log", False),
        ("whole-1a", "rows", False),
        ("scratch-1", "rows.bin", True),
        ("scratch-1", "../rows", False),
        ("scratch-1", ".rows", False),
        ("scratch-1", "", False),
        ("../x", "rows", False),
        ("", "rows", False),
    ],
)
def test_a_file_has_one_plain_name_in_a_folder_with_one_plain_name(
    folder: str, name: str, is_good: bool
) -> None:
    assert is_file_of(folder, name, "run-1") is is_good


def test_a_folder_is_no_path() -> None:
    assert [
        item for item in ("..", ".", "a/b", "a.b", "", "a\n", "é", "a" * 101) if is_folder(item)
    ] == []
