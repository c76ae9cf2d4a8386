"""The machine of the cleaner's invariants; every job that can be divided is run in parts."""

import random
from typing import Any
from unittest.mock import patch

from cleaner.engine.clean import run_clean
from cleaner.engine.shared.part_runner import PartRunner
from cleaner.engine.shared.parts import Part
from cleaner.job import CleanAbortedError, CleanJob, CleanReport, JobControl
from cleaner.planning.shared_clean import PartSizes, SharedClean
from storage.env import Env
from storage.swap.swap_journal import discard_outputs
from tests.support.cleaner import living_log
from tests.support.cleaner.partition_machine import Partition, machine_settings
from tests.support.draws import cases


class SharedPartition(Partition):
    """Some workers run the parts in any order; groups are published as soon as they may be."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)
        self.patched = patch.object(living_log, "run_clean", self.clean_in_parts)
        self.patched.start()

    def clean_in_parts(self, env: Env, job: CleanJob, control: JobControl) -> CleanReport:
        cannot = job.expired_only or job.aborted or job.slack is not None
        if cannot or not job.spill_bytes_max:
            return run_clean(env, job, control)
        workers, size = self.rng.randint(2, 4), self.rng.choice([1, 400])
        sizes = PartSizes(shared_min=0, part_min=size, part_max=size, one_pass=0)
        shared = SharedClean(job, workers, sizes)
        runners = [PartRunner(env, lambda seconds: None) for _ in range(workers)]
        running: list[tuple[Part, PartRunner]] = []
        published = False
        while not shared.is_done:
            part = shared.next_part(0.0) if len(running) < workers else None
            if part is not None:
                running.append((part, self.rng.choice(runners)))
            if running and (part is None or self.rng.random() < 0.5):
                part, runner = running.pop(self.rng.randrange(len(running)))
                shared.finished(part.number, runner.run(job, part, control), 0.0)
                if shared.refusal:
                    if published:
                        raise CleanAbortedError
                    discard_outputs(env, job.directory, job.job_id)
                    return run_clean(env, job, control)
            for group in shared.take_groups():
                published = True
                control.groups_cleaned((group,))
        discard_outputs(env, job.directory, job.job_id)
        return shared.report()

    def teardown(self) -> None:
        self.patched.stop()
        super().teardown()


SharedPartition.TestCase.settings = machine_settings(cases(few=15, many=60))
TestSharedPartition: Any = SharedPartition.TestCase
