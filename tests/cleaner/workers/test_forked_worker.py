"""Workers that tests fork from their own process."""

import gc
import os
from pathlib import Path

import pytest

from storage.env import RealEnv
from tests.support.processes.forked_worker import WORKER, ForkedWorker


def test_garbage_of_the_parent_closes_no_file_of_a_forked_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env, path = RealEnv(), str(tmp_path / "file")

    def read_files(_arguments: list[str]) -> int:
        opened = [env.open(path) for _ in range(100)]  # one has the number of the parent's file
        gc.collect()
        return int(any(file.pread(4, 0) != b"data" for file in opened))

    monkeypatch.setattr("cleaner.workers.worker.main", read_files)
    gc.disable()
    try:
        garbage: list[object] = [env.open(path, create=True)]
        env.open(path, write=True).pwrite(b"data", 0)
        garbage.append(garbage)  # only the collector frees it
        del garbage
        worker = ForkedWorker(["-m", WORKER], 1, 2)
        _, status = os.waitpid(worker.pid, 0)
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(status) == 0
