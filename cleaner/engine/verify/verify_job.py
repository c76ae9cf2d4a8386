"""Outputs that were made outside of the broker: are they exactly what the job allows?

Rules
- What is allowed is what this engine makes of the same job with a map that holds every key. So the
  job is run once more, and what would be written is compared with what is there: batches, records,
  stamps, indexes, checksums, groups, and which of them there are.
- Whatever the size of the map: where it does not hold every key, the keys are gone through in
  shards (verify_keys.py).
- Nothing of what came with the outputs is believed. The report is that of the job as it ran here.
- All inputs are there, before and after. An engine takes one that is not for one that retention
  removed, and leaves nothing of it: true of a log, but not of a folder that others can write to.
- Compressed batches that lost records are equal only if they were packed by the same releases of
  the codecs' libraries, at the same levels.
"""

from collections.abc import Sequence

from cleaner.engine.verify.verify_keys import clean_with_all_keys
from cleaner.engine.verify.verify_outputs import ComparedOutputs
from cleaner.engine.verify.verify_scratch import Scratch
from cleaner.job import CleanAbortedError, CleanedGroup, CleanJob, JobControl
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
    """Check `groups`, the files of each of which lie in the folder of the same place.

    The files are synced, and have the times the engine gives them. Raises InvalidOutputError,
    CleanAbortedError, OSError.
    """
    started = env.monotonic()
    _check_inputs(env, job)
    outputs = ComparedOutputs(env, job, groups, folders, control.read_bytes)
    scratch = Scratch(env, job, control)
    try:
        comparison = _Comparison(control, outputs)
        report, rounds = clean_with_all_keys(env, job, comparison, outputs, scratch)
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


def _check_inputs(env: Env, job: CleanJob) -> None:
    for group in job.groups:
        for source in group:
            path = f"{job.directory}/{filenames.file_name(source.base_offset, filenames.LOG)}"
            if not env.exists(path):
                raise InvalidOutputError(path, -1, "this input is gone: nothing can be verified")


class _Comparison:
    """The control of the job as it runs here: nothing is written, its groups are held against."""

    def __init__(self, control: JobControl, outputs: ComparedOutputs) -> None:
        self._control = control
        self._outputs = outputs

    def read_bytes(self, count: int) -> None:
        """See JobControl."""
        self._control.read_bytes(count)

    def write_bytes(self, count: int) -> None:
        """Not written: what is read in its place is charged by whoever reads it."""

    def aborted(self) -> bool:
        """See JobControl."""
        return self._control.aborted()

    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        """Hold them against what was claimed. Raises InvalidOutputError."""
        for group in groups:
            if self._control.aborted():
                raise CleanAbortedError
            self._outputs.take(group)

    def progress(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        """See JobControl."""
        self._control.progress(stage, done_bytes, total_bytes)
