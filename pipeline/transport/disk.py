"""The disk transport: the lease's directories are on this host, nothing is copied.

The broker removes these directories when the lease ends, and with the topic. A task does not make
them again: the next start of the broker would find the folder of a partition.
"""

import os
from collections.abc import Sequence

from cleaner.job import CleanJob
from pipeline.transport import OUT, SCRATCH
from storage.env import Env


class DiskTransport:
    """Opens the lease's directories by their paths."""

    def __init__(self, env: Env) -> None:
        self._env = env

    def inputs(self, job: CleanJob, bases: Sequence[int]) -> CleanJob:
        """See Transport."""
        return job

    def outputs(self, job: CleanJob, folder: str) -> str:
        """See Transport."""
        directory = _out_directory(job)
        path = f"{directory}/{folder}"
        for each in (directory, path):
            self._env.mkdir(each, parents=False)
        if not folder.startswith(SCRATCH):
            self._env.sync_dir(directory)
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
