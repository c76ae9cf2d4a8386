"""Publishing an Iceberg table: what an interrupted or refused commit leaves behind, and who sees
it."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import JobError
from pipeline.tables.iceberg import NAMESPACE, TABLE, open_catalog, publish_iceberg
from pipeline.tables.table_reading import find_version, read_reach
from pipeline.tables.target import target


def publish(path: Path, values: list[Any], *, end: int = 0) -> None:
    notes = {"topic": "t", "end_offsets": {"0": end}}
    data = path.parent / "data"
    data.mkdir(exist_ok=True)
    pq.write_table(pa.table({"value": values}), data / "part-0.parquet")
    publish_iceberg(data, target(str(path), "iceberg", overwrite=True), notes)


def read(path: Path) -> list[Any]:
    catalog = open_catalog(path)
    try:
        rows: Any = catalog.load_table((NAMESPACE, TABLE)).scan().to_arrow()["value"]
        return list(rows.to_pylist())
    finally:
        catalog.close()


def test_a_catalog_that_an_interrupted_job_left_without_a_table_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.mkdir()
    catalog = open_catalog(path)
    catalog.create_namespace_if_not_exists(NAMESPACE)
    catalog.close()
    publish(path, [b"a"])
    assert read(path) == [b"a"]
    publish(path, [b"b"])
    assert read(path) == [b"b"]


def test_a_job_killed_before_it_moved_its_files_leaves_a_table_to_overwrite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    path.mkdir()

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            publish(path, [b"a"])
    assert target(str(path), "iceberg", overwrite=True).exists
    publish(path, [b"b"])
    assert read(path) == [b"b"]


@pytest.mark.parametrize("name", ["catalog.db", "metadata/*.json", "metadata/*.avro"])
@pytest.mark.parametrize("content", [b"", b"cut \x00\xa3"])
def test_a_damaged_table_is_an_error_of_one_line_and_collects_no_files(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = tmp_path / "t"
    publish(path, [b"a"])
    before = sorted(path.glob("data-*"))
    for file in path.glob(name):
        file.write_bytes(content)
    if name == "catalog.db" and not content:  # an empty file is an empty database
        publish(path, [b"b"])
        assert read(path) == [b"b"]
        return
    with pytest.raises(JobError, match="cannot publish") as caught:
        publish(path, [b"b"])
    assert len(str(caught.value).splitlines()) == 1
    assert sorted(path.glob("data-*")) == before


def test_a_refused_commit_leaves_no_files(tmp_path: Path) -> None:
    path = tmp_path / "t"
    publish(path, [b"a"])
    before = sorted(path.glob("data-*"))
    with pytest.raises(JobError, match="cannot publish"):
        publish(path, ["text, where the column has bytes"])
    assert sorted(path.glob("data-*")) == before
    assert read(path) == [b"a"]


def test_of_two_jobs_that_replace_a_table_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.table import Transaction

    path = tmp_path / "t"
    publish(path, [b"a"])
    commit = Transaction.commit_transaction

    def commit_after_the_other(change: Transaction) -> Any:
        monkeypatch.setattr(Transaction, "commit_transaction", commit)
        publish(path, [b"b"])
        return commit(change)

    monkeypatch.setattr(Transaction, "commit_transaction", commit_after_the_other)
    with pytest.raises(JobError, match="cannot publish"):
        publish(path, [b"c"])
    assert read(path) == [b"b"]
    assert len(list(path.glob("data-*"))) == 2  # those of the two commits


def test_metadata_that_a_killed_job_did_not_commit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.catalog.sql import SqlCatalog

    path = tmp_path / "t"
    publish(path, [b"a"], end=1)
    write_metadata = SqlCatalog._write_metadata

    def die_after_it(**arguments: Any) -> None:
        write_metadata(**arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SqlCatalog, "_write_metadata", staticmethod(die_after_it))
        with pytest.raises(KeyboardInterrupt):
            publish(path, [b"b"], end=2)
    assert read(path) == [b"a"]
    assert read_reach(str(path), "iceberg", "t", [0]) == {0: 1}


def test_a_table_that_was_never_committed_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t"
    publish(path, [b"a"], end=1)
    catalog = open_catalog(path)
    catalog.drop_table((NAMESPACE, TABLE))  # its files stay
    catalog.close()
    with pytest.raises(JobError, match="--overwrite"):
        read_reach(str(path), "iceberg", "t", [0])


def test_rows_and_offsets_come_from_one_version_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "t"
    publish(path, [b"a"], end=1)
    version = find_version(str(path), "iceberg")
    publish(path, [b"b"], end=2)
    assert read_reach(str(path), "iceberg", "t", [0], version) == {0: 1}
    assert read_reach(str(path), "iceberg", "t", [0]) == {0: 2}
