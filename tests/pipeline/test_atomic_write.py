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


def test_a_file_is_on_the_disk_before_it_takes_its_place_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A receipt of an erasure cannot be written again."""
    path, steps = tmp_path / "receipt.json", list[str]()
    sync, replace = os.fsync, Path.replace

    def noted_sync(descriptor: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{descriptor}').readlink().suffix or 'folder'}")
        sync(descriptor)

    def noted_replace(source: Path, target: Path) -> Path:
        steps.append("replace")
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_atomically(path, "text")
    assert [step.partition("-")[0] for step in steps] == ["sync .json", "replace", "sync folder"]
