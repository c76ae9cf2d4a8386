"""The disk transport: the lease's directories are on this host, nothing is copied."""

import os
from collections.abc import Sequence

from cleaner.job import CleanJob
from pipeline.transport import OUT, SCRATCH
from storage.env import Env, mkdir_durably


class DiskTransport:
    """Opens the lease's directories by their paths."""

    def __init__(self, env: Env) -> None:
        self._env = env

    def inputs(self, job: CleanJob, bases: Sequence[int]) -> CleanJob:
        """See Transport."""
        return job

    def outputs(self, job: CleanJob, folder: str) -> str:
        """See Transport."""
        path = f"{_out_directory(job)}/{folder}"
        if folder.startswith(SCRATCH):
            self._env.mkdir(path)
        else:
            mkdir_durably(self._env, path)
        return path

    def deliver(self, job: CleanJob, folder: str, names: Sequence[str]) -> None:
        """See Transport."""

    def fetch(self, job: CleanJob, folder: str, names: Sequence[str]) -> str:
        """See Transport."""
        return f"{_out_directory(job)}/{folder}"

    def close(self) -> None:
        """See Transport."""


def _out_directory(job: CleanJob) -> str:
    return f"{os.path.dirname(job.directory)}/{OUT}"
