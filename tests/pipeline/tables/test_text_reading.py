"""CSV and JSON lines: every character and number arrives, or the files are refused."""

import csv
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.client.topics import as_job_errors
from pipeline.errors import JobError
from pipeline.tables.table_reading import read_table
from pipeline.tables.text_reading import line_separator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

QUOTED = [
    *('say "hi"', '"', '""', 'a "b", c', '{"a": "b, c"}', '5" x 3", 2'),
    *("a\\", 'a\\"b', "x, y\\", "\\", "\\N", "null"),
    *("a\nb", "a\r\nb", "a\rb", "\n", '"\n"'),
    *(" lead", "trail ", "#x", "a\tb", "ü", "\u2028", "\x85"),
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_csv_fields_arrive_as_rfc_4180_writes_them(
    spark: "SparkSession", tmp_path: Path, line_end: str
) -> None:
    path = tmp_path / "table.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator=line_end)
        rows.writerows([("id", "v", "end"), *((n, v, "x") for n, v in enumerate(QUOTED))])
    result = read_table(spark, str(path), "csv").collect()
    assert [(row.id, row.v, row.end) for row in result] == [
        (str(n), value, "x") for n, value in enumerate(QUOTED)
    ]


def test_an_empty_field_in_quotes_is_no_null(spark: "SparkSession", tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('id,v,w\n1,,\n2,"",""\n"",x,y\n')
    result = read_table(spark, str(path), "csv").collect()
    assert [tuple(row) for row in result] == [("1", None, None), ("2", "", ""), ("", "x", "y")]


def test_a_csv_column_may_have_any_name(spark: "SparkSession", tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("id,a`b.c\n1,x\n")
    assert [tuple(row) for row in read_table(spark, str(path), "csv").collect()] == [("1", "x")]


def test_the_header_line_decides_what_separates_lines() -> None:
    assert line_separator("id,v") == "\n"
    assert line_separator("id,v\r") == "\r\n"
    assert line_separator("id,v\r1,2\r") == "\r"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([b'id,v\n1,2\n5,"6\n7,8\n'], "odd number of quotes"),
        ([b'id,v\n1,"a" b\n'], "following quoted value"),
        ([b"id,v\n1,2\n5\n"], "0.csv"),
        ([b"id,v\n1,2\n5,6,7\n"], "0.csv"),
        ([b"id,v\n1,2\n", b"v,id\n2,1\n"], "1.csv"),
        ([b"id,v\n1,2\r\n3,4\r\n"], "end in LF, and others"),
        ([b'id,"v\n"\r\n1,2\r\n'], "end in LF, and others"),
        ([b"id\r\n1\r\n2\n3\r\n"], "end in different ways"),
        ([b"id\r1\r2\n3\r"], "end in different ways"),
        ([b",id\n0,1\n"], "column 1 of .* has no name"),
        ([b'id,""\n0,1\n'], "column 2 of .* has no name"),
        ([b"id,v,id\n1,2,3\n"], "several columns with the name id"),
        ([b"id,v,ID\n1,2,3\n"], "several columns with the name id"),
        (["id,v\n1,é\n".encode("latin1")], "is not UTF-8"),
    ],
)
def test_malformed_csv_is_refused_with_its_path_or_cause(
    spark: "SparkSession", tmp_path: Path, files: list[bytes], reason: str
) -> None:
    for n, content in enumerate(files):
        (tmp_path / f"{n}.csv").write_bytes(content)
    with pytest.raises(JobError, match=reason), as_job_errors():
        read_table(spark, str(tmp_path), "csv").collect()


def test_json_lines_are_read_exactly(spark: "SparkSession", tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(
        '{"id": 9007199254740993, "big": 12345678901234567890123456789, "f": 1}\n\n'
        '{"id": -1, "big": 1, "f": 1.5, "text": "ü"}\r\n'
    )
    result = read_table(spark, str(path), "json").orderBy("id").collect()
    assert [(row.id, int(row.big), row.f, row.text) for row in result] == [
        (-1, 1, 1.5, "ü"),
        (9007199254740993, 12345678901234567890123456789, 1.0, None),
    ]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"id":"a"}{"id":"b"}\n', "not one JSON value: Extra data"),
        (b'{"id":"a"} x\n', "not one JSON value: Extra data"),
        (b'{"id":"a"},{"id":"b"}\n', "not one JSON value: Extra data"),
        (b'{"v":9007199254740993}\n{"v":1.5}\n', "9007199254740993 does not fit"),
        (b'{"v":[{"w":9007199254740993},{"w":0.5}]}\n', "9007199254740993 does not fit"),
        (b'{"v":1e400}\n', "inf does not fit"),
        (b'{"v":["\\ud800"]}\n', "half of a surrogate pair"),
        (json.dumps({"v": 10**400}).encode(), "does not fit"),
        ('{"v":"é"}\n'.encode("latin1"), "is not UTF-8"),
    ],
)
def test_json_lines_that_spark_would_change_are_refused(
    spark: "SparkSession", tmp_path: Path, content: bytes, reason: str
) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(content)
    with pytest.raises(JobError, match=reason) as caught:
        read_table(spark, str(path), "json")
    assert str(path) in str(caught.value)
