"""The files of one attempt of a task, on any host.

Rules
- Every attempt writes to folders with unique names, which its result reports. Folders that no
  result names are deleted with the lease.
- Outputs (folders in `out/`) are durable before delivery. Scratch files, which one stage leaves for
  the next, are not: after a crash the remote compaction starts again.
- Paths in results are those of the job, not of this host.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from cleaner.job import CleanedGroup, CleanJob, CleanReport, Damage
from pipeline.stages.tasks import DamageFound
from pipeline.transport import SCRATCH, InputsGoneError, Transport, open_transport
from storage.env import Env
from storage.format import filenames

_NAME_BYTES: Final = 6  # random; there are a few thousand attempts at most


class TaskFiles:
    """The files of one attempt."""

    def __init__(self, env: Env, transport: Transport, job: CleanJob) -> None:
        self.env = env
        self._transport = transport
        self._job = job
        self._folders: list[str] = []
        self._directory = job.directory

    def job_over(self, bases: Iterable[int]) -> CleanJob:
        """Return the job with the directory of these segments on this host."""
        local = self._transport.inputs(self._job, tuple(bases))
        self._directory = local.directory
        return local

    def check_inputs(self, local: CleanJob, bases: Iterable[int]) -> None:
        """Check after the work that its inputs still exist. Raises InputsGoneError.

        The cleaner treats a missing segment as deleted by retention and skips it.
        """
        for base in bases:
            path = f"{local.directory}/{filenames.file_name(base, filenames.LOG)}"
            if not self.env.exists(path):
                raise InputsGoneError(path)

    def folder(self, stage: str, *, scratch: bool = False) -> tuple[str, str]:
        """Create a folder; return its name in the lease and its path on this host."""
        name = f"{SCRATCH if scratch else ''}{stage}-{self.env.random_bytes(_NAME_BYTES).hex()}"
        path = self._transport.outputs(self._job, name)
        self._folders.append(path)
        return name, path

    def deliver(self, folder: str, names: Iterable[str]) -> None:
        """Deliver files of a folder."""
        self._transport.deliver(self._job, folder, tuple(names))

    def fetch(self, folder: str, names: Iterable[str]) -> str:
        """Return the directory of an earlier task's files on this host."""
        return self._transport.fetch(self._job, folder, tuple(names))

    def discard(self) -> None:
        """Delete the files of this attempt."""
        for path in self._folders:
            if self.env.is_dir(path):
                self.env.remove_tree(path)

    def named(self, path: str) -> str:
        """Return a path of this host as a path of the job."""
        head, name = os.path.split(path)
        return f"{self._job.directory}/{name}" if head == self._directory else path

    def damage_reports(
        self, damaged: Mapping[int, Damage], indexing: Collection[int] = ()
    ) -> tuple[DamageFound, ...]:
        """Return damage in the form of a result; `indexing` are base offsets of the first pass."""
        return tuple(
            DamageFound(
                base,
                self.named(damage.path),
                damage.position,
                damage.reason,
                indexing=base in indexing,
            )
            for base, damage in sorted(damaged.items())
        )

    def renamed(self, report: CleanReport) -> CleanReport:
        """Return a report with paths of the job."""
        damaged = tuple(damage._replace(path=self.named(damage.path)) for damage in report.damaged)
        return replace(report, damaged=damaged)


@contextmanager
def open_task_files(env: Env, source: Mapping[str, Any], job: CleanJob) -> Iterator[TaskFiles]:
    """Open the files of one attempt; delete what it wrote if it fails."""
    transport = open_transport(env, source)
    try:
        place = TaskFiles(env, transport, job)
        try:
            yield place
        except BaseException:
            place.discard()
            raise
    finally:
        transport.close()


def delivered_names(groups: Iterable[CleanedGroup]) -> list[str]:
    """Return the file names of groups."""
    return [file.name for group in groups if group.output for file in group.output.files]
