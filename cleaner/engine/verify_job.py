"""Verify that outputs of a remote clean are exactly those that the job produces.

Rules
- The correct output is that of this engine for the same job with a map that holds every key. So the
  job runs again, and instead of being written its output is compared with the files: batches,
  records, horizons, indexes, checksums and groups.
- If the map does not hold every key, the keys are spilled (spilled/spilled_clean.py).
- Claims that came with the outputs are not trusted. The report is that of the local run.
- All inputs must exist before and after. The engine takes a missing input for one that retention
  removed, which does not apply to a folder that others can write to.
- Compressed batches that lost records are equal only if they were compressed by the same releases
  of the codecs' libraries, at the same levels.
"""

from collections.abc import Sequence

from cleaner.engine.clean import assert_consistent, run_clean
from cleaner.engine.key_map.map_size import may_not_fit
from cleaner.engine.spilled.scratch import NoScratchSpaceError, Scratch
from cleaner.engine.spilled.spilled_clean import SpilledClean
from cleaner.engine.verify.verify_outputs import ComparedOutputs
from cleaner.job import (
    CleanAbortedError,
    CleanedGroup,
    CleanJob,
    CleanReport,
    ForwardingControl,
    JobControl,
)
from cleaner.verification import InvalidOutputError, VerifyReport
from storage.env import Env
from storage.format import filenames


def verify_groups(
    env: Env,
    job: CleanJob,
    groups: Sequence[CleanedGroup],
    folders: Sequence[str],
    control: JobControl,
) -> VerifyReport:
    """Verify `groups`; the files of each are in the folder with the same index.

    The files are synced and get the engine's modification times. Raises InvalidOutputError,
    CleanAbortedError, OSError.
    """
    started = env.monotonic()
    _check_inputs(env, job)
    outputs = ComparedOutputs(env, job, groups, folders, control.read_bytes)
    scratch = Scratch(env, job, control)
    try:
        comparison = _Comparison(control, outputs)
        report, rounds = _run_again(env, job, comparison, outputs, scratch)
    finally:
        scratch.close()
    _check_inputs(env, job)
    outputs.finish()
    return VerifyReport(
        report=report,
        groups=len(groups),
        bytes_compared=outputs.compared,
        rounds=rounds,
        seconds=env.monotonic() - started,
    )


def _run_again(
    env: Env, job: CleanJob, control: JobControl, outputs: ComparedOutputs, scratch: Scratch
) -> tuple[CleanReport, int]:
    """Run the job with `outputs`; return its report and the number of rounds.

    Raises InvalidOutputError if the buffers are too small for a batch of the log,
    CleanAbortedError, OSError, and what `outputs` and `control` raise.
    """
    assert_consistent(job)
    assert job.order is None
    if not may_not_fit(job):
        return run_clean(env, job, control, one_pass=False, outputs=outputs), 1
    clean = SpilledClean(env, job, control, outputs, scratch=scratch)
    try:
        return clean.run(), clean.rounds
    except NoScratchSpaceError as error:
        raise InvalidOutputError(job.directory, -1, str(error)) from error


def _check_inputs(env: Env, job: CleanJob) -> None:
    for group in job.groups:
        for source in group:
            path = f"{job.directory}/{filenames.file_name(source.base_offset, filenames.LOG)}"
            if not env.exists(path):
                raise InvalidOutputError(path, -1, "this input is missing: nothing can be verified")


class _Comparison(ForwardingControl):
    """The control of the local run, which compares groups instead of publishing them."""

    def __init__(self, control: JobControl, outputs: ComparedOutputs) -> None:
        super().__init__(control)
        self._outputs = outputs

    def write_bytes(self, count: int) -> None:
        """Do nothing: the comparison charges the bytes that it reads."""

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Compare groups with the claims. Raises InvalidOutputError."""
        for group in groups:
            if self._control.aborted():
                raise CleanAbortedError
            self._outputs.take(group)
