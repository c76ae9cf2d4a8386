"""How far a topic is in a table is believed only of the content that was made of that topic."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from config import exit_codes
from pipeline.cli import JobError
from pipeline.client.kafka_client import EndOffset
from pipeline.jobs.stream import check_table
from pipeline.tables import upsert
from pipeline.tables.columns import Forms
from pipeline.tables.delta import (
    NO_STATE,
    STATE_ID,
    check_topic_id,
    delta_reason,
    publish_delta,
    removed_versions,
    state_number,
    topic_id_number,
    topic_id_transaction,
    version_id,
)
from pipeline.tables.publish import Target
from pipeline.tables.table_reading import read_reach
from pipeline.tables.upsert import DELETED, Upserts, read_versions


def publish(folder: Path, versions: Mapping[str, int]) -> Path:
    """Make or overwrite the table in `folder`."""
    path, data = folder / "table", folder / "data"
    data.mkdir()
    pq.write_table(pa.table({"key": [b"a"]}), data / "part-0.parquet")
    publish_delta(data, Target(path, "delta", exists=path.exists()), {}, versions)
    if data.exists():
        (data / "part-0.parquet").unlink()
        data.rmdir()
    return path


ROW = {"key": [b"a"], "value": [b"1"], "partition": [0], "offset": [0]}


def publish_rows(path: Path, rows: Mapping[str, Any], versions: Mapping[str, int]) -> None:
    """Make or overwrite the table at `path`, as `publish` of pipeline/tables/publish.py does."""
    data = path.parent / f"{path.name}-data"
    data.mkdir(exist_ok=True)
    pq.write_table(pa.table(rows), data / "part-0.parquet")
    publish_delta(data, Target(path, "delta", exists=path.exists()), {}, versions)


def read_keys(path: Path) -> list[bytes]:
    keys: list[bytes] = pa.table(DeltaTable(str(path)).to_pyarrow_table())["key"].to_pylist()
    return sorted(keys)


@pytest.fixture
def merge_b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that merges a batch of "t" with the key b, offset 1, into a table."""
    data = tmp_path / "batch"
    data.mkdir()
    row = {"key": [b"b"], "value": [b"1"], "partition": [0], "offset": [1], DELETED: [False]}
    pq.write_table(pa.table(row), data / "part-0.parquet")

    @contextmanager
    def written(*_: object) -> Iterator[Path]:
        yield data

    monkeypatch.setattr(upsert, "write_beside", written)
    monkeypatch.setattr(Upserts, "_last", lambda *_: None)

    def merge(path: Path, first: int) -> bool:
        upserts = Upserts(path, "t", Forms(exact_keys=True), tuple(ROW))
        batch: Any = None
        return upserts.merge_batch(batch, {0: first}, {0: EndOffset(2, 0)})

    return merge


def state_of(topic: str, end: int) -> dict[str, int]:
    return {version_id(topic, 0): end, STATE_ID: state_number(topic)}


def test_a_table_that_was_overwritten_with_all_records_is_not_followed(tmp_path: Path) -> None:
    path = publish(tmp_path, state_of("t", 7))
    assert check_table("t", path, tmp_path / "checkpoint", [0]) == {0: 7}
    publish(tmp_path, {STATE_ID: NO_STATE})
    with pytest.raises(JobError, match="is not a table of t written by") as caught:
        check_table("t", path, tmp_path / "checkpoint", [0])
    assert caught.value.code == exit_codes.FAILED
    assert read_reach(str(path), "delta", "t", [0]) == {}
    publish(tmp_path, state_of("t", 9))
    assert check_table("t", path, tmp_path / "checkpoint", [0]) == {0: 9}


def test_a_table_that_was_overwritten_with_another_topic_is_not_followed(tmp_path: Path) -> None:
    path = publish(tmp_path, state_of("t", 7))
    publish(tmp_path, state_of("u", 3))
    assert read_versions(DeltaTable(str(path)), "t", [0]) == {}
    assert read_versions(DeltaTable(str(path)), "u", [0]) == {0: 3}


