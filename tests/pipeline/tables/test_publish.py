"""Parquet tables are replaced as a whole, wherever the job is killed."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.tables.publish import _beside
from pipeline.tables.target import NOTES, target

# Replaces the table at argv[1], and ends as if killed instead of the rename number argv[2].
KILLED = """
import os, sys
from pathlib import Path
from pipeline.tables.publish import _beside, swap_in
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
    swap_in(staging / "data", table, staging)
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
