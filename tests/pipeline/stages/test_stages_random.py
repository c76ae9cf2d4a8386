"""Random logs, cleaned by stages of any cut and by the cleaner: the same bytes must remain."""

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleaner.engine.clean import run_clean
from cleaner.job import CleanJob, CleanReport, JobControl
from storage.env import Env
from tests.support.cleaner import living_log
from tests.support.cleaner.cleaning import write_segments
from tests.support.cleaner.partition_machine import Partition, machine_settings
from tests.support.cleaner.random_logs import jobs, logs
from tests.support.draws import cases
from tests.support.stages import compare
from tests.support.storage.memory_env import MemoryEnv

ANY = settings(
    max_examples=cases(few=25, many=150),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@ANY
@given(st.data(), st.integers(0, 1 << 30))
def test_stages_leave_of_any_log_what_the_cleaner_leaves(data: st.DataObject, seed: int) -> None:
    segments = data.draw(logs())
    env = MemoryEnv(1)
    job = data.draw(jobs(segments, write_segments(env, segments)))
    compare(env, job, random.Random(seed))


class ComparedPartition(Partition):
    """The machine of the cleaner's invariants; each job for the whole log is compared first."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.patched = patch.object(living_log, "run_clean", self.compare_and_clean)
        self.patched.start()

    def compare_and_clean(self, env: Env, job: CleanJob, control: JobControl) -> CleanReport:
        assert isinstance(env, MemoryEnv)
        if env.crash_at is None and job.slack is None:
            compare(env, replace(job, by_index=False), self.rng)
        return run_clean(env, job, control)

    def teardown(self) -> None:
        self.patched.stop()
        super().teardown()


ComparedPartition.TestCase.settings = machine_settings(cases(few=6, many=60))
TestComparedPartition: Any = ComparedPartition.TestCase