@pytest.mark.parametrize("versions", [{STATE_ID: NO_STATE}, {version_id("u", 0): 1, STATE_ID: 3}])
def test_no_other_job_replaces_a_table_while_a_batch_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merge_b: Any, versions: Mapping[str, int]
) -> None:
    """Otherwise the table would have the rows of both."""
    path = tmp_path / "t"
    publish_rows(path, ROW, state_of("t", 1))
    overwrite = deltalake.write_deltalake

    def overwrite_too_late(to: str, rows: Any, **options: Any) -> None:
        def batches() -> Iterator[Any]:
            merging = Thread(target=merge_b, args=(path, 1))  # a thread of delta-rs calls this
            merging.start()
            merging.join()
            yield from rows

        overwrite(to, pa.RecordBatchReader.from_batches(rows.schema, batches()), **options)

    monkeypatch.setattr(deltalake, "write_deltalake", overwrite_too_late)
    with pytest.raises(JobError, match="cannot publish"):
        publish_rows(path, {**ROW, "key": [b"c"]}, versions)
    assert read_keys(path) == [b"a", b"b"]


def test_nothing_is_merged_into_a_table_that_was_overwritten_with_another_topic(
    tmp_path: Path, merge_b: Any
) -> None:
    """Not even records from offset 0 on, none of which such a table lacks."""
    path = tmp_path / "t"
    publish_rows(path, ROW, state_of("t", 0))
    publish_rows(path, ROW, state_of("u", 1))
    with pytest.raises(JobError, match="another job has replaced"):
        merge_b(path, 0)
    assert read_keys(path) == [b"a"]


def test_an_overwrite_by_fewer_partitions_forgets_how_far_it_had_the_others(tmp_path: Path) -> None:
    ends = {version_id("t", number): 7 for number in range(4)}
    path = publish(tmp_path, {**ends, STATE_ID: state_number("t")})
    place = Target(path, "delta", exists=True)
    # The topic was created again with three partitions, of which the table now has one.
    removed = removed_versions(place, "t", present=[0], partitions=range(3))
    publish(tmp_path, {**removed, **state_of("t", 2)})
    # It grew to four again: the table has nothing of the others.
    assert read_versions(DeltaTable(str(path)), "t", range(4)) == {0: 2}


def test_a_new_table_has_no_end_offsets_to_remove(tmp_path: Path) -> None:
    place = Target(tmp_path / "table", "delta", exists=False)
    assert removed_versions(place, "t", present=[0], partitions=range(3)) == {}


def test_a_table_of_an_earlier_release_is_followed_as_before(tmp_path: Path) -> None:
    path = publish(tmp_path, {version_id("t", 0): 7})
    assert read_versions(DeltaTable(str(path)), "t", [0]) == {0: 7}


def test_no_topic_has_the_number_of_a_table_that_is_no_state() -> None:
    numbers = {state_number(f"topic-{number}") for number in range(1000)}
    assert len(numbers) == 1000
    assert min(numbers) > NO_STATE
    assert max(numbers) < 1 << 63


def test_a_table_is_of_the_topic_with_its_id_if_it_states_one(tmp_path: Path) -> None:
    old, new = bytes(range(16)), bytes(range(1, 17))
    path = publish(tmp_path, state_of("t", 7))
    check_topic_id(DeltaTable(str(path)), "t", new)  # of an earlier release
    publish(tmp_path, {topic_id_transaction("t"): topic_id_number(old)})
    table = DeltaTable(str(path))
    for topic, topic_id in (("t", old), ("t", b""), ("t", bytes(16)), ("u", new)):
        check_topic_id(table, topic, topic_id)
    with pytest.raises(JobError, match="t was deleted and created again") as caught:
        check_topic_id(table, "t", new)
    assert caught.value.code == exit_codes.STALE


def test_a_damaged_table_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = publish(tmp_path, state_of("t", 7))
    for file in (path / "_delta_log").glob("*.json"):
        file.write_bytes(file.read_bytes()[:40])
    place = Target(path, "delta", exists=True)
    for work in (
        lambda: removed_versions(place, "t", present=[0], partitions=[0]),
        lambda: publish(tmp_path, state_of("t", 9)),
        lambda: check_table("t", path, tmp_path / "checkpoint", [0]),
    ):
        with pytest.raises(JobError) as caught:
            work()
        assert len(str(caught.value).splitlines()) == 1
        assert str(path) in str(caught.value)


def test_an_error_of_delta_rs_is_one_line_with_its_causes() -> None:
    text = (
        "Generic LocalFileSystem error\n"
        "          \x1b[31m↳\x1b[0m Unable to copy data to file\n"
        "           \x1b[31m↳\x1b[0m No space left on device (os error 28)\n"
        "   0: <unknown>\n"
        "  12: start_thread\n"
        "             at ./nptl/pthread_create.c:442:8\n"
    )
    assert delta_reason(OSError(text)) == (
        "Generic LocalFileSystem error: Unable to copy data to file: No space left on device (os"
        " error 28)"
    )
