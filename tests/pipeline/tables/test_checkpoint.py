"""A checkpoint that a power failure or somebody has damaged: the error says what to do."""

from pathlib import Path

import pytest

from pipeline.client.kafka_client import EndOffset
from pipeline.errors import JobError
from pipeline.tables.checkpoint import check_checkpoint, last_ends, read_planned_ms


def make_checkpoint(folder: Path) -> Path:
    """What Spark leaves if it is killed in its third batch."""
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    (folder / "metadata").write_text('{"id":"1f861963-0cc5-48b0-948a-75ed9c0ecfb2"}')
    for number in range(3):
        ends = f'{{"t": {{"0": [{number + 1}, 0]}}}}'
        settings = '{"batchWatermarkMs":0,"batchTimestampMs":1795964033864,"conf":{}}'
        (folder / f"offsets/{number}").write_text(f"v1\n{settings}\n{ends}")
        (folder / f"offsets/.{number}.crc").touch()
    for number in range(2):
        (folder / f"commits/{number}").write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def test_a_checkpoint_of_a_killed_query_is_sound(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "c")
    check_checkpoint(folder, "t")
    assert last_ends(folder, "t") == {0: EndOffset(2, 0)}
    assert read_planned_ms(folder, 2) < 1795964033864
    (folder / "offsets/0").write_text("")  # nobody reads it any more
    check_checkpoint(folder, "t")


@pytest.mark.parametrize("missing", [["offsets", "commits", "metadata"], ["commits"]])
def test_a_query_that_was_killed_early_has_a_part_of_a_checkpoint(
    tmp_path: Path, missing: list[str]
) -> None:
    folder = make_checkpoint(tmp_path / "c")
    for name in missing:
        (folder / name).rename(tmp_path / name)
    check_checkpoint(folder, "t")
    check_checkpoint(tmp_path / "none", "t")


@pytest.mark.parametrize("name", ["offsets/2", "offsets/1", "commits/1", "metadata"])
@pytest.mark.parametrize("kept", [0.0, 0.9])
def test_a_damaged_file_of_a_checkpoint_is_named_with_the_way_out(
    tmp_path: Path, name: str, kept: float
) -> None:
    folder = make_checkpoint(tmp_path / "c")
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(kept * len(data))])
    with pytest.raises(JobError, match=rf"{name} has no .*remove {folder}: the query then"):
        check_checkpoint(folder, "t")


def test_a_checkpoint_of_another_topic_or_without_a_file_is_refused(
    tmp_path: Path,
) -> None:
    folder = make_checkpoint(tmp_path / "c")
    with pytest.raises(JobError, match="has no offsets of u"):
        check_checkpoint(folder, "u")
    for name in ("metadata", "offsets/1"):
        (folder / name).rename(tmp_path / "away")
        with pytest.raises(JobError, match=f"{name} has no .*remove"):
            check_checkpoint(folder, "t")
        (tmp_path / "away").rename(folder / name)
