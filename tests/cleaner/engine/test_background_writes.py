"""Outputs that are synced in the background: how many at most, and what becomes of errors."""

import errno
import threading
from typing import cast

import pytest

from cleaner.engine.background_writes import SYNCS_MAX, BackgroundWrites
from cleaner.engine.output import CleanedOutput

PATIENCE_SECONDS = 0.2


class Output:
    """Synced when it may be."""

    def __init__(self, may: threading.Event, error: OSError | None = None) -> None:
        self._may = may
        self._error = error

    def sync(self, last_modified_ms: int) -> None:
        assert self._may.wait(20)
        if self._error is not None:
            raise self._error


def fill(background: BackgroundWrites, output: Output) -> None:
    for _ in range(SYNCS_MAX):
        background.sync(cast("CleanedOutput", output), 0)


def test_a_slow_disk_holds_up_whoever_makes_outputs_before_descriptors_run_out() -> None:
    background, may = BackgroundWrites(), threading.Event()
    fill(background, Output(may))
    threading.Timer(PATIENCE_SECONDS, may.set).start()
    fill(background, Output(may))
    assert may.is_set()
    background.wait(lambda: None)
    background.close()


def test_an_output_that_could_not_be_synced_is_told_with_the_next_one_that_waits() -> None:
    background, may = BackgroundWrites(), threading.Event()
    may.set()
    fill(background, Output(may, OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        fill(background, Output(may))
    with pytest.raises(OSError, match="Input/output"):
        background.wait(lambda: None)
    background.close()
