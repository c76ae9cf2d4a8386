"""The stages, in a process that is killed once in the midst of writing what they make."""

import os
import signal

from cleaner.job import CleanedGroup, UnlimitedControl
from pipeline import stages

MARK = "VARVE_TEST_MARK"  # names the file whose absence says that nobody was killed yet


class _Collected(UnlimitedControl):
    def groups_cleaned(self, groups: tuple[CleanedGroup, ...]) -> None:
        super().groups_cleaned(groups)
        try:
            os.close(os.open(os.environ[MARK], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def run_stage(name: str, task: bytes) -> bytes:
    """A registry: see pipeline.stages."""
    from pipeline.stages import rewrite, whole

    whole.UnlimitedControl = rewrite.UnlimitedControl = _Collected  # type: ignore[misc]
    return stages.run_stage(name, task)
