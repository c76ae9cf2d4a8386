"""Reading tables: their columns, and the offsets in the metadata that jobs wrote."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import convert_to_deltalake, write_deltalake

from pipeline.client.topics import as_job_errors
from pipeline.errors import JobError
from pipeline.tables.table_reading import read_reach, read_table
from pipeline.tables.target import NOTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OLD, NEW = pa.table({"k": ["a"], "v": ["1"]}), pa.table({"k": ["b"], "w": [2]})


@pytest.mark.spark
@pytest.mark.parametrize("table_format", ["parquet", "delta"])
def test_a_table_has_the_columns_of_all_its_files(
    spark: "SparkSession", tmp_path: Path, table_format: str
) -> None:
    if table_format == "delta":
        for rows in (OLD, NEW):
            write_deltalake(tmp_path, rows, mode="append", schema_mode="merge")
    else:
        pq.write_table(OLD, tmp_path / "a.parquet")
        pq.write_table(NEW, tmp_path / "b.parquet")
    result = read_table(spark, str(tmp_path), table_format).select("k", "v", "w").orderBy("k")
    assert [tuple(row) for row in result.collect()] == [("a", "1", None), ("b", None, 2)]


@pytest.mark.spark
def test_files_with_one_column_of_two_types_are_refused(
    spark: "SparkSession", tmp_path: Path
) -> None:
    pq.write_table(OLD, tmp_path / "a.parquet")
    pq.write_table(pa.table({"k": ["b"], "v": [2]}), tmp_path / "b.parquet")
    with pytest.raises(JobError, match="Failed to merge incompatible data types"):
        read_table(spark, str(tmp_path), "parquet")


@pytest.mark.spark
@pytest.mark.parametrize("table_format", ["parquet", "delta"])
def test_a_flipped_bit_in_a_parquet_page_is_an_error(
    spark: "SparkSession", tmp_path: Path, table_format: str
) -> None:
    path = tmp_path / "t"
    rows = spark.createDataFrame([("a", "one and another")], "k string, v string").coalesce(1)
    rows.write.option("compression", "none").parquet(str(path))
    if table_format == "delta":
        convert_to_deltalake(str(path))
    (file,) = path.glob("*.parquet")
    file.write_bytes(file.read_bytes().replace(b"one and", b"one end", 1))
    (path / f".{file.name}.crc").unlink()  # Hadoop's own checksum, which copies seldom have
    with pytest.raises(JobError, match="CRC checksum verification failed"), as_job_errors():
        read_table(spark, str(path), table_format).collect()


def test_the_offsets_of_a_table_are_those_of_its_own_topic(tmp_path: Path) -> None:
    assert read_reach(str(tmp_path), "parquet", "t", [0]) == {}
    notes = {"topic": "t", "end_offsets": {"0": 7}}
    (tmp_path / NOTES).write_text(json.dumps(notes))
    assert read_reach(str(tmp_path), "parquet", "t", [0]) == {0: 7}
    assert read_reach(str(tmp_path), "parquet", "u", [0]) == {}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b'{"topic":', b"[]", b"null", b"\xff"),
        *(b'{"topic": "t", "end_offsets": [1]}', b'{"topic": "t", "end_offsets": null}'),
        *(
            b'{"topic": "t", "end_offsets": {"0": "x"}}',
            b'{"topic": "t", "end_offsets": {"0": []}}',
        ),
    ],
)
def test_damaged_metadata_of_a_table_is_an_error_that_names_the_way_out(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / NOTES).write_bytes(content)
    with pytest.raises(JobError, match="--as-of-offsets") as caught:
        read_reach(str(tmp_path), "parquet", "t", [0])
    assert str(tmp_path) in str(caught.value)
