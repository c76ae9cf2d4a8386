"""Parquet tables are replaced as a whole, wherever the job is killed."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import JobError
from pipeline.tables.delta import publish_delta
from pipeline.tables.iceberg import publish_iceberg
from pipeline.tables.publish import _beside, swap_in
from pipeline.tables.target import FORMATS, NOTES, Format, Target, target

# Replaces the table at argv[1], and ends as if killed instead of the rename number argv[2].
KILLED = """
import os, sys
from pathlib import Path
from pipeline.tables.publish import _beside, swap_in
from pipeline.tables.target import Target
table, left, rename = Path(sys.argv[1]), int(sys.argv[2]), Path.rename
def killed(path, to):
    global left
    left -= 1
    if not left:
        os._exit(9)
    return rename(path, to)
Path.rename = killed
with _beside(table) as staging:
    (staging / "data").mkdir()
    (staging / "data" / "_varve.json").write_text("new")
    swap_in(staging / "data", Target(table, "parquet", exists=True), staging)
    os._exit(9)
"""


@pytest.mark.parametrize(("rename", "content"), [(1, "old"), (2, "old"), (3, "new")])
def test_a_job_that_was_killed_while_it_replaced_a_table_leaves_one(
    tmp_path: Path, rename: int, content: str
) -> None:
    table = tmp_path / "a [table]"
    table.mkdir()
    (table / NOTES).write_text("old")
    command = [sys.executable, "-c", KILLED, str(table), str(rename)]
    assert subprocess.run(command, check=False).returncode == 9
    assert target(str(table), "parquet", overwrite=True).exists
    assert (table / NOTES).read_text() == content
    with _beside(table):
        pass
    assert list(tmp_path.iterdir()) == [table]


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_table_that_another_run_created_meanwhile_is_not_replaced(
    tmp_path: Path, table_format: Format
) -> None:
    """Both runs found no table."""
    place = target(str(tmp_path / "table"), table_format, overwrite=False)

    def publish(value: bytes) -> None:
        data = tmp_path / value.decode()
        data.mkdir()
        pq.write_table(pa.table({"value": [value]}), data / "part-0.parquet")
        _publish(data, place)

    publish(b"first")
    before = {path: path.read_bytes() for path in place.path.rglob("*") if path.is_file()}
    with pytest.raises(JobError, match="was created while this job ran"):
        publish(b"second")
    assert before == {path: path.read_bytes() for path in before}
    assert len(list(place.path.rglob("*.parquet"))) == 1


def _publish(data: Path, place: Target) -> None:
    match place.format:
        case "delta":
            publish_delta(data, place, {}, {})
        case "iceberg":
            publish_iceberg(data, place, {})
        case "parquet":
            swap_in(data, place, data.parent)
