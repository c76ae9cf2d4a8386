"""Files that jobs replace as a whole."""

import os
from pathlib import Path

import pytest

from pipeline.atomic_write import write_atomically


def test_a_file_has_the_mode_that_the_umask_allows(tmp_path: Path) -> None:
    """The receipt of an erasure and a report have keys, which may be personal data."""
    path = tmp_path / "new" / "report.html"
    before = os.umask(0o077)
    try:
        write_atomically(path, "text")
        write_atomically(path, b"data")
    finally:
        os.umask(before)
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("data", 0o600)
    with pytest.raises(IsADirectoryError):
        write_atomically(tmp_path / "new", "text")
    assert [each.name for each in tmp_path.rglob("*")] == ["new", "report.html"]
