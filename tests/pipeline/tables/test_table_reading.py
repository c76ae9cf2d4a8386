"""Reading tables that jobs wrote: the offsets in their metadata."""

import json
from pathlib import Path

import pytest

from pipeline.errors import JobError
from pipeline.tables.table_reading import read_reach
from pipeline.tables.target import NOTES


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
