"""The machines of the cleaner's invariants with `cleaner.verify`: it refuses no correct output."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

from cleaner.engine.clean import run_clean
from cleaner.engine.verify.check_log import check_log
from cleaner.job import CleanJob, CleanReport, JobControl
from cleaner.verification import IndexState, LogCheckRequest
from storage.env import Env
from tests.cleaner.invariants.test_selective_invariants import SelectivePartition
from tests.support.cleaner import living_log
from tests.support.cleaner.cleaning import Recorder
from tests.support.cleaner.partition_machine import Partition, machine_settings
from tests.support.draws import cases

SPILL_BYTES = 1 << 30


def clean_verified(env: Env, job: CleanJob, control: JobControl) -> CleanReport:
    """Every clean is verified; before it, the log is checked."""
    room = replace(job, spill_bytes_max=SPILL_BYTES)
    whole = replace(room, groups=tuple((s,) for g in job.groups for s in g), job_id="check")
    if not job.expired_only:
        check = check_log(env, whole, LogCheckRequest(job.first_dirty_offset), Recorder())
        assert not check.uncleaned, f"{check.uncleaned} superseded records in the clean section"
        assert not any(segment.misplaced for segment in check.segments)
        # A loss of power may damage an index: none is ever synced.
        assert not any(segment.index is IndexState.WRONG for segment in check.segments)
    return run_clean(env, replace(job, verify=True, spill_bytes_max=SPILL_BYTES), control)


class VerifiedPartition(Partition):
    """Whole cleans, with transactions, damage, crashes and retention."""

    def __init__(self) -> None:
        super().__init__()
        self.patched = patch.object(living_log, "run_clean", clean_verified)
        self.patched.start()

    def teardown(self) -> None:
        self.patched.stop()
        super().teardown()


class VerifiedSelectivePartition(SelectivePartition):
    """Selective cleans and others."""

    def __init__(self) -> None:
        super().__init__()
        self.patched = patch.object(living_log, "run_clean", clean_verified)
        self.patched.start()

    def teardown(self) -> None:
        self.patched.stop()
        super().teardown()


VerifiedPartition.TestCase.settings = machine_settings(cases(few=10, many=60))
VerifiedSelectivePartition.TestCase.settings = machine_settings(cases(few=10, many=60))
TestVerifiedPartition: Any = VerifiedPartition.TestCase
TestVerifiedSelectivePartition: Any = VerifiedSelectivePartition.TestCase
