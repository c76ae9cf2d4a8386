"""Parquet tables are replaced as a whole, wherever the job is killed."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import JobError
from pipeline.tables.delta import publish_delta
from pipeline.tables.iceberg import publish_iceberg
from pipeline.tables.publish import publish, swap_in
from pipeline.tables.staging import staging_folder
from pipeline.tables.target import FORMATS, NOTES, Format, Target, target

# Replaces the table at argv[1], and ends as if killed instead of the rename number argv[2].
KILLED = """
import os, sys
from pathlib import Path
from pipeline.tables.publish import swap_in
from pipeline.tables.staging import staging_folder
from pipeline.tables.target import Target
table, left, rename = Path(sys.argv[1]), int(sys.argv[2]), Path.rename
def killed(path, to):
    global left
    left -= 1
    if not left:
        os._exit(9)
    return rename(path, to)
Path.rename = killed
with staging_folder(table) as staging:
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
    with staging_folder(table):
        pass
    assert list(tmp_path.iterdir()) == [table]


def test_a_table_is_replaced_where_a_symbolic_link_to_it_points(tmp_path: Path) -> None:
    table, link, data = tmp_path / "disk" / "t", tmp_path / "t", tmp_path / "data"
    for folder, content in ((table, "old"), (data, "new")):
        folder.mkdir(parents=True)
        (folder / NOTES).write_text(content)
    link.symlink_to(table)
    place = target(str(link), "parquet", overwrite=True)
    with staging_folder(place.path) as staging:
        swap_in(data, place, staging)
    assert link.is_symlink()
    assert (table / NOTES).read_text() == (link / NOTES).read_text() == "new"


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_table_that_another_run_created_meanwhile_is_not_replaced(
    tmp_path: Path, table_format: Format
) -> None:
    """Both runs found no table."""
    place = target(str(tmp_path / "table"), table_format, overwrite=False)

    def run(value: bytes) -> None:
        data = tmp_path / value.decode()
        data.mkdir()
        pq.write_table(pa.table({"value": [value]}), data / "part-0.parquet")
        _publish(data, place)

    run(b"first")
    before = {path: path.read_bytes() for path in place.path.rglob("*") if path.is_file()}
    with pytest.raises(JobError, match="was created while this job ran"):
        run(b"second")
    assert before == {path: path.read_bytes() for path in before}
    assert len(list(place.path.rglob("*.parquet"))) == 1


def test_of_two_jobs_that_replace_a_table_at_once_one_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "table"
    table.mkdir()
    (table / NOTES).write_text("old")
    place = target(str(table), "parquet", overwrite=True)
    rename = Path.rename

    def swap(content: str) -> None:
        with staging_folder(table) as staging:
            (staging / "data").mkdir()
            (staging / "data" / NOTES).write_text(content)
            swap_in(staging / "data", place, staging)

    def rename_between(path: Path, to: Path) -> None:
        monkeypatch.setattr(Path, "rename", rename)
        path.rename(to)
        swap("second")

    monkeypatch.setattr(Path, "rename", rename_between)
    with pytest.raises(JobError, match="was created while this job ran"):
        swap("first")
    assert (table / NOTES).read_text() == "second"


class Rows:
    """Stands for a DataFrame of two tasks. `between` is called when the first has finished."""

    def __init__(self, between: Callable[[Path], object]) -> None:
        self._between = between
        self.write = self.sparkSession = self.conf = self

    def parquet(self, data: str) -> None:
        for task in range(2):
            Path(data).mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table({"value": [task]}), f"{data}/part-{task}.parquet")
            if task == 0:
                self._between(Path(data).parent)

    def get(self, _name: str, _default: None) -> None: ...
    def set(self, _name: str, _value: str) -> None: ...
    def unset(self, _name: str) -> None: ...


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_table_has_all_rows_though_another_job_for_it_starts_meanwhile(
    tmp_path: Path, table_format: Format
) -> None:
    place = target(str(tmp_path / "table"), table_format, overwrite=False)
    program = f"""
from pathlib import Path
from pipeline.tables.staging import staging_folder
with staging_folder(Path({str(place.path)!r})):
    pass
"""
    rows: Any = Rows(lambda _: subprocess.run([sys.executable, "-c", program], check=True))
    assert publish(rows, place, {}).rows == 2


@pytest.mark.parametrize("table_format", FORMATS)
def test_a_table_whose_first_rows_were_removed_meanwhile_is_not_published(
    tmp_path: Path, table_format: Format
) -> None:
    place = target(str(tmp_path / "table"), table_format, overwrite=False)
    rows: Any = Rows(shutil.rmtree)
    with pytest.raises(JobError, match="another process removed"):
        publish(rows, place, {})
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def _publish(data: Path, place: Target) -> None:
    match place.format:
        case "delta":
            publish_delta(data, place, {}, {})
        case "iceberg":
            publish_iceberg(data, place, {})
        case "parquet":
            swap_in(data, place, data.parent)
